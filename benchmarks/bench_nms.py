"""nms and batched_nms compared with torchvision's or, where that is not installed, on the CPU with the plain double loop."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import extension_cpp
from benchmarks.contenders import compiled_cpp, graphed
from benchmarks.harness import OURS, Case, Grid, reported
from extension_cpp.ops._operator import reference_of

try:
    import torchvision
except Exception:  # Absent, or made for another torch.
    torchvision = None

SIZES = {"cpu": (100, 1_000, 5_000, 20_000), "cuda": (100, 300, 1_000, 2_000, 4_096, 10_000, 20_000, 100_000)}
FIELDS = (1_000, 10_000)
GRID = (10, 100, 1_000, 10_000)
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


def double_loop(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    order = scores.sort(stable=True, descending=True).indices
    n = len(order)
    drop, keep = torch.zeros(n, dtype=torch.uint8), torch.empty(n, dtype=torch.int64)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (boxes, order, drop, keep)]
    loop = compiled_cpp(LOOP).loop
    loop.restype = ctypes.c_int64
    kept = loop(*pointers[:2], ctypes.c_int64(n), ctypes.c_double(iou_threshold), pointers[2], pointers[3])
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


def boxes_with_outliers(n: int) -> tuple[Tensor, Tensor]:
    """One of a hundred far off the others."""
    boxes, scores = random_boxes(n, 1_000)
    boxes[::100] += 1e6
    return boxes, scores


def boxes_of_all_sizes(n: int, field: float, most: float = 1_000) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    low, side = torch.rand(n, 2, generator=generator) * field, 1 + (most - 1) * torch.rand(n, 2, generator=generator)
    return torch.cat([low, low + side], 1).round(), torch.randperm(n, generator=generator).float()


def equal_boxes(n: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([[0.0, 0.0, 4.0, 4.0]]).repeat(n, 1), -torch.arange(n).float()


def chained_boxes(n: int) -> tuple[Tensor, Tensor]:
    """Each overlaps the next: every decision waits for the one before."""
    low = torch.arange(n).float()[:, None] * torch.tensor([1.0, 0.0])
    return torch.cat([low, low + 4], 1), -torch.arange(n).float()


def part_of(device: str, n: int) -> Callable | None:
    """The sort, where no faster one is known: the CPU kernel sorts faster, those for CUDA up to half a million boxes."""
    known = device == "cuda" and n > 2**19
    return (lambda boxes, scores, *idxs: scores.sort(descending=True)) if known else None


def single(
    device: str, make: Callable[[], tuple[Tensor, Tensor]], n: int, threshold: float = THRESHOLD, **described
) -> Case:
    return Case(
        "nms",
        device,
        {name: lambda boxes, scores, f=f: f(boxes, scores, threshold) for name, (f, _) in peers(device).items()},
        lambda: tuple(t.to(device) for t in make()),
        lambda boxes, scores: reference_of(extension_cpp.nms)(boxes, scores, threshold),
        dtype=torch.float32,
        bytes=20 * n,
        part=part_of(device, n),
        **described,
    )


def batched(device: str, n: int) -> Case:
    def inputs() -> tuple[Tensor, ...]:
        idxs = torch.randint(CLASSES, (n,), generator=torch.Generator().manual_seed(1))
        return tuple(t.to(device) for t in (*random_boxes(n, 1000), idxs))

    return Case(
        "batched_nms",
        device,
        {name: lambda *args, f=f: f(*args, THRESHOLD) for name, (_, f) in peers(device).items()},
        inputs,
        lambda *args: reference_of(extension_cpp.batched_nms)(*args, THRESHOLD),
        workload=f"{CLASSES} classes",
        dtype=torch.float32,
        size=f"{n:,}",
        bytes=28 * n,
        part=part_of(device, n),
        x=n,
        axis="boxes",
        draw="time",
    )


def padded(device: str, n: int) -> Case:
    """Of the size that is known without the values; peers are padded afterwards, as one would for a CUDA graph."""

    def pad(function: Callable) -> Callable:
        def run(boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
            keep = function(boxes, scores, THRESHOLD)
            return torch.cat([keep, keep.new_full((n - len(keep),), -1)]), torch.tensor(len(keep), device=device)

        return run

    def ours(boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        return extension_cpp.nms_padded(boxes, scores, THRESHOLD)

    return Case(
        "nms_padded",
        device,
        {
            OURS: ours,
            **({f"{OURS}, as a CUDA graph": graphed(ours)} if device == "cuda" else {}),
            **{name: pad(function) for name, (function, _) in peers(device).items() if name != OURS},
        },
        lambda: tuple(t.to(device) for t in random_boxes(n, 1_000)),
        lambda boxes, scores: reference_of(extension_cpp.nms_padded)(boxes, scores, THRESHOLD),
        workload="in a field of 1,000",
        dtype=torch.float32,
        size=f"{n:,}",
        bytes=28 * n,
    )


def large(make: Callable[[], tuple[Tensor, Tensor]], n: int, title: str, threshold: float = THRESHOLD) -> Case:
    """So many boxes that a peer has no memory for them, or no time."""

    def ours(boxes: Tensor, scores: Tensor) -> Tensor:
        return extension_cpp.nms(boxes, scores, threshold)

    return Case(
        "nms",
        "cuda",
        {OURS: ours},
        lambda: tuple(t.cuda() for t in make()),
        workload="no peer",
        dtype=torch.float32,
        size=f"{n:,} {title}",
        bytes=20 * n,
        part=part_of("cuda", n),
    )


def memory(n: int) -> Case:
    def measured(boxes: Tensor, scores: Tensor) -> float:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        extension_cpp.nms(boxes, scores, THRESHOLD)
        return float(torch.cuda.max_memory_allocated() - before)

    extra = {"workload": "memory next to the inputs", "unit": "B", "timer": reported, "rounds": 1}
    made = lambda: tuple(t.cuda() for t in random_boxes(n, 10_000))  # noqa: E731
    return Case("nms", "cuda", {OURS: measured}, made, dtype=torch.float32, size=f"{n:,}", **extra)


def grid(device: str) -> Grid:
    """From few boxes far apart to many that all overlap. Of larger sides areas are rounded, and peers fuse products."""

    def inputs(n: int, field: int, side: int) -> tuple[Tensor, Tensor]:
        boxes, scores = boxes_of_all_sizes(n, field, side)
        return boxes.to(device), scores.to(device)

    def ours(boxes: Tensor, scores: Tensor) -> Tensor:
        return extension_cpp.nms(boxes, scores, THRESHOLD)

    name, (peer, _) = next((name, pair) for name, pair in peers(device).items() if name != OURS)
    return Grid(
        "nms",
        device,
        torch.float32,
        ("boxes", "field", "side"),
        GRID,
        ours,
        (name, lambda boxes, scores: peer(boxes, scores, THRESHOLD)),
        inputs,
        lambda n, field, side: side <= 1_000,
    )


def cases(device: str) -> Iterator[Case | Grid]:
    """All cases of a device."""
    for field in FIELDS:
        # Of the wide field nearly all boxes stay, and for each the reference takes a step; so it does for each of a chain.
        for n in SIZES[device][:-1] if (device, field) == ("cpu", FIELDS[1]) else SIZES[device]:
            curve = {"workload": f"in a field of {field:,}", "size": f"{n:,}", "x": n, "axis": "boxes", "draw": "time"}
            make = lambda n=n, field=field: random_boxes(n, field)  # noqa: E731
            yield single(device, make, n, **curve, short=(n, field) == (5_000, 1_000))
    many = 20_000 if device == "cuda" else 5_000  # of those that a peer, or the reference, goes through one at a time
    hard = [
        ("in 200 clusters", 20_000, lambda n: clustered_boxes(n, 200)),
        ("all equal", 20_000, equal_boxes),
        ("in a chain", many, chained_boxes),
        ("with outliers", many, boxes_with_outliers),
    ]
    if device == "cuda":
        hard += [("in a chain", n, chained_boxes) for n in (1_000, 4_096, 10_000)]
        hard += [("all equal", n, equal_boxes) for n in (1_000, 50_000)]
    for title, n, make in hard:
        yield single(device, lambda make=make, n=n: make(n), n, workload="hard cases", size=f"{n:,} {title}")
    for n in (1_000, 10_000, 100_000 if device == "cuda" else 30_000):
        yield batched(device, n)
    for n in (1_000, 5_000):
        yield padded(device, n)
    if device == "cuda":
        for n in (200_000, 1_000_000):
            yield large(lambda n=n: random_boxes(n, 10_000), n, "in a field of 10,000")
            yield memory(n)
        for n in (50_000, 200_000):
            yield large(lambda n=n: boxes_with_outliers(n), n, "with outliers")
        for field in (1_000, 10_000):
            boxes = f"of sides from 1 to 1,000 in a field of {field:,}"
            yield large(lambda field=field: boxes_of_all_sizes(200_000, field), 200_000, boxes, threshold=0.05)
    if len(peers(device)) > 1:
        yield grid(device)
