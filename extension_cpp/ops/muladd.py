"""mymuladd, mymul and myadd_out: elementwise multiply, multiply-add, and add into a given tensor."""

import torch
from torch import Tensor

from extension_cpp.ops import _check
from extension_cpp.ops._dispatch import call_handle, is_eager, is_plain, write_handle
from extension_cpp.ops._register import batch_first, register

__all__ = ["myadd_out", "mymul", "mymuladd"]

_ops = torch.ops.extension_cpp
_mymuladd, _mymuladd_no_grad = _ops.mymuladd.default, _ops.mymuladd.no_grad._handle
_mymul, _mymul_no_grad = _ops.mymul.default, _ops.mymul.no_grad._handle
_mymul_backward, _mymul_backward_no_grad = _ops.mymul_backward.default, _ops.mymul_backward.no_grad._handle
_myadd_out = _ops.myadd_out.default


def mymuladd(a: Tensor, b: Tensor, c: float) -> Tensor:
    r"""Multiply-add: :math:`a \cdot b + c`, elementwise, rounded once.

    Args:
        a: any shape; float16, bfloat16, float32 or float64; any strides.
        b: a shape that broadcasts with that of `a`; dtype and device of `a`.
        c: the number to add.

    Returns:
        A tensor of the shape that `a` and `b` broadcast to, of their dtype, with the strides that ``a * b`` would have.
        float16 and bfloat16 are computed in float32; the result is that of a fused multiply-add on every device, except
        where plain PyTorch serves, which rounds the product too.

    Differentiable any number of times in `a` and `b`, backward and forward; gradients are summed over broadcast
    dimensions.

    Raises:
        RuntimeError: if the shapes don't broadcast, if dtypes or devices differ, or the dtype is none of the four.

    Example:
        >>> extension_cpp.mymuladd(torch.tensor([1.0, 2.0]), torch.tensor([3.0]), 0.5)
        tensor([3.5000, 6.5000])
    """
    if is_plain(a, b):
        return call_handle(_mymuladd_no_grad, a, b, c)
    return (_MulAdd.apply if is_eager(a, b) else _mymuladd)(a, b, c)


def mymul(a: Tensor, b: Tensor) -> Tensor:
    r"""Multiply: :math:`a \cdot b`, elementwise.

    Arguments, result, derivatives and errors are those of :func:`mymuladd`, without `c`.

    Example:
        >>> extension_cpp.mymul(torch.tensor([1.0, 2.0]), torch.tensor([3.0]))
        tensor([3., 6.])
    """
    if is_plain(a, b):
        return call_handle(_mymul_no_grad, a, b)
    return (_Mul.apply if is_eager(a, b) else _mymul)(a, b)


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
    if is_plain(a, b) and is_plain(out, out):
        return write_handle(_myadd_out._handle, out, a, b, out)
    if torch.is_grad_enabled():
        for name, t in (("a", a), ("b", b), ("out", out)):
            if isinstance(t, Tensor) and t.requires_grad:
                why = "as writing into out has none; got one that does"
                _check.fail("myadd_out", f"{name} must not require a gradient, {why}")
    _myadd_out(a, b, out)


# References: plain PyTorch, which the tests and benchmarks compare with, and which serves devices without a kernel.


def mymuladd_reference(a: Tensor, b: Tensor, c: float) -> Tensor:
    """What :func:`mymuladd` computes, in PyTorch's own operators."""
    if a.dtype in (torch.float32, torch.float64):
        return a * b + c
    return (a * b).copy_(a.float() * b.float() + c)  # Of the strides that a conversion of the inputs may lose.


def mymul_reference(a: Tensor, b: Tensor) -> Tensor:
    """What :func:`mymul` computes, in PyTorch's own operators."""
    return a * b


def myadd_out_reference(a: Tensor, b: Tensor, out: Tensor) -> None:
    """What :func:`myadd_out` computes, in PyTorch's own operators."""
    torch.add(a, b, out=out)


