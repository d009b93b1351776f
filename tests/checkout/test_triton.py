"""What the build makes of Triton's kernels, without a GPU."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import extension_cpp
from extension_cpp.ops import _backends

ROOT = Path(__file__).parents[2]
NVCC = shutil.which("nvcc")
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def ahead(monkeypatch):
    module = importlib.import_module("extension_cpp.triton._ahead")
    monkeypatch.setattr(module, "operators", {})
    return module


def test_which_operators_are_compiled(ahead):
    """Those whose Triton kernel is a formula, and whose family has no .cu file."""
    found = {name: len(ahead.kernels_of(operator)) for name, operator in _backends.operators.items()}
    assert {name for name, kernels in found.items() if kernels} == {"add_one", "my_op"}
    assert found["add_one"] == 1


def test_a_configuration_for_each_architecture(ahead, monkeypatch, tmp_path):
    """That of tuned.json where it has one; kernels are shared where sizes have the same."""
    from extension_cpp.triton import elementwise

    file = tmp_path / "tuned.json"
    file.write_text(json.dumps({"9.0": {"add_one": {"float32": {"many": {"BLOCK": 2048, "num_warps": 8}}}}}))
    monkeypatch.setattr(ahead, "TUNED", file)
    operator = _backends.operators["add_one"]
    ahead.operators["add_one"] = ahead.Ahead(operator, "", ahead.kernels_of(operator), [torch.float32, torch.float64])
    ahead.plan([ahead.Target("8.0", False), ahead.Target("9.0a", False), ahead.Target("9.0a", True)])
    (table,) = ahead.operators["add_one"].tables
    assert len(table) == 2 * len(elementwise.LAYOUTS) * len(elementwise.SIZES)
    chosen = {jobs: [(job.block, job.warps) for job in jobs] for jobs in table}
    assert Counter(map(tuple, chosen.values())) == {
        ((1024, 4),) * 3: 4 + 4,  # Few elements, and all of float64.
        ((1024, 4), (2048, 8), (2048, 8)): 4,
    }


def test_tuned_configurations_are_ones_that_are_tried(ahead):
    """By names that the build looks for; a wrong one would be ignored."""
    from extension_cpp.triton.elementwise import CONFIGS, SIZES, TYPES

    tried = [{"BLOCK": config.kwargs["BLOCK"], "num_warps": config.num_warps} for config in CONFIGS]
    assert ahead.DEFAULT in tried
    for architecture, by_operator in json.loads(ahead.TUNED.read_text()).items():
        assert re.fullmatch(r"\d+\.\d", architecture)
        for name, by_dtype in by_operator.items():
            assert name in _backends.operators
            for dtype, by_size in by_dtype.items():
                assert getattr(torch, dtype) in TYPES and {*by_size} <= {*SIZES}
                assert all(chosen in tried for chosen in by_size.values())


@pytest.mark.long
@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_images(tmp_path):
    """Each kernel's names, architectures and machine code, as the library has them."""
    (library,) = Path(extension_cpp.__file__).parent.glob("_C.*")
    out = tmp_path / "triton"
    script = ROOT / "extension_cpp" / "triton" / "_ahead.py"
    done = subprocess.run(
        [sys.executable, script, "3.0", NVCC, out, library, "8.0", "9.0a", "12.0+PTX"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    code, images = out.with_suffix(".cu").read_text(), out.with_suffix(".bin").read_bytes()
    found = re.findall(r'\{"(\w+)_kernel", (\d+), (\w+), (\w+), (\d+), 1024, 128, 0\}', code)
    kinds = Counter((name, int(architecture), exact, ptx) for name, architecture, exact, ptx, _ in found)
    wanted = ((80, "false", "false"), (90, "true", "false"), (120, "false", "false"), (120, "false", "true"))
    assert kinds == {(name, *each): 4 * 4 for name in ("add_one", "my_op") for each in wanted}
    places = [int(place) for *_, place in found]
    assert places == sorted({*places})
    assert all(images[place : place + 4] == b"\x50\xed\x55\xba" for place in places)  # Of what the driver reads.
    assert b"tmp" not in images and str(ROOT).encode() not in images
