"""Detectors of torchvision, and the post-processing of a YOLO head, unchanged: with extension_cpp.compat.torchvision on,
and without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from torch import Tensor, nn

from benchmarks.harness import OURS, Case, Function
from extension_cpp.compat.torchvision import install, uninstall

try:
    import torchvision
    from torchvision import ops
    from torchvision.models import detection
except Exception:  # Absent, or made for another torch.
    torchvision = None

CANDIDATES = (2_100, 8_400, 25_200)
CLASSES = 80
MODELS = ("fasterrcnn_resnet50_fpn", "retinanet_resnet50_fpn", "ssd300_vgg16")
installed = [False]
SCORES = {
    "fasterrcnn_resnet50_fpn": "roi_heads.box_predictor.cls_score",
    "retinanet_resnet50_fpn": "head.classification_head.cls_logits",
    "ssd300_vgg16": "head.classification_head",
}


def contenders(function: Function) -> dict[str, Function]:
    """The same code twice. What is installed changes at the first call of a turn, and costs the others nothing."""

    def run(on: bool, *inputs) -> object:
        if installed[0] != on:
            (install if on else uninstall)()
            installed[0] = on
        return function(*inputs)

    return {OURS: partial(run, True), "torchvision": partial(run, False)}


def yolo(prediction: Tensor, confidence: float, iou_threshold: float) -> Tensor:
    """As it is usually written for (4 + classes, candidates), which moves classes apart by hand."""
    boxes, scores = prediction.T.split((4, CLASSES), 1)
    scores, classes = scores.max(1)
    chosen = scores > confidence
    boxes, scores, classes = ops.box_convert(boxes[chosen], "cxcywh", "xyxy"), scores[chosen], classes[chosen]
    keep = ops.nms(boxes + classes[:, None] * 7680, scores, iou_threshold)[:300]
    return torch.cat([boxes[keep], scores[keep, None], classes[keep, None]], 1)


def head(device: str, n: int) -> Tensor:
    """What a head says of an image of 640 by 640 with 40 objects: boxes around these, few of a high score."""
    generator = torch.Generator().manual_seed(0)
    objects = torch.rand(40, 4, generator=generator) * torch.tensor([640.0, 640, 200, 200]) + 10
    boxes = objects[torch.randint(40, (n,), generator=generator)] + 8 * torch.randn(n, 4, generator=generator)
    scores = torch.rand(n, CLASSES, generator=generator) * torch.rand(n, 1, generator=generator) ** 12
    return torch.cat([boxes, scores], 1).T.contiguous().to(device)


def post_processing(device: str, n: int, confidence: float, workload: str) -> Case:
    function = partial(yolo, confidence=confidence, iou_threshold=0.45)
    return Case(
        "yolo",
        device,
        contenders(function),
        lambda: (head(device, n),),
        None,
        workload=workload,
        dtype=torch.float32,
        size=f"{n:,}",
        x=n,
        axis="candidates",
        draw="time",
    )


@cache
def model_and_images(name: str, device: str) -> tuple[nn.Module, list[Tensor]]:
    """Of random weights, with features and class scores of a standard deviation of 1, so that some boxes are found."""
    torch.manual_seed(0)
    model = getattr(detection, name)(weights=None, weights_backbone=None)
    images = [torch.rand(3, 480, 640)]
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    deviations: list[float] = []

    def measure(module: nn.Module, inputs: tuple, result: Tensor) -> None:
        deviations.append(result.std().item())

    with torch.no_grad():
        model.backbone.train()(model.transform.eval()(images)[0].tensors)
        model.eval()
        scores = model.get_submodule(SCORES[name])
        handle = scores.register_forward_hook(measure)
        model(images)
        handle.remove()
        for layer in scores.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                layer.weight /= max(deviations)
    return model.to(device), [image.to(device) for image in images]


@torch.no_grad()
def detect(name: str, device: str) -> list[Tensor]:
    model, images = model_and_images(name, device)
    return list(model(images)[0].values())


def suppressions(name: str, device: str) -> list[tuple]:
    """The arguments of batched_nms in a call of a model."""
    model_and_images(name, device)
    calls: list[tuple] = []
    function = ops.boxes.batched_nms

    def record(*arguments) -> Tensor:
        calls.append(arguments)
        return function(*arguments)

    ops.boxes.batched_nms = record
    try:
        detect(name, device)
    finally:
        ops.boxes.batched_nms = function
    return calls


def detector(device: str, name: str) -> Iterator[Case]:
    def suppress(*calls: tuple) -> list[Tensor]:
        return [ops.batched_nms(*arguments) for arguments in calls]

    described: dict = {"dtype": torch.float32, "rounds": 5}
    yield Case(name, device, contenders(partial(detect, name, device)), workload="an image", **described)
    inputs: Callable = lambda: tuple(suppressions(name, device))  # noqa: E731
    yield Case(name, device, contenders(suppress), inputs, workload="its batched_nms alone", **described)


def cases(device: str) -> Iterator[Case]:
    if torchvision is None:
        return
    for name in MODELS:
        yield from detector(device, name)
    for n in CANDIDATES:
        yield post_processing(device, n, 0.25, "post-processing of scores above 0.25")
        yield post_processing(device, n, 0.001, "post-processing of scores above 0.001")
