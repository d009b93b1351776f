"""nms, batched_nms and nms_padded: greedy non-maximum suppression of axis-aligned boxes."""

import torch
from torch import Tensor

from extension_cpp.ops._operator import operator

__all__ = ["batched_nms", "nms", "nms_padded"]


def _suppress(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """The greedy method as it stands: a step for each box that is kept."""
    boxes = boxes.to(torch.promote_types(boxes.dtype, torch.float32))
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    rest = scores.sort(stable=True, descending=True).indices
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
    order = scores.sort(stable=True, descending=True).indices
    return order[keep[order]]


@operator(differentiable=False, autocast="float32")
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

    Raises:
        RuntimeError: if a shape, dtype or device is not as above.

    The greedy method is that of torchvision.ops.nms; the pruning of pairs is explained in csrc/nms.h.

    Example:
        >>> boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 11, 11], [20, 20, 30, 30]])
        >>> extension_cpp.nms(boxes, torch.tensor([0.8, 0.9, 0.7]), 0.5)
        tensor([1, 2])
    """
    return _suppress(boxes, scores, iou_threshold)


@operator(differentiable=False, autocast="float32")
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


@operator(differentiable=False, autocast="float32")
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
