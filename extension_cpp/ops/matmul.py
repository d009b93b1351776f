"""matmul: the product of two matrices."""

from typing import Any

import torch
from torch import Tensor

from extension_cpp.ops._operator import operator

__all__ = ["matmul"]

try:
    from torch._C import _get_fp32_precision_getter as _float32_precision
except ImportError:  # A torch that renamed it: the same at six times the cost.

    def _float32_precision(backend: str, op: str) -> str:
        return torch.backends.cuda.matmul.fp32_precision


def _allows_tf32(a: Tensor) -> bool:
    """Whether PyTorch's switch is on, where it means something. It is of the call: kernels can't ask for it."""
    return isinstance(a, Tensor) and a.is_cuda and a.dtype is torch.float32 and _tf32_is_on()


def _tf32_is_on() -> bool:
    return _float32_precision("cuda", "matmul") == "tf32"


# torch.compile guards on the switch by itself. What torch.compiler.assume_constant_result does, without its import of all
# of the compiler.
_tf32_is_on._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _backward(grad: Tensor, a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return None if b is None else matmul(grad, b.t()), None if a is None else matmul(a.t(), grad)


def _vmap(info: Any, in_dims: Any, a: Tensor, b: Tensor, allow_tf32: bool) -> Any:
    """Of a batch of both PyTorch's own product, of contiguous ones for the same reason as in the reference."""
    if in_dims[0] is None or in_dims[1] is None:
        return None  # One call, along the dimension that the batch becomes a part of.
    return torch.bmm(*((t.movedim(dim, 0) if dim else t).contiguous() for t, dim in zip((a, b), in_dims))), 0


@operator(
    backward=_backward,
    saved_for={"a": "b", "b": "a"},
    vmap=_vmap,
    independent="M N",
    summed="K",
    autocast="lower",
    flops="2 M N K",
    filled={"allow_tf32": _allows_tf32},
)
def matmul(a: Tensor, b: Tensor, allow_tf32: bool = False) -> Tensor:
    r"""Matrix product: :math:`c_{mn} = \sum_k a_{mk} b_{kn}`.

    Args:
        a: (M, K); float16, bfloat16, float32 or float64; any strides.
        b: (K, N); dtype and device of `a`; any strides.

    Returns:
        (M, N), contiguous, of the dtype of `a`; zeros where K is 0. Sums of float16 and bfloat16 are kept in float32 and
        rounded once. With the unit roundoff :math:`u` of that dtype, and :math:`\varepsilon` the spacing at 1 of float32, or
        of float64 for float64,

        .. math:: |\hat{c} - c| \le u |c| + (1 + u) \gamma\, |a| |b|, \quad
            \gamma = \frac{K \varepsilon}{1 - K \varepsilon},

        where no product or sum overflows or falls below the normal numbers: twice the bound of a sum of rounded products in
        any order, as tensor cores cut where others round.

    On CUDA, float16, bfloat16 and float64 are computed on tensor cores. So is float32 on Hopper, unless the product is
    small or K is above :math:`2^{18}`: an element is then a sum of three bfloat16s, which hold all of its bits unless it is
    below :math:`2^{-102}`. The bound is the same. float32 is computed in tf32 only where PyTorch's own switch allows it:
    ``torch.backends.cuda.matmul.fp32_precision = "tf32"``, or what sets that, as
    ``torch.set_float32_matmul_precision("high")``. Factors are then rounded to 11 bits: :math:`\varepsilon = 2^{-10}`.

    ``torch.ops.extension_cpp.matmul`` doesn't read that switch: its third argument, ``allow_tf32=True``, allows tf32.

    A transposed view is as fast as a contiguous matrix. The bits of the result are the same on every run and for every
    layout of `a` and `b`, on one type of device.

    Differentiable any number of times, backward and forward. The gradients are :math:`g b^T` and :math:`a^T g`, by the same
    operator. In forward mode, and under ``vmap`` of both factors, PyTorch's own product computes the result, whose bits may
    differ.

    Raises:
        RuntimeError: if a shape, dtype or device is not as above.

    Example:
        >>> extension_cpp.matmul(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]]))
        tensor([[11.]])
    """
    # Of copies: the bits that torch.mm returns depend on the layouts. It reads PyTorch's switch for tf32 itself.
    return torch.mm(*(t.clone(memory_format=torch.contiguous_format) for t in (a, b)))
