"""The declaration of an operator, and what is derived from it.

    @operator(backward=_scale_backward)
    def scale(input: Tensor, scalar_arg: float) -> Tensor:
        \"\"\"What the operator does, for who calls it.\"\"\"
        return input * scalar_arg  # the reference: the same in plain PyTorch

The schema and the signature stand next to the kernels in csrc/ (common/signature.h). From these, here: the public function
with its quick way past autograd where nothing needs it, fake kernel, derivatives of any order in both directions, every
transform of torch.func, autocast, and an overload for each backend.
"""

from __future__ import annotations

import ctypes
import importlib
import linecache
import warnings
from collections.abc import Callable, Sequence
from functools import cache, cached_property, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from extension_cpp import _loader
from extension_cpp.ops import _backends, _signature
from extension_cpp.ops._signature import Signature, fail

NAMESPACE = "extension_cpp"
F = TypeVar("F", bound=Callable[..., Any])

_library = torch.library.Library(NAMESPACE, "FRAGMENT")

try:
    from torch._C import (
        _any_requires_grad,
        _are_functorch_transforms_active,
        _AutoDispatchBelowADInplaceOrView,
        _AutoDispatchBelowAutograd,
        _dispatch_call_boxed,
        _ExcludeDispatchKeyGuard,
        _is_any_autocast_enabled,
        _len_torch_dispatch_stack,
        _len_torch_function_stack,
    )
    from torch._C._functorch import TransformType, get_interpreter_stack
except ImportError as error:
    raise ImportError(
        f"extension_cpp: torch {torch.__version__} lacks what its operators are made of: {error}"
    ) from None

_HELPERS = {
    "_call": _dispatch_call_boxed,  # The quickest way into the dispatcher from Python.
    "_compiling": is_dynamo_compiling,
    "_transforms": _are_functorch_transforms_active,
    "_dispatch_modes": _len_torch_dispatch_stack,
    "_function_modes": _len_torch_function_stack,
    "_grad_enabled": torch.is_grad_enabled,
    "_forward_ad": forward_ad,
    "_increment_version": increment_version,
    "_Tensor": Tensor,
}
_NUMBERS = {"float": ("float", "int"), "int": ("int",), "bool": ("bool",)}


def operator(
    *,
    backward: Callable | None = None,
    saved_for: dict[str, str] | None = None,
    differentiable: bool = True,
    independent: str = "",
    vmap: Callable | None = None,
    autocast: str = "promote",
    filled: dict[str, Callable] | None = None,
    triton: bool = False,
    public: bool = True,
    fake: Callable | None = None,
    signature: str = "",
    name: str = "",
) -> Callable[[F], F]:
    """Declare the operator of a function's name, whose schema, signature and kernels the libraries have registered.

    The function is its reference: the operator in plain PyTorch, right for arguments that pass the checks. It is compared
    with the kernels, it is used where there is none, and the derivatives in forward mode are its own. What is returned is
    the public function, with the same documentation.

    Args:
        backward: the gradients of the tensors that have one, in the order of the arguments, each of the shape of its
            argument or of what that was broadcast to. Its parameters say what it needs: the gradients of the results
            first, then arguments by their names, `result` (or `result0`, `result1`, ...), and `needs`, a tuple that says
            of each argument whether it needs a gradient. Only those are kept. Without it, the derivative is that of the
            reference.
        saved_for: argument to the argument whose gradient needs it: it is None where that one needs none.
        differentiable: False for an operator whose results have no derivative.
        independent: dimensions along which the results are computed independently, "B" or "M N": vmap makes one call.
        vmap: a rule of its own, as of torch.autograd.Function.
        autocast: what torch.autocast does with floating arguments: "promote" to the widest dtype among them, "lower" to
            autocast's own, "float32", or "" for nothing.
        filled: arguments of the schema that the public function doesn't have: name to a function of the first tensor.
        triton: whether extension_cpp/triton/<stem>.py has a kernel of the operator's name.
        public: False for what only derivatives call.
        fake: a fake kernel of its own, in place of that of the signature.
        signature: of an operator that no library of this package has.
        name: of the operator, where the function has another.
    """

    def declare(reference: F) -> F:
        return Operator(
            reference,
            backward=backward,
            saved_for=saved_for or {},
            differentiable=differentiable,
            independent=independent.split(),
            vmap=vmap,
            autocast=autocast,
            filled=filled or {},
            triton=triton,
            public=public,
            fake=fake,
            signature=signature,
            name=name or reference.__name__,
        ).function

    return declare


