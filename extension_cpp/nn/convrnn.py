"""ConvRNN: a recurrent layer whose state is convolved with a learned kernel."""

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from extension_cpp.ops.convrnn import convrnn_forward


class ConvRNN(torch.nn.Module):
    r"""A recurrent layer whose hidden state is convolved, circularly, with a learned kernel.

    .. math:: h_t[n] = \tanh\Big(\sum_{k=0}^{K-1} w[k] \, h_{t-1}[(n + k - p) \bmod H] + x_t[n]\Big), \quad
        p = \lfloor K / 2 \rfloor

    It is called as :class:`torch.nn.RNN` is. It has K weights for every H. Input and state have the same size H; for another
    size, put a linear layer before or after it.

    Args:
        kernel_size: K, from 1 to H.
        batch_first: whether input and output are (B, T, H) rather than (T, B, H).
        device: of the parameter.
        dtype: of the parameter; float16, bfloat16, float32 or float64.

    Attributes:
        weight: (1, 1, K), the kernel w; drawn from :math:`U(-1 / \sqrt K, 1 / \sqrt K)` by :meth:`reset_parameters`.

    Inputs:
        input: (T, B, H), (B, T, H) if `batch_first`, or (T, H), or a :class:`torch.nn.utils.rnn.PackedSequence` of (T, H);
            dtype and device of `weight`.
        hx: (1, B, H), or (1, H) with an input (T, H), the state h_0; zeros if not given.

    Returns:
        output, with the shape of `input`, or a PackedSequence as `input` is: h_1 to h_T; and h_n, with the shape of `hx`:
        h_T, of each sequence its last. They share no memory, and may be overwritten before a backward pass.

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

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        return _run(input, self.weight, hx, self.batch_first)


def _run(
    input: Tensor | PackedSequence, weight: Tensor, hx: Tensor | None, batch_first: bool
) -> tuple[Tensor | PackedSequence, Tensor]:
    if isinstance(input, PackedSequence):
        return _run_packed(input, weight, hx)
    if input.dim() not in (2, 3):
        wanted = "(B, T, H)" if batch_first else "(T, B, H)"
        raise RuntimeError(f"ConvRNN: input must have shape {wanted} or (T, H), got {tuple(input.shape)}")
    if input.dim() == 2:
        y = _states(input[None], weight, hx, (1, input.shape[1]))
        return _free(y[0, 1:]), y[:, -1].clone()
    x = input if batch_first else input.transpose(0, 1)
    y = _states(x, weight, hx, (1, x.shape[0], x.shape[2]))
    output = _free(y[:, 1:])
    return output if batch_first else output.transpose(0, 1), y[None, :, -1].clone()


torch.fx.wrap("_run")  # A node of a graph, as a module of PyTorch's is: which way it goes depends on the input.


def _run_packed(input: PackedSequence, weight: Tensor, hx: Tensor | None) -> tuple[PackedSequence, Tensor]:
    """Sequences of several lengths, the longest first. What comes after the end of one is computed, and not used."""
    if input.data.dim() != 2:
        raise RuntimeError(f"ConvRNN: input must be packed of sequences (T, H), got data {tuple(input.data.shape)}")
    x, lengths = pad_packed_sequence(PackedSequence(input.data, input.batch_sizes), batch_first=True)
    shape = (1, x.shape[0], x.shape[2])
    if hx is not None and tuple(hx.shape) == shape and input.sorted_indices is not None:
        hx = hx.index_select(1, input.sorted_indices)
    y = _states(x, weight, hx, shape)
    output = pack_padded_sequence(y[:, 1:], lengths, batch_first=True)
    h_n = y[torch.arange(x.shape[0], device=y.device), lengths.to(y.device)]
    if input.unsorted_indices is not None:
        h_n = h_n[input.unsorted_indices]
    return PackedSequence(output.data, input.batch_sizes, input.sorted_indices, input.unsorted_indices), h_n[None]


def _free(states: Tensor) -> Tensor:
    """Memory of its own, where a gradient needs the states as they are; a trace is one for both, and what vmap has batched
    doesn't say.
    """
    unknown = torch.jit.is_tracing() or _are_functorch_transforms_active()
    return states.clone() if states.requires_grad or unknown else states


def _states(x: Tensor, weight: Tensor, hx: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """h_0 to h_T for x (B, T, H), from hx of a shape."""
    if hx is None:
        hx = x.new_zeros(shape)
    elif not torch.jit.is_tracing() and tuple(hx.shape) != shape:
        raise RuntimeError(f"ConvRNN: hx must have shape {shape}, got {tuple(hx.shape)}")
    return convrnn_forward(x, weight, hx.reshape(x.shape[0], x.shape[2]))
