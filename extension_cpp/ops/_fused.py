"""Formulas for `fused` of a declaration, with the kernels' bits in Inductor's loops."""

import torch
from torch import Tensor


def multiply_add(a: Tensor, b: Tensor, c: float) -> Tensor:
    """a * b + c, rounded once: where the loops have this instruction, on a CPU those over vectors."""
    if a.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return NotImplemented
    from torch._inductor.inductor_prims import fma

    # Of a shape that few constants of a program have: torch.compile takes those of one shape for one if they are equal, and
    # 0.0 and -0.0 are.
    return fma(a, b, a.new_full((1,) * a.dim(), c))


def multiply(a: Tensor, b: Tensor | float) -> Tensor:
    """a * b, rounded before what comes next: on CUDA Inductor contracts a plain product with a sum after it.

    Except a product with the number 0, which has no rounding.
    """
    if a.device.type == "cpu" or (not isinstance(b, Tensor) and b == 0):
        return a * b
    return multiply_add(a, b if isinstance(b, Tensor) else a.new_full((), b), -0.0)
