"""Which implementation of an operator is used on a type of device, and how to choose another.

An operator `<op>` leads to the implementation that is used, which is settled at import. Once a backend was chosen by
:class:`use_backend`, there is an overload `<op>.<backend>` too, with the same schema, fake kernel and derivatives:
``torch.ops.extension_cpp.<op>.reference``. To make those at import would take half of its time. Calls are led to them
before the dispatcher sees them, which costs nothing where no backend is chosen, while torch.compile traces it as it traces
any mode.
"""

import ctypes
import os
import threading
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.overrides import TorchFunctionMode

from extension_cpp import _elf, _loader

NAMESPACE = "extension_cpp"
"""Of an operator whose declaration names none."""
BACKENDS = ("native", "triton", "reference")
COMPILED = "triton (compiled)"
"""What "native" is called where the library's kernel is Triton's, compiled when the package was built."""
VARIABLE = "EXTENSION_CPP_BACKEND"

chosen = os.environ.get(VARIABLE, "")
"""The backend that the environment asks for; empty for the best there is."""
interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
"""Whether Triton's kernels run in its interpreter, on tensors of the CPU too."""

operators: dict[str, Any] = {}
"""Every operator that was declared (_operator.Operator), by name; that of one in another namespace has it in front."""
elsewhere: dict[str, dict[str, str]] = {}
"""Operators of other libraries that run kernels of this package (extension_cpp.compat): the backend by device type."""
_making = threading.RLock()
_overloads: dict[str, dict[Any, Callable]] = {backend: {} for backend in BACKENDS}
"""What a call leads to, by backend. One dictionary each, so that torch.compile looks at Triton's only once it is filled."""


def backends(*device_types: str) -> dict[str, dict[str, str]]:
    """Which implementation of each operator is used on each type of device.

    Args:
        device_types: types to tell next to "cpu", "cuda" and that of this machine's accelerator.

    Returns:
        Operator name to device type to "native" (compiled C++ or CUDA), "triton (compiled)" (native too, made of a Triton
        kernel when the package was built), "triton" (compiled just in time) or "reference" (plain PyTorch), as it was settled
        at import; :class:`use_backend` changes nothing here. The name of an operator in another namespace has it in
        front, as in "my_ops::scale". A type of device is missing where the environment variable EXTENSION_CPP_BACKEND
        asks for a backend that the operator doesn't have there. An operator of another library is there while
        :mod:`extension_cpp.compat` is on for it, with its library in front, and the types of device that run ours.

    Initialises no device.

    Example:
        >>> {op for op, by_device in extension_cpp.backends().items() if by_device["cpu"] != "native"}
        set()
    """
    accelerator = torch.accelerator.current_accelerator(check_available=False)
    there = ["cpu", "cuda", *([accelerator.type] if accelerator else []), *device_types]
    found = {
        name: {device: backend for device in dict.fromkeys(there) if (backend := shown(operator, device))}
        for name, operator in sorted(operators.items())
        if operator.public
    }
    return found | {name: dict(used) for name, used in elsewhere.items()}


def implementations(operator: Any, device_type: str) -> list[str]:
    """The backends that an operator has on a type of device, best first."""
    found = ["native"] if device_type in operator.native else []
    found += ["triton"] if operator.triton and device_type in _triton_devices() else []
    return [*found, "reference"]


def used(operator: Any, device_type: str) -> str | None:
    """The backend that a call leads to unless told otherwise; None where the environment wants one that isn't there."""
    found = implementations(operator, device_type)
    return found[0] if not chosen else chosen if chosen in found else None


def shown(operator: Any, device_type: str) -> str | None:
    """What :func:`backends` calls the backend that is used."""
    backend = used(operator, device_type)
    return COMPILED if backend == "native" and is_compiled(operator, device_type) else backend


def is_compiled(operator: Any, device_type: str) -> bool:
    """Whether an operator's native kernel is Triton's, compiled when the package was built."""
    return device_type == "cuda" and operator.triton and operator.qualified in compiled()[1]


@cache
def compiled() -> tuple[list[str], frozenset[str]]:
    """What of Triton was compiled when the package was built: for which architectures, and of which operators."""
    library = _loader.libraries.get("_C_cuda")
    ask = getattr(ctypes.CDLL(str(library)), "extension_cpp_compiled", None) if library else None
    if ask is None:
        return [], frozenset()
    ask.restype = ctypes.c_char_p
    architectures, *names = ask().decode().split()
    return architectures.split("/"), frozenset(f"{NAMESPACE}::{name}" for name in names)


@cache
def _triton_devices() -> tuple[str, ...]:
    cuda = ("cuda",) if torch.version.cuda or torch.version.hip else ()
    return () if find_spec("triton") is None else ("cpu", *cuda) if interpreted else cuda


def why_no_triton() -> str:
    """Why Triton is used on no device here; empty if it is."""
    if find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    return "" if _triton_devices() else "torch was built without CUDA, and TRITON_INTERPRET=1 is not set"


def device_type(args: Iterable[Any]) -> str:
    """That of the first tensor; empty without one, as where None was passed for the only one."""
    return next((arg.device.type for arg in args if isinstance(arg, Tensor)), "")


def why_not_loaded(operator: Any, device_type: str) -> str | None:
    """Why the library is missing that has an operator's kernels, where it is one of this package."""
    return _loader.load_errors.get(f"_C_{device_type}") if operator.namespace == NAMESPACE else None


def fail(op: str, message: str) -> NoReturn:
    raise RuntimeError(f"{op}: {message}")


