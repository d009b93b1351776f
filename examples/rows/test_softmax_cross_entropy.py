"""The contract of softmax_cross_entropy and of its derivative: python -m pytest test_softmax_cross_entropy.py"""

import torch
from softmax_cross_entropy import softmax_cross_entropy, softmax_cross_entropy_backward
from torch.nn.functional import cross_entropy

from extension_cpp.testing import FLOATING, Case, Contract, row_samples

ULPS = dict.fromkeys(FLOATING, 32.0)


def samples(device: str, dtype: torch.dtype):
    for i, logits in enumerate(row_samples(device, dtype)):
        if logits.shape[-1] == 0:
            continue
        rows = logits.shape[:-1]
        target = torch.arange(rows.numel(), device=device).view(rows) % logits.shape[-1]
        target = torch.where(target % 5 == 3, -100, target)
        yield logits, target, -100, (0.0, 0.1)[i % 2]


def backward_samples(device: str, dtype: torch.dtype):
    for logits, target, ignore_index, smoothing in samples(device, dtype):
        lse = logits.double().logsumexp(-1).contiguous()
        grad = torch.linspace(-1, 1, target.numel(), device=device).view(target.shape).to(dtype)
        yield grad, lse.sin(), logits, target, lse, ignore_index, smoothing


def longer(args, times):
    return tuple(torch.cat([a] * times) if isinstance(a, torch.Tensor) else a for a in args)


def magnitude(logits, target, ignore_index, smoothing):
    lse = logits.logsumexp(-1)
    return lse.abs() + logits.abs().amax(-1) + 1, lse.abs() + 1


def backward_magnitude(grad, grad_lse, logits, target, lse, ignore_index, smoothing):
    """An error of lse, and of a logit, is one of the exponent."""
    softmax = torch.exp(logits - lse[..., None]) * (1 + logits.abs() + lse.abs()[..., None])
    return (1 + softmax) * (grad.abs() + grad_lse.abs())[..., None]


class TestSoftmaxCrossEntropy(Contract):
    op = Case(softmax_cross_entropy, samples, ulps=ULPS, magnitude=magnitude, grown=longer)

    def test_is_that_of_pytorch(self, device):
        for smoothing in (0.0, 0.2):
            logits = torch.randn(40, 1000, device=device, dtype=torch.float64, requires_grad=True)
            target = torch.randint(0, 1000, (40,), device=device)
            target[::7] = 5
            options = {"ignore_index": 5, "label_smoothing": smoothing}
            ours, _ = softmax_cross_entropy(logits, target, **options)
            theirs = cross_entropy(logits, target, reduction="none", **options)
            torch.testing.assert_close(ours, theirs)
            grads = [torch.autograd.grad(loss.square().sum(), logits)[0] for loss in (ours, theirs)]
            torch.testing.assert_close(*grads)

    def test_logits_of_minus_infinity(self, device):
        """Classes that are masked have a probability and a gradient of 0."""
        logits = torch.zeros(2, 100, device=device)
        logits[:, 50:] = -torch.inf
        logits.requires_grad_()
        loss, lse = softmax_cross_entropy(logits, torch.zeros(2, dtype=torch.int64, device=device))
        torch.testing.assert_close(lse, torch.full_like(lse, 50.0).log(), atol=1e-6, rtol=0)
        (grad,) = torch.autograd.grad(loss.sum(), logits)
        assert not grad[:, 50:].any() and not grad.isnan().any()


class TestSoftmaxCrossEntropyBackward(Contract):
    op = Case(softmax_cross_entropy_backward, backward_samples, ulps=ULPS, magnitude=backward_magnitude, grown=longer)
