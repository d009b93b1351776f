"""add_one: input + 1;  my_op: input * scalar_arg. Both move 8 bytes an element of float32 for 1 operation."""

import triton.language as tl
from torch import Tensor

from extension_cpp.ops.add_one import _add_one_fake, _my_op_fake
from extension_cpp.triton.elementwise import bits_of, elementwise, launch, number, offsets, positions, widen


@elementwise
def _add_one(
    out, x, n, s0, s1, x0, x1, x2, DIMS: tl.constexpr, MANY: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    at = positions(BLOCK, WIDE)
    value = tl.load(x + offsets(at, s0, s1, x0, x1, x2, DIMS), at < n)
    tl.store(out + at, (widen(value) + 1).to(value.dtype), at < n)


@elementwise
def _my_op(
    out, x, bits, n, s0, s1, x0, x1, x2, DIMS: tl.constexpr, MANY: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    at = positions(BLOCK, WIDE)
    value = tl.load(x + offsets(at, s0, s1, x0, x1, x2, DIMS), at < n)
    wide = widen(value)
    tl.store(out + at, (wide * number(bits).to(wide.dtype)).to(value.dtype), at < n)


def add_one(input: Tensor) -> Tensor:
    return launch(_add_one, _add_one_fake(input), (input,))


def my_op(input: Tensor, scalar_arg: float) -> Tensor:
    return launch(_my_op, _my_op_fake(input, scalar_arg), (input,), bits_of(scalar_arg))
