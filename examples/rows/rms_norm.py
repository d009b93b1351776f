"""rms_norm: rows divided by their root mean square, times a weight, and the derivative."""

from pathlib import Path

import torch
from torch import Tensor

from extension_cpp import jit, operator

jit.load(*(Path(__file__).with_name(f"rms_norm.{suffix}") for suffix in ("cpp", "cu")))


def _backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return rms_norm_backward(grad, x, weight, eps)


def _scale(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@operator(name="my_ops::rms_norm", backward=_backward, independent="...")
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    r"""Rows divided by their root mean square, times a weight:
    :math:`x \cdot w / \sqrt{\mathrm{mean}(x^2) + \mathrm{eps}}`, with the mean over the last dimension.

    Args:
        x: (..., N); float16, bfloat16, float32 or float64; any strides.
        weight: (N,), the weights w; dtype and device of `x`; any stride.
        eps: is added to the mean of the squares.

    Returns:
        (..., N), contiguous, of the dtype of `x`. float16 and bfloat16 are computed in float32 and rounded once.

    Differentiable any number of times in `x` and `weight`. The same bits on every run.

    Raises:
        RuntimeError: if a shape, dtype or device is not as above.

    Example:
        >>> rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]))
        tensor([0.8485, 2.2627])
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(compute)
    return (wide * _scale(wide, eps) * weight.to(compute)).to(x.dtype).contiguous()


@operator(name="my_ops::rms_norm_backward", independent="...", summed="...", public=False)
def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight for that of the result."""
    compute = torch.promote_types(x.dtype, torch.float32)
    wide, grad = x.to(compute), grad.to(compute)
    scale, g = _scale(wide, eps), grad * weight.to(compute)
    grad_x = scale * (g - wide * (scale * scale * (g * wide).mean(-1, keepdim=True)))
    grad_weight = (grad * wide * scale).sum_to_size(weight.shape)
    return grad_x.to(x.dtype).contiguous(), grad_weight.to(x.dtype)
