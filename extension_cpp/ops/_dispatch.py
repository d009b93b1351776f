"""How a call finds its kernel: past autograd where nothing needs it, to the reference where there is no kernel."""

import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import extension_cpp

_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})

try:
    from torch._C import (
        _are_functorch_transforms_active,
        _dispatch_call_boxed,
        _len_torch_dispatch_stack,
        _len_torch_function_stack,
    )
except ImportError:  # A torch that renamed one of them: every call takes the general way.

    def eager_needs_grad(a: Tensor, b: Tensor) -> bool | None:
        return None

    def direct(overload: Any) -> Callable:
        return overload

else:

    def eager_needs_grad(a: Tensor, b: Tensor) -> bool | None:
        """Whether a plain eager call on a and b must be differentiable; None if it is no plain call.

        The autograd formula that torch.library registers is entered through Python on every call, for some 2.7 µs where
        no gradient is needed and 10 where one is: more than the operator itself takes on small tensors. A plain call, in
        which no transform, mode, subclass or compiler takes part, goes past it.
        """
        if (
            type(a) not in _PLAIN_TYPES
            or type(b) not in _PLAIN_TYPES
            or torch.compiler.is_compiling()
            or _are_functorch_transforms_active()
            or _len_torch_dispatch_stack()
            or _len_torch_function_stack()
        ):
            return None
        if forward_ad._current_level >= 0:
            return True
        return (a.requires_grad or b.requires_grad) and torch.is_grad_enabled()

    def direct(overload: Any) -> Callable:
        """The quickest way into the dispatcher, for plain calls."""
        return partial(_dispatch_call_boxed, overload._handle)


def register_reference(name: str, reference: Callable) -> None:
    """Let `reference` serve an operator's overload on every device type for which no native kernel was loaded."""

    @wraps(reference)
    def fallback(*args: Any) -> Any:
        _warn_once(name.split("::")[1].split(".")[0], next(a.device.type for a in args if isinstance(a, Tensor)))
        return reference(*args)

    torch.library.impl(name, "default", fallback)


_warned: set[tuple[str, str]] = set()


def _warn_once(op: str, device_type: str) -> None:
    if (op, device_type) in _warned:
        return
    _warned.add((op, device_type))
    reason = extension_cpp.load_errors.get(f"_C_{device_type}", "extension_cpp has no kernel for this device type")
    warnings.warn(f"{op}: runs its slower PyTorch reference on {device_type}: {reason}", stacklevel=4)
