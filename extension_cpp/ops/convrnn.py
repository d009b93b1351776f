"""convrnn_forward: a recurrence over time whose state is convolved with a kernel, and its derivatives."""

import torch
from torch import Tensor

from extension_cpp.ops._operator import operator
from extension_cpp.ops._recurrence import convolved_recurrence, convolved_recurrence_backward

__all__ = ["convrnn_forward"]


def _slope(h: Tensor) -> Tensor:
    """That of tanh where its value is h."""
    return (1 - h) * (1 + h)


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
    return convolved_recurrence(torch.tanh, x, kernel, hidden)


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
    return convolved_recurrence_backward(_slope, grad, y, kernel, kernel_grad)
