"""The example that captures a detection head as a CUDA graph."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import extension_cpp
from extension_cpp.testing import DEVICES

EXAMPLE = Path(__file__).parents[2] / "examples" / "cuda_graph" / "detect.py"


@pytest.fixture
def example() -> dict:
    return runpy.run_path(str(EXAMPLE))


def features(device: str, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(round(scale))
    return (scale * torch.randn(64, 20, 30, generator=generator)).to(device)


def make_head(example: dict, device: str, most: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return example["Head"](most=most).eval().to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("most", [20, 5000])
@torch.no_grad()
def test_head(example, device, most):
    """What is cut off at the end is what one would filter first, with a result of any size."""
    head = make_head(example, device, most)
    for scale in (0.0, 1.0, 3.0):
        boxes, scores, classes = head.decode(features(device, scale))
        likely = scores > head.least_score
        kept = extension_cpp.batched_nms(boxes[likely], scores[likely], classes[likely], head.iou_threshold)[:most]
        *found, count = head(features(device, scale))
        assert count == len(kept) and all(len(part) == most for part in found)
        for part, all_of_it in zip(found, (boxes, scores, classes)):
            assert torch.equal(part[:count], all_of_it[likely][kept])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@torch.no_grad()
def test_graph(example):
    """A replay computes what a call computes, from other features than those that were captured, and waits for nothing."""
    head = make_head(example, "cuda", 600)  # Of 600 cells.
    head.least_score = 0.9
    graph = example["Graph"](head, features("cuda", 1.0))
    counts = set()
    for scale in (3.0, 0.0, 2.0):
        given = features("cuda", scale)
        expected = [part.clone() for part in head(given)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            results = graph(given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(map(torch.equal, results, expected))
        counts.add(int(results[-1]))
    assert len(counts) > 1


def test_program():
    path = str(Path(extension_cpp.__file__).parents[1])
    code = f"import sys, runpy; sys.path.insert(0, {path!r}); runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0 and "detections on" in done.stdout, done.stderr
