"""rms_norm: the contract of it and of its derivative, and what is particular to rows."""

import torch
from rms_norm import rms_norm, rms_norm_backward

from extension_cpp.testing import FLOATING, Case, Contract, row_samples

ULPS = dict.fromkeys(FLOATING, 8.0)  # Of sums over a row.


def samples(device: str, dtype: torch.dtype):
    for x in row_samples(device, dtype):
        yield x, torch.linspace(-2, 1, x.shape[-1], device=device).to(dtype), 1e-3


def backward_samples(device: str, dtype: torch.dtype):
    for x, weight, _ in samples(device, dtype):
        yield x.flip(0) / 2, x, weight, 0.5  # With less, what cancels out leaves too little of the second derivatives.


def magnitude(grad, x, weight, eps):
    """What rounding errors are relative to: the sum of the magnitudes that enter a result."""
    scale, g = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps), (grad * weight).abs()
    shift = x.abs() * scale * scale * (g * x.abs()).mean(-1, keepdim=True)
    return scale * (g + shift), (grad * x * scale).abs().sum_to_size(weight.shape)


class TestRMSNorm(Contract):
    op = Case(rms_norm, samples, ulps=ULPS, grown=lambda args, times: (torch.cat([args[0]] * times), *args[1:]))

    def test_scale_does_not_matter(self, device):
        """A row times a power of two gives the same bits without eps; rows don't depend on each other."""
        x, weight = torch.randn(7, 300, device=device), torch.randn(300, device=device)
        y = rms_norm(x, weight, 0.0)
        assert torch.equal(rms_norm(x * 4, weight, 0.0), y)
        assert torch.equal(rms_norm(x[2:5], weight, 0.0), y[2:5])

    def test_long_rows(self, device):
        """Rows that are cut into parts, for threads or for blocks: the same bits from any layout and with one thread."""
        x, weight = torch.randn(2, 300_001, device=device), torch.randn(300_001, device=device)
        y = rms_norm(x, weight, 1e-6)
        torch.testing.assert_close(y, rms_norm.operator.reference(x, weight, 1e-6))
        assert torch.equal(rms_norm(torch.cat([x, x], 1)[:, :300_001], weight, 1e-6), y)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            assert torch.equal(rms_norm(x, weight, 1e-6), y)
        finally:
            torch.set_num_threads(threads)


class TestRMSNormBackward(Contract):
    op = Case(
        rms_norm_backward,
        backward_samples,
        ulps=ULPS,
        magnitude=magnitude,
        grown=lambda args, times: (*(torch.cat([a] * times) for a in args[:2]), *args[2:]),
    )

    def test_lengths(self, device, dtype):
        """On CUDA the length chooses the kernel, its threads and its shared memory: each choice computes all of a row."""
        for size in range(512, 40_961, 512 if device == "cuda" else 8192):
            grad, x = torch.randn(2, 20, size, device=device).to(dtype)
            weight = torch.rand(size, device=device).to(dtype)
            found = rms_norm_backward(grad, x, weight, 1e-3)
            wanted = rms_norm_backward.operator.reference(grad.double(), x.double(), weight.double(), 1e-3)
            for got, want in zip(found, wanted):
                assert (got - want).norm() <= 4 * torch.finfo(dtype).eps * want.norm(), f"rows of {size}"
