"""What an operator registers beside its kernels, where torch.library has no function for it."""

import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

import extension_cpp

_library = torch.library.Library("extension_cpp", "IMPL")


def register_reference(name: str, reference: Callable) -> None:
    """Let `reference` serve an operator's overload on every device type for which no native kernel was loaded."""

    @wraps(reference)
    def fallback(*args: Any) -> Any:
        _warn_once(name.split("::")[1].split(".")[0], next(a.device.type for a in args if isinstance(a, Tensor)))
        return reference(*args)

    torch.library.impl(name, "default", fallback)


_warned: set[tuple[str, str]] = set()


def _warn_once(op: str, device_type: str) -> None:
    """Once a process where a whole library doesn't serve; once an operator where a device type has no library."""
    reason = extension_cpp.load_errors.get(f"_C_{device_type}")
    key = ("" if reason else op, device_type)
    if key in _warned:
        return
    _warned.add(key)
    who = f"{op}: runs its" if reason is None else f"extension_cpp: {op} and all other operators run their"
    reason = reason or "extension_cpp has no kernel for this device type"
    warnings.warn(f"{who} slower PyTorch reference on {device_type}: {reason}", stacklevel=4)


def register_mutation(overload: Any, argument: int) -> None:
    """Tell autograd that an operator writes into an argument.

    Kernels on the stable ABI can't. Without it, a gradient that needs the overwritten values is silently wrong.
    """

    def kernel(keyset: Any, *args: Any) -> None:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            overload.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)
        torch.autograd.graph.increment_version(args[argument])

    _library.impl(overload, kernel, "ADInplaceOrView", with_keyset=True)


def batch_first(in_dims: Sequence[int | None], *tensors: Tensor) -> list[Tensor]:
    """For vmap: tensors whose batch is their first dimension and which broadcast as their elements do."""
    first = [t if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, in_dims)]
    dims = max(t.dim() - (dim is not None) for t, dim in zip(first, in_dims))
    return [
        t if dim is None else t.reshape(t.shape[0], *(1,) * (dims + 1 - t.dim()), *t.shape[1:])
        for t, dim in zip(first, in_dims)
    ]