def mymul_backward_reference(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a and b, of one shape, for the gradient of a * b."""
    return grad * b, grad * a


# Fake kernels: checks, and the shape, dtype, strides and device of the result.


def _check_inputs(op: str, a: Tensor, b: Tensor) -> None:
    _check.check_floating(op, "a", a)
    _check.check_same(op, "b", b, "a", a)
    _check.broadcast_shapes(op, a=a, b=b)


def _check_out(op: str, a: Tensor, b: Tensor, out: Tensor) -> None:
    _check.check_floating(op, "a", a)
    _check.check_same(op, "b", b, "a", a)
    _check.check_same(op, "out", out, "a", a)
    shape = _check.broadcast_shapes(op, a=a, b=b)
    if out.shape != shape:
        _check.fail(op, f"out must have the shape that a and b broadcast to, {tuple(shape)}, got {tuple(out.shape)}")
    if _check.is_symbolic(a, b, out):
        return
    if _check.has_internal_overlap(out):
        got = f"shape {tuple(out.shape)} with strides {tuple(out.stride())}"
        _check.fail(op, f"out must not overlap itself, got {got}")
    for name, t in (("a", a), ("b", b)):
        if _check.partially_overlap(t, out):
            _check.fail(op, f"out must be {name} itself or not overlap it, got a partial overlap")


def _check_backward(op: str, grad: Tensor, a: Tensor, b: Tensor) -> None:
    _check.check_floating(op, "grad", grad)
    for name, t in (("a", a), ("b", b)):
        _check.check_same(op, name, t, "grad", grad)
        if t.shape != grad.shape:
            _check.fail(op, f"{name} must have the shape of grad, {tuple(grad.shape)}, got {tuple(t.shape)}")


def _mymuladd_fake(a: Tensor, b: Tensor, c: float) -> Tensor:
    _check_inputs("mymuladd", a, b)
    return _check.empty_elementwise(a, b)


def _mymul_fake(a: Tensor, b: Tensor) -> Tensor:
    _check_inputs("mymul", a, b)
    return _check.empty_elementwise(a, b)


def _myadd_out_fake(a: Tensor, b: Tensor, out: Tensor) -> None:
    _check_out("myadd_out", a, b, out)


def _mymul_backward_fake(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    _check_backward("mymul_backward", grad, a, b)
    return _check.empty_elementwise(grad, a, b), _check.empty_elementwise(grad, a, b)


# Derivatives. Those of a * b and of a * b + c are the same.


def _save(ctx, a: Tensor, b: Tensor) -> None:
    ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b if ctx.needs_input_grad[0] else None)
    ctx.shapes = a.shape, b.shape


def _setup_context(ctx, inputs, output) -> None:
    _save(ctx, *inputs[:2])


def _backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    shape_a, shape_b = ctx.shapes
    nothing = (None,) * (len(ctx.needs_input_grad) - 2)
    if a is not None and b is not None and shape_a == shape_b:
        if not torch.is_grad_enabled() and is_eager(grad, a, b):
            return *call_handle(_mymul_backward_no_grad, grad, a, b), *nothing
        return *_mymul_backward(grad, a, b), *nothing
    grad_a = None if b is None else mymul(grad, b).sum_to_size(shape_a)
    grad_b = None if a is None else mymul(grad, a).sum_to_size(shape_b)
    return grad_a, grad_b, *nothing


def _setup_context_backward(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward_of_backward(ctx, grad_grad_a: Tensor, grad_grad_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grad, a, b = ctx.saved_tensors
    return grad_grad_a * b + grad_grad_b * a, grad_grad_b * grad, grad_grad_a * grad


class _Mul(torch.autograd.Function):
    """The derivatives of mymul for plain eager calls, at a third of the cost of those that torch.library registers."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        _save(ctx, a, b)
        ctx.save_for_forward(a, b)
        return call_handle(_mymul_no_grad, a, b)

    backward = staticmethod(_backward)

    @staticmethod
    def jvp(ctx, tangent_a: Tensor | None, tangent_b: Tensor | None, *_: None) -> Tensor:
        a, b = ctx.saved_tensors
        terms = [x * y for x, y in ((tangent_a, b), (a, tangent_b)) if x is not None and y is not None]
        return terms[0] + terms[1] if len(terms) == 2 else terms[0]


class _MulAdd(_Mul):
    """The same for mymuladd."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, c: float) -> Tensor:  # type: ignore[override]
        _save(ctx, a, b)
        ctx.save_for_forward(a, b)
        return call_handle(_mymuladd_no_grad, a, b, c)


# vmap: the batch becomes the first dimension of an ordinary broadcasting call.


def _mymuladd_vmap(info, in_dims, a: Tensor, b: Tensor, c: float):
    return _mymuladd(*batch_first(in_dims[:2], a, b), c), 0


def _mymul_vmap(info, in_dims, a: Tensor, b: Tensor):
    return _mymul(*batch_first(in_dims, a, b)), 0


def _mymul_backward_vmap(info, in_dims, grad: Tensor, a: Tensor, b: Tensor):
    grad, a, b = torch.broadcast_tensors(*batch_first(in_dims, grad, a, b))
    return _mymul_backward(grad, a, b), (0, 0)


for _name, _fake, _reference, _vmap in (
    ("mymuladd", _mymuladd_fake, mymuladd_reference, _mymuladd_vmap),
    ("mymul", _mymul_fake, mymul_reference, _mymul_vmap),
):
    register(
        _name,
        fake=_fake,
        reference=_reference,
        check=_check_inputs,
        backward=_backward,
        setup_context=_setup_context,
        vmap=_vmap,
        triton=True,
    )
register(
    "mymul_backward",
    fake=_mymul_backward_fake,
    reference=mymul_backward_reference,
    check=_check_backward,
    backward=_backward_of_backward,
    setup_context=_setup_context_backward,
    vmap=_mymul_backward_vmap,
    triton=True,
)
register("myadd_out", fake=_myadd_out_fake, reference=myadd_out_reference, check=_check_out, mutates=2)