class Operator:
    """What was declared of an operator, and what is made of it."""

    def __init__(
        self,
        reference: Callable,
        *,
        backward: Callable | None,
        saved_for: dict[str, str],
        differentiable: bool,
        independent: list[str],
        vmap: Callable | None,
        autocast: str,
        filled: dict[str, Callable],
        triton: bool,
        public: bool,
        fake: Callable | None,
        signature: str,
        name: str,
    ) -> None:
        self.name = name
        self.stem = reference.__module__.rpartition(".")[2]
        self.reference = reference
        self.backward, self.saved_for, self.differentiable = backward, saved_for, differentiable
        self.independent, self.vmap, self.autocast = independent, vmap, autocast
        self.filled, self.triton, self.public = filled, triton, public
        self._fake, self._signature = fake, signature
        self.native: list[str] = []
        self.made: set[str] = set()
        self.triton_function: Callable | None = None
        self.qualified = f"{NAMESPACE}::{self.name}"
        self.packet = getattr(getattr(torch.ops, NAMESPACE), self.name)
        self.default = self.packet.default
        # An operator that Python defines has none.
        self.kernel: Any = self.packet.kernel._handle if "kernel" in self.packet.overloads() else None
        self.schema = self.default._schema
        arguments = self.schema.arguments
        self.names = [argument.name for argument in arguments]
        self.defaults = [argument.default_value if argument.has_default_value() else None for argument in arguments]
        self.tensors = [i for i, argument in enumerate(arguments) if "Tensor" in str(argument.type)]
        self.written = [
            i for i, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write
        ]
        self.differentiable = differentiable and not self.written
        _backends.add(self)
        self.replaced: dict[str, Any] = {}
        self._complete(self.default, None)
        self._choose_kernels()
        self.function = self._make_function()

    # What the signature says.

    @cached_property
    def signature(self) -> Signature:
        if self._signature:
            return Signature.read(self._signature, self.schema)
        for library in _loader.libraries.values():
            if line := _ask(library)(self.name.encode()):
                return Signature.read(line.decode(), self.schema)
        fail(self.name, f"no signature of it in {', '.join(map(str, _loader.libraries.values())) or 'any library'}")

    def fake(self, *args: Any) -> Any:
        """The results of a call without their values; raises what the kernels raise."""
        if self._fake:
            return self._fake(*args)
        every = self.all_arguments(args)
        return self.signature.empty(every, self.signature.check(every))

    def checked(self, *args: Any) -> Any:
        """The reference, with the errors of the kernels."""
        self.signature.check(args)
        return self.reference(*args)

    @cached_property
    def differentiable_arguments(self) -> list[int]:
        """Positions of the tensors that may have a gradient."""
        described = {argument.name: argument for argument in self.signature.arguments}

        def dtypes(name: str) -> tuple[torch.dtype, ...]:
            return dtypes(described[name].like) if described[name].like else described[name].dtypes

        return [i for i in self.tensors if all(dtype.is_floating_point for dtype in dtypes(self.names[i]))]

    # The public function.

    def _make_function(self) -> Any:
        """A function with the parameters of the reference: the quick way, for plain calls, and else the general one.

        The quick way is written out for its arguments, as every call pays for it: no transform, mode, subclass or compiler
        takes part, and nothing needs a derivative. It leads to <op>.kernel, which has none. Entering a formula that is
        registered in Python takes longer than the operator itself takes on small tensors.
        """
        parameters, arguments, plain, grads = [], [], [], []
        defaults: dict[str, Any] = {}
        for i, (name, argument) in enumerate(zip(self.names, self.schema.arguments)):
            kind = str(argument.type)
            if name in self.filled:
                arguments.append(f"_fill_{name}({self.names[0]})")
                defaults[f"_fill_{name}"] = self.filled[name]
                continue
            parameters.append(f"{name}=_default_{name}" if argument.has_default_value() else name)
            if argument.has_default_value():
                defaults[f"_default_{name}"] = self.defaults[i]
            arguments.append(name)
            if i in self.tensors:
                if "Optional" in kind:
                    plain.append(f"({name} is None or type({name}) is _Tensor)")
                    grads.append(f"{name} is not None and {name}.requires_grad")
                else:
                    plain.append(f"type({name}) is _Tensor")
                    grads.append(f"{name}.requires_grad")
            elif kind in _NUMBERS:  # A tensor in place of a number might need a gradient.
                plain.append(f"({' or '.join(f'type({name}) is {t}' for t in _NUMBERS[kind])})")
        ways = ["_compiling()", "_transforms()", "_dispatch_modes()", "_function_modes()"]
        if self.differentiable or self.written:
            ways = [f"({' or '.join(grads)}) and _grad_enabled()", *ways, "_forward_ad._current_level >= 0"]
        ways += [f"{self.names[i]}.is_inference()" for i in self.written]  # Last: torch.compile can't ask.
        kernel = f"_call(_kernel, {', '.join(arguments)})"
        quick = [f"            return {kernel}"]
        if self.written:
            quick = [
                f"            {kernel}",
                *(f"            _increment_version({self.names[i]})" for i in self.written),
            ]
            quick.append("            return None")
        test = f"        if {' and '.join(plain)} and not ({' or '.join(ways)}):"
        if _backends.chosen or self.kernel is None:  # Kernels are replaced where the dispatcher finds them.
            test, quick = "", []
        scope = {**_HELPERS, **defaults, "_kernel": self.kernel, "_general": self._make_general()}
        # Helpers are variables of a closure, which torch.compile can guard.
        source = "\n".join(
            [
                f"def make({', '.join(scope)}):",
                f"    def {self.name}({', '.join(parameters)}):",
                *([test] if test else []),
                *quick,
                f"        return _general({', '.join(arguments)})",
                f"    return {self.name}",
            ]
        )
        file = f"<{self.qualified}>"
        linecache.cache[file] = len(source), None, source.splitlines(True), file
        made: dict[str, Any] = {"__name__": __name__}
        exec(compile(source, file, "exec"), made)
        function = made["make"](**scope)
        function.__qualname__ = self.name
        function.__doc__ = self.reference.__doc__
        function.__module__ = self.reference.__module__
        function.__annotations__ = {k: v for k, v in self.reference.__annotations__.items() if k not in self.filled}
        function.operator = self
        return function

    def _make_general(self) -> Callable:
        default, kernel, tensors = self.default, self.kernel, self.tensors
        numbers = [i for i in range(len(self.names)) if i not in tensors]

        def general(*args: Any) -> Any:
            if is_dynamo_compiling():
                return default(*args)
            for i in numbers:
                if isinstance(args[i], Tensor) and args[i].requires_grad:
                    why = "got a tensor that requires a gradient, of which it would get none"
                    fail(self.name, f"{self.names[i]} must be a number, {why}")
            eager = not (
                self.written
                or kernel is None
                or _backends.chosen
                or _are_functorch_transforms_active()
                or _len_torch_dispatch_stack()
                or _len_torch_function_stack()
                or forward_ad._current_level >= 0
                or _is_any_autocast_enabled()  # It casts before a derivative keeps what it needs.
            ) and all(type(args[i]) is Tensor or type(args[i]) is Parameter or args[i] is None for i in tensors)
            if not eager or any(args[i] is None for i in tensors):
                return default(*args)
            if self.differentiable and torch.is_grad_enabled() and _any_requires_grad(*args):
                return self._apply(*args)
            return _dispatch_call_boxed(kernel, *args)

        return general

    @cached_property
    def _apply(self) -> Callable:
        """A plain call that needs a gradient: torch's own entry, without what Function.apply does for torch.func."""
        function = self._derivative(self.default, None, quick=True)
        return super(torch.autograd.Function, function).apply  # type: ignore[misc]

    # Registration.

    def _complete(self, overload: Any, backend: str | None) -> None:
        """Fake kernel, derivatives and transforms of an overload; what they call is then of the same backend."""
        name = overload._name.removesuffix(".default")

        def fake(*args: Any) -> Any:
            result = self.fake(*args)
            if backend is not None:
                _backends.require(self.name, backend, args)
            return result

        torch.library.register_fake(name, fake, lib=_library)
        name = name.partition("::")[2]
        if self.written:
            _implement(name, torch.library.fallthrough_kernel, "Autograd")
            if backend != "triton":  # There torch.library does it.
                _implement(name, self._make_write(overload), "ADInplaceOrView", with_keyset=True)
            _library.impl(name, self._make_negative(overload), "Negative")
        elif self.differentiable:
            _implement(name, self._make_autograd(overload, backend), "Autograd", with_keyset=True)
        else:
            _implement(name, torch.library.fallthrough_kernel, "Autograd")
        _library.impl(name, self._make_transformed(overload, backend), "FuncTorchDynamicLayerFrontMode")
        if self.autocast:
            for device in ("CPU", "CUDA"):
                _library.impl(name, self._make_autocast(overload, device), f"Autocast{device}")

    def _choose_kernels(self) -> None:
        """Let the operator lead to what is used on each type of device."""
        name = self.name

        def fallback(*args: Any) -> Any:
            """On types of device that have no kernel of their own here."""
            _backends.require(name, _backends.chosen or "reference", args)
            if not _backends.chosen and (device := _backends.device_type(args)):
                _backends.warn_once(name, device, "reference")
            return self.checked(*args)

        def triton(*args: Any) -> Any:
            if not _backends.chosen:
                _backends.warn_once(name, "cuda", "triton")
            if self.triton_function is None:
                _backends.make(self, "triton")
            return self.triton_function(*args)  # type: ignore[misc]

        _library.impl(name, fallback, "CompositeExplicitAutograd")
        # What a plain call can turn out to be after all: on another type of device, under autocast, or traced.
        for key in (
            "CompositeExplicitAutograd",
            "AutocastCPU",
            "AutocastCUDA",
            "Tracer",
            *["Negative"] * bool(self.written),
        ):
            if self.kernel is not None:
                _library.impl(f"{name}.kernel", self.default, key)
        by_triton = False
        for device in ("cpu", "cuda"):
            backend, there = _backends.used(name, device), device in self.native
            by_triton |= backend == "triton"
            if backend == "native" or not (there or backend == "triton"):
                continue
            if there:
                self.replaced[device] = torch.library.get_kernel(self.qualified, device.upper())
            kernel = triton if backend == "triton" else fallback
            _implement(name, kernel, device.upper())
            if backend == "triton":
                _implement(f"{name}.kernel", kernel, device.upper())
        if by_triton and not _backends.interpreted:
            self._show_the_compiler(self.default)

    def make_overload(self, backend: str) -> Any:
        """<op>.<backend>."""
        if backend == "triton":
            return self._make_triton()
        kernel = self._native_kernel if backend == "native" else self.checked
        if backend not in self.packet.overloads():  # as it is after an attempt that was interrupted
            schema = str(self.schema).partition("(")[2]
            _library.define(f"{self.name}.{backend}({schema}")
        _library.impl(f"{self.name}.{backend}", kernel, "CompositeExplicitAutograd")
        overload = getattr(self.packet, backend)
        self._complete(overload, backend)
        return overload

    def _native_kernel(self, *args: Any) -> Any:
        _backends.require(self.name, "native", args)
        device = _backends.device_type(args)
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.upper()))
        kernel = self.replaced.get(device)
        return kernel.call_boxed(keys, *args) if kernel else self.default.redispatch(keys, *args)

    def _make_triton(self) -> Any:
        """<op>.triton, of the kernel in extension_cpp/triton."""
        module = importlib.import_module(f"{NAMESPACE}.triton.{self.stem}")
        function = getattr(module, self.name)

        def run(*args: Any) -> Any:
            _backends.require(self.name, "triton", args)
            return function(*args)

        run.__annotations__ = {k: v for k, v in self.reference.__annotations__.items()}
        # torch infers the schema of the parameters.
        wraps(self.reference)(run)
        # The interpreter's kernels can't be taken apart by a compiler.
        make: Callable = torch.library.custom_op if _backends.interpreted else torch.library.triton_op
        written = [self.names[i] for i in self.written]
        overload = make(f"{self.qualified}.triton", run, mutates_args=written)._opoverload
        self._complete(overload, "triton")
        if not _backends.interpreted:
            self._show_the_compiler(overload)
        # An eager call needs nothing of what triton_op does for the compiler, which takes it longer than the kernel.
        _library.impl(f"{self.name}.triton", function, "CUDA")
        self.triton_function = function
        return overload

    def _show_the_compiler(self, overload: Any) -> None:
        """Where Triton is used for an overload, let torch.compile see its kernels.

        Not where a size or number is symbolic: an operator as a whole depends less on how well a version of torch reasons
        about those. Nor in torch.export, which keeps operators as they are.
        """
        from torch._subclasses.fake_tensor import FakeTensor
        from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

        known = {Tensor, FunctionalTensor, FakeTensor}

        def rule(mode: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            from torch.export._trace import (
                custom_triton_ops_decomposition_disabled,
            )  # Which imports all of the compiler.

            used = overload is not self.default or _backends.used(self.name, _backends.device_type(args)) == "triton"
            symbolic = any(
                _signature.is_symbolic(arg)
                if isinstance(arg, Tensor)
                else isinstance(arg, torch.SymInt | torch.SymFloat)
                for arg in args
            )
            if not used or symbolic or custom_triton_ops_decomposition_disabled() or not {*types} <= known:
                return mode.__torch_dispatch__(op, types, args, kwargs)
            with mode:
                if self.triton_function is None:
                    _backends.make(self, "triton")
                return self.triton_function(*args, **(kwargs or {}))  # type: ignore[misc]

        name = overload._name.removesuffix(".default")
        torch.library.register_torch_dispatch(name, FunctionalTensorMode, rule, lib=_library)

    # Derivatives and transforms.

    def all_arguments(self, args: Sequence[Any]) -> Sequence[Any]:
        """With the defaults of arguments that the dispatcher left out."""
        return args if len(args) == len(self.names) else [*args, *self.defaults[len(args) :]]

    def _make_autograd(self, overload: Any, backend: str | None) -> Callable:
        @cache
        def derivative() -> Any:
            return self._derivative(overload, backend)

        def autograd(keys: Any, *args: Any) -> Any:
            if forward_ad._current_level >= 0 and any(is_dual(arg) for arg in args):
                return self.checked(*args)  # PyTorch's own operators know forward mode.
            if torch.is_grad_enabled() and _any_requires_grad(*args):
                return derivative().apply(*self.all_arguments(args))
            with _AutoDispatchBelowAutograd():
                return overload.redispatch(keys & torch._C._after_autograd_keyset, *args)

        return autograd

    def _make_transformed(self, overload: Any, backend: str | None) -> Callable:
        @cache
        def derivative() -> Any:
            return self._derivative(overload, backend)

        def transformed(*args: Any) -> Any:
            """Under transforms of torch.func. PyTorch's own operators, the reference, know forward mode and functionalize."""
            kinds = {interpreter.key() for interpreter in get_interpreter_stack()}
            reference = self.written or not kinds <= {TransformType.Vmap, TransformType.Grad}
            if TransformType.Grad in kinds and self.differentiable and self.backward is None:
                reference = True
            try:
                return self.checked(*args) if reference else derivative().apply(*self.all_arguments(args))
            except RuntimeError as error:
                if TransformType.Vmap not in kinds or type(error) is not RuntimeError:
                    raise
                if str(error).startswith(f"{self.name}: "):
                    raise
                # Of an operator of PyTorch's in the reference, of which the caller knows nothing.
                raise RuntimeError(f"{self.name}: vmap can't batch its reference: {error}") from error

        return transformed

    def _make_write(self, overload: Any) -> Callable:
        def write(keys: Any, *args: Any) -> None:
            """What PyTorch's own functions with `out` refuse, and a new version of what is written.

            Kernels on the stable ABI can't do this. Without a new version, a gradient that needs the overwritten values is
            silently wrong.
            """
            recorded = torch.is_grad_enabled()
            for i in self.tensors:
                if not isinstance(args[i], Tensor):
                    continue
                if recorded and args[i].requires_grad:
                    why = "as writing has none; got one that does"
                    fail(self.name, f"{self.names[i]} must not require a gradient, {why}")
                if forward_ad._current_level >= 0 and is_dual(args[i]):
                    fail(
                        self.name,
                        f"{self.names[i]} must not have a tangent, as writing has no derivative; got one that does",
                    )
            for i in self.written:
                if args[i] is None:
                    fail(self.name, f"{self.names[i]} must be a tensor, got None")
                if args[i].is_inference() and not torch.is_inference_mode_enabled():
                    fail(
                        self.name, f"{self.names[i]} must not be an inference tensor outside of inference mode, got one"
                    )
            with _AutoDispatchBelowADInplaceOrView():
                overload.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args)
            for i in self.written:
                increment_version(args[i])

        return write

    def _make_negative(self, overload: Any) -> Callable:
        def negative(*args: Any) -> None:
            """PyTorch's own fallback for views with a negative bit takes no operator that returns nothing."""
            plain = {id(t): t.resolve_neg() for t in args if isinstance(t, Tensor)}
            overload(*(plain.get(id(arg), arg) for arg in args))
            for i in self.written:
                if args[i].is_neg():
                    args[i].copy_(plain[id(args[i])])

        return negative

    def _make_autocast(self, overload: Any, device: str) -> Callable:
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device}"))
        kind = device.lower()

        def autocast(*args: Any) -> Any:
            floating = [a for a in args if isinstance(a, Tensor) and a.is_floating_point() and a.device.type == kind]
            dtype = torch.float32 if self.autocast == "float32" else torch.get_autocast_dtype(kind)
            if self.autocast == "promote":
                for t in floating:
                    dtype = torch.promote_types(dtype, t.dtype) if t is not floating[0] else t.dtype
            if not self.written and not any(t.dtype == torch.float64 for t in floating):
                args = tuple(a.to(dtype) if any(a is t for t in floating) else a for a in args)
            with _ExcludeDispatchKeyGuard(keys):
                return overload(*args)

        return autocast

    def _derivative(self, overload: Any, backend: str | None, quick: bool = False) -> Any:
        """The torch.autograd.Function of an overload; `quick`, for plain calls only."""
        positions = {name: i for i, name in enumerate(self.names)}
        results = len(self.schema.returns)
        code = self.backward.__code__ if self.backward else None
        wanted = code.co_varnames[results : code.co_argcount] if code else self.names
        # What the formula takes after the gradients: from what is saved, from the arguments, or what is needed.
        kept: list[
            tuple[str, int, int | None]
        ] = []  # "argument" or "result", its position, and which gradient it is for
        takes: list[tuple[str, int]] = []
        for name in wanted:
            if name == "needs":
                takes.append(("needs", 0))
            elif name.removeprefix("result").isdigit() or name == "result":
                takes.append(("saved", len(kept)))
                kept.append(("result", int(name.removeprefix("result") or 0), None))
            elif positions[name] in self.tensors:
                takes.append(("saved", len(kept)))
                other = self.saved_for.get(name)
                kept.append(("argument", positions[name], None if other is None else positions[other]))
            else:
                takes.append(("number", positions[name]))
        formula = _within(backend, self.backward or self._derivative_of_reference)
        gradients = self.differentiable_arguments if self.differentiable else []
        broadcasts, count = self.signature.broadcasts, len(self.names)
        numbers = any(source == "number" for source, _ in takes)

        class Derivative(torch.autograd.Function):
            @staticmethod
            def forward(*args: Any) -> Any:
                if quick:
                    return _dispatch_call_boxed(self.kernel, *args)
                with _AutoDispatchBelowAutograd():
                    return overload(*args)

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                outputs = (output,) if results == 1 else output
                if not self.differentiable:
                    ctx.mark_non_differentiable(*outputs)
                    return
                needs = ctx.needs_input_grad
                ctx.save_for_backward(
                    *(
                        (outputs if source == "result" else inputs)[at] if other is None or needs[other] else None
                        for source, at, other in kept
                    )
                )
                ctx.shapes = [None if inputs[i] is None else inputs[i].shape for i in gradients]
                if numbers:
                    ctx.numbers = inputs

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                saved, needs = ctx.saved_tensors, ctx.needs_input_grad
                given = [
                    saved[at] if source == "saved" else ctx.numbers[at] if source == "number" else needs
                    for source, at in takes
                ]
                found = formula(*grads, *given)
                found = (found,) if isinstance(found, Tensor) or found is None else found
                every: list[Any] = [None] * count
                for i, shape, grad in zip(gradients, ctx.shapes, found, strict=True):
                    if grad is not None and shape is not None and needs[i]:
                        if grad.shape != shape:
                            grad = grad.sum_to_size(shape) if broadcasts else grad.reshape(shape)
                        every[i] = grad
                return tuple(every)

            @staticmethod
            def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
                rule = self.vmap or self._vmap
                return _within(backend, rule)(info, in_dims, *args)

        Derivative.__name__ = Derivative.__qualname__ = f"{self.name}_derivative"
        return Derivative

    def _derivative_of_reference(self, *args: Any) -> Any:
        """The gradients that autograd has of the reference, differentiable themselves."""
        results = len(self.schema.returns)
        grads, inputs = args[:results], list(args[results:])
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            for i in self.differentiable_arguments:
                if (
                    inputs[i] is not None
                ):  # A new name for it, which the gradient is taken of; the graph goes on behind it.
                    inputs[i] = (
                        inputs[i].view_as(inputs[i]) if inputs[i].requires_grad else inputs[i].detach().requires_grad_()
                    )
            outputs = self.reference(*inputs)
            outputs = (outputs,) if results == 1 else outputs
            wanted = [inputs[i] for i in self.differentiable_arguments if inputs[i] is not None]
            pairs = [(out, grad) for out, grad in zip(outputs, grads) if out.requires_grad and grad is not None]
            found = iter(
                torch.autograd.grad(
                    [out for out, _ in pairs],
                    wanted,
                    [grad for _, grad in pairs],
                    create_graph=again,
                    allow_unused=True,
                )
                if pairs
                else [None] * len(wanted)
            )
            return tuple(None if inputs[i] is None else next(found) for i in self.differentiable_arguments)

    def _vmap(self, info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        """One call for the batch where the signature says how.

        Else the reference's operators, batched by PyTorch, or a call each of what has no derivative.
        """
        batched = {i: t for i, t in enumerate(args) if isinstance(t, Tensor)}
        outs = [0] * len(self.schema.returns)
        patterns = {}
        for argument, _ in self.signature.tensors(args):
            i = self.names.index(argument.name)
            if i in batched:
                dims = batched[i].dim() - (in_dims[i] is not None)
                patterns[i] = next(
                    (p for p in argument.patterns if p.pack or len(p.sizes) == dims), argument.patterns[0]
                )
        if self.signature.elementwise:
            moved = batch_first([in_dims[i] for i in batched], *batched.values())
            if not self.signature.broadcasts:
                moved = list(torch.broadcast_tensors(*moved))
            return self._call_with(args, dict(zip(batched, moved))), outs[0] if len(outs) == 1 else tuple(outs)
        for name in self.independent:
            with_it = [i for i, pattern in patterns.items() if name in pattern.sizes]
            if not all(i in with_it for i in batched if in_dims[i] is not None):
                continue
            size, merged = 0, {}
            for i in with_it:
                t, dim = args[i], in_dims[i]
                at = patterns[i].sizes.index(name) - len(patterns[i].sizes)  # from the last dimension
                t = t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
                size = t.shape[at]
                merged[i] = t.movedim(0, at - 1).flatten(t.dim() + at - 1, t.dim() + at)
            found = self._call_with(args, merged)
            found = (found,) if isinstance(found, Tensor) else found
            split = []
            for t, result in zip(found, self.signature.results):
                if name not in result.pattern.sizes:  # A sum over it: of the whole batch, not of its parts.
                    break
                at = result.pattern.sizes.index(name) - len(result.pattern.sizes)
                split.append(t.unflatten(at, (info.batch_size, size)).movedim(at - 1, 0))
            if len(split) == len(outs):
                return (split[0], 0) if len(outs) == 1 else (tuple(split), tuple(outs))
        if self.signature.dynamic_size:
            fail(self.name, "vmap needs results of one size, and its result has one that depends on values")
        if self.differentiable:
            results = torch.func.vmap(self.reference, tuple(in_dims), randomness=info.randomness)(*args)
        else:  # Which may need values, as PyTorch's batching has none; no derivative is lost.
            calls = [
                self.default(*(arg if dim is None else arg.select(dim, n) for arg, dim in zip(args, in_dims)))
                for n in range(info.batch_size)
            ]
            results = torch.stack(calls) if len(outs) == 1 else tuple(map(torch.stack, zip(*calls)))
        return results, outs[0] if len(outs) == 1 else tuple(outs)

    def _call_with(self, args: Sequence[Any], changed: dict[int, Tensor]) -> Any:
        return self.default(*(changed.get(i, arg) for i, arg in enumerate(args)))


def _implement(name: str, kernel: Any, key: str, *, with_keyset: bool = False) -> None:
    """In place of what is registered there, if anything is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        _library.impl(name, kernel, key, with_keyset=with_keyset, allow_override=True)


def is_dual(value: Any) -> bool:
    return isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None


def _within(backend: str | None, function: Callable) -> Callable:
    if backend is None:
        return function

    @wraps(function)
    def run(*args: Any) -> Any:
        with _backends.use_backend(backend):
            return function(*args)

    return run


def batch_first(in_dims: Sequence[int | None], *tensors: Tensor) -> list[Tensor]:
    """For vmap: tensors whose batch is their first dimension and which broadcast as their elements do."""
    first = [t if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, in_dims)]
    dims = max(t.dim() - (dim is not None) for t, dim in zip(first, in_dims))
    return [
        t if dim is None else t.reshape(t.shape[0], *(1,) * (dims + 1 - t.dim()), *t.shape[1:])
        for t, dim in zip(first, in_dims)
    ]


@cache
def _ask(library: Any) -> Callable[[bytes], bytes | None]:
    """The function of a library that tells the signatures of its operators."""
    try:
        function = ctypes.CDLL(str(library)).extension_cpp_signature
    except AttributeError:  # It has none: the library of the CUDA kernels.
        return lambda name: None
    function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
    return function


def reference_of(function: Callable) -> Callable:
    """The plain PyTorch that an operator's function is declared with."""
    return function.operator.reference  # type: ignore[attr-defined]
