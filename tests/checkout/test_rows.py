"""The operators of examples/rows and examples/recurrence, which are compiled just in time, pass the contract."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"rms_norm": "rows", "softmax_cross_entropy": "rows", "diagonal_lstm": "recurrence"}
QUICK = "parity or gradcheck or is_that or minus or scale or long"


@pytest.mark.parametrize(
    ("name", "checks"),
    [
        ("rms_norm", QUICK),
        *(pytest.param(name, "", marks=pytest.mark.long) for name in FOLDERS),
    ],
)
def test_contract(name, checks, tmp_path_factory):
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    cache = tmp_path_factory.getbasetemp() / "cache"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": str(cache)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"test_{name}.py", "-k", checks]
    done = subprocess.run(command, cwd=ROOT / "examples" / FOLDERS[name], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= (10 if checks else 100)


@pytest.mark.parametrize("name", FOLDERS)
def test_are_short(name):
    """What an author writes of such an operator, without the declaration and the test."""
    assert len((ROOT / "examples" / FOLDERS[name] / f"{name}.cpp").read_text().splitlines()) <= 120