def require(operator: Any, backend: str, args: Iterable[Any]) -> None:
    """Raise unless the operator has that backend where the arguments are."""
    device = device_type(args)
    found = implementations(operator, device)
    if backend not in found and device not in ("", "meta"):
        reason = why_not_loaded(operator, device) if backend == "native" else ""
        if backend == "triton" and operator.triton:
            reason = why_no_triton()
        wanted = f"backend must be {' or '.join(found)} on {device}, got {backend}"
        fail(operator.name, f"{wanted}{f': {reason}' if reason else ''}")


def add(operator: Any) -> None:
    """Enter an operator, once its kernels are loaded and before anything else is registered."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    found = [device for device in ("cpu", "cuda") if has(operator.qualified, device.upper())]
    operator.native = found
    name = operator.qualified.removeprefix(f"{NAMESPACE}::")
    if name in operators:
        fail(operator.name, f"{operator.qualified} is declared already")
    operators[name] = operator

    def no_triton(*args: Any, **kwargs: Any) -> Any:
        require(operator, "triton", (*args, *kwargs.values()))

    _lead_to(operator, "triton", no_triton)


def watch_gpus() -> None:
    """Once PyTorch initialises CUDA, and not before, see whether its GPUs run what was compiled of Triton."""
    if compiled()[1] and not chosen:
        torch.cuda._lazy_call(leave_compiled)


def leave_compiled() -> None:
    """Where a GPU runs none of it, use Triton just in time if it is there, else the reference."""
    from extension_cpp import _build, _machine

    architectures, names = compiled()

    def is_run_by(gpu: tuple[int, int]) -> bool:
        code, ptx = _build.runs_on(architectures, gpu)
        # A driver compiles no PTX of a newer CUDA than its own.
        return code or (ptx and (_machine.driver_version() or 0) >= _elf.built_for(_loader.libraries["_C_cuda"])[0])

    if not all(is_run_by(torch.cuda.get_device_capability(i)) for i in range(torch.cuda.device_count())):
        for operator in operators.values():
            if operator.qualified in names and "cuda" in operator.native:
                operator.leave_compiled()


def _lead_to(operator: Any, backend: str, overload: Callable) -> None:
    """Let calls of an operator lead to this while `backend` is chosen."""
    for name in operator.packet.overloads():
        if name not in BACKENDS:
            _overloads[backend][getattr(operator.packet, name)] = overload


def _prepare(backend: str) -> str:
    """Make what `backend` needs; returns why it can't be used, or nothing. Triton takes long to import: not before."""
    if backend not in BACKENDS:
        return f"backend must be native, triton or reference, got {backend!r}"
    if backend == "triton" and (reason := why_no_triton()):
        return f"backend must be native or reference, got 'triton': {reason}"
    for operator in operators.values():
        if backend != "triton" or operator.triton:
            make(operator, backend)
    return ""


def make(operator: Any, backend: str) -> None:
    """Make an operator's overload for a backend unless it was made."""
    with _making:
        if backend not in operator.made:
            entry = operator.packet._op
            _lead_to(operator, backend, operator.make_overload(backend))
            operator.packet._op = entry  # Its hash is that of the packet, by which others know the operator.
            operator.made.add(backend)


# Run while torch.compile traces, not traced itself. What torch.compiler.assume_constant_result does, without its import of
# all of the compiler.
_prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]


class use_backend(TorchFunctionMode):
    """Uses one implementation of every operator, to test it or to find a fault.

    Args:
        backend: "native", the compiled kernels; "triton"; or "reference", plain PyTorch.

    Holds for the thread and the block of a ``with`` statement, for the functions of this package and for
    ``torch.ops.extension_cpp``; derivatives of what was called in it come from the same backend. The innermost holds.
    Under torch.compile it may stand around the compiled function, which is then compiled once for each backend, or inside
    of it. For a whole process there is the environment variable EXTENSION_CPP_BACKEND, read at import.

    What torch.export saw in it names the backend's operators: a process that loads such a program has to call
    ``use_backend(...)`` before.

    Raises:
        RuntimeError: if there is no such backend here; and from an operator that doesn't have it on the device of its
            arguments, saying which it has.

    Example:
        >>> with extension_cpp.use_backend("reference"):
        ...     loss = model(input)
    """

    def __init__(self, backend: str) -> None:
        super().__init__()
        if wrong := _prepare(backend):
            raise RuntimeError(f"use_backend: {wrong}")
        self.backend = backend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        table = _overloads[self.backend]
        overload = func.default if isinstance(func, OpOverloadPacket) and hasattr(func, "default") else func
        if overload in table:
            func = table[overload]
        return func(*args, **(kwargs or {}))


_warned: set[tuple[str, str]] = set()


def warn_once(operator: Any, device_type: str, backend: str) -> None:
    """Once a process where a whole library isn't used; once an operator where a device type has no library."""
    op, reason = operator.name, why_not_loaded(operator, device_type)
    if reason is None and backend == "triton":
        return  # It was never meant to be another.
    key = ("" if reason else operator.qualified, device_type)
    if key in _warned:
        return
    _warned.add(key)
    if reason is None:
        said = f"{op}: runs its slower PyTorch reference on {device_type}"
        reason = f"{operator.namespace} has no kernel for this device type"
        if operator.triton and device_type == "cuda":
            reason = why_no_triton()
    elif backend == "triton":
        others = "as do all other operators that can; those that can't run their slower PyTorch reference"
        said = f"extension_cpp: {op} runs in Triton on {device_type}, {others}"
    else:
        others = "operators" if why_no_triton() else "operators that can't run in Triton"
        said = f"extension_cpp: {op} and all other {others} run their slower PyTorch reference on {device_type}"
    warnings.warn(f"{said}: {reason}", stacklevel=4)


if chosen and (wrong := _prepare(chosen)):
    raise ImportError(f"extension_cpp: in the environment variable {VARIABLE} the {wrong}")
