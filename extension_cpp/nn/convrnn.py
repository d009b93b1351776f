"""ConvRNN: a recurrent layer whose state is convolved with a learned kernel."""

import torch
from torch import Tensor

from extension_cpp.ops.convrnn import convrnn_forward


class ConvRNN(torch.nn.Module):
    r"""A recurrent layer whose hidden state is convolved, circularly, with a learned kernel.

    .. math:: h_t[n] = \tanh\Big(\sum_{k=0}^{K-1} w[k] \, h_{t-1}[(n + k - p) \bmod H] + x_t[n]\Big), \quad
        p = \lfloor K / 2 \rfloor

    It is called as :class:`torch.nn.RNN` is. K weights, whatever H is: the input has the size of the state, and what is
    wanted before or after it, a linear layer say, is a module of its own.

    Args:
        kernel_size: K, from 1 to H.
        batch_first: whether input and output are (B, T, H) rather than (T, B, H). Neither is copied.
        device: of the parameter.
        dtype: of the parameter; float16, bfloat16, float32 or float64.

    Attributes:
        weight: (1, 1, K), the kernel w; drawn from :math:`U(-1 / \sqrt K, 1 / \sqrt K)` by :meth:`reset_parameters`.

    Inputs:
        input: (T, B, H), (B, T, H) if `batch_first`, or (T, H); dtype and device of `weight`.
        hx: (1, B, H), or (1, H) with an input (T, H), the state h_0; zeros if not given.

    Returns:
        output, with the shape of `input`: h_1 to h_T; and h_n, with the shape of `hx`: h_T.

    Raises:
        ValueError: if `kernel_size` is below 1.
        RuntimeError: if a shape, dtype or device is not as above.

    The recurrence is :func:`extension_cpp.convrnn_forward`.

    Example:
        >>> layer = extension_cpp.nn.ConvRNN(kernel_size=3)
        >>> output, h_n = layer(torch.randn(10, 2, 64))
        >>> output.shape, h_n.shape
        (torch.Size([10, 2, 64]), torch.Size([1, 2, 64]))
    """

    def __init__(
        self,
        kernel_size: int,
        *,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if kernel_size < 1:
            raise ValueError(f"ConvRNN: kernel_size must be at least 1, got {kernel_size}")
        self.kernel_size = kernel_size
        self.batch_first = batch_first
        self.weight = torch.nn.Parameter(torch.empty(1, 1, kernel_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        bound = self.kernel_size**-0.5
        torch.nn.init.uniform_(self.weight, -bound, bound)

    def extra_repr(self) -> str:
        return f"{self.kernel_size}" + (", batch_first=True" if self.batch_first else "")

    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if input.dim() not in (2, 3):
            wanted = "(B, T, H)" if self.batch_first else "(T, B, H)"
            raise RuntimeError(f"ConvRNN: input must have shape {wanted} or (T, H), got {tuple(input.shape)}")
        if input.dim() == 2:
            output, h_n = self._states(input[None], hx, (1, input.shape[1]))
            return output[0], h_n
        x = input if self.batch_first else input.transpose(0, 1)
        output, h_n = self._states(x, hx, (1, x.shape[0], x.shape[2]))
        return output if self.batch_first else output.transpose(0, 1), h_n

    def _states(self, x: Tensor, hx: Tensor | None, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """h_1 to h_T for x (B, T, H), and h_T; the latter, and hx, of a shape."""
        if hx is None:
            hx = x.new_zeros(shape)
        elif tuple(hx.shape) != shape:
            raise RuntimeError(f"ConvRNN: hx must have shape {shape}, got {tuple(hx.shape)}")
        y = convrnn_forward(x, self.weight, hx.reshape(x.shape[0], x.shape[2]))
        return y[:, 1:], y[:, -1].reshape(shape)
