"""nms, batched_nms and nms_padded: greedy non-maximum suppression of axis-aligned boxes."""

import math
from typing import Any

import torch
from torch import Tensor

from extension_cpp.ops._backends import fail
from extension_cpp.ops._operator import operator

__all__ = ["batched_nms", "nms", "nms_padded"]


def _order(scores: Tensor) -> Tensor:
    """From the greatest score on, NaN first: also one with a sign, which PyTorch's sort on CUDA can take for the least."""
    if scores.is_floating_point():
        scores = torch.where(scores.isnan(), torch.nan, scores)
    return scores.sort(stable=True, descending=True).indices


def _suppress(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """The greedy method as it stands: a step for each box that is kept."""
    boxes = boxes.to(torch.promote_types(boxes.dtype, torch.float32))
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    rest = _order(scores)
    keep = [rest[:0]]
    while rest.numel():
        first, rest = rest[:1], rest[1:]
        keep.append(first)
        low = torch.maximum(boxes[first, :2], boxes[rest, :2])
        high = torch.minimum(boxes[first, 2:], boxes[rest, 2:])
        width, height = (high - low).clamp(min=0).unbind(1)
        inter = width * height
        iou = inter / (areas[first] + areas[rest] - inter)
        rest = rest[~(iou.double() > iou_threshold)]
    return torch.cat(keep)


def _suppress_by_class(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float) -> Tensor:
    keep = torch.zeros_like(idxs, dtype=torch.bool)
    for value in idxs.unique():
        members = (idxs == value).nonzero().squeeze(1)
        keep[members[_suppress(boxes[members], scores[members], iou_threshold)]] = True
    order = _order(scores)
    return order[keep[order]]


def _in_onnx(op: str, boxes: Any, scores: Any, iou_threshold: float, idxs: Any) -> Any:
    """The kept boxes by NonMaxSuppression, which knows float32 alone, no order of equal scores, and no inverted boxes."""
    from onnxscript import opset18 as onnx
    from onnxscript.ir import DataType

    if boxes.dtype == DataType.DOUBLE:
        fail(
            op,
            "boxes must be float16, bfloat16 or float32 in ONNX, whose NonMaxSuppression has no float64; got float64",
        )
    if not isinstance(iou_threshold, float | int) or iou_threshold < 0:
        fail(op, f"iou_threshold must be a constant of at least 0 in ONNX, got {iou_threshold}")
    # An IoU in float32 is greater than the threshold if it is greater than the next float32 below that.
    limit = torch.tensor(min(iou_threshold, 1.0) if iou_threshold == iou_threshold else 1.0, dtype=torch.float32)
    if limit.item() > iou_threshold:
        limit = limit.nextafter(torch.tensor(-math.inf))

    def argsort(values: Any, n: Any, largest: int) -> Any:
        return onnx.TopK(values, n, axis=0, largest=largest, sorted=1)[1]  # Of equal values the first index first.

    n = onnx.Shape(scores, start=0, end=1)
    if scores.dtype.is_floating_point():  # NaN first, which TopK has no place for.
        wide = scores if scores.dtype == DataType.DOUBLE else onnx.Cast(scores, to=DataType.FLOAT)
        nan = onnx.IsNaN(wide)
        order = argsort(onnx.Where(nan, onnx.CastLike(onnx.Constant(value_float=0.0), wide), wide), n, 1)
        order = onnx.Gather(order, argsort(onnx.Gather(onnx.Cast(nan, to=DataType.INT64), order), n, 1))
    else:
        order = argsort(onnx.Cast(scores, to=DataType.INT64), n, 1)
    # By their places in the order, from n down to 1, no two boxes have the same score.
    places = onnx.Cast(onnx.Range(onnx.Squeeze(n), 0, -1), to=DataType.FLOAT)
    low, high = onnx.Split(onnx.Gather(onnx.Cast(boxes, to=DataType.FLOAT), order), axis=1, num_outputs=2)
    # An inverted box overlaps nothing, as an empty one. NonMaxSuppression would turn it.
    boxes = onnx.Unsqueeze(onnx.Concat(low, onnx.Max(low, high), axis=1), [0])
    places = onnx.Unsqueeze(places, [0, 1])
    if idxs is not None:  # Each class has a row, in which the boxes of others score nothing.
        idxs = onnx.Gather(onnx.Cast(idxs, to=DataType.INT64), order)
        classes = onnx.Unique(idxs, sorted=1)[0]
        members = onnx.Equal(onnx.Unsqueeze(classes, [1]), onnx.Unsqueeze(idxs, [0]))
        places = onnx.Where(onnx.Unsqueeze(members, [0]), places, onnx.Constant(value_float=0.0))
    found = onnx.NonMaxSuppression(
        boxes, places, n, onnx.Constant(value_float=limit.item()), onnx.Constant(value_float=0.5)
    )
    kept = onnx.Squeeze(onnx.Slice(found, [2], [3], [1]), [1])
    if idxs is not None:  # They come class by class.
        kept = onnx.TopK(kept, onnx.Shape(kept), axis=0, largest=0, sorted=1)[0]
    return onnx.Gather(order, kept)


def _nms_in_onnx(boxes, scores, iou_threshold: float):
    return _in_onnx("nms", boxes, scores, iou_threshold, None)


def _batched_nms_in_onnx(boxes, scores, idxs, iou_threshold: float):
    return _in_onnx("batched_nms", boxes, scores, iou_threshold, idxs)


def _nms_padded_in_onnx(boxes, scores, iou_threshold: float, idxs=None):
    from onnxscript import opset18 as onnx

    keep = _in_onnx("nms_padded", boxes, scores, iou_threshold, idxs)
    count = onnx.Size(keep)
    missing = onnx.Sub(onnx.Shape(scores), onnx.Shape(keep))
    return onnx.Pad(
        keep, onnx.Concat(onnx.Constant(value_ints=[0]), missing, axis=0), onnx.Constant(value_int=-1)
    ), count


@operator(differentiable=False, autocast="float32", onnx=_nms_in_onnx)
def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    r"""Greedy non-maximum suppression: the boxes that no box of a higher score overlaps too much.

    Boxes are visited in descending order of score, equal scores by index, NaN first. A box is kept unless its IoU with one
    kept before is greater than the threshold, where

    .. math:: \mathrm{IoU}(a, b) = \frac{|a \cap b|}{|a| + |b| - |a \cap b|}, \quad |a| = (x_2 - x_1)(y_2 - y_1),

    and the sides of an intersection are no less than zero. Boxes may be empty, inverted, infinite or NaN: the formula holds
    as it stands, and an IoU of 0/0 is NaN, which is not greater than anything.

    Args:
        boxes: (N, 4), as (x1, y1, x2, y2); float16, bfloat16, float32 or float64; any strides.
        scores: (N,); any of these dtypes, or uint8, int8, int16, int32 or int64; device of `boxes`; any strides.
        iou_threshold: any number. With one below zero, boxes that don't overlap suppress one another too.

    Returns:
        int64, (kept,): the indices of the kept boxes in the order in which they are visited.

    float16 and bfloat16 are computed in float32. Each operation is rounded on its own, and the IoU is compared with the
    threshold as a float64, so every device gives the same result. That is torchvision's on the CPU, to the last tie.
    torchvision on CUDA fuses products with sums, rounds the threshold to float32, and some of float16 to float16; where an
    IoU is within such a rounding of the threshold, it may differ.

    Not differentiable: indices have no gradient. `boxes` and `scores` may require one.

    The size of the result depends on the values, so on CUDA a call waits for the device, once; in a CUDA graph use
    :func:`nms_padded`. ``torch.compile(fullgraph=True)`` takes such a function where
    ``torch._dynamo.config.capture_dynamic_output_shape_ops`` is true.

    In ONNX (:func:`extension_cpp.onnx_translations`) it is `NonMaxSuppression`, with the same result to the last tie in a
    runtime that suppresses by "greater than", as onnxruntime does. Boxes of float64, and a threshold below zero, have none.

    Raises:
        RuntimeError: if a shape, dtype or device is not as above.

    The greedy method is that of torchvision.ops.nms; the pruning of pairs is explained in csrc/nms.h.

    Example:
        >>> boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 11, 11], [20, 20, 30, 30]])
        >>> extension_cpp.nms(boxes, torch.tensor([0.8, 0.9, 0.7]), 0.5)
        tensor([1, 2])
    """
    return _suppress(boxes, scores, iou_threshold)


@operator(differentiable=False, autocast="float32", onnx=_batched_nms_in_onnx)
def batched_nms(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float) -> Tensor:
    r"""Non-maximum suppression of each class on its own.

    Args:
        boxes: (N, 4), as for :func:`nms`.
        scores: (N,), as for :func:`nms`.
        idxs: (N,), the class of each box, any number; uint8, int8, int16, int32 or int64; device of `boxes`.
        iou_threshold: as for :func:`nms`.

    Returns:
        int64, (kept,): the indices of the boxes that :func:`nms` keeps of each class, all in descending order of score,
        equal scores by index.

    The boxes of a class are not moved away from those of others, as torchvision.ops.batched_nms does with few boxes: that
    costs their coordinates precision. The result is always that of a loop over the classes.

    Derivatives, errors and CUDA graphs are as for :func:`nms`.

    Example:
        >>> boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 11, 11], [0, 0, 10, 10]])
        >>> extension_cpp.batched_nms(boxes, torch.tensor([0.8, 0.9, 0.7]), torch.tensor([0, 0, 1]), 0.5)
        tensor([1, 2])
    """
    return _suppress_by_class(boxes, scores, idxs, iou_threshold)


def _vmap_padded(info: Any, in_dims: Any, boxes: Any, scores: Any, iou_threshold: float, idxs: Any) -> Any:
    """One call for the batch: a class of boxes is one of a sample. What is kept comes sample by sample once it is sorted."""
    boxes, scores, idxs = (
        t if t is None else t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip((boxes, scores, idxs), (*in_dims[:2], in_dims[3]))
    )
    samples, n = scores.shape
    sample = torch.arange(samples, device=scores.device)
    group = sample[:, None].expand(samples, n)
    if idxs is not None:  # The classes of a sample are numbered from 0 to at most n - 1.
        ordered, order = idxs.sort(dim=1)
        steps = torch.nn.functional.pad(ordered.diff(dim=1) != 0, (1, 0)) if n else ordered
        group = group * n + torch.zeros_like(order).scatter(1, order, steps.cumsum(1))
    keep, _ = nms_padded(boxes.flatten(0, 1), scores.flatten(), iou_threshold, group.flatten())
    of, order = keep.div(max(n, 1), rounding_mode="floor").sort(stable=True)  # What is not kept comes first, as of -1.
    starts = torch.searchsorted(of, of.new_zeros(samples + 1) + torch.arange(samples + 1, device=of.device))
    place = starts[:-1, None] + torch.arange(n, device=of.device)
    kept = keep[order[place.clamp(max=max(samples * n - 1, 0))]] - n * sample[:, None] if n else place
    return (kept.masked_fill(place >= starts[1:, None], -1), starts.diff()), (0, 0)


@operator(differentiable=False, autocast="float32", onnx=_nms_padded_in_onnx, vmap=_vmap_padded)
def nms_padded(
    boxes: Tensor, scores: Tensor, iou_threshold: float, idxs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r""":func:`nms`, or :func:`batched_nms` where `idxs` is given, with a result whose size depends on that of `boxes` alone.

    On CUDA a call doesn't wait for the device, and can be captured in a CUDA graph.

    Args:
        boxes: (N, 4), as for :func:`nms`.
        scores: (N,), as for :func:`nms`.
        iou_threshold: as for :func:`nms`.
        idxs: (N,), as for :func:`batched_nms`, or None.

    Returns:
        int64, (N,): the indices of the kept boxes, then -1; and int64, (): how many are kept.

    Derivatives and errors are as for :func:`nms`.

    Example:
        >>> boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 11, 11], [20, 20, 30, 30]])
        >>> extension_cpp.nms_padded(boxes, torch.tensor([0.8, 0.9, 0.7]), 0.5)
        (tensor([ 1,  2, -1]), tensor(2))
    """
    classes = torch.zeros_like(scores, dtype=torch.int64) if idxs is None else idxs
    keep = _suppress_by_class(boxes, scores, classes, iou_threshold)
    count = torch.tensor(keep.numel(), device=boxes.device)
    return torch.cat([keep, keep.new_full((boxes.shape[0] - keep.numel(),), -1)]), count
