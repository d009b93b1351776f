"""The checks of the C++ kernels (csrc/check.h, csrc/overlap.h), in the same words, for fake kernels and references."""

from collections import Counter
from math import gcd
from typing import NoReturn

import torch
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGER = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
MAX_DIMS = 64


def fail(op: str, message: str) -> NoReturn:
    raise RuntimeError(f"{op}: {message}")


def dtype_name(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def check_strided(op: str, name: str, t: Tensor | None) -> None:
    if t is None:
        fail(op, f"{name} must be a tensor, got None")
    if t.layout != torch.strided:
        fail(op, f"{name} must be a strided tensor, got {t.layout}")


def check_floating(op: str, name: str, t: Tensor) -> None:
    check_strided(op, name, t)
    if t.dtype not in FLOATING:
        fail(op, f"{name} must have dtype float16, bfloat16, float32 or float64, got {dtype_name(t)}")


def check_integer(op: str, name: str, t: Tensor) -> None:
    if t.dtype not in INTEGER:
        fail(op, f"{name} must have dtype uint8, int8, int16, int32 or int64, got {dtype_name(t)}")


def check_real(op: str, name: str, t: Tensor) -> None:
    if t.dtype not in FLOATING + INTEGER:
        wanted = "float16, bfloat16, float32, float64, uint8, int8, int16, int32 or int64"
        fail(op, f"{name} must have dtype {wanted}, got {dtype_name(t)}")


def check_device(op: str, name: str, t: Tensor, like_name: str, like: Tensor) -> None:
    if t.device != like.device:
        fail(op, f"{name} must be on the device of {like_name}, {like.device}, got {t.device}")


def check_same(op: str, name: str, t: Tensor, like_name: str, like: Tensor) -> None:
    check_strided(op, name, t)
    if t.dtype != like.dtype:
        fail(op, f"{name} must have the dtype of {like_name}, {dtype_name(like)}, got {dtype_name(t)}")
    check_device(op, name, t, like_name, like)


def broadcast_shapes(op: str, **tensors: Tensor) -> torch.Size:
    for name, t in tensors.items():
        if t.dim() > MAX_DIMS:
            fail(op, f"{name} must have at most {MAX_DIMS} dimensions, got {t.dim()}")
    try:
        if all(
            type(t) is Tensor for t in tensors.values()
        ):  # The quicker way, which is not for tensors without memory.
            return torch.broadcast_tensors(*tensors.values())[0].shape
        return torch.broadcast_shapes(*(t.shape for t in tensors.values()))
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # A question about a symbolic size, for torch.compile to answer.
            raise
        got = " and ".join(str(tuple(t.shape)) for t in tensors.values())
        fail(op, f"{' and '.join(tensors)} must have shapes that broadcast, got {got}")


def empty_elementwise(*tensors: Tensor) -> Tensor:
    """What an elementwise operator on tensors returns, uninitialised: broadcast shape, and TensorIterator's strides."""
    expanded = torch.broadcast_tensors(*tensors)
    first = tensors[0]
    if (
        type(first) is Tensor and first.is_contiguous() and expanded[0].shape == first.shape
    ):  # It decides alone, at once.
        return torch.empty(first.shape, dtype=first.dtype, device=first.device)
    from torch._prims_common import compute_elementwise_output_strides

    strides = compute_elementwise_output_strides(*expanded)
    return torch.empty_strided(expanded[0].shape, strides, dtype=tensors[0].dtype, device=tensors[0].device)


Term = tuple[int, int, int]  # stride, least and greatest index


def _reaches(terms: list[Term], target: int, budget: list[int]) -> bool:
    """Whether sum(stride * index) can be target; terms go from the largest stride down. See csrc/overlap.h."""
    if not terms:
        return target == 0
    budget[0] -= 1
    if budget[0] < 0:
        return True
    (stride, least, most), rest = terms[0], terms[1:]
    if target % gcd(stride, *(s for s, _, _ in rest)):
        return False
    low, high = sum(s * x for s, x, _ in rest), sum(s * x for s, _, x in rest)
    begin, end = max(least, -((high - target) // stride)), min(most, (target - low) // stride)
    return any(_reaches(rest, target - stride * x, budget) for x in range(begin, end + 1))


def _merge(terms: list[Term]) -> list[Term]:
    low: Counter[int] = Counter()
    high: Counter[int] = Counter()
    for stride, least, most in terms:
        low[stride] += least
        high[stride] += most
    return [(stride, low[stride], high[stride]) for stride in sorted({s for s, _, _ in terms}, reverse=True)]


def _index_terms(t: Tensor) -> list[Term]:
    return [(stride, 0, size - 1) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


def has_internal_overlap(t: Tensor) -> bool:
    if t.numel() < 2 or t.is_contiguous():
        return False
    terms = sorted(_index_terms(t), reverse=True)
    if terms[-1][0] == 0:
        return True
    return any(
        _reaches(_merge([(stride, 1, most), *((s, -m, m) for s, _, m in terms[k + 1 :])]), 0, [100_000])
        for k, (stride, _, most) in enumerate(terms)
    )


def partially_overlap(x: Tensor, y: Tensor) -> bool:
    """Whether views of one storage share an element without being the same view."""
    if x.untyped_storage()._cdata != y.untyped_storage()._cdata or x.numel() == 0 or y.numel() == 0:
        return False
    mine, others, offset = _index_terms(x), _index_terms(y), int(y.storage_offset() - x.storage_offset())
    if mine == others and offset == 0:
        return False
    if any(stride == 0 for stride, _, _ in mine + others):
        mine, others = ([t for t in terms if t[0]] for terms in (mine, others))
    return _reaches(_merge([*mine, *((s, -m, 0) for s, _, m in others)]), offset, [100_000])


def is_symbolic(*tensors: Tensor) -> bool:
    """Whether a size or stride is a symbol, of which nothing exact can be asked without specialising on it."""
    numbers = (n for t in tensors for n in (*t.shape, *t.stride(), t.storage_offset()))
    return any(isinstance(n, torch.SymInt) for n in numbers)
