"""torchvision's non-maximum suppression by the kernels of this package, for programs that call torchvision.

    extension_cpp.compat.torchvision.install()

The kernels of torch.ops.torchvision.nms are replaced, for eager, compiled and scripted programs alike, and the functions
between which torchvision.ops.batched_nms chooses.
"""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from extension_cpp import ops
from extension_cpp.ops import _backends
from extension_cpp.ops._backends import fail

__all__ = ["install", "uninstall"]

NAME = "torchvision::nms"
DTYPES = {"cpu": (torch.float32, torch.float64), "cuda": (torch.float16, torch.float32, torch.float64)}
"""Of boxes, where torchvision has a kernel."""
CLASSES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FUNCTIONS = ("_batched_nms_vanilla", "_batched_nms_coordinate_trick")
"""Of torchvision.ops.boxes: batched_nms calls one of them, by the number of boxes."""


def _is_ours(boxes: Tensor, scores: Tensor) -> bool:
    """Whether our kernels give what torchvision's give; all else is left to those, with their errors.

    On the CPU torchvision takes scores of the boxes' dtype alone, on CUDA of any.
    """
    device = boxes.device
    return (
        boxes.dtype in DTYPES.get(device.type, ())
        and (scores.dtype is boxes.dtype or (device.type == "cuda" and scores.dtype in (*DTYPES["cuda"], *CLASSES)))
        and boxes.dim() == 2
        and boxes.shape[1] == 4
        and scores.shape == boxes.shape[:1]
        and scores.device == device
    )


def _make_kernel(device: str) -> Callable:
    previous = torch.library.get_kernel(NAME, device.upper())

    def nms(keys: Any, boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
        if _is_ours(boxes, scores):
            return ops.nms(boxes, scores, iou_threshold)
        return previous.call_boxed(keys, boxes, scores, iou_threshold)

    return nms


def _make_batched(replaced: Callable) -> Callable:
    # torch.jit.script reads this function, and leaves out of it what is not for scripts.
    def batched_nms(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float) -> Tensor:
        if torch.jit.is_scripting():
            return replaced(boxes, scores, idxs, iou_threshold)
        else:
            return _batched_nms(replaced, boxes, scores, idxs, iou_threshold)

    return batched_nms


def _batched_nms(replaced: Callable, boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float) -> Tensor:
    # A program that is saved names torchvision's operators alone, so that it loads without this package. Of a program that
    # is only compiled torch.compiler.is_exporting() says that it is exported, before torch 2.13; not so what it returns.
    saved = torch.jit.is_tracing() or torch.compiler._is_exporting_flag
    if (
        not saved
        and boxes.device.type in _backends.elsewhere.get(NAME, ())
        and not boxes.is_quantized
        and _is_ours(boxes, scores)
        and idxs.dtype in CLASSES
        and idxs.shape == scores.shape
        and idxs.device == boxes.device
    ):
        return ops.batched_nms(boxes, scores, idxs, iou_threshold)
    return replaced(boxes, scores, idxs, iou_threshold)


class _Installation:
    """What is replaced, until it is put back."""

    def __init__(self) -> None:
        self.boxes = sys.modules["torchvision.ops.boxes"]
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        try:
            devices = [device for device in DTYPES if has(NAME, device.upper())]
        except RuntimeError:
            fail("compat.torchvision", "torchvision has no operators: its library is for another PyTorch")
        native = [device for device in devices if _backends.used(ops.nms.operator, device) == "native"]  # type: ignore[attr-defined]
        self.functions = {name: getattr(self.boxes, name) for name in FUNCTIONS if hasattr(self.boxes, name)}
        self.library = torch.library.Library("torchvision", "IMPL")
        for device in native:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Warning only once for all operators")
                self.library.impl("nms", _make_kernel(device), device.upper(), with_keyset=True, allow_override=True)
            # Another thread may have found the kernel in the dispatcher, and enter it when it is no longer installed.
            _kept.append(torch.library.get_kernel(NAME, device.upper()))
        _backends.elsewhere[NAME] = dict.fromkeys(native, "native")
        for name, function in self.functions.items():
            setattr(self.boxes, name, _make_batched(function))

    def remove(self) -> None:
        for name, function in self.functions.items():
            setattr(self.boxes, name, function)
        del _backends.elsewhere[NAME]
        self.library._destroy()


_lock = threading.RLock()
_open: set[install] = set()
_installation: _Installation | None = None
_kept: list[Any] = []


def _settle() -> None:
    """Install or remove, as what is open asks for."""
    global _installation
    if _open and _installation is None:
        _installation = _Installation()
    elif not _open and _installation is not None:
        installation, _installation = _installation, None
        installation.remove()


class install:
    """Lets torchvision's nms and batched_nms run the kernels of this package, in the whole process.

    On each device type where :func:`extension_cpp.nms` is native, `torch.ops.torchvision.nms` runs it, in eager, compiled
    and scripted programs, also in those that were compiled or scripted before. `torchvision.ops.batched_nms` runs
    :func:`extension_cpp.batched_nms`, except in what is scripted, traced or exported: these programs keep torchvision's
    operators alone. Importing this package installs nothing; the environment variable ``EXTENSION_CPP_COMPAT=torchvision``
    does once both are imported. :func:`extension_cpp.backends` has a row "torchvision::nms" while it is on.

    The result on the CPU is torchvision's, to the last tie. On CUDA torchvision's own result differs from that on the CPU
    by roundings, as :func:`extension_cpp.nms` describes; here it doesn't. `batched_nms` is exact, where torchvision moves
    the boxes of each class away from those of others, which costs few boxes precision. What these kernels don't take is
    left to torchvision's, with its results and its errors: quantized boxes, dtypes and shapes that it refuses.

    Once is enough: a second call changes nothing. In a ``with`` statement it is undone at the end of the block, unless
    another call or block, of any thread, still wants it. Calls on other threads meanwhile run one or the other.

    Raises:
        ImportError: if torchvision can't be imported.
        RuntimeError: if torchvision has no operators, as where its library is for another version of PyTorch.

    Example:
        >>> with extension_cpp.compat.torchvision.install():
        ...     detections = model(images)
    """

    def __init__(self) -> None:
        self.__enter__()

    def __enter__(self) -> install:
        importlib.import_module(
            "torchvision.ops.boxes"
        )  # Not with our lock: another thread may import it, and wait for that.
        with _lock:
            _open.add(self)
            try:
                _settle()
            except BaseException:
                _open.discard(self)
                raise
        return self

    def __exit__(self, *exception: Any) -> None:
        with _lock:
            _open.discard(self)
            _settle()


def uninstall() -> None:
    """Undo every :class:`install`: torchvision runs its own kernels and functions again."""
    with _lock:
        _open.clear()
        _settle()
