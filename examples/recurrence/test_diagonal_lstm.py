"""The contract of diagonal_lstm and of its derivative: python -m pytest test_diagonal_lstm.py"""

import torch
from diagonal_lstm import diagonal_lstm, diagonal_lstm_backward

from extension_cpp.testing import FLOATING, Case, Contract, sequence_samples

ULPS = dict.fromkeys(FLOATING, 32.0)  # Of errors that states and gradients carry on.


def samples(device: str, dtype: torch.dtype):
    yield from sequence_samples(device, dtype, inputs=4, weights=4, states=2)


def backward_samples(device: str, dtype: torch.dtype):
    for args in samples(device, dtype):
        h, c = diagonal_lstm(*args)
        yield torch.cos(3 * args[0]), torch.sin(args[1]), h, c, *args


def magnitude(*args):
    return [y.abs() + 1 for y in diagonal_lstm.operator.reference(*args)]


def backward_magnitude(grad_h, grad_c, *args):
    """In sums, the sum of the magnitudes."""
    grads = [g.abs() for g in diagonal_lstm_backward.operator.reference(grad_h.abs(), grad_c.abs(), *args)]
    return *(g + 1 for g in grads[:4]), *(g.sum((0, 1)) + 1 for g in grads[:4]), *(g + 1 for g in grads[8:])


def longer(args, times):
    """Of a larger batch."""
    return tuple(a if a.dim() == 1 else torch.cat([a] * times) for a in args)


class TestDiagonalLSTM(Contract):
    op = Case(diagonal_lstm, samples, ulps=ULPS, magnitude=magnitude, grown=longer)

    def test_is_that_of_pytorch(self, device):
        """Of torch.nn.LSTM, where the states don't feed back into the gates."""
        lstm = torch.nn.LSTM(6, 8, batch_first=True, dtype=torch.float64, device=device)
        torch.nn.init.zeros_(lstm.weight_hh_l0)
        x, (h, c) = (
            torch.randn(3, 5, 6, dtype=torch.float64, device=device),
            torch.randn(2, 3, 8, device=device).double(),
        )
        want, (_, last) = lstm(x, (h[None], c[None]))
        gates = (x @ lstm.weight_ih_l0.T + lstm.bias_ih_l0 + lstm.bias_hh_l0).chunk(4, -1)
        got, cells = diagonal_lstm(*gates, *x.new_zeros(4, 8), h, c)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(cells[:, -1], last[0])
        weight = lstm.weight_ih_l0
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), weight)[0] for y in (got, want)))


class TestDiagonalLSTMBackward(Contract):
    op = Case(diagonal_lstm_backward, backward_samples, ulps=ULPS, magnitude=backward_magnitude, grown=longer)
