"""matmul: the product of two matrices."""

import torch
from torch import Tensor

from extension_cpp.ops import _check
from extension_cpp.ops._dispatch import call_handle, is_eager, is_plain
from extension_cpp.ops._register import register

__all__ = ["matmul"]

try:
    from torch._C import _get_fp32_precision_getter as _float32_precision
except ImportError:  # A torch that renamed it: the same at six times the cost.

    def _float32_precision(backend: str, op: str) -> str:
        return torch.backends.cuda.matmul.fp32_precision


_ops = torch.ops.extension_cpp
_matmul, _matmul_no_grad = _ops.matmul.default, _ops.matmul.no_grad._handle


def matmul(a: Tensor, b: Tensor) -> Tensor:
    r"""Matrix product: :math:`c_{mn} = \sum_k a_{mk} b_{kn}`.

    Args:
        a: (M, K); float16, bfloat16, float32 or float64; any strides.
        b: (K, N); dtype and device of `a`; any strides.

    Returns:
        (M, N), contiguous, of the dtype of `a`; zeros where K is 0. Sums of float16 and bfloat16 are kept in float32 and
        rounded once. With the unit roundoff :math:`u` of that dtype, and :math:`\varepsilon` the spacing at 1 of float32, or
        of float64 for float64,

        .. math:: |\hat{c} - c| \le u |c| + (1 + u) \gamma\, |a| |b|, \quad
            \gamma = \frac{K \varepsilon}{1 - K \varepsilon},

        where no product or sum overflows or falls below the normal numbers: twice the bound of a sum of rounded products in
        any order, as tensor cores cut where others round.

    On CUDA, float16 and bfloat16 are computed on tensor cores. float32 is computed in float32, and in tf32 only where
    PyTorch's own switch allows it: ``torch.backends.cuda.matmul.fp32_precision = "tf32"``, or what sets that, as
    ``torch.set_float32_matmul_precision("high")``. Factors are then rounded to 11 bits: :math:`\varepsilon = 2^{-10}`.

    A transposed view is as fast as a contiguous matrix. The bits of the result are the same on every run and for every
    layout of `a` and `b`, on one kind of device.

    Differentiable any number of times, backward and forward, by the same operator: the gradients are :math:`g b^T` and
    :math:`a^T g`.

    Raises:
        RuntimeError: if a shape, dtype or device is not as above.

    Example:
        >>> extension_cpp.matmul(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]]))
        tensor([[11.]])
    """
    if is_plain(a, b):
        return call_handle(_matmul_no_grad, a, b, a.is_cuda and _allows_tf32(a))
    return _MatMul.apply(a, b) if is_eager(a, b) else _matmul(a, b, _allows_tf32(a))


def _allows_tf32(a: Tensor) -> bool:
    """Whether PyTorch's switch is on, where it means something. It is of the call: kernels can't ask for it."""
    return isinstance(a, Tensor) and a.is_cuda and a.dtype is torch.float32 and _tf32_is_on()


def _tf32_is_on() -> bool:
    return _float32_precision("cuda", "matmul") == "tf32"


# torch.compile guards on the switch by itself. What torch.compiler.assume_constant_result does, without its import of all
# of the compiler.
_tf32_is_on._dynamo_marked_constant = True  # type: ignore[attr-defined]


# The reference: plain PyTorch, which the tests and benchmarks compare with, and which serves devices without a kernel.


def matmul_reference(a: Tensor, b: Tensor, allow_tf32: bool = False) -> Tensor:
    """What :func:`matmul` computes, in PyTorch's own operator, which reads its switch itself.

    Of copies: the bits that it returns depend on the layouts.
    """
    return torch.mm(*(t.clone(memory_format=torch.contiguous_format) for t in (a, b)))


# Checks and the fake kernel.


def _check_inputs(op: str, a: Tensor, b: Tensor) -> None:
    _check.check_floating(op, "a", a)
    _check.check_same(op, "b", b, "a", a)
    for name, t in (("a", a), ("b", b)):
        if t.dim() != 2:
            _check.fail(op, f"{name} must have 2 dimensions, got shape {tuple(t.shape)}")
    if a.shape[1] != b.shape[0]:
        got = f"{tuple(a.shape)} and {tuple(b.shape)}"
        _check.fail(op, f"a and b must have shapes (M, K) and (K, N), got {got}")


def _matmul_fake(a: Tensor, b: Tensor, allow_tf32: bool = False) -> Tensor:
    _check_inputs("matmul", a, b)
    return a.new_empty((a.shape[0], b.shape[1]))


# Derivatives.


def _setup_context(ctx, inputs, output) -> None:
    a, b = inputs[:2]
    ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b if ctx.needs_input_grad[0] else None)


def _backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    grad_a = None if b is None else matmul(grad, b.t())
    grad_b = None if a is None else matmul(a.t(), grad)
    return grad_a, grad_b, *(None,) * (len(ctx.needs_input_grad) - 2)


class _MatMul(torch.autograd.Function):
    """The derivatives for plain eager calls, at a third of the cost of those that torch.library registers."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        _setup_context(ctx, (a, b), None)
        ctx.save_for_forward(a, b)
        return call_handle(_matmul_no_grad, a, b, _allows_tf32(a))

    backward = staticmethod(_backward)

    @staticmethod
    def jvp(ctx, tangent_a: Tensor | None, tangent_b: Tensor | None) -> Tensor:
        a, b = ctx.saved_tensors
        terms = [matmul(x, y) for x, y in ((tangent_a, b), (a, tangent_b)) if x is not None and y is not None]
        return terms[0] + terms[1] if len(terms) == 2 else terms[0]


# vmap: a batch of one argument becomes rows or columns of one product; batches of both are one product each.


def _matmul_vmap(info, in_dims, a: Tensor, b: Tensor, allow_tf32: bool = False):
    in_a, in_b = in_dims[:2]
    if in_b is None:
        a = a.movedim(in_a, 0)
        return _matmul(a.flatten(0, 1), b, allow_tf32).unflatten(0, a.shape[:2]), 0
    if in_a is None:
        b = b.movedim(in_b, 1)
        return _matmul(a, b.flatten(1, 2), allow_tf32).unflatten(1, b.shape[1:]), 1
    a, b = a.movedim(in_a, 0), b.movedim(in_b, 0)
    products = [_matmul(x, y, allow_tf32) for x, y in zip(a, b)]
    return torch.stack(products) if products else a.new_empty((0, a.shape[1], b.shape[2])), 0


register(
    "matmul",
    fake=_matmul_fake,
    reference=matmul_reference,
    check=_check_inputs,
    backward=_backward,
    setup_context=_setup_context,
    vmap=_matmul_vmap,
)
