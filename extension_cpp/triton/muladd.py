"""mymuladd: a * b + c, rounded once;  mymul: a * b. Both move 12 bytes an element of float32 for 2 operations or 1."""

import triton.language as tl
from torch import Tensor

from extension_cpp.ops.muladd import _mymul_backward_fake, _mymul_fake, _mymuladd_fake
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
def _mymuladd(
    out,
    a,
    b,
    high,
    low,
    n30,
    rest,
    s0,
    s1,
    a0,
    a1,
    a2,
    b0,
    b1,
    b2,
    DIMS: tl.constexpr,
    MANY: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = positions(BLOCK, WIDE)
    inside = at < elements(n30, rest, WIDE)
    x = tl.load(a + offsets(at, s0, s1, a0, a1, a2, DIMS), inside)
    y = widen(tl.load(b + offsets(at, s0, s1, b0, b1, b2, DIMS), inside))
    tl.store(out + at, tl.fma(widen(x), y, number(high, low).to(y.dtype)).to(x.dtype), inside)


@Kernel
def _mymul(
    out,
    a,
    b,
    n30,
    rest,
    s0,
    s1,
    a0,
    a1,
    a2,
    b0,
    b1,
    b2,
    DIMS: tl.constexpr,
    MANY: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = positions(BLOCK, WIDE)
    inside = at < elements(n30, rest, WIDE)
    x = tl.load(a + offsets(at, s0, s1, a0, a1, a2, DIMS), inside)
    y = tl.load(b + offsets(at, s0, s1, b0, b1, b2, DIMS), inside)
    tl.store(out + at, (widen(x) * widen(y)).to(x.dtype), inside)


def mymuladd(a: Tensor, b: Tensor, c: float) -> Tensor:
    if (out := plain(a, b)) is not None:
        return launch_plain(_mymuladd, out, (a, b), *bits_of(c))
    return launch(_mymuladd, _mymuladd_fake(a, b, c), (a, b), *bits_of(c))


def mymul(a: Tensor, b: Tensor) -> Tensor:
    if (out := plain(a, b)) is not None:
        return launch_plain(_mymul, out, (a, b))
    return launch(_mymul, _mymul_fake(a, b), (a, b))


def mymul_backward(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    grad_a, grad_b = _mymul_backward_fake(grad, a, b)
    return launch(_mymul, grad_a, (grad, b)), launch(_mymul, grad_b, (grad, a))
