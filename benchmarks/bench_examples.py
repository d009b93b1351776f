"""The operators of examples/rows and examples/recurrence next to PyTorch's own, compiled ones, Liger's kernels where they are
installed, and cuDNN's LSTM.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.contenders import NODE, backward, compiled, graphed, in_calling_thread
from benchmarks.harness import OURS, Case, Function, reported, time_calls
from extension_cpp.ops._operator import reference_of

EXAMPLES = Path(__file__).parent.parent / "examples"
ROWS = {
    "cpu": ((4_096, 1_024), (512, 8_192)),
    "cuda": ((4_096, 1_024), (4_096, 4_096), (65_536, 1_024), (16_384, 8_192), (4_096, 16_384)),
}
LOGITS = {"cpu": ((256, 32_000),), "cuda": ((8_192, 32_000), (8_192, 128_256))}
SEQUENCES = {"cpu": ((16, 128, 64),), "cuda": ((16, 512, 512), (32, 256, 1_024))}
DTYPES = (torch.bfloat16, torch.float32)
EPS = 1e-6


@cache
def example(folder: str, name: str) -> Any:
    """The operator, which is compiled when it is first needed."""
    sys.path.insert(0, str(EXAMPLES / folder))
    return getattr(importlib.import_module(name), name)


@cache
def liger(module: str, name: str) -> Any:
    """One of Liger's autograd functions; None where it isn't installed."""
    try:
        return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)
    except ImportError:
        return None


def once_compiled(function: Callable[[], Function]) -> Function:
    """`function()` under torch.compile, made when it is first called."""
    made = cache(lambda: compiled(function()))
    return lambda *args: made()(*args)


def memory_of(function: Function) -> Function:
    """What a call allocates at most, apart from what was there."""

    def measured(*inputs: Any) -> float:
        for leaf in inputs:
            leaf.grad = None  # Of another contender, which would count as memory that was there.
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function(*inputs)
        return float(torch.cuda.max_memory_allocated() - before)

    return measured


def both(
    op: str, device: str, contenders: dict[str, Function], inputs: Callable, passes: tuple[int, int], **described: Any
) -> Iterator[Case]:
    """Forward, and forward and backward; `passes` is how often the first input is read or written, in bytes."""
    reference = described.pop("reference")
    grown = described.pop("tolerance")
    steps = {**contenders, **described.pop("nodes", {})}
    # What the host takes longer for than the device, and than flushing the cache hides, is timed as Python sees it; and as a
    # graph, which is the device's part.
    by_python = device == "cuda" and passes[1] < 2**30

    def training() -> tuple:
        leaves = tuple(t.requires_grad_() if t.is_floating_point() else t for t in inputs())
        return torch.randn_like(reference(*leaves)).detach(), *leaves

    trained = {
        "inputs": training,
        "reference": backward(reference),
        "bytes": passes[1],
        "tolerance": grown,
        **described,
    }
    yield Case(op, device, contenders, inputs, reference, bytes=passes[0], **described)
    trainings = {name: backward(who) for name, who in steps.items()}
    timed = {"timer": time_calls, "reason": NODE} if by_python else {}
    yield Case(op, device, trainings, workload="forward and backward", **timed, **trained)
    if by_python:
        of_one_thread = {name: in_calling_thread(step) for name, step in trainings.items()}
        workload = "forward and backward in the calling thread"
        yield Case(op, device, of_one_thread, workload=workload, **timed, **trained)
        graphs = {name: graphed(trainings[name]) for name in contenders}
        yield Case(op, device, graphs, workload="forward and backward as a CUDA graph", **trained)


def rms_norm(device: str) -> Iterator[Case]:
    def ours() -> Function:
        return example("rows", "rms_norm")

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return reference_of(ours())(x, weight, EPS)

    contenders: dict[str, Function] = {
        OURS: lambda x, weight: ours()(x, weight, EPS),
        "torch": lambda x, weight: functional.rms_norm(x, weight.shape, weight, EPS),
        "compiled": once_compiled(lambda: lambda x, weight: functional.rms_norm(x, weight.shape, weight, EPS)),
    }
    # How much of a step is the node in Python: with one, PyTorch's own kernels take as long as ours, or longer.
    nodes = {"torch's kernels, a node in Python": InPython.apply} if device == "cuda" else {}
    if device == "cuda" and (function := liger("rms_norm", "LigerRMSNormFunction")):
        # Not in place, as the others.
        contenders["Liger"] = lambda x, weight: function.apply(x, weight, EPS, 0.0, "llama", False)
    for dtype, (rows, n) in product(DTYPES, ROWS[device]):

        def inputs(dtype: torch.dtype = dtype, rows: int = rows, n: int = n) -> tuple[Tensor, ...]:
            return torch.randn(rows, n, device=device).to(dtype), torch.rand(n, device=device).to(dtype)

        moved = dtype.itemsize * rows * n
        grown = torch.finfo(dtype).eps * 32 * (1 + rows**0.5)  # Of a sum over rows.
        size = f"{rows} x {n}"
        yield from both(
            "rms_norm", device, contenders, inputs, (2 * moved, 5 * moved), dtype=dtype, size=size,
            reference=reference, tolerance=grown, nodes=nodes,
        )  # fmt: skip


class InPython(torch.autograd.Function):
    """The least that a derivative written in Python does: it calls one operator of PyTorch's each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y, scale = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, EPS)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        return torch.ops.aten._fused_rms_norm_backward(grad, x, weight.shape, scale, weight, [True, True])


