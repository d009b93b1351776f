"""add_one: input + 1;  my_op: input * scalar_arg. Both move 8 bytes an element of float32 for 1 operation."""

import triton.language as tl
from torch import Tensor

from extension_cpp.ops.add_one import _add_one_fake, _my_op_fake
from extension_cpp.triton.elementwise import (
    Kernel,
    bits_of,
    elements,
    launch,
    launch_plain,
    number,
    offsets,
    plain,
    positions,
    widen,
)


@Kernel
def _add_one(
    out,
    x,
    n30,
    rest,
    s0,
    s1,
    x0,
    x1,
    x2,
    DIMS: tl.constexpr,
    MANY: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = positions(BLOCK, WIDE)
    inside = at < elements(n30, rest, WIDE)
    value = tl.load(x + offsets(at, s0, s1, x0, x1, x2, DIMS), inside)
    tl.store(out + at, (widen(value) + 1).to(value.dtype), inside)


@Kernel
def _my_op(
    out,
    x,
    high,
    low,
    n30,
    rest,
    s0,
    s1,
    x0,
    x1,
    x2,
    DIMS: tl.constexpr,
    MANY: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = positions(BLOCK, WIDE)
    inside = at < elements(n30, rest, WIDE)
    value = tl.load(x + offsets(at, s0, s1, x0, x1, x2, DIMS), inside)
    wide = widen(value)
    tl.store(out + at, (wide * number(high, low).to(wide.dtype)).to(value.dtype), inside)


def add_one(input: Tensor) -> Tensor:
    if (out := plain(input)) is not None:
        return launch_plain(_add_one, out, (input,))
    return launch(_add_one, _add_one_fake(input), (input,))


def my_op(input: Tensor, scalar_arg: float) -> Tensor:
    if (out := plain(input)) is not None:
        return launch_plain(_my_op, out, (input,), *bits_of(scalar_arg))
    return launch(_my_op, _my_op_fake(input, scalar_arg), (input,), *bits_of(scalar_arg))
