"""convrnn_forward: a recurrence over time whose state is convolved with a kernel, and its derivatives."""

import torch
from torch import Tensor

from extension_cpp.ops import _check
from extension_cpp.ops._dispatch import call_handle, is_eager, is_plain
from extension_cpp.ops._register import register

__all__ = ["convrnn_forward"]

_ops = torch.ops.extension_cpp
_forward, _forward_no_grad = _ops.convrnn_forward.default, _ops.convrnn_forward.no_grad._handle
_backward, _backward_no_grad = _ops.convrnn_backward.default, _ops.convrnn_backward.no_grad._handle


def convrnn_forward(x: Tensor, kernel: Tensor, hidden: Tensor) -> Tensor:
    r"""A recurrence over time whose state is convolved, circularly, with a kernel.

    .. math:: h_0 = \mathrm{hidden}, \quad
        h_t[n] = \tanh\Big(\sum_{k=0}^{K-1} w[k] \, h_{t-1}[(n + k - p) \bmod H] + x_t[n]\Big), \quad
        p = \lfloor K / 2 \rfloor

    A cross-correlation, as in PyTorch's convolutions, without a bias.

    Args:
        x: (B, T, H); float16, bfloat16, float32 or float64; any strides.
        kernel: (1, 1, K), the weights w, with 1 <= K <= H; dtype and device of `x`; any strides.
        hidden: (B, H) or (B, 1, H); dtype and device of `x`; any strides.

    Returns:
        (B, T + 1, H), contiguous, of the dtype of `x`: the states from h_0, which is `hidden`, to h_T.

    B and T may be 0. For float16 and bfloat16 a step is computed in float32, and its result rounded to the dtype before the
    next: it goes on with what it returned, so that a sequence that is cut in two gives the same bits.

    Differentiable any number of times in all three; a first derivative is one more kernel, further ones are made of
    PyTorch's own operators, step by step. The same bits on every run.

    Raises:
        RuntimeError: if a shape, dtype or device is not as above.

    Example:
        >>> x, hidden = torch.zeros(1, 2, 4), torch.tensor([[1.0, 0.0, 0.0, 0.0]])
        >>> extension_cpp.convrnn_forward(x, torch.tensor([[[1.0, 0.0, 0.0]]]), hidden)  # the state moves to the right
        tensor([[[1.0000, 0.0000, 0.0000, 0.0000],
                 [0.0000, 0.7616, 0.0000, 0.0000],
                 [0.0000, 0.0000, 0.6420, 0.0000]]])
    """
    if is_plain(x, kernel) and is_plain(x, hidden):
        return call_handle(_forward_no_grad, x, kernel, hidden)
    return (_ConvRNN.apply if is_eager(x, kernel, hidden) else _forward)(x, kernel, hidden)


# References: plain PyTorch, which the tests and benchmarks compare with, and which serves devices without a kernel.


def _convolved(h: Tensor, kernel: Tensor) -> Tensor:
    """The sum over k of kernel[k] * h[(n + k - p) mod H], of rows (B, H)."""
    size, taps = h.shape[1], kernel.shape[2]
    p = taps // 2
    # Not a convolution of PyTorch's, which on CUDA rounds float32 to TF32.
    return torch.cat([h[:, size - p :], h, h[:, : taps - 1 - p]], 1).unfold(1, taps, 1) @ kernel.flatten()


def _spread(d: Tensor, kernel: Tensor) -> Tensor:
    """The sum over k of kernel[k] * d[(m - k + p) mod H], of rows (B, H): the transpose of _convolved."""
    size, taps = d.shape[1], kernel.shape[2]
    p = taps - 1 - taps // 2
    return torch.cat([d[:, size - p :], d, d[:, : taps - 1 - p]], 1).unfold(1, taps, 1) @ kernel.flatten().flip(0)


def _correlated(d: Tensor, h: Tensor, taps: int) -> Tensor:
    """The sums over all else of d[n] * h[(n + k - p) mod H], for each k, of states (B, T, H)."""
    size, p = h.shape[2], taps // 2
    wide = torch.cat([h[:, :, size - p :], h, h[:, :, : taps - 1 - p]], 2)
    return torch.stack([(d * wide[:, :, k : k + size]).sum() for k in range(taps)]).view(1, 1, taps)


def convrnn_forward_reference(x: Tensor, kernel: Tensor, hidden: Tensor) -> Tensor:
    """What :func:`convrnn_forward` computes, in PyTorch's own operators."""
    compute = torch.promote_types(x.dtype, torch.float32)
    states = [hidden.reshape(x.shape[0], x.shape[2])]
    for x_t in x.unbind(1):
        states.append(torch.tanh(_convolved(states[-1].to(compute), kernel.to(compute)) + x_t).to(x.dtype))
    return torch.stack(states, 1)


