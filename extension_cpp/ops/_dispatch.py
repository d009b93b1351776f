"""How a call from Python finds its kernel: past autograd where nothing needs it."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

try:
    from torch._C import (
        _are_functorch_transforms_active,
        _AutoDispatchBelowADInplaceOrView,
        _dispatch_call_boxed,
        _len_torch_dispatch_stack,
        _len_torch_function_stack,
    )
except ImportError:  # A torch that renamed one of them: every call takes the general way.

    def is_eager(*tensors: Tensor) -> bool:
        return False

    def is_plain(a: Tensor, b: Tensor) -> bool:
        return False

    call_handle: Any = None
    write_handle: Any = None

else:
    call_handle = _dispatch_call_boxed  # The quickest way into the dispatcher from Python, for plain calls.

    def is_eager(*tensors: Tensor) -> bool:
        """Whether a call on `tensors` is one in which no transform, mode, subclass or compiler takes part.

        Of a compiler, Dynamo is asked; the later stages work under a dispatch mode.

        The autograd formula that torch.library registers is entered through Python on every call, for some 2.7 µs where
        no gradient is needed and 10 where one is: more than the operator itself takes on small tensors. An eager call
        goes past it: to a torch.autograd.Function, or, where it `is_plain`, to the overload without a formula.
        """
        return all(type(t) is Tensor or type(t) is Parameter for t in tensors) and not (
            is_dynamo_compiling()
            or _are_functorch_transforms_active()
            or _len_torch_dispatch_stack()
            or _len_torch_function_stack()
        )

    def is_plain(a: Tensor, b: Tensor) -> bool:
        """Whether a call on a and b is eager and needs no gradient; written out, as every call pays for it."""
        return (
            type(a) is Tensor
            and type(b) is Tensor
            and not (
                ((a.requires_grad or b.requires_grad) and torch.is_grad_enabled())
                or is_dynamo_compiling()
                or _are_functorch_transforms_active()
                or _len_torch_dispatch_stack()
                or _len_torch_function_stack()
                or forward_ad._current_level >= 0
            )
        )

    def write_handle(handle: Any, written: Tensor, *args: Any) -> None:
        """A plain call of what writes into one of its arguments, past the kernel that tells autograd so: entering that
        through Python takes longer than a small operator.
        """
        with _AutoDispatchBelowADInplaceOrView():
            call_handle(handle, *args)
        if not written.is_inference():
            increment_version(written)
