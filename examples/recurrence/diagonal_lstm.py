"""diagonal_lstm: an LSTM whose states feed back into their own channel alone, and the derivative."""

from pathlib import Path

import torch
from torch import Tensor

from extension_cpp import jit, operator
from extension_cpp.ops._recurrence import recurrence, recurrence_backward

jit.load(*(Path(__file__).with_name(f"diagonal_lstm.{suffix}") for suffix in ("cpp", "cu")))


def _cell(h, c, x_i, x_f, x_g, x_o, w_i, w_f, w_g, w_o):
    i, f, o = torch.sigmoid(x_i + w_i * h), torch.sigmoid(x_f + w_f * h), torch.sigmoid(x_o + w_o * h)
    c = f * c + i * torch.tanh(x_g + w_g * h)
    return o * torch.tanh(c), c


def _backward(grad0, grad1, result0, result1, x_i, x_f, x_g, x_o, w_i, w_f, w_g, w_o, h, c):
    return diagonal_lstm_backward(grad0, grad1, result0, result1, x_i, x_f, x_g, x_o, w_i, w_f, w_g, w_o, h, c)


@operator(name="my_ops::diagonal_lstm", backward=_backward, independent="B")
def diagonal_lstm(
    x_i: Tensor,
    x_f: Tensor,
    x_g: Tensor,
    x_o: Tensor,
    w_i: Tensor,
    w_f: Tensor,
    w_g: Tensor,
    w_o: Tensor,
    h: Tensor,
    c: Tensor,
) -> tuple[Tensor, Tensor]:
    r"""An LSTM whose states feed back into their own channel alone:
    :math:`c = \sigma(x_f + w_f h) c + \sigma(x_i + w_i h) \tanh(x_g + w_g h)` and :math:`h = \sigma(x_o + w_o h) \tanh(c)`.

    Args:
        x_i, x_f, x_g, x_o: (B, T, H), of the four gates; float16, bfloat16, float32 or float64; any strides.
        w_i, w_f, w_g, w_o: (H,), their weights of h; dtype and device of `x_i`; any stride.
        h, c: (B, H), the states before the first step; dtype and device of `x_i`; any strides.

    Returns:
        h and c after each step, (B, T, H). Both are differentiable in all arguments, any number of times.
    """
    h, c = recurrence(_cell, (x_i, x_f, x_g, x_o), (w_i, w_f, w_g, w_o), (h, c))
    return h, c


@operator(name="my_ops::diagonal_lstm_backward", independent="B", summed="B", public=False)
def diagonal_lstm_backward(
    grad_h: Tensor,
    grad_c: Tensor,
    y_h: Tensor,
    y_c: Tensor,
    x_i: Tensor,
    x_f: Tensor,
    x_g: Tensor,
    x_o: Tensor,
    w_i: Tensor,
    w_f: Tensor,
    w_g: Tensor,
    w_o: Tensor,
    h: Tensor,
    c: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of all arguments for those of the results."""
    inputs, weights = (x_i, x_f, x_g, x_o), (w_i, w_f, w_g, w_o)
    return tuple(recurrence_backward(_cell, (grad_h, grad_c), (y_h, y_c), inputs, weights, (h, c)))
