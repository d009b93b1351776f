"""What an operator registers beside its kernels: for the operator itself, and for each of its implementations."""

import importlib
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

import extension_cpp
from extension_cpp.ops import _backends, _check

_library = torch.library.Library("extension_cpp", "FRAGMENT")


def register(
    name: str,
    *,
    fake: Callable,
    reference: Callable,
    check: Callable,
    backward: Callable | None = None,
    setup_context: Callable | None = None,
    vmap: Callable | None = None,
    mutates: int | None = None,
    triton: bool = False,
) -> None:
    """Complete an operator whose schema and kernels the libraries have registered.

    Args:
        name: the operator. It may have an overload `no_grad`, which gets no derivatives (_dispatch.py).
        fake: checks, and makes the result without its values.
        reference: the operator in plain PyTorch, right for arguments that pass `check`.
        check: called with the operator's name and its tensors, raises for those that the kernels refuse.
        backward, setup_context: its derivative, as for torch.library.register_autograd.
        vmap: its rule, as for torch.library.register_vmap.
        mutates: the argument that it writes into.
        triton: whether extension_cpp/triton/<stem>.py has a function of the operator's name.
    """
    packet = getattr(torch.ops.extension_cpp, name)
    stem = reference.__module__.rpartition(".")[2]
    makers: dict[str, Callable[[], Callable]] = {"native": lambda: make("native", native)}
    makers["reference"] = lambda: make("reference", checked)
    if triton:
        makers["triton"] = lambda: _make_triton(name, stem, finish)
    _backends.add(name, makers)

    kinds = [str(argument.type) for argument in packet.default._schema.arguments]

    def checked(*args: Any) -> Any:
        check(name, *(arg for arg, kind in zip(args, kinds) if "Tensor" in kind))
        return reference(*args)

    def native(*args: Any) -> Any:
        _backends.require(name, "native", args)
        kind = _backends.device_type(args)
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, kind.upper()))
        kernel = replaced.get(kind)
        return kernel.call_boxed(keys, *args) if kernel else packet.default.redispatch(keys, *args)

    def finish(overload: str, backend: str | None) -> None:
        """Fake kernel, derivatives and vmap of an overload; what they call is then of the same backend."""
        qualified = f"extension_cpp::{name}.{overload}".removesuffix(".default")
        as_fake = fake
        if backend is not None:

            @wraps(fake)
            def as_fake(*args: Any) -> Any:
                result = fake(*args)
                _backends.require(name, backend, args)
                return result

        torch.library.register_fake(qualified, as_fake, lib=_library)
        if overload == "no_grad":
            return
        if backward is not None:
            formula = _within(backend, backward)
            torch.library.register_autograd(qualified, formula, setup_context=setup_context, lib=_library)
        if vmap is not None:
            torch.library.register_vmap(qualified, _within(backend, vmap), lib=_library)
        if mutates is not None and overload != "triton":  # There torch.library does it.
            _register_mutation(getattr(packet, overload), mutates)

    def make(backend: str, kernel: Callable) -> Callable:
        if backend not in packet.overloads():  # as it is after an attempt that was interrupted
            schema = str(packet.default._schema).partition("(")[2]
            _library.define(f"{name}.{backend}({schema}")
        _library.impl(f"{name}.{backend}", kernel, "CompositeExplicitAutograd")
        finish(backend, backend)
        return getattr(packet, backend)

    replaced: dict[str, Any] = {}
    for overload in packet.overloads():
        finish(overload, None)
        replaced |= _serve(name, overload, checked)


def _within(backend: str | None, function: Callable) -> Callable:
    if backend is None:
        return function

    @wraps(function)
    def run(*args: Any) -> Any:
        with _backends.use_backend(backend):
            return function(*args)

    return run


