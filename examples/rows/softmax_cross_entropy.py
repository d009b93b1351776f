"""softmax_cross_entropy: the loss of each row of logits in one pass, and its gradient in one more."""

from pathlib import Path

import torch
from torch import Tensor

from extension_cpp import jit, operator

jit.load(*(Path(__file__).with_name(f"softmax_cross_entropy.{suffix}") for suffix in ("cpp", "cu")))


def _backward(
    grad: Tensor,
    grad_lse: Tensor,
    logits: Tensor,
    target: Tensor,
    result1: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    return softmax_cross_entropy_backward(grad, grad_lse, logits, target, result1, ignore_index, label_smoothing)


def _is_ignored(target: Tensor, classes: int, ignore_index: int) -> Tensor:
    return (target == ignore_index) | (target < 0) | (target >= classes)


@operator(name="my_ops::softmax_cross_entropy", backward=_backward, independent="...")
def softmax_cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    r"""The cross-entropy of softmax(logits) and a class a row, as
    ``torch.nn.functional.cross_entropy(..., reduction="none")`` has it.

    Args:
        logits: (..., N) with N >= 1; float16, bfloat16, float32 or float64; any strides.
        target: (...), the class of each row; int64.
        ignore_index: a target whose loss and gradient are 0, as are those of a target that is no class.
        label_smoothing: what part of the target's probability is spread over all classes.

    Returns:
        The losses, (...), of the dtype of `logits`; and the logarithm of the sum of exp(logits), (...), float64, of which
        the derivative is made. Both are differentiable in `logits`, any number of times.
    """
    compute = torch.promote_types(logits.dtype, torch.float32)
    x, classes = logits.to(compute), logits.shape[-1]
    lse = x.logsumexp(-1)
    picked = x.gather(-1, target.clamp(0, classes - 1)[..., None])[..., 0]
    loss = lse - (1 - label_smoothing) * picked - label_smoothing * x.mean(-1)
    loss = torch.where(_is_ignored(target, classes, ignore_index), 0, loss)
    return loss.to(logits.dtype).contiguous(), lse.to(torch.float64).contiguous()


@operator(name="my_ops::softmax_cross_entropy_backward", independent="...", autocast="", public=False)
def softmax_cross_entropy_backward(
    grad: Tensor,
    grad_lse: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The gradient of logits for those of the results."""
    compute = torch.promote_types(logits.dtype, torch.float32)
    x, classes = logits.to(compute), logits.shape[-1]
    of_loss = torch.where(_is_ignored(target, classes, ignore_index), 0, grad.to(compute))[..., None]
    softmax = torch.exp(x - lse.to(compute)[..., None])
    here = torch.arange(classes, device=target.device) == target[..., None]
    wanted = torch.where(here, (1 - label_smoothing) * of_loss, 0) + label_smoothing / classes * of_loss
    return (softmax * (of_loss + grad_lse.to(compute)[..., None]) - wanted).to(logits.dtype).contiguous()