def convrnn_backward_reference(
    grad: Tensor, y: Tensor, kernel: Tensor, kernel_grad: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, kernel (empty without `kernel_grad`) and hidden (B, H) for that of y, in PyTorch's operators."""
    compute = torch.promote_types(grad.dtype, torch.float32)
    wide, states, w = grad.to(compute), y.to(compute), kernel.to(compute)
    from_later = torch.zeros_like(wide[:, 0])
    deltas = []
    for t in range(grad.shape[1] - 1, 0, -1):
        delta = (wide[:, t] + from_later) * ((1 - states[:, t]) * (1 + states[:, t]))
        deltas.append(delta.to(grad.dtype))
        from_later = _spread(deltas[-1].to(compute), w)
    grad_x = torch.stack(deltas[::-1], 1) if deltas else grad[:, 1:].clone(memory_format=torch.contiguous_format)
    grad_kernel = kernel.new_empty(1, 1, 0)
    if kernel_grad:
        grad_kernel = _correlated(grad_x.to(compute), states[:, :-1], kernel.shape[2]).to(grad.dtype)
    return grad_x, grad_kernel, (wide[:, 0] + from_later).to(grad.dtype).contiguous()


# Fake kernels: checks, and the shape, dtype, strides and device of the result.


def _check_kernel(op: str, kernel: Tensor, like_name: str, like: Tensor) -> None:
    _check.check_same(op, "kernel", kernel, like_name, like)
    if kernel.dim() != 3 or kernel.shape[0] != 1 or kernel.shape[1] != 1:
        _check.fail(op, f"kernel must have shape (1, 1, K), got {tuple(kernel.shape)}")
    taps, width = kernel.shape[2], like.shape[2]
    if taps < 1 or taps > width:
        _check.fail(op, f"kernel must have 1 to H elements, got K = {taps} and H = {width}")


def _check_inputs(op: str, x: Tensor, kernel: Tensor, hidden: Tensor) -> None:
    _check.check_floating(op, "x", x)
    if x.dim() != 3:
        _check.fail(op, f"x must have shape (B, T, H), got {tuple(x.shape)}")
    _check_kernel(op, kernel, "x", x)
    _check.check_same(op, "hidden", hidden, "x", x)
    flat, deep = (x.shape[0], x.shape[2]), (x.shape[0], 1, x.shape[2])
    if tuple(hidden.shape) not in (flat, deep):
        _check.fail(op, f"hidden must have shape {flat} or {deep}, got {tuple(hidden.shape)}")


def _check_backward(op: str, grad: Tensor, y: Tensor, kernel: Tensor) -> None:
    _check.check_floating(op, "grad", grad)
    if grad.dim() != 3 or grad.shape[1] < 1:
        _check.fail(op, f"grad must have shape (B, T + 1, H), got {tuple(grad.shape)}")
    _check.check_same(op, "y", y, "grad", grad)
    if y.shape != grad.shape:
        _check.fail(op, f"y must have the shape of grad, {tuple(grad.shape)}, got {tuple(y.shape)}")
    _check_kernel(op, kernel, "grad", grad)


def _forward_fake(x: Tensor, kernel: Tensor, hidden: Tensor) -> Tensor:
    _check_inputs("convrnn_forward", x, kernel, hidden)
    batch, steps, width = x.shape
    return x.new_empty(batch, steps + 1, width)


def _backward_fake(grad: Tensor, y: Tensor, kernel: Tensor, kernel_grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    _check_backward("convrnn_backward", grad, y, kernel)
    batch, states, width = grad.shape
    grad_kernel = grad.new_empty(1, 1, kernel.shape[2] if kernel_grad else 0)
    return grad.new_empty(batch, states - 1, width), grad_kernel, grad.new_empty(batch, width)


# Derivatives.


def _setup_context(ctx, inputs, output: Tensor) -> None:
    _, kernel, hidden = inputs
    ctx.save_for_backward(output, kernel)
    ctx.hidden_dim = hidden.dim()


def _gradients(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    y, kernel = ctx.saved_tensors
    needs_x, needs_kernel, needs_hidden = ctx.needs_input_grad
    if not torch.is_grad_enabled() and is_eager(grad, y, kernel):
        grad_x, grad_kernel, grad_hidden = call_handle(_backward_no_grad, grad, y, kernel, needs_kernel)
    else:
        grad_x, grad_kernel, grad_hidden = _backward(grad, y, kernel, needs_kernel)
    if ctx.hidden_dim == 3:
        grad_hidden = grad_hidden[:, None]
    return grad_x if needs_x else None, grad_kernel if needs_kernel else None, grad_hidden if needs_hidden else None


class _ConvRNN(torch.autograd.Function):
    """The derivatives for plain eager calls, at a third of the cost of those that torch.library registers."""

    @staticmethod
    def forward(ctx, x: Tensor, kernel: Tensor, hidden: Tensor) -> Tensor:
        y = call_handle(_forward_no_grad, x, kernel, hidden)
        _setup_context(ctx, (x, kernel, hidden), y)
        ctx.save_for_forward(y, kernel)
        return y

    backward = staticmethod(_gradients)

    @staticmethod
    def jvp(ctx, x: Tensor | None, kernel: Tensor | None, hidden: Tensor | None) -> Tensor:
        y, w = ctx.saved_tensors
        return _tangents(y, w, x, kernel, None if hidden is None else hidden.reshape(y.shape[0], y.shape[2]))[1]


def _tangents(
    y: Tensor, kernel: Tensor, x_dot: Tensor | None, kernel_dot: Tensor | None, hidden_dot: Tensor | None
) -> tuple[Tensor, Tensor]:
    """How y (B, T + 1, H) changes with its inputs, and, for each step, how what tanh is taken of does (B, T, H)."""
    states_dot = [torch.zeros_like(y[:, 0]) if hidden_dot is None else hidden_dot]
    sums_dot = []
    for t in range(1, y.shape[1]):
        sum_dot = _convolved(states_dot[-1], kernel)
        if x_dot is not None:
            sum_dot = sum_dot + x_dot[:, t - 1]
        if kernel_dot is not None:
            sum_dot = sum_dot + _convolved(y[:, t - 1], kernel_dot)
        sums_dot.append(sum_dot)
        states_dot.append(sum_dot * (1 - y[:, t] * y[:, t]))
    return torch.stack(sums_dot, 1) if sums_dot else y[:, 1:], torch.stack(states_dot, 1)


def _setup_context_backward(ctx, inputs, output: tuple[Tensor, Tensor, Tensor]) -> None:
    grad, y, kernel, ctx.kernel_grad = inputs
    ctx.save_for_backward(grad, y, kernel, output[0])


def _gradients_of_gradients(
    ctx, grad_x_bar: Tensor, grad_kernel_bar: Tensor, grad_hidden_bar: Tensor
) -> tuple[Tensor | None, ...]:
    """For what is wanted of grad_x, grad_kernel and grad_hidden.

    The gradients are linear in grad: the transpose of that is the tangent of the forward recurrence.
    """
    grad, y, kernel, grad_x = ctx.saved_tensors
    batch, states, width = y.shape
    if batch == 0 or states == 1:
        zeros = (torch.zeros_like(t) for t in (y, kernel))
        return torch.cat([grad_hidden_bar[:, None], torch.zeros_like(y[:, 1:])], 1), *zeros, None
    kernel_bar = grad_kernel_bar if ctx.kernel_grad else None
    sums_bar, grad_bar = _tangents(y, kernel, grad_x_bar, kernel_bar, grad_hidden_bar)
    flat = grad_x.reshape(-1, width)
    from_later = torch.cat([_spread(flat, kernel).view(grad_x.shape)[:, 1:], torch.zeros_like(y[:, :1])], 1)
    y_bar = torch.cat([torch.zeros_like(y[:, :1]), -2 * y[:, 1:] * sums_bar * (grad[:, 1:] + from_later)], 1)
    if kernel_bar is not None:
        spread = _spread(flat, kernel_bar).view(grad_x.shape)
        y_bar = y_bar + torch.cat([spread, torch.zeros_like(y[:, :1])], 1)
    return grad_bar, y_bar, _correlated(grad_x, grad_bar[:, :-1], kernel.shape[2]), None


# vmap: over the batch of an ordinary call where the kernel is one for all, else a call for each.


def _forward_vmap(info, in_dims, x: Tensor, kernel: Tensor, hidden: Tensor):
    if in_dims[1] is not None:
        return _each(_forward, info, in_dims, x, kernel, hidden)
    x, hidden = (
        t.movedim(dim, 0) if dim is not None else t.expand(info.batch_size, *t.shape)
        for t, dim in ((x, in_dims[0]), (hidden, in_dims[2]))
    )
    return _forward(x.flatten(0, 1), kernel, hidden.flatten(0, 1)).unflatten(0, x.shape[:2]), 0


def _backward_vmap(info, in_dims, *args):
    return _each(_backward, info, in_dims, *args)


def _each(op, info, in_dims, *args):
    calls = [
        op(*(a if dim is None else a.select(dim, i) for a, dim in zip(args, in_dims))) for i in range(info.batch_size)
    ]
    if isinstance(calls[0], Tensor):
        return torch.stack(calls), 0
    return tuple(map(torch.stack, zip(*calls))), (0,) * len(calls[0])


register(
    "convrnn_forward",
    fake=_forward_fake,
    reference=convrnn_forward_reference,
    check=_check_inputs,
    backward=_gradients,
    setup_context=_setup_context,
    vmap=_forward_vmap,
)
register(
    "convrnn_backward",
    fake=_backward_fake,
    reference=convrnn_backward_reference,
    check=_check_backward,
    backward=_gradients_of_gradients,
    setup_context=_setup_context_backward,
    vmap=_backward_vmap,
)
