"""Elementwise operators in Triton: a formula of scalars is all that an author writes.

    @elementwise
    @triton.jit
    def my_op(input, scalar_arg):
        return input * scalar_arg

It has the operator's name, and the formula takes arguments of its schema, by their names: tensors in float32, or those of
float64 and of integers in their own type as in C++, and numbers in that of the first tensor. Several results are a tuple.

The kernel that is made of it is one loop over the result, in the order in which that lies in memory, with up to three
dimensions once those that lie behind one another in every operand are merged. Operands that need more are copied first.
"""

import linecache
import re
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from extension_cpp.ops import _backends, _signature

# What autotuning chooses from, once for each dtype, number of dimensions and kind of size; Triton's cache on disk keeps it.
CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps)
    for block, warps in ((1024, 4), (512, 4), (512, 2), (1024, 8), (2048, 8))
]
MANY = 2**20  # Elements from which on the configuration matters.
MAX_DIMS = 3
# What the launcher of what is compiled ahead tells apart: 0 for operands that are contiguous and aligned, else how many
# dimensions they have.
LAYOUTS = (0, 1, 2, 3)
SIZES = ("few", "many")
TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.uint8: "u8"}
TYPES |= {torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}
MAX_INT = 2**31 - 1


def make(kind: str, formula: Any, parameters: list[str], body: list[str], unspecialized: list[str]) -> Any:
    """The kernel of these lines, which calls the formula by its name."""
    name = formula.fn.__name__
    # By its own name, under which Inductor writes down what a kernel calls.
    others = "\n".join([*parameters, *body]).replace(f" = {name}(", " = (")
    if name in re.findall(r"\w+", others) or hasattr(globals().get(name), "fn"):
        how = f"give the formula another, and call {kind}(formula) by the operator's"
        _backends.fail(name, f"its kernel has another use for that name; {how}")
    lines = [f"def {name}_kernel({', '.join(parameters)}):", *(f"    {line}" for line in body), ""]
    source = "\n".join(lines)
    file = f"<{name}_kernel of extension_cpp.triton>"
    linecache.cache[file] = len(source), None, source.splitlines(True), file  # Triton reads the source of a kernel.
    scope = {**globals(), name: formula}
    if _backends.interpreted:
        formula.fn.__globals__.setdefault("tl", tl)  # The interpreter looks for it there.
        patch_once_a_launch()
    exec(compile(source, file, "exec"), scope)
    return triton.jit(scope[f"{name}_kernel"], do_not_specialize=unspecialized)


