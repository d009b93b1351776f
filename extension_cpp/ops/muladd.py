"""mymuladd, mymul and myadd_out: elementwise multiply, multiply-add, and add into a given tensor."""

import torch
from torch import Tensor

from extension_cpp.ops import _fused
from extension_cpp.ops._operator import operator

__all__ = ["myadd_out", "mymul", "mymuladd"]


def _backward(grad: Tensor, a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Of a * b and of a * b + c. One pass gives both gradients, where they are of one shape.

    Nested tensors know operators of one or two tensors only.
    """
    if a is not None and b is not None and a.shape == b.shape and not grad.is_nested:
        return mymul_backward(grad, a, b)
    return None if b is None else mymul(grad, b), None if a is None else mymul(grad, a)


def _fused_backward(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return _fused.multiply(grad, b), _fused.multiply(grad, a)


def _product(a: Tensor, b: Tensor, c: float) -> Tensor:
    """Its derivative is that of a * b + c."""
    return a * b


@operator(
    backward=_backward,
    saved_for={"a": "b", "b": "a"},
    flops="2 ...",
    fused=_fused.multiply_add,
    exact=_product,
    triton=True,
)
def mymuladd(a: Tensor, b: Tensor, c: float) -> Tensor:
    r"""Multiply-add: :math:`a \cdot b + c`, elementwise, rounded once.

    Args:
        a: any shape; float16, bfloat16, float32 or float64; any strides.
        b: a shape that broadcasts with that of `a`; dtype and device of `a`.
        c: the number to add; rounded to float32 unless `a` is float64.

    Returns:
        A tensor of the shape that `a` and `b` broadcast to, of their dtype, with the strides that ``a * b`` would have.
        float16 and bfloat16 are computed in float32; the result is that of a fused multiply-add on every device, except
        where plain PyTorch is used, which rounds the product too.

    Differentiable any number of times in `a` and `b`, backward and forward; gradients are summed over broadcast
    dimensions.

    Raises:
        RuntimeError: if the shapes don't broadcast, if dtypes or devices differ, or the dtype is none of the four.

    Example:
        >>> extension_cpp.mymuladd(torch.tensor([1.0, 2.0]), torch.tensor([3.0]), 0.5)
        tensor([3.5000, 6.5000])
    """
    if a.dtype in (torch.float32, torch.float64):
        return a * b + c
    # Into a product, which has the strides that conversions may lose, and whose gradient would be 0 times what is infinite.
    return (a * b).detach().copy_((a.float() * b.float() + c).to(a.dtype))


@operator(backward=_backward, saved_for={"a": "b", "b": "a"}, fused=_fused.multiply, exact=True, triton=True)
def mymul(a: Tensor, b: Tensor) -> Tensor:
    r"""Multiply: :math:`a \cdot b`, elementwise.

    Arguments, result, derivatives and errors are those of :func:`mymuladd`, without `c`.

    Example:
        >>> extension_cpp.mymul(torch.tensor([1.0, 2.0]), torch.tensor([3.0]))
        tensor([3., 6.])
    """
    return a * b


@operator()
def myadd_out(a: Tensor, b: Tensor, out: Tensor) -> None:
    r"""Write :math:`a + b`, elementwise, into `out`.

    Args:
        a: any shape; float16, bfloat16, float32 or float64; any strides.
        b: a shape that broadcasts with that of `a`; dtype and device of `a`.
        out: the shape that `a` and `b` broadcast to; dtype and device of `a`; any strides with which no two indices name
            the same element. It may be `a` or `b` itself, but not overlap them otherwise.

    Not differentiable, as PyTorch's own functions with `out`: while gradients are recorded, no argument may require one.

    Raises:
        RuntimeError: if an argument is not as above; `out` is then unchanged.

    Example:
        >>> out = torch.empty(2)
        >>> extension_cpp.myadd_out(torch.tensor([1.0, 2.0]), torch.tensor([3.0]), out)
        >>> out
        tensor([4., 5.])
    """
    out.copy_(a + b)


@operator(flops="2 ...", fused=_fused_backward, triton=True, public=False)
def mymul_backward(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a and b, of one shape, for the gradient of a * b."""
    return grad * b, grad * a
