"""convrnn_forward compared with the loop over time that one would write in PyTorch's operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad

import extension_cpp
from benchmarks.contenders import backward, compiled, graphed
from benchmarks.harness import OURS, TOLERANCES, Case, Function, Grid
from extension_cpp.ops._operator import reference_of

SIZES = {
    "cpu": [(2, 10, 64), (32, 128, 16), (32, 256, 512), (1, 256, 4096)],
    "cuda": [(2, 10, 64), (32, 256, 512), (128, 256, 256), (64, 1024, 1024), (1, 512, 4096), (4, 64, 16384)],
}
STEPS = {"cpu": (16, 64), "cuda": (16, 64, 1024)}  # of a curve that has one of the sizes on it
TAPS = 3
GRID = (1, 4, 16, 64, 256, 1024)


def step(h: Tensor, x_t: Tensor, kernel: Tensor) -> Tensor:
    taps = kernel.shape[2]
    return torch.tanh(conv1d(pad(h, (taps // 2, taps - 1 - taps // 2), mode="circular"), kernel) + x_t)


def loop(step: Function) -> Function:
    def run(x: Tensor, kernel: Tensor, hidden: Tensor) -> Tensor:
        states = [hidden[:, None]]
        for x_t in x.split(1, 1):
            states.append(step(states[-1], x_t, kernel))
        return torch.cat(states, 1)

    return run


def peers(device: str, wrap: Callable[[Function], Function]) -> dict[str, Function]:
    # A step at a time, as torch.compile takes half a second for each that it sees in one graph.
    found = {
        OURS: wrap(extension_cpp.convrnn_forward),
        "loop": wrap(loop(step)),
        "compiled step": wrap(loop(compiled(step))),
    }
    if device == "cuda":
        found["loop as a graph"] = graphed(wrap(loop(step)))
    return found


def inputs(device: str, dtype: torch.dtype, size: tuple[int, int, int], taps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Magnitudes of the kernel add up to 0.9, so that contenders' roundings don't grow over time."""
    batch, steps, width = size
    kernel = torch.rand(1, 1, taps, device=device) - 0.5
    kernel = 0.9 * kernel / kernel.abs().sum()
    return tuple(
        t.to(dtype)
        for t in (torch.randn(batch, steps, width, device=device), kernel, torch.randn(batch, width, device=device))
    )


def both(device: str, dtype: torch.dtype, size: tuple[int, int, int], taps: int = TAPS, **described) -> Iterator[Case]:
    batch, steps, width = size
    name = str(size) if taps == TAPS else f"{size}, {taps} taps"
    elements = batch * steps * width
    short = size == SIZES["cpu"][1]
    common = {"dtype": dtype, "size": name, **described}

    def training() -> tuple[Tensor, ...]:
        x, kernel, hidden = inputs(device, dtype, size, taps)
        grad = torch.randn(batch, steps + 1, width, device=device).to(dtype)
        return grad, *(t.requires_grad_() for t in (x, kernel, hidden))

    def chain(x: Tensor, kernel: Tensor, hidden: Tensor) -> Tensor:
        """The steps of a row that is no longer than a warp, which wait for each other whatever else is done."""
        least = max(32, taps)
        return extension_cpp.convrnn_forward(x[:1, :, :least], kernel, hidden[:1, :least])

    yield Case(
        "convrnn_forward",
        device,
        peers(device, lambda f: f),
        lambda: inputs(device, dtype, size, taps),
        reference_of(extension_cpp.convrnn_forward),
        bytes=2 * dtype.itemsize * elements,
        part=chain if device == "cuda" else None,
        operations=2 * taps * elements,
        short=short,
        **common,
    )
    trained = {
        "inputs": training,
        "reference": backward(reference_of(extension_cpp.convrnn_forward)),
        "bytes": 5 * dtype.itemsize * elements,
        "operations": 6 * taps * elements,
        # The kernel's gradient is a sum of so many products.
        "tolerance": torch.finfo(dtype).eps * 32 * (1 + math.sqrt(elements)),
        **common,
    }
    contenders = peers(device, backward)
    graph_of_loop = contenders.pop("loop as a graph", None)
    yield Case("convrnn_forward", device, contenders, workload="forward and backward", short=short, **trained)
    if graph_of_loop:  # The device's part: the host takes longer than our kernels.
        graphs = {OURS: graphed(contenders[OURS]), "loop": graph_of_loop}
        yield Case("convrnn_forward", device, graphs, workload="forward and backward as a CUDA graph", **trained)


def grid(device: str) -> Grid:
    """All sizes that the loop takes some milliseconds for."""
    dtype, most_steps, most = torch.float32, 64, 2**24 if device == "cuda" else 2**18
    return Grid(
        "convrnn_forward",
        device,
        dtype,
        ("B", "T", "H"),
        GRID,
        extension_cpp.convrnn_forward,
        ("loop", loop(step)),
        lambda *size: inputs(device, dtype, size, TAPS),
        lambda b, t, h: t <= most_steps and h >= TAPS and b * t * h <= most,
        lambda *size: 10 * TOLERANCES[dtype],
    )


def cases(device: str) -> Iterator[Case | Grid]:
    """All cases of a device."""
    torch.backends.cudnn.allow_tf32 = False  # The loop, too, is to compute in float32.
    batch, _, width = on_curve = (32, 256, 512)
    for size in SIZES[device]:
        on = {"x": size[1], "axis": f"steps of ({batch}, T, {width})", "draw": "time"} if size == on_curve else {}
        yield from both(device, torch.float32, size, **on)
    for steps in STEPS[device]:
        yield from both(
            device, torch.float32, (batch, steps, width), x=steps, axis=f"steps of ({batch}, T, {width})", draw="time"
        )
    yield from both(device, torch.float32, on_curve, taps=31)
    if device == "cuda":  # One row, over several multiprocessors.
        yield next(both(device, torch.float32, (1, 2048, 4096)))
    # In bfloat16 the loop's sums over time are too far off to be compared.
    yield next(both(device, torch.bfloat16, on_curve))
    yield grid(device)