@cache
def patch_once_a_launch() -> None:
    """Make Triton's interpreter faster: it puts its own functions into triton.language again whenever a kernel calls another
    function, which takes longer than all else.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_patch_lang"):  # Another version of Triton, which may be faster by itself.
        return
    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) in patched:
            return None
        patched.add(id(function.__globals__))
        return patch(function)

    def launch_anew(*args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(*args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew


class Kernel:
    """The kernel of a formula, and what was chosen for it."""

    def __init__(
        self, formula: Any, tensors: list[str], numbers: list[str], results: int, read: Sequence[str] = ()
    ) -> None:
        """`read`: how each number is read from its halves (:func:`reader`)."""
        self.results = results
        name = formula.fn.__name__
        self.inputs_at: list[int] = []
        self.numbers_at: dict[int, str] = {}  # To how each is read.
        halves = [f"{number}_{half}" for number in numbers for half in ("high", "low")]
        parameters = [f"out{i}" for i in range(results)] + tensors + halves + ["n30", "rest", "size0", "size1"]
        parameters += [f"{tensor}_stride{d}" for tensor in tensors for d in range(MAX_DIMS)]
        constants = [f"{constant}: tl.constexpr" for constant in ("DIMS", "MANY", "WIDE", "BLOCK")]
        given = {tensor: f"widen_floating({tensor}_value)" for tensor in tensors}
        given |= {name: f"{how}({name}_high, {name}_low).to(wide.dtype)" for name, how in zip(numbers, read)}
        values = [f"value{i}" for i in range(results)]

        def body(inside: str) -> list[str]:
            """A program's elements; only those `inside` of the result, where not all are."""
            lines = []
            for tensor in tensors:
                strides = ", ".join(f"{tensor}_stride{d}" for d in range(MAX_DIMS))
                place = f"{tensor} + offsets(at, size0, size1, {strides}, DIMS)"
                lines.append(f"{tensor}_value = tl.load({place}{inside})")
            lines.append(f"wide = widen_floating({tensors[0]}_value)")
            lines.append(f"{', '.join(values)} = {name}({', '.join(given[a] for a in formula.arg_names)})")
            return lines + [
                f"tl.store(out{i} + at, {value}.to(out{i}.dtype.element_ty){inside})" for i, value in enumerate(values)
            ]

        lines = [
            "at = positions(BLOCK, WIDE)",
            "inside = at < elements(n30, rest, WIDE)",
            "if DIMS == 1:",  # Without a mask accesses are wide, however many elements there are.
            "    if tl.program_id(0) < elements(n30, rest, WIDE) // BLOCK:",
            *(f"        {line}" for line in body("")),
            "    else:",
            *(f"        {line}" for line in body(", inside")),
            "else:",
            *(f"    {line}" for line in body(", inside")),
        ]
        self.pointers = parameters[: results + len(tensors)]
        self.plain = make("elementwise", formula, parameters + constants, lines, halves)
        configs = CONFIGS[:1] if _backends.interpreted else CONFIGS  # The interpreter has nothing to measure.
        keep = {} if _backends.interpreted else {"cache_results": True}
        self.tuned = triton.autotune(configs, key=["DIMS", "MANY"], **keep)(self.plain)
        self.chosen: dict[Any, dict[str, Any]] = {}

    # What is compiled ahead of time, for csrc/common/triton.cuh to choose from.

    def variants(self, configuration: Callable[[str], tuple[int, int]]) -> list[tuple[int, int, int]]:
        """Layouts, each with elements of a block and warps."""
        return [(layout, *configuration(size)) for layout in LAYOUTS for size in SIZES]

    def constants(self, layout: int, block: int) -> dict[str, int]:
        constants = {"DIMS": layout or 1, "MANY": False, "WIDE": False, "BLOCK": block, "n30": 0}
        constants |= {name: 1 for name in ("size0", "size1") if int(name[-1]) >= layout - 1}
        strides = [name for name in self.plain.arg_names if re.search(r"_stride\d$", name)]
        return constants | {name: int(name.endswith("0")) for name in strides if int(name[-1]) >= layout}

    def types(self, dtype: torch.dtype) -> dict[str, str]:
        """Triton's, of the parameters."""
        return dict.fromkeys(self.plain.arg_names, "i32") | dict.fromkeys(self.pointers, pointer(dtype))

    def aligned(self, layout: int) -> list[str]:
        """The parameters that 16 divides."""
        return self.pointers if layout == 0 else []

    def __call__(self, n: int, arguments: tuple, constants: dict[str, Any], dtype: torch.dtype) -> None:
        """Past the autotuner, which takes longer than a small launch, once it has chosen."""
        key = dtype, constants["DIMS"], constants["MANY"]
        if (config := self.chosen.get(key)) is not None:
            self.plain[(triton.cdiv(n, config["BLOCK"]),)](*arguments, **constants, **config)
        else:
            self.trace(n, self.tuned, arguments, constants)
            self.chosen[key] = self.tuned.best_config.all_kwargs()

    @staticmethod
    def trace(n: int, tuned: Any, arguments: tuple, constants: dict[str, Any]) -> None:
        tuned[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](*arguments, **constants)


# In kernels


