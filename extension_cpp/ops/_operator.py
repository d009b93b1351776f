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
import hashlib
import importlib
import inspect
import marshal
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch._C import (
    DisableTorchFunction,
    _any_requires_grad,
    _are_functorch_transforms_active,
    _AutoDispatchBelowAutograd,
    _dispatch_call_boxed,
    _get_function_stack_at,
    _is_any_autocast_enabled,
    _is_tracing,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._functorch import unwrap_if_dead
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from extension_cpp import _loader
from extension_cpp.ops import _backends, _derivatives
from extension_cpp.ops._backends import NAMESPACE, fail
from extension_cpp.ops._later import when_imported

if TYPE_CHECKING:  # It is read once a signature is asked for, which no import does.
    from extension_cpp.ops._signature import Signature

F = TypeVar("F", bound=Callable[..., Any])


@cache
def _libraries(namespace: str) -> tuple[torch.library.Library, torch.library.Library]:
    """What is registered from Python, and overloads with arguments of other types. PyTorch lets go of the second first: once
    one of two overloads with the same arguments is gone, it can't remove one with others.
    """
    return torch.library.Library(namespace, "FRAGMENT"), torch.library.Library(namespace, "FRAGMENT")


def _loaded_so_far() -> int:
    """One number, which a call compares, for how many modules and libraries there are."""
    return len(sys.modules) + (len(torch.ops.loaded_libraries) << 16)


SMALL = {True: 2**22, False: 2**13}
"""Elements, on CUDA or not, up to which a node of autograd in Python takes longer than what a kernel of ours saves. On CUDA
it runs on the thread of the backward, which makes it slower."""
_data_address = torch._C._data_address  # type: ignore[attr-defined]


def _code_of(function: Any) -> Any:
    """The code of a function, behind decorators, a partial or an object; None of what isn't Python's."""
    function = inspect.unwrap(function.func if isinstance(function, partial) else function)
    return getattr(function if hasattr(function, "__code__") else type(function).__call__, "__code__", None)


def _dtypes_of(signature: Signature, name: str) -> tuple[torch.dtype, ...]:
    """Those that an argument may have."""
    described = next(argument for argument in signature.arguments if argument.name == name)
    return _dtypes_of(signature, described.like) if described.like else described.dtypes


def _function_modes_matter() -> bool:
    """Whether one is active that is not torch.set_default_device, which is for functions that make tensors of nothing."""
    count = _len_torch_function_stack()
    return count > 1 or (count == 1 and type(_get_function_stack_at(0)).__module__ != "torch.utils._device")


def _is_dynamic(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None


def _without_modes(function: Callable, *args: Any) -> Any:
    with DisableTorchFunction():
        return function(*args)


_HELPERS = {
    "_without_modes": _without_modes,
    "_DisableTorchFunction": DisableTorchFunction,
    "_call": _dispatch_call_boxed,  # The quickest way into the dispatcher from Python.
    "_compiling": is_dynamo_compiling,
    "_transforms": _are_functorch_transforms_active,
    "_dispatch_modes": _len_torch_dispatch_stack,
    "_function_modes": _len_torch_function_stack,
    "_function_modes_matter": _function_modes_matter,
    "_any_requires_grad": _any_requires_grad,
    "_grad_enabled": torch.is_grad_enabled,
    "_forward_ad": forward_ad,
    "_Tensor": Tensor,
    "_Parameter": Parameter,
    "_tracing": _is_tracing,
    "_autocast": _is_any_autocast_enabled,
    "_unwrap": unwrap_if_dead,
    "_strided": torch.strided,
    "_SMALL": SMALL,
    "_impls": torch.library._impls,
    "_modules": sys.modules,
    "_loaded": torch.ops.loaded_libraries,
    # By names that no argument or operator has, as it may be called "len" or "type".
    **{f"_{builtin.__name__}": builtin for builtin in (type, len, float, int, bool)},
}
# Where a plain call of an operator, or one under vmap, passes in the dispatcher, before its kernel and there.
_PASSED = ("FuncTorchBatched", "Autograd", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView", "CPU", "CUDA")
_NUMBERS = {"float": ("float", "int"), "int": ("int",), "bool": ("bool",)}


@dataclass(kw_only=True, eq=False, repr=False)  # What else dataclasses make takes milliseconds of each import.
class operator:
    """Declares the operator of a function's name, whose schema, signature and kernels a library has registered.

    The function is its reference: the operator in plain PyTorch, right for arguments that pass the checks. It is compared
    with the kernels, it is used where there is none, and the derivatives in forward mode are its own. What is returned is
    the public function, with the same documentation.
    """

    backward: Callable | None = None
    """The gradients of the tensors that have one, in the order of the arguments, each of the shape of its argument or of
    what that was broadcast to. Its parameters say what it needs: the gradients of the results first, then arguments by
    their names, `result` (or `result0`, `result1`, ...), and `needs`, a tuple that says of each argument whether it needs a
    gradient. Only those are kept. Without it, the derivative is that of the reference."""
    saved_for: dict[str, str] = field(default_factory=dict)
    """Argument to the argument whose gradient needs it: it is None where that one needs none."""
    differentiable: bool | str = True
    """False for an operator whose results have no derivative, as where its signature takes no floating tensor; "once" if its
    gradients have none: then asking for a second derivative raises an error, where a formula that can't be differentiated
    would give a wrong one."""
    independent: str = ""
    """Dimensions along which the results are computed independently, "B" or "M N": vmap makes one call, and DTensor shards
    along them."""
    summed: str = ""
    """Dimensions that a result is a sum over if it lacks them, "K": DTensor shards along them too, and sums the parts."""
    vmap: Callable | None = None
    """A rule of its own, as of torch.autograd.Function; None from it leaves a call to the derived one."""
    autocast: str = "promote"
    """What torch.autocast does with floating arguments: "promote" to the widest dtype among them, "lower" to autocast's
    own, "float32", or "" for nothing."""
    flops: str = ""
    """Floating-point operations of a call, for PyTorch's counter: products of sizes of the signature, "2 M N K + M N", where
    "..." is the number of elements. Without it, one an element of an elementwise operator, else none."""
    filled: dict[str, Callable] = field(default_factory=dict)
    """Arguments of the schema that the public function doesn't have: name to a function of the first tensor."""
    onnx: Callable | None = None
    """What the operator is in ONNX, of onnxscript's operators, where the reference can't be traced: it asks for values."""
    fused: Callable | bool = False
    """What torch.compile's Inductor fuses with the operators around it, in place of a call of the kernel, for float32 and
    float64: a function of PyTorch's operators that gives the kernel's bits and writes into nothing. True is the reference.
    On CUDA Inductor contracts a product with a sum after it, of this operator or the next."""
    exact: Callable | bool = False
    """Whether the reference of an elementwise operator has the kernels' bits, in every dtype. Then it is used where the
    derivative would take longer in Python than in PyTorch's own operators: for calls on small tensors that record one. A
    function, if only the derivative has the bits of that of PyTorch's operators: it calls them, and the values of its one
    result are replaced by the kernel's."""
    triton: bool | str = False
    """Whether extension_cpp/triton/<stem>.py has a kernel of the operator's name; or the name of such a module."""
    public: bool = True
    """False for what only derivatives call."""
    fake: Callable | None = None
    """A fake kernel of its own, in place of that of the signature."""
    signature: str = ""
    """Of an operator that no library has."""
    name: str = ""
    """Of the operator, where the function has another, or where it is in a namespace of its own, as torch.library has it:
    "my_ops::scale"."""

    def __call__(self, reference: F) -> F:
        return Operator(reference, self).function


class Operator:
    """What was declared of an operator, and what is made of it."""

    def __init__(self, reference: Callable, declared: operator) -> None:
        namespace, _, self.name = (declared.name or reference.__name__).rpartition("::")
        self.namespace = namespace or NAMESPACE
        self.stem = reference.__module__.rpartition(".")[2]
        self.reference, self.declared = reference, declared
        self.backward, self.triton, self.public = declared.backward, bool(declared.triton), declared.public
        self.native: list[str] = []
        self.made: set[str] = set()
        self.triton_function: Callable | None = None
        self.qualified = f"{self.namespace}::{self.name}"
        self.library, self.other_types = _libraries(self.namespace)
        try:
            self.packet = getattr(getattr(torch.ops, self.namespace), self.name)
        except AttributeError:
            how = "compile and load the C++ that has it, or correct the name there or here"
            if self.namespace == NAMESPACE:
                how = f"csrc/{self.stem}.cpp must register it, under this name, and make build compile it"
            fail(self.name, f"no library that is loaded has a schema of {self.qualified}: {how}")
        self.default = self.packet.default
        # An operator that Python defines has none.
        self.kernel: Any = self.packet.kernel._handle if "kernel" in self.packet.overloads() else None
        self.schema = self.default._schema
        arguments = self.schema.arguments
        self.names = [argument.name for argument in arguments]
        self.defaults = [argument.default_value if argument.has_default_value() else None for argument in arguments]
        self.types = [str(argument.type) for argument in arguments]  # Which takes long.
        self.tensors = [i for i, type_name in enumerate(self.types) if "Tensor" in type_name]
        self.optional = [i for i in self.tensors if "Optional" in self.types[i]]
        self.written = [
            i for i, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write
        ]
        self._check_schema()
        self.last_default = self.defaults[-1] if arguments[-1].has_default_value() else object()
        self._check_declaration()
        self.differentiable = bool(declared.differentiable) and not self.written and self._takes_floating()
        # torch.library._impls has every registration made in Python. Those made here are taken out (`implement`).
        passed = frozenset(f"{self.namespace}/{self.name}/{key}" for key in _PASSED)
        torch.library._impls.difference_update(passed)
        self.is_ours = passed.isdisjoint
        self._refuse_tensors_for_numbers(self.packet)
        for name in self.packet.overloads():
            self._refuse_tensors_for_numbers(getattr(self.packet, name))
        _backends.add(self)
        self.replaced: dict[str, Any] = {}
        self.shown: set[str] = set()
        self._complete(self.default, None)
        self._choose_kernels()
        self.registered = self._registrations()
        self.looked = -1
        self.unchanged = [-1]
        self.looked_for_vmap = -1, False
        self.exact_dtypes: list[torch.dtype] = []
        """In which the reference can take the place of the kernels. Empty until the signature is read."""
        self.accepted: set[tuple] = set()  # What the signature has accepted, of samples of a batch.
        self.function = self._make_function()
        when_imported("torch._dynamo", lambda module: self.write_out())
        when_imported("torch.utils.flop_counter", self._count_operations)
        if declared.fused:
            when_imported("torch._inductor.lowering", self._fuse)

    def _check_schema(self) -> None:
        """Raise for a schema of which something would be derived that is wrong on some path."""
        returned = [str(result.type) for result in self.schema.returns]
        if not self.tensors:
            fail(self.name, f"its schema must have a tensor among its arguments, got ({', '.join(self.types)})")
        if not (self.written or returned):  # As where the mark is left out of what is written.
            what = "return a tensor, or write into one that it marks, as Tensor(a!)"
            fail(self.name, f"its schema must {what}, got {self.schema}")
        for argument in self.schema.arguments:
            if argument.kwarg_only:  # The dispatcher is called by position.
                fail(
                    self.name,
                    f"{argument.name} must not be keyword-only in its schema, got {self.schema}: leave out the *",
                )
            if argument.name.startswith("_"):  # As what the code of the public function calls.
                fail(self.name, f"{argument.name} must have a name without an underscore in front, got {self.schema}")
        for name, type_name in zip(self.names, self.types):
            if "Tensor" in type_name and type_name not in ("Tensor", "Optional[Tensor]"):
                want = f"{name} must be a Tensor or a Tensor? in its schema"
                fail(self.name, f"{want}, got {type_name}: stack them, or declare an argument for each")
        for i, type_name in enumerate(returned):
            if type_name != "Tensor":
                want = f"result {i} must be a Tensor in its schema"
                fail(self.name, f"{want}, got {type_name}: return as many tensors as there are, each by itself")
        if self.written and returned:  # Autograd, and what makes writes functional, would each have to know of both.
            names = ", ".join(self.names[i] for i in self.written)
            what = "declare one operator that writes and another that returns, or let this one return nothing"
            fail(
                self.name,
                f"its schema must return nothing, -> (), as it writes {names}, got {', '.join(returned)}: {what}",
            )

    def _check_declaration(self) -> None:
        """Raise for what would be ignored, or fail in a call later on."""
        declared = self.declared
        if declared.differentiable not in (True, False, "once"):
            fail(self.name, f'differentiable must be True, False or "once", got {declared.differentiable!r}')
        if declared.autocast not in ("promote", "lower", "float32", ""):
            fail(self.name, f'autocast must be "promote", "lower", "float32" or "", got {declared.autocast!r}')
        if code := getattr(self.reference, "__code__", None):
            names = [*code.co_varnames[: code.co_argcount]]
            if names != self.names:
                wanted = f"the arguments of its schema, {', '.join(self.names)}"
                fail(self.name, f"the parameters of its reference must be {wanted}, got {', '.join(names)}")
            given = dict(zip(reversed(names), reversed(self.reference.__defaults__ or ())))  # type: ignore[attr-defined]
            for argument in self.schema.arguments:
                want = [argument.default_value] if argument.has_default_value() else []
                if (got := [given[argument.name]] if argument.name in given else []) != want:
                    what = f"the default of {argument.name} in its reference"
                    has, gives = (repr(*value) if value else "no default" for value in (want, got))
                    fail(self.name, f"{what} must be that of its schema, {has}, got {gives}")
        results = len(self.schema.returns)
        own = {"needs", "result", *(f"result{i}" for i in range(results))}
        known = {*self.names, *own}
        taken = self.taken if self.backward else []
        for name in own.intersection(self.names, taken):
            fail(self.name, f"backward must name one thing, got {name}, an argument too: call the argument otherwise")
        for what, used in (
            ("backward", taken),
            ("saved_for", [*declared.saved_for, *declared.saved_for.values()]),
            ("filled", declared.filled),
        ):
            for name in used:
                if name not in (known if what == "backward" else self.names):
                    more = ", result, result0 to the number of results, or needs" if what == "backward" else ""
                    fail(self.name, f"{what} must name arguments, {', '.join(self.names)}{more}; got {name}")

    @cached_property
    def taken(self) -> list[str]:
        """What `backward` takes after the gradients of the results, by name."""
        results = len(self.schema.returns)
        try:  # Of what a decorator has wrapped, a partial or an object too.
            parameters = [*inspect.signature(self.backward).parameters.values()]  # type: ignore[arg-type]
        except (TypeError, ValueError):
            fail(self.name, f"backward must be a function whose parameters Python can tell, got {self.backward!r}")
        names = []
        for p in parameters:
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
                names.append(p.name)
            elif p.kind != p.KEYWORD_ONLY or p.default is p.empty:  # A partial has defaults of what it is given.
                what = "of a decorator, functools.wraps tells them" if p.kind != p.KEYWORD_ONLY else "leave out the *"
                fail(self.name, f"backward must name what it takes, by position, got {p}: {what}")
        if len(names) < results:
            fail(
                self.name,
                f"backward must take the gradients of the results first, {results}, got {', '.join(names) or 'none'}",
            )
        return names[results:]

    # What the signature says.

    @cached_property
    def signature(self) -> Signature:
        signature = self._read_signature()
        if self.declared.exact and not signature.elementwise:
            fail(self.name, "exact= is for elementwise operators: leave it out of the declaration")
        if callable(self.declared.exact) and len(signature.results) != 1:
            fail(self.name, f"exact=function is for operators with one result, got {len(signature.results)}")
        sizes = {"...", *(name for a in signature.arguments for p in a.patterns for name in p.names), *self.names}
        for field_name in ("independent", "summed", "flops"):
            for name in re.findall(r"\.\.\.|[A-Za-z_]\w*", getattr(self.declared, field_name)):
                if name not in sizes:
                    fail(self.name, f"{field_name} must name sizes of its signature, got {name}")
        for size in self.declared.flops.replace(" + ", " ").split():
            if not re.fullmatch(r"\.\.\.|\w+([-+*]\w+)?", size):
                fail(self.name, f'flops must be products of sizes, "2 M N + N", got {size} in {self.declared.flops}')
        results = [result.pattern.names for result in signature.results]
        for name in re.findall(r"[A-Za-z_]\w*", self.declared.independent):
            if not any(name in names for names in results):
                fail(self.name, f"independent must name sizes that results have, got {name}")
        for name in re.findall(r"[A-Za-z_]\w*", self.declared.summed):
            if all(name in names for names in results):
                fail(self.name, f"summed must name sizes that a result lacks, got {name}")
        allowed = [_dtypes_of(signature, self.names[i]) for i in self.tensors]
        self.exact_dtypes[:] = [t for t in _derivatives.FLOATING if all(t in dtypes for dtypes in allowed)]
        return signature

    def _read_signature(self) -> Signature:
        from extension_cpp.ops._signature import Signature

        if line := self._line():
            return Signature.read(line, self.schema)
        fail(self.name, f"no signature of {self.qualified} in {', '.join(_all_libraries()) or 'any library'}")

    def _line(self) -> str:
        """The signature as it is written, if there is one."""
        if self.declared.signature:
            return self.declared.signature
        return next(
            (line.decode() for at in _all_libraries() if (line := signature_in(at)(self.qualified.encode()))), ""
        )

    def _takes_floating(self) -> bool:
        """Whether a tensor of the signature may be floating. By its words, as to read it at import takes long."""
        arguments = self._line().partition("->")[0].split(";")
        dtypes = [re.search(r" of (\w+( *\| *\w+)*)", part) for part in arguments if " as " not in part]
        return not dtypes or any(found is None or "float" in found[1] or "real" in found[1] for found in dtypes)

    def _mark_caches(self) -> None:
        """Let torch.compile take no graph from its cache on disk that has another derivative, or another formula fused.

        An operator is only a name in the keys of that cache.
        """
        config: Any = importlib.import_module("torch.compiler.config")
        tags = [f"{self.namespace} {self._sources};"]
        if self.declared.fused:
            tags += [f"{self.qualified} is replaced on {d};" for d in ("cpu", "cuda") if self._is_replaced(d)]
        for tag in tags:
            if tag not in config.cache_key_tag:
                config.cache_key_tag += tag

    @cached_property
    def _sources(self) -> str:
        """A hash of the Python that the operator, and what is derived from it, is written in."""
        declared = self.declared
        given = (self.reference, declared.backward, declared.vmap, declared.fused, declared.fake)
        codes = {code.co_filename: code for function in given if (code := _code_of(function))}
        files = {str(path): None for path in Path(__file__).parent.glob("*.py")} | codes
        digest = hashlib.sha256(declared.signature.encode())
        for file, code in sorted(files.items()):  # That of a frozen program may be nowhere.
            digest.update(Path(file).read_bytes() if Path(file).is_file() else marshal.dumps(code))
        return digest.hexdigest()[:16]

    def fake(self, *args: Any) -> Any:
        """The results of a call without their values; raises what the kernels raise."""
        self._mark_caches()
        if self.declared.fake:
            return self.declared.fake(*args)
        every = self.all_arguments(args)
        return self.signature.empty(every, self.signature.check(every))

    def _is_replaced(self, device: str) -> bool:
        """Whether a call leads to another kernel than those that have the bits of `fused`."""
        backends = ("native",) if device == "cpu" else ("native", "triton")
        return _backends.used(self, device) not in backends or not self.uses_only_ours()

    def _is_fused(self, *args: Any) -> bool:
        """Whether Inductor takes `fused` in place of a call: not in float16 and bfloat16, which it doesn't round between
        operators."""
        first = args[self.tensors[0]]
        device, plain = first.device.type, first.dtype in (torch.float32, torch.float64)
        return bool(self.declared.fused) and plain and device in ("cpu", "cuda") and not self._is_replaced(device)

    def uses_only_ours(self) -> bool:
        """Whether no user has registered a kernel that a plain call would reach, or a rule for vmap.

        torch.library has those of Python. Of those of C++ only the dispatcher knows, which takes long to ask: it is asked
        again once a module was imported or torch.ops.load_library called, as these load the libraries that register.
        """
        count = _loaded_so_far()
        if self.looked != count:
            self.looked = count
            self.unchanged[0] = count if self._registrations() == self.registered else -1
        return self.unchanged[0] == count and self.is_ours(torch.library._impls)

    def has_users_vmap(self) -> bool:
        """Whether a user has registered a rule for vmap."""
        if f"{self.namespace}/{self.name}/FuncTorchBatched" in torch.library._impls:
            return True
        if self.looked_for_vmap[0] != (count := _loaded_so_far()):
            found = torch._C._dispatch_has_kernel_for_dispatch_key(self.qualified, "FuncTorchBatched")
            self.looked_for_vmap = count, found
        return self.looked_for_vmap[1]

    def explain(self, error: RuntimeError | MemoryError) -> RuntimeError | MemoryError:
        """What a call raises for an error of a kernel: PyTorch's own class where memory ran out, and always with the name.

        Kernels on the stable ABI raise nothing but RuntimeError, and LibTorch's C interface says where it was called, not why
        that failed. Only torch 2.13 and later keep the reason.
        """
        said = str(error)
        if isinstance(error, MemoryError):  # std::bad_alloc
            return error if said.startswith(f"{self.name}: ") else MemoryError(f"{self.name}: can't allocate memory")
        if type(error) is not RuntimeError:
            return error
        if "API call failed at " in said and not said.startswith(f"{self.name}: "):
            said = f"{self.name}: {_last_error() or said}"
        if said.startswith("ZeroTensors are immutable"):  # PyTorch's of one that is to be written, before any kernel.
            said = f"{self.name}: {said}"
        if "out of memory. Tried to allocate" in said:
            return torch.OutOfMemoryError(said)
        return error if said == str(error) else RuntimeError(said)

    def _registrations(self) -> list[str]:
        """The dispatcher's kernels where a call passes, each with the place in a source file that registered it."""
        lines = torch._C._dispatch_dump(self.qualified).splitlines()
        return [line for line in lines if line.partition(":")[0].partition(" ")[0].partition("[")[0] in _PASSED]

    def checked(self, *args: Any) -> Any:
        """The reference, with the errors of the kernels."""
        self.signature.check(self.all_arguments(args))  # Which may name a number that was left out.
        with _RecordFunctionFast(f"{self.qualified}.reference"):
            return self.reference(*args)

    @cached_property
    def differentiable_arguments(self) -> list[int]:
        """Positions of the tensors that may have a gradient."""
        signature = self.signature
        return [i for i in self.tensors if all(t.is_floating_point for t in _dtypes_of(signature, self.names[i]))]

    def decomposition(self, *args: Any) -> Any:
        """The reference, as what traces an operator into others calls it."""
        tensors = [(name, arg.shape) for name, arg in zip(self.names, args) if isinstance(arg, Tensor)]
        sizes = [(name, dim, n) for name, shape in tensors for dim, n in enumerate(shape) if _is_dynamic(n)]
        try:
            result = self.reference(*args)
        except RuntimeError as error:  # torch's of a value that isn't known yet is one too.
            fail(self.name, f"its reference can't be traced into PyTorch's own operators: {error}")
        # PyTorch would say so when the program runs; or nowhere, if it was loaded from a file.
        for name, dim, n in sizes:
            if not _is_dynamic(n):
                why = f"its reference takes the size, {int(n)} here, for a constant, as a loop does"
                fail(self.name, f"dimension {dim} of {name} must not be dynamic: {why}")
        return result

    # The public function.

    def _make_function(self) -> Any:
        """A function with the parameters of the reference. Its code is written out at its first call, or once torch.compile
        is imported, which reads it: no import compiles what is not called.
        """
        self.scope = {**_HELPERS, "_kernel": self.kernel, "_general": self._make_general(), "_operator": self}
        self.scope |= {"_is_ours": self.is_ours, "_unchanged": self.unchanged, "_below_autograd": self._below_autograd}
        self.scope |= {"_exact_dtypes": self.exact_dtypes, "_exact": self.exact}
        self.scope |= {"_filled": self.declared.filled, "_last_default": self.last_default}
        first = "return _operator.write_out()(*args, **kwargs)"
        function: Any = _derivatives.maker("<extension_cpp>", "function(*args, **kwargs)", first, *self.scope)(
            **self.scope
        )
        function.__name__ = function.__qualname__ = self.name
        function.__doc__ = self.reference.__doc__
        function.__module__ = self.reference.__module__
        function.__annotations__ = {
            k: v for k, v in self.reference.__annotations__.items() if k not in self.declared.filled
        }
        function.__wrapped__ = self.reference  # Which has the parameters.
        if self.declared.filled:
            signature = inspect.signature(self.reference)
            given = [p for name, p in signature.parameters.items() if name not in self.declared.filled]
            function.__signature__ = signature.replace(parameters=given)
        function.operator = self
        return function

    def write_out(self) -> Any:
        """Give the public function its code: the quick way, for plain calls, and else the general one.

        The quick way is written out for its arguments, as every call pays for it: no transform, mode, subclass or compiler
        takes part, nothing needs a derivative, and no user has registered a kernel for the operator. It leads to
        <op>.kernel, which has no derivative. Entering a formula that is registered in Python takes longer than the operator
        itself takes on small tensors.
        """
        parameters, every, arguments, plain, tensors, grads, unwrapped = [], [], [], [], [], [], []
        defaults: dict[str, Any] = {}
        for i, (name, argument) in enumerate(zip(self.names, self.schema.arguments)):
            type_name = self.types[i]
            if name in self.declared.filled:
                fill = f"_filled['{name}']"
                every.append(f"{fill}({self.names[0]})")
                arguments.append(f"_without_modes({fill}, {self.names[0]}) if _there else {every[-1]}")
                unwrapped.append(arguments[-1])
                continue
            parameters.append(f"{name}={_derivatives.DEFAULT}{name}" if argument.has_default_value() else name)
            if argument.has_default_value():
                defaults[f"{_derivatives.DEFAULT}{name}"] = self.defaults[i]
            every.append(name)
            arguments.append(name)
            unwrapped.append(name)
            if i in self.tensors:
                tensors.append(name)
                optional = i in self.optional
                none = f"{name} is None or " * optional
                plain.append(f"({none}_type({name}) is _Tensor or _type({name}) is _Parameter)")
                grads.append(f"{name} is not None and " * optional + f"{name}.requires_grad")
                unwrapped[-1] = f"None if {name} is None else " * optional + f"_unwrap({name})"
            elif type_name in _NUMBERS:  # A tensor in place of a number might need a gradient.
                plain.append(f"({' or '.join(f'_type({name}) is _{t}' for t in _NUMBERS[type_name])})")
        # As uses_only_ours has them.
        users = ["not _is_ours(_impls)", "_len(_modules) + (_len(_loaded) << 16) != _unchanged[0]"]
        # torch.set_default_device is a mode that sees what a tensor is asked, which takes it as long as a call.
        others = ["_compiling()", "(_there := _function_modes()) and _function_modes_matter()", *users]
        any_requires_grad = f"(_any_requires_grad({', '.join(tensors)}) if _there else {' or '.join(grads)})"
        recorded = f"{any_requires_grad} and _grad_enabled()"
        if self.differentiable or self.written:
            others.append("_forward_ad._current_level >= 0")
        call = f"_call(_kernel, {', '.join(arguments)})"
        if self.schema.arguments[-1].has_default_value():
            # The dispatcher knows it, and takes as long as for two tensors to see that a number is none.
            *rest, last = arguments
            value = f"({self.names[-1]} := {last})" if last != self.names[-1] else last
            shorter = ", ".join(["_kernel", *rest])
            call = f"_call({shorter}) if {value} is _last_default else _call({shorter}, {self.names[-1]})"
        if self.written:  # torch.compile can't ask for the last.
            inference = (
                f"{self.names[i]} is not None and " * (i in self.optional) + f"{self.names[i]}.is_inference()"
                for i in self.written
            )
            others += ["_dispatch_modes()", recorded, *inference]
            way = [f"return {call}"]
        else:
            # Below autograd, a transform would lose the gradient of what it has wrapped.
            below = f"if not _transforms(): return _below_autograd({', '.join(arguments)})"
            way = [f"if not _modes: return {call}", below]
        if self.differentiable:
            record = f"return _operator._apply[_modes > 0]({', '.join(unwrapped)})"
            plainly = "not (_transforms() or _tracing() or _autocast())"
            needing = [f"elif {plainly}: {record}"]
            if self.declared.exact:
                small = tell = f"_operator.is_small({', '.join(arguments)})"
                exact = f"return _exact({', '.join(arguments)})"
                if self.is_exact_on_one:
                    few = "{0}.numel() <= _SMALL[{0}.is_cuda] or {0}.is_cuda and _operator.is_one_of_pytorchs"
                    test = f"{{0}}.layout is _strided and {{0}}.dtype in _exact_dtypes and {{0}}.dim() <= 8 and ({few})"
                    small = test.format(*tensors)
                needing = [
                    "else:",
                    # PyTorch has rules of its own for what has the bits of its operators.
                    f"    if not _modes and {'not _tracing()' if self.has_their_bits else plainly}:",
                    "        if _there:",
                    "            with _DisableTorchFunction():",
                    f"                if {tell}: {exact}",
                    f"        elif {small}: {exact}",
                    f"    if {plainly}: {record}",
                ]
            way = [f"if not ({recorded}):", *(f"    {line}" for line in way), *needing]
        if not self.written:
            if self.differentiable and self.has_their_bits:  # PyTorch's rules for its operators are in C++.
                alike = f"_transforms() and not (_modes or _there) and _operator.is_alike({', '.join(arguments)})"
                way.insert(0, f"if {alike}: return _exact({', '.join(arguments)})")
            way.insert(0, "_modes = _dispatch_modes()")
        quick = [
            f"if {' and '.join(plain)} and not ({' or '.join(others)}):",
            "    try:",
            *(f"        {line}" for line in way),
            "    except (RuntimeError, MemoryError) as error:",
            "        raise _operator.explain(error) from error.__cause__",
        ]
        if _backends.chosen or self.kernel is None:  # Kernels are replaced where the dispatcher finds them.
            quick = []
        body = "\n".join([*quick, f"return _general({', '.join(every)})"])
        head = f"{self.name}({', '.join(parameters)})"
        made = _derivatives.maker(f"<{self.qualified}>", head, body, *self.scope, *defaults)(**self.scope, **defaults)
        # The code last: another thread may call the function meanwhile.
        self.function.__defaults__ = made.__defaults__
        self.function.__code__ = made.__code__
        vars(self.function).pop("__wrapped__", None)
        vars(self.function).pop("__signature__", None)
        return self.function

    def _make_general(self) -> Callable:
        packet, default, kernel, tensors = self.packet, self.default, self.kernel, self.tensors
        numbers = [i for i in range(len(self.names)) if i not in tensors]
        floats = [i for i in numbers if self.types[i] == "float"]
        kinds = {i: _NUMBERS[self.types[i]] for i in numbers if self.types[i] in _NUMBERS}
        if self.written or self.declared.fake:  # Which may ask for the value.
            floats = []

        def prepare() -> bool:
            return self.symbolic is not None

        prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]

        def general(*args: Any) -> Any:
            for i in numbers:
                if isinstance(args[i], Tensor):
                    _derivatives.refuse_for_number(self.name, self.names[i], args[i])
            if is_dynamo_compiling():
                if floats and not _len_torch_function_stack() and not torch.compiler.is_exporting():
                    known = torch.fx.experimental.symbolic_shapes.has_static_value
                    if not all(known(args[i]) for i in floats if isinstance(args[i], float | int)) and prepare():
                        return packet.symbolic(*args)
                return default(*args)
            for i in floats:
                if isinstance(args[i], (torch.SymFloat, torch.SymInt)):
                    return default(*args) if _len_torch_function_stack() else self.symbolic(*args)
            try:
                return eager(*args)
            except NotImplementedError:
                # PyTorch's error names an overload, and nothing else.
                if any(isinstance(args[i], Tensor) and args[i].is_nested for i in tensors):
                    self.signature.check(args)
                raise
            except (RuntimeError, MemoryError) as error:
                raise self.explain(error) from error.__cause__

        def eager(*args: Any) -> Any:
            if (
                not self.uses_only_ours()  # First, whatever the operator is: the quick way is closed until it was asked.
                or self.written
                or kernel is None
                or _backends.chosen
                or _are_functorch_transforms_active()
                or _function_modes_matter()
                or forward_ad._current_level >= 0
                or _is_tracing()  # torch.jit.trace, whose program has the operator, not Python's derivative of it.
                or _is_any_autocast_enabled()  # It casts before a derivative keeps what it needs.
            ):
                return default(*args)
            for i in tensors:
                if type(args[i]) is not Tensor and type(args[i]) is not Parameter:
                    return default(*args)
            seen = _len_torch_dispatch_stack()
            if self.differentiable and torch.is_grad_enabled() and _any_requires_grad(*args):
                # A reference may take other numbers for more than they are.
                plain = all(type(args[i]).__name__ in kinds[i] for i in kinds)
                return self.record(seen, *args) if plain else default(*args)
            return _dispatch_call_boxed(kernel, *args) if not seen else self._below_autograd(*args)

        return general

    def record(self, modes: int, *args: Any) -> Any:
        """A plain call that needs a gradient."""
        if self.declared.exact and not modes:
            with DisableTorchFunction():
                if self.is_small(*args):
                    return self.exact(*args)
        return self._apply[modes > 0](*map(_derivatives.alive, args))

    def _below_autograd(self, *args: Any) -> Any:
        """A formula that is registered in Python takes as long as all else, and so does what Python does with an overload.

        So would a mode's comparing of the last argument with its default, in half a microsecond.
        """
        if args[-1] is self.last_default:
            args = args[:-1]
        below = _AutoDispatchBelowAutograd()  # From now on, and not from a `with` that takes as long as it.
        try:
            return _dispatch_call_boxed(self.default._handle, *args)
        finally:
            del below  # Which an error would keep, with this frame.

    @cached_property
    def _apply(self) -> list[Callable]:
        """A plain call that needs a gradient, without a dispatch mode and with one.

        torch's own entry, without what Function.apply does for torch.func while a transform is active.
        """
        calls = (partial(_dispatch_call_boxed, self.kernel), self._below_autograd)
        return [_derivatives.make_function(self, None, call) for call in calls]

    @property
    def is_exact_on_one(self) -> bool:
        """Whether the reference can be called for a tensor in any state, as what has its bits: it is PyTorch's to look at."""
        return self.has_their_bits and self.types == ["Tensor", *(t for t in self.types if t in _NUMBERS)]

    @property
    def has_their_bits(self) -> bool:
        """Whether the reference, made of PyTorch's operators, can take the place of the operator, also under autocast."""
        return self.declared.exact is True and self.declared.autocast in ("promote", "")

    @cached_property
    def is_small(self) -> Callable[..., bool]:
        """Whether a call with these arguments, which records a gradient, is quicker as PyTorch's own nodes; its tensors need
        no check but these. Written out for the arguments, as such a call pays for it.

        `_data_address` is 0 where the memory was freed, which PyTorch's operators would read, and raises for a tensor that
        has none, as a sparse one or that of a transform that is over; `data_ptr` would also make a lazy copy. `shape` raises
        for a nested one.
        """
        size = "{0}.numel() <= _SMALL[_device >= 0]"
        if len(self.tensors) == 1:
            size = f"({size} or {{0}}.is_cuda and _operator.is_one_of_pytorchs)"
        return self._tell("is_small", f"{size} and _len(_shape) <= 8", "_data_address({0}) != 0")

    @cached_property
    def is_alike(self) -> Callable[..., bool]:
        """Whether tensors need no other check, under a transform, for PyTorch's operators to take them as this one does."""
        return self._tell("is_alike", "({0}.is_cpu or {0}.is_cuda)", "{0}.layout is _strided and not {0}.is_nested")

    def _tell(self, name: str, of_first: str, of_each: str) -> Callable[..., bool]:
        """A function of all arguments: tests of the tensors, for those of one floating dtype, shape and device.

        Of a dtype that the signature allows: the reference would take others, which the kernels refuse.
        """
        first, *others = (self.names[i] for i in self.tensors)
        tests = [f"_dtype in _exact_dtypes and {of_first} and {of_each}".format(first)]
        for t in others:
            alike = (
                f"{t}.dtype is _dtype and {t}.shape == _shape and {t}.get_device() == _device and {of_each.format(t)}"
            )
            tests.append(f"({t} is None or {alike})" if self.names.index(t) in self.optional else alike)
        read = f"_dtype, _shape, _device = {first}.dtype, {first}.shape, {first}.get_device()"
        body = f"try:\n    {read}\n    return {' and '.join(tests)}\nexcept RuntimeError:\n    return False"
        scope = {**_HELPERS, "_data_address": _data_address, "_operator": self}
        scope["_exact_dtypes"] = self.signature and self.exact_dtypes
        head = f"{name}({', '.join(self.names)})"
        return _derivatives.maker(f"<{self.qualified} {name}>", head, body, *scope)(**scope)

    @cached_property
    def is_one_of_pytorchs(self) -> bool:
        """Whether the reference is one operator of PyTorch's on one tensor: our kernel and derivative move as much memory, so
        that a node in Python only takes time.
        """
        from torch.utils._python_dispatch import TorchDispatchMode

        if self.declared.exact is not True or len(self.tensors) > 1:
            return False
        calls = []

        class Count(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                calls.append(func)
                return func(*args, **(kwargs or {}))

        one = torch.ones(1)
        try:
            with torch.no_grad(), Count():
                self.reference(*(one if i in self.tensors else 1 for i in range(len(self.names))))
        except Exception:  # Of a reference that takes no such number.
            return False
        return len(calls) == 1

    @cached_property
    def exact(self) -> Callable:
        """What records a call on small tensors, where the declaration has `exact`."""
        if not callable(recorded := self.declared.exact):
            return self.reference
        kernel, first = self.kernel, self.tensors[0]

        def exact(*args: Any) -> Tensor:
            # A graph is replayed without Python, and has a kernel less with the operator's own derivative.
            if args[first].is_cuda and torch.cuda.is_current_stream_capturing():
                return self._apply[0](*args)
            result = recorded(*args)
            result.data = _dispatch_call_boxed(kernel, *args)
            return result

        return exact

    # Registration.

    def _refuse_tensors_for_numbers(self, entry: Any) -> None:
        """Let torch.ops refuse a tensor in place of a number, as the public function does, if a derivative would be lost.

        PyTorch converts it before the dispatcher, and with it all kernels of ours, sees the call. Before anything keeps an
        overload in a dictionary, as its hash is that of `_op`.
        """
        by_user = {name: i for i, name in enumerate(self.names) if name not in self.declared.filled}
        numbers = {name: i for name, i in by_user.items() if self.types[i] in _NUMBERS}
        if not numbers:
            return
        call = entry._op

        @wraps(call)
        def refuse_or_call(*args: Any, **kwargs: Any) -> Any:
            for name, i in numbers.items():
                given = args[i] if i < len(args) else kwargs.get(name)
                if isinstance(given, Tensor):
                    _derivatives.refuse_for_number(self.name, name, given)
            try:
                return call(*args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                raise self.explain(error) from error.__cause__

        torch.jit._builtins._register_builtin(refuse_or_call, self.qualified)  # For TorchScript, which knows `call`.
        entry._op = refuse_or_call

    def _complete(self, overload: Any, backend: str | None) -> None:
        """Fake kernel, derivatives and transforms of an overload; what they call is then of the same backend."""
        name = overload._name.removesuffix(".default")

        def fake(*args: Any) -> Any:
            from extension_cpp.ops import _sharding

            _sharding.register(self, overload)
            try:
                result = self.fake(*args)
            except RuntimeError as error:
                if type(error).__name__ == "DynamicOutputShapeException":  # It says no more than the overload.
                    why = "which fake tensors without symbolic sizes, and DTensor, can't have"
                    error.args = (f"{self.name}: the size of the result depends on values, {why}",)
                elif str(error).startswith(
                    "Storage size calculation overflowed"
                ):  # PyTorch's, of more than 2^63 bytes.
                    error.args = (f"{self.name}: can't allocate memory: {error}",)
                elif str(error) == "Stride calculation overflowed":
                    error.args = (f"{self.name}: {error}",)
                raise
            if backend is not None:
                _backends.require(self, backend, args)
            return result

        torch.library.register_fake(name, fake, lib=self.library)
        if backend is not None:
            self._refuse_tensors_for_numbers(overload)
        overload._tags = _Tags(self)
        name = name.partition("::")[2]
        if self.written:
            self.implement(name, torch.library.fallthrough_kernel, "Autograd")
            self.implement(name, _derivatives.make_write(self, overload), "ADInplaceOrView", with_keyset=True)
            self.library.impl(name, _derivatives.make_negative(self, overload), "Negative")
        elif self.differentiable:
            self.implement(name, _derivatives.make_autograd(self, overload, backend), "Autograd", with_keyset=True)
        else:
            self.implement(name, torch.library.fallthrough_kernel, "Autograd")
        transformed = _derivatives.make_transformed(self, overload, backend)
        self.library.impl(name, transformed, "FuncTorchDynamicLayerFrontMode")
        if overload is self.default and self.kernel is not None:
            self.library.impl(f"{name}.kernel", transformed, "FuncTorchDynamicLayerFrontMode")
        if self.declared.autocast:
            for device in ("CPU", "CUDA"):
                autocast = _derivatives.make_autocast(self, overload, device)
                self.implement(name, autocast, f"Autocast{device}")
                # torch.library.register_autocast replaces this one, and fails where it is missing.
                overload.py_impl(getattr(torch._C.DispatchKey, f"Autocast{device}"))(autocast)

    def implement(self, name: str, kernel: Any, key: str, *, with_keyset: bool = False) -> None:
        """Register a kernel of an overload, in place of what is registered there, if anything is."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            self.library.impl(name, kernel, key, with_keyset=with_keyset, allow_override=True)
        torch.library._impls.discard(f"{self.namespace}/{name}/{key}")  # What is found there later is a user's.

    def _choose_kernels(self) -> None:
        """Let the operator lead to what is used on each type of device."""
        name = self.name
        for key in ("CompositeExplicitAutograd", "NestedTensorCPU", "NestedTensorCUDA"):
            self.library.impl(name, self._fallback, key)
        # What a plain call can turn out to be after all: on another type of device, under autocast, traced, or of a tensor
        # that torch.func made and is done with, which may need a gradient behind what it says of itself.
        for key in (
            "CompositeExplicitAutograd",
            "AutocastCPU",
            "AutocastCUDA",
            "AutogradNestedTensor",
            "FuncTorchGradWrapper",
            "Tracer",
            *["Negative"] * bool(self.written),
        ):
            if self.kernel is not None:
                self.library.impl(f"{name}.kernel", self.default, key)
                self.packet.kernel._tags = self.default._tags
        if self.kernel is not None:  # In place of what warns of a derivative that is missing.
            self.library.impl(f"{name}.kernel", torch.library.fallthrough_kernel, "Autograd")
        for device in ("cpu", "cuda"):
            backend, there = _backends.used(self, device), device in self.native
            if there and backend != "native":
                self.replaced[device] = torch.library.get_kernel(self.qualified, device.upper())
            if backend == "triton" or (there and backend != "native"):
                self._replace_kernel(device)
        if any(map(self._shows_triton, ("cpu", "cuda"))) and not _backends.interpreted:
            self._show_the_compiler(self.default)

    def _fallback(self, *args: Any) -> Any:
        """On types of device that have no kernel of their own here."""
        _backends.require(self, _backends.chosen or "reference", args)
        self.signature.check(self.all_arguments(args))  # Before a warning of what then isn't run.
        if not _backends.chosen and (device := _backends.device_type(args)):
            _backends.warn_once(self, device, "reference")
        return self.checked(*args)

    def _replace_kernel(self, device: str) -> None:
        """Let calls on a type of device lead to Triton or the reference."""

        def triton(*args: Any) -> Any:
            if not _backends.chosen:
                _backends.warn_once(self, "cuda", "triton")
            if self.triton_function is None:
                _backends.make(self, "triton")
            return self.triton_function(*args)  # type: ignore[misc]

        def triton_into(*args: Any) -> None:
            """For <op>.kernel, which makes a new version of what it writes, as native kernels do."""
            triton(*args)
            every = self.all_arguments(args)
            for i in self.written:
                if every[i] is not None and not every[i].is_inference():
                    increment_version(every[i])

        by_triton = _backends.used(self, device) == "triton"
        self.implement(self.name, triton if by_triton else self._fallback, device.upper())
        if by_triton:
            self.implement(f"{self.name}.kernel", triton_into if self.written else triton, device.upper())

    def leave_compiled(self) -> None:
        """Do without Triton's kernels that were compiled with the package: a GPU can't run them."""
        self.native.remove("cuda")
        self._replace_kernel("cuda")
        if _backends.used(self, "cuda") != "triton":
            self.implement(f"{self.name}.kernel", self.default, "CUDA")
        self.registered, self.looked = self._registrations(), -1

    def _shows_triton(self, device: str) -> bool:
        """Whether torch.compile sees Triton's kernels where the operator is called on a type of device."""
        if _backends.is_compiled(self, device) and device in self.native:
            return not _backends.chosen and not _backends.why_no_triton()
        return _backends.used(self, device) == "triton"

    def _count_operations(self, counter: Any) -> None:
        """Enter the formula into torch.utils.flop_counter."""

        def formula(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
            return self.signature.operations(self.all_arguments(args), self.declared.flops)

        counter.register_flop_formula(self.packet, get_raw=True)(formula)

    def _fuse(self, lowering: Any) -> None:
        """Let Inductor take `fused` for the operator."""
        function = self.reference if self.declared.fused is True else self.declared.fused

        def decomposition(*args: Any) -> Any:
            if not self._is_fused(*args):
                return NotImplemented
            return function(*self.all_arguments(args))  # type: ignore[operator]

        from torch._inductor.decomposition import decompositions, fast_random_decomps

        decompositions[self.default] = decomposition
        fast_random_decomps.cache_clear()  # A copy of these.
        # As of any operator. Inductor has to be told so where there is a decomposition.
        strides = lowering.tag_to_layout_constraint(torch.Tag.needs_exact_strides)
        lowering.make_fallback(self.default, layout_constraint=strides, warn=False, override_decomp=True)

    def make_overload(self, backend: str) -> Any:
        """<op>.<backend>."""
        if backend == "triton":
            return self._make_triton()
        kernel = self._native_kernel if backend == "native" else self.checked
        if backend not in self.packet.overloads():  # as it is after an attempt that was interrupted
            schema = str(self.schema).partition("(")[2]
            self.library.define(f"{self.name}.{backend}({schema}")
        self.library.impl(f"{self.name}.{backend}", kernel, "CompositeExplicitAutograd")
        overload = getattr(self.packet, backend)
        self._complete(overload, backend)
        return overload

    def _native_kernel(self, *args: Any) -> Any:
        _backends.require(self, "native", args)
        device = _backends.device_type(args)
        if not device:  # None in place of its only tensor.
            self.signature.check(args)
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.upper()))
        kernel = self.replaced.get(device)
        return kernel.call_boxed(keys, *args) if kernel else self.default.redispatch(keys, *args)

    @cached_property
    def symbolic(self) -> Any:
        """<op>.symbolic, for numbers that are known to torch.compile as symbols only.

        An argument that is a float in the schema is one value for a whole graph. This overload takes any number; where
        torch.compile takes it apart, below autograd, the numbers become tensors of one element for <op>.tensor.
        """
        from torch._subclasses.functional_tensor import FunctionalTensorMode

        floats = [i for i, type_name in enumerate(self.types) if type_name == "float"]

        def with_numbers(function: Callable, args: Sequence[Any]) -> list[Any]:
            return [function(arg) if i in floats else arg for i, arg in enumerate(args)]

        def kernel(*args: Any) -> Any:
            return self.default(*with_numbers(lambda arg: arg.item() if isinstance(arg, Tensor) else arg, args))

        def rule(mode: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with mode:
                one = torch.ones((), dtype=torch.float64, device="cpu")
                return self.packet.tensor(*with_numbers(lambda number: one * number, self.all_arguments(args)))

        entry = self.packet._op
        arguments, _, results = str(self.schema).partition("(")[2].rpartition(" -> ")
        # A tensor has no default, and then nothing before it may have one.
        without_defaults = re.sub(r"=(\[[^\]]*\]|[^,)]*)", "", arguments)
        for name, given, type_name in (("symbolic", arguments, "Scalar"), ("tensor", without_defaults, "Tensor")):
            made = re.sub(r"\bfloat (\w+)", rf"{type_name} \1", given)
            self.other_types.define(f"{self.name}.{name}({made} -> {results}")
        self.packet._op = entry
        for overload in (self.packet.symbolic, self.packet.tensor):
            self.library.impl(overload._name.partition("::")[2], kernel, "CompositeExplicitAutograd")
            self._complete(overload, None)
        torch.library.register_torch_dispatch(
            f"{self.qualified}.symbolic", FunctionalTensorMode, rule, lib=self.library
        )
        self.shown.add(f"{self.qualified}.symbolic")
        return self.packet.symbolic

    def triton_kernel(self) -> Any:
        """What the module that the declaration names has under the operator's name."""
        named = self.declared.triton
        module = importlib.import_module(named if isinstance(named, str) else f"extension_cpp.triton.{self.stem}")
        if not hasattr(module, self.name):
            fail(self.name, f"triton= of the declaration names {module.__name__}, which has no kernel of this name")
        return getattr(module, self.name)

    def _make_triton(self) -> Any:
        """<op>.triton, of that kernel."""
        kernel = self.triton_kernel()
        if hasattr(kernel, "prepare"):  # A formula under @elementwise or the like.
            kernel.prepare(self)

        def function(*args: Any) -> Any:
            with _RecordFunctionFast(f"{self.qualified}.triton"):
                return kernel(*args)

        def run(*args: Any) -> Any:
            _backends.require(self, "triton", args)
            return function(*args)

        run.__annotations__ = {k: v for k, v in self.reference.__annotations__.items()}
        # torch infers the schema of the parameters.
        wraps(self.reference)(run)
        # The interpreter's kernels can't be taken apart by a compiler.
        make: Callable = torch.library.custom_op if _backends.interpreted else torch.library.triton_op
        written = [self.names[i] for i in self.written]
        overload = make(f"{self.qualified}.triton", run, mutates_args=written)._opoverload
        # From torch 2.14 on a call of it would go past what profiles record.
        if enable_short_cut := getattr(overload, "_enable_pyobj_dispatch", None):
            enable_short_cut(False)
        self._complete(overload, "triton")
        if not _backends.interpreted:
            self._show_the_compiler(overload)
        # An eager call needs nothing of what triton_op does for the compiler, which takes it longer than the kernel.
        for device in ("CUDA", *["CPU"] * _backends.interpreted):
            self.library.impl(f"{self.name}.triton", function, device)
        self.triton_function = function
        return overload

    def _show_the_compiler(self, overload: Any) -> None:
        """Where Triton is used for an overload, let torch.compile see its kernels.

        Not where a size or number is symbolic: an operator as a whole depends less on how well a version of torch reasons
        about those. Nor in torch.export, which keeps operators as they are.
        """
        from torch._subclasses.fake_tensor import FakeTensor
        from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

        from extension_cpp.ops._signature import is_symbolic

        known = {Tensor, FunctionalTensor, FakeTensor}

        def rule(mode: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if self._is_decomposed(op):
                with mode:
                    return self.decomposition(*args, **(kwargs or {}))
            from torch.export._trace import (
                custom_triton_ops_decomposition_disabled,
            )  # Which imports all of the compiler.

            device = _backends.device_type(args)
            used = overload is not self.default or self._shows_triton(device)
            # Another version of Triton may add up in another order: what was compiled with the package stays a call of it.
            if overload is self.default and _backends.is_compiled(self, device) and not self.signature.elementwise:
                used = False
            symbolic = any(
                is_symbolic(arg) if isinstance(arg, Tensor) else isinstance(arg, torch.SymInt | torch.SymFloat)
                for arg in args
            )
            fused = overload is self.default and self._is_fused(*args)
            if not used or symbolic or fused or custom_triton_ops_decomposition_disabled() or not {*types} <= known:
                return mode.__torch_dispatch__(op, types, args, kwargs)
            with mode:
                if self.triton_function is None:
                    _backends.make(self, "triton")
                return self.triton_function(*args, **(kwargs or {}))  # type: ignore[misc]

        name = overload._name.removesuffix(".default")
        torch.library.register_torch_dispatch(name, FunctionalTensorMode, rule, lib=self.library)
        self.shown.add(name)

    def show_exporters(self) -> None:
        """Decompose the operator before its reference's writes, and its own, are made functional: then they are too."""
        from torch._subclasses.functional_tensor import FunctionalTensorMode

        def rule(mode: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not self._is_decomposed(op):
                return mode.__torch_dispatch__(op, types, args, kwargs)
            with mode:
                return self.decomposition(*args, **(kwargs or {}))

        for overload in self.packet.overloads():
            name = f"{self.qualified}.{overload}".removesuffix(".default")
            if name not in self.shown:
                torch.library.register_torch_dispatch(name, FunctionalTensorMode, rule, lib=self.library)
                self.shown.add(name)

    def _is_decomposed(self, overload: Any) -> bool:
        """Whether what traces now is to take the operator apart, as run_decompositions was told."""
        from torch.fx.experimental import proxy_tensor

        table = getattr(proxy_tensor.get_proxy_mode(), "decomposition_table", None)
        if table is None:  # Up to torch 2.12 it is there.
            table = getattr(proxy_tensor, "CURRENT_DECOMPOSITION_TABLE", {})
        return table.get(overload) == self.decomposition  # Inductor's table has another.

    def all_arguments(self, args: Sequence[Any]) -> Sequence[Any]:
        """With the defaults of arguments that the dispatcher left out."""
        return args if len(args) == len(self.names) else [*args, *self.defaults[len(args) :]]


class _Tags(Sequence):
    """Of an operator's overloads, as OpOverload.tags has them. They ask for the signature, which no import reads.

    What PyTorch does with a pointwise operator is meant for one result.
    """

    def __init__(self, operator: Operator) -> None:
        self.operator = operator

    def __len__(self) -> int:
        try:
            return 1 + (self.operator.signature.elementwise and len(self.operator.schema.returns) == 1)
        except (
            RuntimeError
        ):  # torch.export asks every operator: a wrong signature is an error where this one is called.
            return 1

    def __getitem__(self, index: Any) -> Any:
        return (torch.Tag.pt2_compliant_tag, torch.Tag.pointwise)[: len(self)][index]


def _all_libraries() -> list[str]:
    """This package's, which are Python modules too, and those of extension_cpp.jit and torch.ops.load_library."""
    return [*dict.fromkeys(map(str, [*_loader.libraries.values(), *torch.ops.loaded_libraries]))]


@cache
def signature_in(library: Any) -> Callable[[bytes], bytes | None]:
    """The function of a library that tells the signatures of its operators."""
    try:
        function = ctypes.CDLL(str(library)).extension_cpp_signature
    except AttributeError:  # It has none: the library of the CUDA kernels.
        return lambda name: None
    function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
    return function


@cache
def _what() -> Callable[[], bytes | None]:
    try:
        function = ctypes.CDLL(None).torch_exception_get_what_without_backtrace
    except AttributeError:  # Before torch 2.13.
        return lambda: None
    function.restype, function.argtypes = ctypes.c_char_p, []
    return function


def _last_error() -> str:
    """The message of the exception that LibTorch's C interface met last in this thread, if it keeps it."""
    return (_what()() or b"").decode(errors="replace")


def reference_of(function: Callable) -> Callable:
    """The plain PyTorch that an operator's function is declared with."""
    return function.operator.reference  # type: ignore[attr-defined]
