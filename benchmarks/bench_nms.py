"""nms and batched_nms beside torchvision's, or where that is not installed, on the CPU, beside the plain double loop."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import extension_cpp
from benchmarks.harness import OURS, Case

try:
    import torchvision
except Exception:  # Absent, or made for another torch.
    torchvision = None

SIZES = {"cpu": (1_000, 5_000, 20_000), "cuda": (100, 1_000, 5_000, 20_000, 100_000)}
THRESHOLD = 0.5
CLASSES = 80

LOOP = r"""
#include <algorithm>
#include <cstdint>
extern "C" int64_t loop(const float (*b)[4], const int64_t* order, int64_t n, double t, uint8_t* drop, int64_t* keep) {
  int64_t kept = 0;
  for (int64_t p = 0; p < n; ++p) {
    const float* x = b[order[p]];
    if (drop[p]) continue;
    keep[kept++] = order[p];
    for (int64_t q = p + 1; q < n; ++q) {
      const float* y = b[order[q]];
      if (drop[q]) continue;
      const float w = std::max(0.f, std::min(x[2], y[2]) - std::max(x[0], y[0]));
      const float h = std::max(0.f, std::min(x[3], y[3]) - std::max(x[1], y[1]));
      const float inter = w * h, area = (x[2] - x[0]) * (x[3] - x[1]);
      drop[q] = inter / (area + (y[2] - y[0]) * (y[3] - y[1]) - inter) > t;
    }
  }
  return kept;
}
"""


@cache
def compiled_loop() -> Callable:
    folder = Path(tempfile.mkdtemp())
    (folder / "loop.cpp").write_text(LOOP)
    subprocess.run(["c++", "-O3", "-shared", "-fPIC", "-o", "loop.so", "loop.cpp"], cwd=folder, check=True)
    loop = ctypes.CDLL(str(folder / "loop.so")).loop
    loop.restype = ctypes.c_int64
    return loop


def double_loop(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    order = scores.sort(stable=True, descending=True).indices
    n = len(order)
    drop, keep = torch.zeros(n, dtype=torch.uint8), torch.empty(n, dtype=torch.int64)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (boxes, order, drop, keep)]
    kept = compiled_loop()(*pointers[:2], ctypes.c_int64(n), ctypes.c_double(iou_threshold), pointers[2], pointers[3])
    return keep[:kept]


def double_loop_by_class(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float) -> Tensor:
    members = [(idxs == c).nonzero().squeeze(1) for c in idxs.unique()]
    keep = torch.cat([m[double_loop(boxes[m], scores[m], iou_threshold)] for m in members])
    return keep[scores[keep].sort(descending=True).indices]


def peers(device: str) -> dict[str, tuple[Callable, Callable]]:
    """nms and batched_nms, by whose they are."""
    result: dict[str, tuple[Callable, Callable]] = {OURS: (extension_cpp.nms, extension_cpp.batched_nms)}
    if torchvision is not None:
        result["torchvision"] = (torchvision.ops.nms, torchvision.ops.batched_nms)
    elif device == "cpu":
        result["double loop"] = (double_loop, double_loop_by_class)
    return result


def random_boxes(n: int, field: float) -> tuple[Tensor, Tensor]:
    """Boxes of side 1 to 100. Sixteenths keep products exact, so that it doesn't matter whether a peer fuses them."""
    generator = torch.Generator().manual_seed(0)
    low, side = torch.rand(n, 2, generator=generator) * field, 1 + 99 * torch.rand(n, 2, generator=generator)
    return (torch.cat([low, low + side], 1) * 16).round() / 16, torch.randperm(n, generator=generator).float()


def clustered_boxes(n: int, clusters: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    centres = torch.rand(clusters, 2, generator=generator) * 1000
    low = centres[torch.randint(clusters, (n,), generator=generator)] + 3 * torch.randn(n, 2, generator=generator)
    return (torch.cat([low, low + 40], 1) * 16).round() / 16, torch.randperm(n, generator=generator).float()


def equal_boxes(n: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([[0.0, 0.0, 4.0, 4.0]]).repeat(n, 1), -torch.arange(n).float()


def chained_boxes(n: int) -> tuple[Tensor, Tensor]:
    """Each overlaps the next: every decision waits for the one before."""
    low = torch.arange(n).float()[:, None] * torch.tensor([1.0, 0.0])
    return torch.cat([low, low + 4], 1), -torch.arange(n).float()


def single(device: str, title: str, make: Callable[[], tuple[Tensor, Tensor]], n: int) -> Case:
    def contenders():
        boxes, scores = (t.to(device) for t in make())
        return {name: lambda f=f: f(boxes, scores, THRESHOLD) for name, (f, _) in peers(device).items()}

    return Case("nms", title, device, contenders, bytes=20 * n)


def batched(device: str, n: int) -> Case:
    def contenders():
        boxes, scores = (t.to(device) for t in random_boxes(n, 1000))
        idxs = torch.randint(CLASSES, (n,), generator=torch.Generator().manual_seed(1)).to(device)
        return {name: lambda f=f: f(boxes, scores, idxs, THRESHOLD) for name, (_, f) in peers(device).items()}

    return Case("batched_nms", f"{n:,} boxes of {CLASSES} classes", device, contenders, bytes=28 * n)


def large(n: int) -> Case:
    """Named after the memory it takes; too many for a peer."""
    boxes, scores = (t.cuda() for t in random_boxes(n, 10_000))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    extension_cpp.nms(boxes, scores, THRESHOLD)
    megabytes = (torch.cuda.max_memory_allocated() - before) / 1e6

    def contenders():
        return {OURS: lambda: extension_cpp.nms(boxes, scores, THRESHOLD)}

    title = f"{n:,} in a field of 10,000, {megabytes:.0f} MB beside the inputs"
    return Case("nms", title, "cuda", contenders, bytes=20 * n, compare=False)


def cases(device: str) -> Iterator[Case]:
    """All cases of a device."""
    for n in SIZES[device]:
        for field in (1_000, 10_000):
            yield single(device, f"{n:,} in a field of {field:,}", lambda n=n, field=field: random_boxes(n, field), n)
    yield single(device, "20,000 in 200 clusters", lambda: clustered_boxes(20_000, 200), 20_000)
    yield single(device, "20,000 equal", lambda: equal_boxes(20_000), 20_000)
    yield single(device, "a chain of 20,000", lambda: chained_boxes(20_000), 20_000)
    for n in (10_000, 100_000):
        yield batched(device, n)
    if device == "cuda":
        yield from map(large, (200_000, 1_000_000))
