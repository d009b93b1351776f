"""A short form of tests/fuzz.py, the same calls each time: `make fuzz` draws others, and runs them under sanitizers."""

import json
from pathlib import Path

import fuzz
import pytest

from extension_cpp.testing import DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", range(len(fuzz.corpus())))
def test_corpus(number, device):
    """What was ever found stays found."""
    fuzz.check(fuzz.corpus()[number], fuzz.find_contracts(Path(__file__).parent), device)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_calls(device):
    done, call, why = fuzz.fuzz(fuzz.find_contracts(Path(__file__).parent), device, seed=0, most=400)
    assert not why, f"{why}\n{json.dumps(call)}"
    assert done >= 300
