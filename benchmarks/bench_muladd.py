"""mymuladd, mymul and myadd_out compared with what one would use instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import extension_cpp
from benchmarks.contenders import (
    CALL,
    COLD,
    DTYPES,
    RECORD,
    backward,
    batched_call,
    calls,
    compiled,
    graphed,
    sizes,
    training_steps,
    vectors,
)
from benchmarks.harness import OURS, Case, Function, Grid, time_calls
from extension_cpp.ops import _backends
from extension_cpp.ops._operator import reference_of

FRESH = (26,)  # On the CPU: what memory that is fresh for every result costs.
GRID = (1, 3, 16, 64, 500, 1000, 4096)
LEAST_GRAPH = 20  # Below, a CUDA graph shows the time of its launch.
C = 1.5


def mymuladd(a: Tensor, b: Tensor) -> Tensor:
    return extension_cpp.mymuladd(a, b, C)


def mymuladd_reference(a: Tensor, b: Tensor) -> Tensor:
    return reference_of(extension_cpp.mymuladd)(a, b, C)


def eager(a: Tensor, b: Tensor) -> Tensor:
    return a * b + C


def addcmul(device: str, dtype: torch.dtype) -> Function:
    c = torch.tensor(C, dtype=dtype, device=device)
    return lambda a, b: torch.addcmul(c, a, b)


def peers(device: str, dtype: torch.dtype) -> dict[str, Function]:
    return {
        OURS: mymuladd,
        "a*b+c": eager,
        "addcmul": addcmul(device, dtype),
        "compiled a*b+c": compiled(eager),
    }


def forward(device: str, dtype: torch.dtype, log2: int) -> Iterator[Case]:
    n = 2**log2
    common = {"dtype": dtype, "size": f"2^{log2}", "x": n, "bytes": 3 * dtype.itemsize * n}
    common["reason"] = COLD if device == "cpu" and log2 <= 16 else ""
    two, four = vectors(device, dtype, n, 2), vectors(device, dtype, n, 3)
    short = log2 == 20 or (log2 == 16 and dtype == torch.float32)
    yield Case(
        "mymuladd",
        device,
        peers(device, dtype),
        two,
        mymuladd_reference,
        operations=2 * n,
        short=short,
        **common,
    )
    yield Case(
        "mymul",
        device,
        {OURS: extension_cpp.mymul, "torch.mul": torch.mul},
        two,
        reference_of(extension_cpp.mymul),
        operations=n,
        **common,
    )

    def returning_out(function: Function) -> Function:
        return lambda a, b, out: (function(a, b, out), out)[1]

    yield Case(
        "myadd_out",
        device,
        {OURS: returning_out(extension_cpp.myadd_out), "torch.add(out=)": lambda a, b, out: torch.add(a, b, out=out)},
        four,
        returning_out(reference_of(extension_cpp.myadd_out)),
        operations=n,
        short=short,
        **common,
    )


def cached(dtype: torch.dtype, log2: int) -> Case:
    """The same inputs again and again, as a program's next step finds them: declared bytes would make inputs rotate."""
    return Case(
        "mymuladd",
        "cpu",
        peers("cpu", dtype),
        vectors("cpu", dtype, 2**log2, 2),
        mymuladd_reference,
        workload="forward from the cache",
        dtype=dtype,
        size=f"2^{log2}",
        operations=2 * 2**log2,
    )


def in_triton(dtype: torch.dtype, log2: int) -> Iterator[Case]:
    """What is used with a CUDA torch where the CUDA library is not: how much of its kernels' speed is left.

    As CUDA graphs, as a launch by Triton may take longer than the flush of the cache that hides it.
    """
    n = 2**log2
    ops = torch.ops.extension_cpp
    workload = "forward in Triton as a CUDA graph"
    common = {"workload": workload, "dtype": dtype, "size": f"2^{log2}", "x": n, "bytes": 3 * dtype.itemsize * n}
    two = vectors("cuda", dtype, n, 2)
    chosen = {OURS: graphed(lambda a, b: ops.mymuladd.triton(a, b, C)), "native graph": graphed(mymuladd)}
    yield Case("mymuladd", "cuda", chosen, two, mymuladd_reference, operations=2 * n, **common)
    chosen = {OURS: graphed(ops.mymul.triton), "native graph": graphed(extension_cpp.mymul)}
    yield Case("mymul", "cuda", chosen, two, reference_of(extension_cpp.mymul), operations=n, **common)


def training(device: str, dtype: torch.dtype, log2: int) -> Iterator[Case]:
    n = 2**log2

    def inputs() -> tuple[Tensor, ...]:
        grad, a, b = vectors(device, dtype, n, 3)()
        return grad, a.requires_grad_(), b.requires_grad_()

    steps = {
        OURS: backward(mymuladd),
        "a*b+c": backward(eager),
        "compiled a*b+c": backward(compiled(eager)),
    }
    common = {
        "inputs": inputs,
        "reference": backward(mymuladd_reference),
        "dtype": dtype,
        "size": f"2^{log2}",
        "x": n,
        "bytes": 8 * dtype.itemsize * n,
        "operations": 4 * n,
        "reason": RECORD if device == "cuda" and log2 <= 24 else "",
    }
    short = log2 == 20 and dtype == torch.float32
    # Up to there the host takes longer than the device, and than flushing the cache hides.
    timer = time_calls if device == "cuda" and log2 <= 20 else None
    yield Case("mymuladd", device, steps, workload="forward and backward", short=short, timer=timer, **common)
    if device == "cuda" and log2 >= LEAST_GRAPH:
        graphs = {name: graphed(step) for name, step in steps.items()}
        yield Case("mymuladd", device, graphs, workload="forward and backward as a CUDA graph", **common)


