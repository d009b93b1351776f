"""add_one and my_op: elementwise with one tensor; on CUDA by Triton."""

from torch import Tensor

from extension_cpp.ops import _fused
from extension_cpp.ops._operator import operator

__all__ = ["add_one", "my_op"]


def _add_one_backward(grad: Tensor) -> Tensor:
    return grad


def _my_op_backward(grad: Tensor, scalar_arg: float) -> Tensor:
    return my_op(grad, scalar_arg)


@operator(backward=_add_one_backward, fused=True, exact=True, triton=True)
def add_one(input: Tensor) -> Tensor:
    r"""Add one: :math:`\text{input} + 1`, elementwise.

    Args:
        input: any shape; float16, bfloat16, float32 or float64; any strides.

    Returns:
        A tensor of the shape and dtype of `input`, with the strides that ``input + 1`` would have, except those of dimensions
        of size 1. float16 and bfloat16 are computed in float32 and rounded once.

    Differentiable any number of times, backward and forward.

    Raises:
        RuntimeError: if the dtype is none of the four.

    Example:
        >>> extension_cpp.add_one(torch.tensor([1.0, 2.0]))
        tensor([2., 3.])
    """
    return input + 1


@operator(backward=_my_op_backward, fused=_fused.multiply, exact=True, triton=True)
def my_op(input: Tensor, scalar_arg: float) -> Tensor:
    r"""Scale: :math:`\text{input} \cdot \text{scalar\_arg}`, elementwise.

    Args:
        input: as for :func:`add_one`.
        scalar_arg: the number to multiply with; rounded to float32 unless `input` is float64.

    Result, derivatives (in `input`) and errors are those of :func:`add_one`.

    Example:
        >>> extension_cpp.my_op(torch.tensor([1.0, 2.0]), 3.0)
        tensor([3., 6.])
    """
    return input * float(scalar_arg)