def softmax_cross_entropy(device: str) -> Iterator[Case]:
    def ours() -> Function:
        return example("rows", "softmax_cross_entropy")

    def torchs(logits: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(logits, target, reduction="none")

    def reference(logits: Tensor, target: Tensor) -> Tensor:
        return reference_of(ours())(logits, target, -100, 0.0)[0]

    contenders: dict[str, Function] = {
        OURS: lambda logits, target: ours()(logits, target)[0],
        "torch": torchs,
        "compiled": once_compiled(lambda: torchs),
    }
    if device == "cuda" and (function := liger("cross_entropy", "LigerCrossEntropyFunction")):
        # It has no other form: where a gradient is recorded, that takes the place of the logits.
        others = None, -100, 0.0, 0.0, "none"
        contenders["Liger in place"] = lambda logits, target: function.apply(logits, target, *others)[0]
    for dtype, (rows, n) in product(DTYPES, LOGITS[device]):

        def inputs(dtype: torch.dtype = dtype, rows: int = rows, n: int = n) -> tuple[Tensor, ...]:
            return torch.randn(rows, n, device=device).to(dtype), torch.randint(n, (rows,), device=device)

        moved = dtype.itemsize * rows * n
        described = {"dtype": dtype, "size": f"{rows} x {n}"}
        yield from both(
            "softmax_cross_entropy", device, contenders, inputs, (moved, 3 * moved), reference=reference,
            tolerance=torch.finfo(dtype).eps * 32, **described,
        )  # fmt: skip
        if device == "cuda":

            def training(inputs: Callable = inputs) -> tuple:
                logits, target = inputs()
                return torch.ones(len(target), device=device, dtype=logits.dtype), logits.requires_grad_(), target

            used = {name: memory_of(backward(who)) for name, who in contenders.items()}
            extra = {"workload": "memory of forward and backward", "unit": "B", "timer": reported, "rounds": 1}
            extra["reason"] = "Liger writes the gradient where the logits were, which are lost"
            yield Case("softmax_cross_entropy", device, used, training, **described, **extra)


def diagonal_lstm(device: str) -> Iterator[Case]:
    def ours() -> Function:
        return example("recurrence", "diagonal_lstm")

    def reference(*args: Tensor) -> Tensor:
        return reference_of(ours())(*args)[0]

    loop = {"graph": graphed(reference)} if device == "cuda" else {}
    for batch, steps, width in SEQUENCES[device]:
        size = f"({batch}, {steps}, {width})"

        def inputs(batch: int = batch, steps: int = steps, width: int = width) -> tuple[Tensor, ...]:
            gates = torch.randn(4, batch, steps, width, device=device)
            return *gates.unbind(), *torch.rand(4, width, device=device).unbind(), *gates[:2, :, 0].clone().unbind()

        elements = batch * steps * width
        contenders = {OURS: lambda *args: ours()(*args)[0], "loop": reference}
        yield Case(
            "diagonal_lstm",
            device,
            {**contenders, **loop},
            inputs,
            reference,
            dtype=torch.float32,
            size=size,
            bytes=4 * 6 * elements,
            tolerance=1e-4,
        )
        # What one would take instead: its states feed back through matrices, of which a step waits for the product.
        full = torch.nn.LSTM(width, width, batch_first=True, device=device)

        def next_to(batch: int = batch, steps: int = steps, width: int = width, inputs: Callable = inputs) -> tuple:
            return torch.randn(batch, steps, width, device=device), *inputs()

        name = f"torch.nn.LSTM ({'cuDNN' if device == 'cuda' else 'oneDNN'}), with matrices"
        yield Case(
            "diagonal_lstm",
            device,
            {OURS: lambda x, *args: ours()(*args)[0], name: lambda x, *args, full=full: full(x)[0]},
            next_to,
            workload="next to an LSTM with matrices",
            dtype=torch.float32,
            size=size,
        )


def cases(device: str) -> Iterator[Case]:
    """All cases of a device."""
    yield from rms_norm(device)
    yield from softmax_cross_entropy(device)
    yield from diagonal_lstm(device)
