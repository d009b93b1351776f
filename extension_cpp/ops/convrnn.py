"""convrnn_forward: a recurrence over time whose state is convolved with a kernel, and its derivatives."""

import torch
from torch import Tensor

from extension_cpp.ops._operator import operator

__all__ = ["convrnn_forward"]


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


def _backward(grad: Tensor, result: Tensor, kernel: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor, ...]:
    return convrnn_backward(grad, result, kernel, needs[1])


@operator(backward=_backward, independent="B", autocast="lower", flops="2 B T H K")
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
    compute = torch.promote_types(x.dtype, torch.float32)
    states = [hidden.reshape(x.shape[0], x.shape[2])]
    for x_t in x.unbind(1):
        states.append(torch.tanh(_convolved(states[-1].to(compute), kernel.to(compute)) + x_t).to(x.dtype))
    return torch.stack(states, 1)


@operator(
    independent="B",
    summed="B",
    autocast="lower",
    flops="2 B S-1 H K + 2 B S-1 H K kernel_grad",
    public=False,
)
def convrnn_backward(
    grad: Tensor, y: Tensor, kernel: Tensor, kernel_grad: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, kernel (empty without `kernel_grad`) and hidden (B, H) for that of y."""
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
