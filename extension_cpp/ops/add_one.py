"""add_one and my_op: elementwise with one tensor; on CUDA by Triton."""

import torch
from torch import Tensor

from extension_cpp.ops import _check
from extension_cpp.ops._dispatch import call_handle, is_eager, is_plain
from extension_cpp.ops._register import register

__all__ = ["add_one", "my_op"]

_ops = torch.ops.extension_cpp
_add_one, _add_one_no_grad = _ops.add_one.default, _ops.add_one.no_grad._handle
_my_op, _my_op_no_grad = _ops.my_op.default, _ops.my_op.no_grad._handle


def add_one(input: Tensor) -> Tensor:
    r"""Add one: :math:`\text{input} + 1`, elementwise.

    Args:
        input: any shape; float16, bfloat16, float32 or float64; any strides.

    Returns:
        A tensor of the shape and dtype of `input`, with the strides that ``input + 1`` would have. float16 and bfloat16 are
        computed in float32 and rounded once.

    Differentiable any number of times, backward and forward.

    Raises:
        RuntimeError: if the dtype is none of the four.

    Example:
        >>> extension_cpp.add_one(torch.tensor([1.0, 2.0]))
        tensor([2., 3.])
    """
    if is_plain(input, input):
        return call_handle(_add_one_no_grad, input)
    return (_AddOne.apply if is_eager(input) else _add_one)(input)


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
    if is_plain(input, input):
        return call_handle(_my_op_no_grad, input, scalar_arg)
    return (_MyOp.apply if is_eager(input) else _my_op)(input, scalar_arg)


# References: plain PyTorch, which the tests and benchmarks compare with, and which serves devices without a kernel.


def add_one_reference(input: Tensor) -> Tensor:
    """What :func:`add_one` computes, in PyTorch's own operators."""
    return input + 1


def my_op_reference(input: Tensor, scalar_arg: float) -> Tensor:
    """What :func:`my_op` computes, in PyTorch's own operators."""
    return input * float(scalar_arg)


# Checks and fake kernels.


def _check_input(op: str, input: Tensor) -> None:
    _check.check_floating(op, "input", input)
    _check.broadcast_shapes(op, input=input)


def _add_one_fake(input: Tensor) -> Tensor:
    _check_input("add_one", input)
    return _check.empty_elementwise(input)


def _my_op_fake(input: Tensor, scalar_arg: float) -> Tensor:
    _check_input("my_op", input)
    return _check.empty_elementwise(input)


# Derivatives: those of my_op are my_op of the gradient.


def _add_one_setup_context(ctx, inputs, output) -> None:
    pass


def _add_one_backward(ctx, grad: Tensor) -> Tensor:
    return grad


def _my_op_setup_context(ctx, inputs, output) -> None:
    ctx.scalar_arg = inputs[1]


def _my_op_backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
    return my_op(grad, ctx.scalar_arg), None


class _AddOne(torch.autograd.Function):
    """The derivatives of add_one for plain eager calls, as _Mul in muladd.py has them."""

    @staticmethod
    def forward(ctx, input: Tensor) -> Tensor:
        return call_handle(_add_one_no_grad, input)

    backward = staticmethod(_add_one_backward)

    @staticmethod
    def jvp(ctx, tangent: Tensor) -> Tensor:
        return tangent.clone()


class _MyOp(torch.autograd.Function):
    """The same for my_op."""

    @staticmethod
    def forward(ctx, input: Tensor, scalar_arg: float) -> Tensor:
        ctx.scalar_arg = scalar_arg
        return call_handle(_my_op_no_grad, input, scalar_arg)

    backward = staticmethod(_my_op_backward)

    @staticmethod
    def jvp(ctx, tangent: Tensor, _: None) -> Tensor:
        return my_op(tangent, ctx.scalar_arg)


# vmap: the batch is one more dimension.


def _add_one_vmap(info, in_dims, input: Tensor):
    return _add_one(input), in_dims[0]


def _my_op_vmap(info, in_dims, input: Tensor, scalar_arg: float):
    return _my_op(input, scalar_arg), in_dims[0]


register(
    "add_one",
    fake=_add_one_fake,
    reference=add_one_reference,
    check=_check_input,
    backward=_add_one_backward,
    setup_context=_add_one_setup_context,
    vmap=_add_one_vmap,
    triton=True,
)
register(
    "my_op",
    fake=_my_op_fake,
    reference=my_op_reference,
    check=_check_input,
    backward=_my_op_backward,
    setup_context=_my_op_setup_context,
    vmap=_my_op_vmap,
    triton=True,
)
