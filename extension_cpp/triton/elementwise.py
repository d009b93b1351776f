"""What elementwise operators in Triton share: which elements meet, rounding, and the launch.

A kernel is one loop over the result, in the order in which that lies in memory, with up to three dimensions once those that
lie behind one another in every operand are merged. Operands that need more are copied first.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from extension_cpp.ops import _backends

# What autotuning chooses from, once for each dtype, kind of loop and of size; Triton's cache on disk keeps the choice.
CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps)
    for block, warps in ((1024, 4), (512, 4), (1024, 8), (2048, 4), (2048, 8))
]
MANY = 2**20  # Elements from which on the configuration matters.
MAX_DIMS = 3


def elementwise(function: Callable) -> Any:
    """A kernel for :func:`launch`, autotuned. An argument `bits` is a number as :func:`bits_of` makes it."""
    bits = ["bits"] if "bits" in function.__code__.co_varnames else []
    configs = CONFIGS[:1] if _backends.interpreted else CONFIGS  # The interpreter has nothing to measure.
    tuned = triton.autotune(configs, key=["DIMS", "MANY"], cache_results=not _backends.interpreted)
    return tuned(triton.jit(function, do_not_specialize=bits))


# In kernels


@triton.jit
def positions(BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Of this program's elements in the result."""
    start = tl.program_id(0)
    if WIDE:
        start = start.to(tl.int64)
    return start * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def offsets(at, size0, size1, stride0, stride1, stride2, DIMS: tl.constexpr):
    """Of an operand's elements, where the result's are at `at`."""
    if DIMS == 1:
        return at * stride0
    elif DIMS == 2:
        return at % size0 * stride0 + at // size0 * stride1
    else:
        rest = at // size0
        return at % size0 * stride0 + rest % size1 * stride1 + rest // size1 * stride2


@triton.jit
def widen(x):
    """In the type of the computation: float64 for itself, float32 for all others."""
    if x.dtype == tl.float64:
        return x
    else:
        return x.to(tl.float32)


@triton.jit
def number(bits):
    """The number that :func:`bits_of` took apart, as float64: as an argument of its own it would be a float32."""
    return tl.full((), bits, tl.int64).to(tl.float64, bitcast=True)


# Outside


def bits_of(value: float) -> int:
    import struct

    return struct.unpack("<q", struct.pack("<d", value))[0]


def fold(out: Tensor, inputs: tuple[Tensor, ...]) -> list[tuple[int, list[int]]]:
    """Sizes and the inputs' strides, innermost first in the order of `out`, which is dense; at least one dimension."""
    dims: list[tuple[int, list[int]]] = []
    for d in sorted((d for d in range(out.dim()) if out.shape[d] != 1), key=out.stride):
        size, strides = out.shape[d], [t.stride(d) for t in inputs]
        if dims and strides == [stride * dims[-1][0] for stride in dims[-1][1]]:
            dims[-1] = (dims[-1][0] * size, dims[-1][1])
        else:
            dims.append((size, strides))
    return dims or [(1, [1] * len(inputs))]


def launch(kernel: Any, out: Tensor, inputs: tuple[Tensor, ...], *numbers: int) -> Tensor:
    """kernel(out, *inputs, *numbers, n, sizes, strides of each input), a program a block of `out`, on its device."""
    n = out.numel()
    if n == 0:
        return out
    inputs = tuple(t if t.shape == out.shape else t.expand(out.shape) for t in inputs)
    dims = fold(out, inputs)
    if len(dims) > MAX_DIMS:
        inputs = tuple(torch.empty_like(out).copy_(t) for t in inputs)
        dims = [(n, [1] * len(inputs))]
    farthest = max(sum((size - 1) * strides[i] for size, strides in dims) for i in range(len(inputs)))
    constants = {"DIMS": len(dims), "MANY": n >= MANY, "WIDE": max(n, farthest) >= 2**31 - max_block()}
    dims += [(1, [0] * len(inputs))] * (MAX_DIMS - len(dims))
    sizes = [size for size, _ in dims[:-1]]
    strides = [strides[i] for i in range(len(inputs)) for _, strides in dims]
    arguments = (out, *inputs, *numbers, n, *sizes, *strides)

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(n, meta["BLOCK"]),)

    traceable = isinstance(kernel, Autotuner) and isinstance(kernel.fn, JITFunction)
    traced = wrap_triton(kernel) if traceable else kernel
    if traced is not kernel:
        traced[grid](*arguments, **constants)
    elif out.device.type == "cuda":
        with torch.cuda.device(out.device):  # Triton launches on the current device.
            kernel[grid](*arguments, **constants)
    else:
        kernel[grid](*arguments, **constants)
    return out


def max_block() -> int:
    return max(config.kwargs["BLOCK"] for config in CONFIGS)