def layouts(device: str, dtype: torch.dtype) -> Iterator[Case]:
    side = 8192 if device == "cuda" else 1024

    def square(*size: int, on: str) -> Tensor:
        return torch.randn(size or (side, side), device=on).to(dtype)

    images = (side // 128, 256, 56, 56) if device == "cuda" else (4, 64, 56, 56)
    last = {"memory_format": torch.channels_last}
    makers: dict[str, Callable[[str], tuple[Tensor, Tensor]]] = {
        "both transposed": lambda on: (square(on=on).t(), square(on=on).t()),
        "one transposed": lambda on: (square(on=on), square(on=on).t()),
        "a row broadcast": lambda on: (square(on=on), square(side, on=on)),
        "a column broadcast": lambda on: (square(on=on), square(side, 1, on=on)),
        "outer product": lambda on: (square(side, 1, on=on), square(side, on=on)),
        "columns of a wider matrix": lambda on: (square(on=on), square(side, side + 8, on=on)[:, :side]),
        "columns off alignment": lambda on: (square(on=on), square(side, side + 8, on=on)[:, 1 : side + 1]),
        "one element off alignment": lambda on: (square(side**2 + 1, on=on)[1:], square(side**2 + 1, on=on)[1:]),
        "every second element": lambda on: (square(side**2, on=on)[::2], square(side**2, on=on)[::2]),
        "channels last": lambda on: (
            square(*images, on=on).contiguous(**last),
            square(*images, on=on).contiguous(**last),
        ),
        "channels last and first": lambda on: (square(*images, on=on), square(*images, on=on).contiguous(**last)),
        "a channel's bias": lambda on: (square(*images, on=on), square(images[1], 1, 1, on=on)),
        "permuted": lambda on: (
            square(side // 32, 512, 256, on=on).permute(2, 0, 1),
            square(256, side // 32, 512, on=on),
        ),
    }
    if dtype != torch.float32:  # The same paths, so that the ones that differ in nothing but bytes are left out.
        makers = {title: makers[title] for title in ("one transposed", "a row broadcast", "channels last and first")}
    for title, make in makers.items():
        a, b = make("meta")
        result = torch.broadcast_shapes(a.shape, b.shape).numel()
        # A cache line is read whole, however little of it is used.
        read = sum(t.untyped_storage().nbytes() for t in (a, b))
        yield Case(
            "mymuladd",
            device,
            {OURS: mymuladd, "a*b+c": eager, "addcmul": addcmul(device, dtype)},
            partial(make, device),
            mymuladd_reference,
            workload="strided",
            dtype=dtype,
            size=title,
            bytes=read + result * dtype.itemsize,
            operations=2 * result,
            short=title == "both transposed" and dtype == torch.float32,
        )


def permuted(device: str, dtype: torch.dtype) -> Grid:
    """Tensors of all shapes, of which the other one's dimensions lie in another order."""
    most, few = 2**27 if device == "cuda" else 2**22, 2**12

    def inputs(a: int, b: int, c: int) -> tuple[Tensor, Tensor]:
        other = torch.randn(b, c, a, device=device).to(dtype)
        return torch.randn(a, b, c, device=device).to(dtype), other.permute(2, 0, 1)

    return Grid(
        "mymul",
        device,
        dtype,
        ("A", "B", "C"),
        GRID,
        extension_cpp.mymul,
        ("torch.mul", torch.mul),
        inputs,
        lambda *sizes: math.prod(sizes) <= most,
        reason=lambda *sizes: CALL if device == "cpu" and math.prod(sizes) <= few else "",
    )


def call(device: str) -> Case:
    inputs = vectors(device, torch.float32, 16, 2)
    return Case(
        "mymuladd",
        device,
        peers(device, torch.float32),
        inputs,
        mymuladd_reference,
        workload="a call on 16 elements",
        timer=time_calls,
        reason=CALL,
        short=True,
    )


def cases(device: str) -> Iterator[Case | Grid]:
    """All cases of a device."""
    yield call(device)
    sixteen = vectors(device, torch.float32, 16, 2)
    yield from calls("mymuladd", device, mymuladd, eager, sixteen)
    least = torch.ops.aten.mul.Tensor, lambda grad, a, b: (grad * b, grad * a)
    yield from calls("mymul", device, extension_cpp.mymul, torch.mul, sixteen, least)
    yield from training_steps("mymul", device, extension_cpp.mymul, torch.mul, sixteen, least)
    yield batched_call("mymuladd", device, mymuladd, eager, lambda: (torch.randn(2, 16, device=device),) * 2)
    for dtype in DTYPES:
        for log2 in sizes(device, dtype):
            yield from forward(device, dtype, log2)
            both = {"native", "triton"} <= {*_backends.implementations(extension_cpp.mymuladd.operator, device)}
            if device == "cuda" and both and log2 >= LEAST_GRAPH:
                extension_cpp.use_backend("triton")  # Makes the overloads.
                yield from in_triton(dtype, log2)
        if device == "cpu":
            yield cached(dtype, 20)
        for log2 in FRESH if device == "cpu" and dtype == torch.float32 else ():
            yield from (case for case in forward(device, dtype, log2) if case.op != "mymul")
        for log2 in sizes(device, dtype) if device == "cuda" else sizes(device, dtype)[-2:]:
            yield from training(device, dtype, log2)
        yield from layouts(device, dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield permuted(device, dtype)