def _serve(name: str, overload: str, reference: Callable) -> dict[str, Any]:
    """Let an overload lead to what serves each type of device. Returns the kernels that had to make way, by type."""
    qualified = f"{name}.{overload}".removesuffix(".default")
    replaced: dict[str, Any] = {}

    def fallback(*args: Any) -> Any:
        """On types of device that have no kernel of their own here."""
        _backends.require(name, _backends.chosen or "reference", args)
        if not _backends.chosen and (kind := _backends.device_type(args)):
            _warn_once(name, kind, "reference")
        return reference(*args)

    def triton(*args: Any) -> Any:
        if not _backends.chosen:
            _warn_once(name, "cuda", "triton")
        return _backends.triton_function(name)(*args)

    _library.impl(qualified, fallback, "CompositeExplicitAutograd")
    for kind in ("cpu", "cuda"):
        backend, there = _backends.serving(name, kind), kind in _backends._native[name]
        if backend == "native" or not (there or backend == "triton"):
            continue
        if there:
            replaced[kind] = torch.library.get_kernel(f"extension_cpp::{qualified}", kind.upper())
        kernel = triton if backend == "triton" else fallback
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            _library.impl(qualified, kernel, kind.upper(), allow_override=True)
    if "triton" in (_backends.serving(name, "cpu"), _backends.serving(name, "cuda")) and not _backends.interpreted:
        _show_the_compiler(name, overload)
    return replaced


def _show_the_compiler(name: str, overload: str) -> None:
    """Where Triton serves an overload, let torch.compile see its kernels.

    Not where a size or number is symbolic: an operator as a whole depends less on how well a version of torch reasons about
    those. Nor in torch.export, which keeps operators as they are.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    known = (Tensor, FunctionalTensor, FakeTensor)

    def rule(mode: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.export._trace import custom_triton_ops_decomposition_disabled  # Which imports all of the compiler.

        served = overload == "triton" or _backends.serving(name, _backends.device_type(args)) == "triton"
        symbolic = any(
            _check.is_symbolic(arg) if isinstance(arg, Tensor) else isinstance(arg, torch.SymInt | torch.SymFloat)
            for arg in args
        )
        if not served or symbolic or custom_triton_ops_decomposition_disabled() or not {*types} <= {*known}:
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return _backends.triton_function(name)(*args, **(kwargs or {}))

    qualified = f"extension_cpp::{name}.{overload}".removesuffix(".default")
    torch.library.register_torch_dispatch(qualified, FunctionalTensorMode, rule, lib=_library)


def _make_triton(name: str, stem: str, finish: Callable[[str, str], None]) -> Callable:
    """Make <op>.triton of the function in extension_cpp/triton."""
    function = getattr(importlib.import_module(f"extension_cpp.triton.{stem}"), name)

    @wraps(function)
    def run(*args: Any) -> Any:
        _backends.require(name, "triton", args)
        return function(*args)

    # The interpreter's kernels can't be taken apart by a compiler.
    make: Callable = torch.library.custom_op if _backends.interpreted else torch.library.triton_op
    schema = getattr(torch.ops.extension_cpp, name).default._schema
    written = [argument.name for argument in schema.arguments if argument.is_write]
    operator = make(f"extension_cpp::{name}.triton", run, mutates_args=written)
    finish("triton", "triton")
    if not _backends.interpreted:
        _show_the_compiler(name, "triton")
    # An eager call needs nothing of what triton_op does for the compiler, which takes it longer than the kernel.
    _library.impl(f"{name}.triton", function, "CUDA")
    _backends.functions[name] = function
    return operator._opoverload


_warned: set[tuple[str, str]] = set()


def _warn_once(op: str, device_type: str, backend: str) -> None:
    """Once a process where a whole library doesn't serve; once an operator where a device type has no library."""
    reason = extension_cpp.load_errors.get(f"_C_{device_type}")
    if reason is None and backend == "triton":
        return  # It was never meant to be another.
    key = ("" if reason else op, device_type)
    if key in _warned:
        return
    _warned.add(key)
    if reason is None:
        said = f"{op}: runs its slower PyTorch reference on {device_type}"
        reason = "extension_cpp has no kernel for this device type"
        if op in _backends._makers["triton"] and device_type == "cuda":
            reason = _backends.why_no_triton()
    elif backend == "triton":
        others = "as do all other operators that can; those that can't run their slower PyTorch reference"
        said = f"extension_cpp: {op} runs in Triton on {device_type}, {others}"
    else:
        others = "operators" if _backends.why_no_triton() else "operators that can't run in Triton"
        said = f"extension_cpp: {op} and all other {others} run their slower PyTorch reference on {device_type}"
    warnings.warn(f"{said}: {reason}", stacklevel=4)


def _register_mutation(overload: Any, argument: int) -> None:
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