@triton.jit
def positions(BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Of this program's elements in the result."""
    start = tl.program_id(0)
    if WIDE:
        start = start.to(tl.int64)
    return start * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def elements(n30, rest, WIDE: tl.constexpr):
    """How many there are: a count past 31 bits comes in two parts."""
    if WIDE:
        return tl.full((), n30, tl.int64) * 1073741824 + rest
    else:
        return n30 * 1073741824 + rest


@triton.jit
def offsets(at, size0, size1, stride0, stride1, stride2, DIMS: tl.constexpr):
    """Of an operand's elements, where the result's are at `at`."""
    if DIMS == 1:
        return at * stride0
    elif DIMS == 2:
        return at % size0 * stride0 + at // size0 * stride1
    else:
        rest = at // size0
        return at % size0 * stride0 + rest % size1 * stride1 + rest // size1 * stride2


@triton.jit
def widen(x):
    """In the type of the computation: float64 for itself, float32 for all others."""
    if x.dtype == tl.float64:
        return x
    else:
        return x.to(tl.float32)


@triton.jit
def widen_floating(x):
    """The same for what is floating; an integer stays in its type, as float32 has no number for many of int32 and int64."""
    if x.dtype.is_int():
        return x
    else:
        return widen(x)


@triton.jit
def whole(high, low):
    """The int64 of its halves, as :func:`halves` makes them."""
    return (tl.full((), high, tl.int64) << 32) | (tl.full((), low, tl.int64) & 0xFFFFFFFF)


@triton.jit
def number(high, low):
    """A float64 from the halves of its bits: as an argument of its own it would be a float32."""
    return whole(high, low).to(tl.float64, bitcast=True)


# Outside. torch.compile of torch 2.11 and before takes no constant beyond 32 bits.


def pointer(dtype: torch.dtype) -> str:
    """Triton's type of a tensor."""
    return f"*{TYPES[dtype]}"


def halves(bits: int) -> tuple[int, int]:
    """An int64 as two of 32 bits."""
    low = bits & 0xFFFFFFFF
    return bits >> 32, low - (low >> 31 << 32)


def reader(kind: str) -> str:
    """The function of kernels that reads a number of this type of a schema: an int as a float64 could be another."""
    return "whole" if kind in ("int", "bool") else "number"


def bits_of(value: float, read: str) -> tuple[int, int]:
    """The halves of a number for what reads it."""
    return halves(int(value) if read == "whole" else struct.unpack("<q", struct.pack("<d", value))[0])


def fold(out: Tensor, inputs: Sequence[Tensor]) -> list[tuple[int, list[int]]]:
    """Sizes and the inputs' strides, innermost first in the order of `out`, which is dense; at least one dimension."""
    dims: list[tuple[int, list[int]]] = []
    for d in sorted((d for d in range(out.dim()) if out.shape[d] != 1), key=out.stride):
        size, strides = out.shape[d], [t.stride(d) for t in inputs]
        if dims and strides == [stride * dims[-1][0] for stride in dims[-1][1]]:
            dims[-1] = (dims[-1][0] * size, dims[-1][1])
        else:
            dims.append((size, strides))
    return dims or [(1, [1] * len(inputs))]


class elementwise:
    """What <op>.triton runs: the kernel of the formula whose tensors are given, of several for optional arguments."""

    def __init__(self, *formulas: Any) -> None:
        self.formulas = formulas

    def prepare(self, operator: Any) -> None:
        """Make the kernels, for the operator that was declared."""
        self.operator = operator
        for result in operator.signature.results:  # Which the kernel writes in the type of the first tensor.
            if result.dtype and (result.dtype,) != operator.signature.arguments[0].dtypes:
                wanted = "its signature must give the result of an elementwise formula the dtype of its inputs"
                _backends.fail(operator.name, f"{wanted}, got {_signature.dtype_name(result.dtype)}")
        at = {name: i for i, name in enumerate(operator.names)}
        kernels = []
        for formula in sorted(self.formulas, key=lambda formula: -len(formula.arg_names)):
            for name in formula.arg_names:
                if name not in at:
                    wanted = f"its Triton formula must take arguments of its schema, {', '.join(at)}"
                    _backends.fail(operator.name, f"{wanted}; got {name}")
            tensors = [name for name in formula.arg_names if at[name] in operator.tensors]
            numbers = [name for name in formula.arg_names if name not in tensors]
            read = [reader(operator.types[at[name]]) for name in numbers]
            kernel = Kernel(formula, tensors, numbers, len(operator.schema.returns) or 1, read)
            kernel.inputs_at = [at[name] for name in tensors]
            kernel.numbers_at = {at[name]: how for name, how in zip(numbers, read)}
            kernels.append(kernel)
        self.kernels = kernels

    def fits(self) -> bool:
        """Whether it can be compiled ahead: all tensors have one dtype, and at most one is written to."""
        operator, signature = self.operator, self.operator.signature
        first, *others = signature.arguments
        return (
            signature.elementwise
            and all(argument.like == first.name for argument in others)
            and all(result.dtype is None for result in signature.results)
            and len(operator.written) + len(signature.results) > 0
            and len(operator.written) <= 1
        )

    def __call__(self, *args: Any) -> Any:
        operator = self.operator
        if len(args) < len(operator.names):
            args = operator.all_arguments(args)
        for kernel in self.kernels:
            inputs = [args[i] for i in kernel.inputs_at]
            if not any(t is None for t in inputs):
                break
        else:
            return operator.fake(*args)  # Which says what is missing.
        numbers = [half for i, read in kernel.numbers_at.items() for half in bits_of(args[i], read)]
        written = operator.written
        if kernel.results == 1 and not written and (out := plain(*inputs)) is not None:
            return launch_plain(kernel, out, inputs, *numbers)
        outs = operator.fake(*args)
        if written:  # Not into it itself: autotuning runs a kernel more than once.
            outs = _signature.empty_elementwise(*inputs, dtype=inputs[0].dtype)
        results = launch(kernel, (outs,) if isinstance(outs, Tensor) else outs, inputs, *numbers)
        if written:
            args[written[0]].copy_(results[0])
            return None
        return _signature.Signature.pack_results(list(results))


def plain(*inputs: Tensor) -> Tensor | None:
    """Memory for the result of inputs that all checks would pass and whose elements lie alike; else None. In few steps, as
    the checks one by one take longer than a launch.
    """
    first = inputs[0]
    if type(first) is not Tensor:
        return None
    dtype, shape, device = first.dtype, first.shape, first.device
    for t in inputs:
        if type(t) is not Tensor or t.layout != torch.strided or t.dtype != dtype or t.shape != shape:
            return None
        if t.device != device or not t.is_contiguous():
            return None
    return torch.empty(shape, dtype=dtype, device=device) if dtype in _signature.FLOATING and len(shape) <= 64 else None


def launch_plain(kernel: Kernel, out: Tensor, inputs: Sequence[Tensor], *numbers: int) -> Tensor:
    """:func:`launch` for what :func:`plain` made."""
    n = out.numel()
    if n:
        linear = (1, 1) + (1, 0, 0) * len(inputs)
        constants = {"DIMS": 1, "MANY": n >= MANY, "WIDE": n > MAX_INT - 4096}
        _start(kernel, n, (out, *inputs, *numbers, n // 2**30, n % 2**30, *linear), constants)
    return out


def launch(kernel: Kernel, outs: tuple[Tensor, ...], inputs: Sequence[Tensor], *numbers: int) -> tuple[Tensor, ...]:
    """kernel(*outs, *inputs, *numbers, n, sizes, strides of each input), a program a block of the results."""
    out = outs[0]
    n = out.numel()
    if n == 0:
        return outs
    inputs = tuple(t if t.shape == out.shape else t.expand(out.shape) for t in inputs)
    dims = fold(out, inputs)
    beyond = len(dims) > 1 and max(max(size, *strides) for size, strides in dims) > MAX_INT
    if len(dims) > MAX_DIMS or beyond:
        inputs = tuple(torch.empty_like(out).copy_(t) for t in inputs)
        dims = [(n, [1] * len(inputs))]
    last = max(n, *(sum((size - 1) * strides[i] for size, strides in dims) for i in range(len(inputs))))
    constants = {"DIMS": len(dims), "MANY": n >= MANY, "WIDE": last > MAX_INT - 4096}
    dims = dims + [(1, [0] * len(inputs))] * (MAX_DIMS - len(dims))
    # In one dimension its size isn't needed.
    sizes = [size for size, _ in dims[:-1]] if constants["DIMS"] > 1 else [1, 1]
    strides = [strides[i] for i in range(len(inputs)) for _, strides in dims]
    arguments = (*outs, *inputs, *numbers, n // 2**30, n % 2**30, *sizes, *strides)
    if type(out) is Tensor:
        _start(kernel, n, arguments, constants)
    else:
        kernel.trace(n, wrap_triton(kernel.tuned), arguments, constants)
    return outs


def _start(kernel: Kernel, n: int, arguments: tuple, constants: dict[str, Any]) -> None:
    device = arguments[0].device
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        kernel(n, arguments, constants, arguments[0].dtype)
    else:
        with torch.cuda.device(device):  # Triton launches on the current device.
            kernel(n, arguments, constants, arguments[0].dtype)
