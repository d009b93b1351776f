"""Signatures: the shapes and dtypes of an operator's arguments and results, in one line.

The line stands next to the operator's schema in csrc/. The kernels check their arguments by it, with the same words
(csrc/common/signature.cpp); here the fake kernels, the checks of references and all that is derived from shapes use it.
The guide to adding an operator has the grammar.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from extension_cpp.ops._backends import fail
from extension_cpp.ops._derivatives import FLOATING

INTEGER = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
GROUPS = {"floating": FLOATING, "integer": INTEGER, "real": FLOATING + INTEGER}
MAX_DIMS = 64
MAX_NAMES = 16
TERM = r"(?!(?:as|of|where)\b)[A-Za-z_]\w*|\d{1,18}"
SIZE = re.compile(rf"({TERM})(?:([-+*])({TERM}))?", re.ASCII)
NAME = re.compile(r"[A-Za-z_]\w*")

Sizes = dict[str, Any]
"""Dimensions and numbers by name; under "..." the leading dimensions."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def value(size: str, sizes: Sizes) -> Any:
    """Of "T", "T+1", "2*N", "K*kernel_grad" or "4"; KeyError for a name that has none."""
    first, operation, second = SIZE.fullmatch(size).groups()  # type: ignore[union-attr]
    left, right = (int(n) if n.isdigit() else sizes[n] for n in (first, second or "0"))
    left, right = (int(n) if isinstance(n, bool | torch.SymBool) else n for n in (left, right))
    return left * right if operation == "*" else left - right if operation == "-" else left + right


def cut(text: str, word: str) -> tuple[str, str]:
    """What comes before the word, and what follows it."""
    before, _, after = text.partition(f" {word} ")
    return before.strip(), after.strip()


@dataclass(frozen=True)
class Pattern:
    """A shape."""

    sizes: tuple[str, ...]
    """Without "..."."""
    pack: bool = False
    """Whether it begins with "...", any number of dimensions."""
    broadcast: tuple[str, ...] = ()
    """The arguments that it is the broadcast shape of."""

    @classmethod
    def read(cls, op: str, text: str, result: bool) -> Pattern:
        if text.startswith("broadcast("):
            match = re.fullmatch(r"broadcast\(([^)]*)\)", text)
            if match is None:
                fail(op, f"its signature must have nothing next to broadcast(...) in a shape, got {text!r}")
            return cls((), broadcast=tuple(name.strip() for name in match[1].split(",")))
        parts = [part for part in text.split() if part != "()"]
        if "..." in parts[1:]:
            fail(op, f"its signature must have '...' first in a shape, got {text!r}")
        if "?" in parts and not result:
            fail(op, f"its signature must have '?' in a result only, got {text!r}")
        return cls(tuple(part for part in parts if part != "..."), pack="..." in parts)

    def __str__(self) -> str:
        sizes = ["..."] * self.pack + list(self.sizes)
        return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"

    @property
    def names(self) -> list[str]:
        return [name for size in self.sizes for name in NAME.findall(size)]


@dataclass(frozen=True)
class Argument:
    """A tensor that an operator takes."""

    name: str
    patterns: tuple[Pattern, ...]
    like: str = ""
    """The argument that has the same dtype."""
    dtypes: tuple[torch.dtype, ...] = FLOATING
    condition: str = ""
    """ "1 <= K <= H" """
    written: bool = False
    optional: bool = False

    @property
    def parts(self) -> list[str]:
        """Of the condition."""
        return [part.strip() for part in self.condition.split("<=")] if self.condition else []


@dataclass(frozen=True)
class Result:
    """A tensor that an operator returns."""

    pattern: Pattern
    like: str
    """The argument that it has the dtype of, if it has none of its own; else the first that is given."""
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Signature:
    op: str
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    positions: dict[str, int] = field(repr=False)
    """Of all arguments of the schema, by name."""
    numbers: dict[str, int] = field(repr=False)
    """Those of them that sizes may be computed with."""

    @classmethod
    def read(cls, text: str, schema: Any) -> Signature:
        """Read the line that goes with a schema."""
        op = schema.name.partition("::")[2]
        before, arrow, after = text.partition("->")
        if not arrow:
            fail(op, "its signature must say its results, got no '->'")
        in_schema = {argument.name: argument for argument in schema.arguments}
        arguments = []
        for part in map(str.strip, before.split(";")):
            name, colon, shapes = part.partition(":")
            if not colon or name not in in_schema:
                fail(op, f"its signature must describe its tensors, got {part!r}")
            shapes, condition = cut(shapes.strip(), "where")
            shapes, dtypes = cut(shapes, "of")
            shapes, like = cut(shapes, "as")
            if like and dtypes:
                fail(op, f"its signature must have 'as' or 'of' for an argument, not both, got {part!r}")
            patterns = tuple(Pattern.read(op, shape.strip(), False) for shape in shapes.split("|"))
            dims = {None if p.pack or p.broadcast else len(p.sizes) for p in patterns}
            if len(patterns) > 1 and (len(dims) < len(patterns) or None in dims):
                fail(op, f"its signature must have alternatives of different numbers of dimensions, got {shapes!r}")
            known = in_schema[name]
            arguments.append(
                Argument(
                    name,
                    patterns,
                    like,
                    read_dtypes(op, dtypes or "floating"),
                    condition,
                    bool(known.alias_info and known.alias_info.is_write),
                    "Optional" in str(known.type),
                )
            )
        results = []
        for part in re.split(r",(?![^(]*\))", after) if after.strip() else ():
            shape, dtype = cut(part.strip(), "of")
            shape, like = cut(shape, "as")
            own = read_dtype(op, dtype) if dtype else None
            results.append(Result(Pattern.read(op, shape, True), like, own))
        positions = {name: i for i, name in enumerate(in_schema)}
        numbers = {
            name: i for name, i in positions.items() if str(schema.arguments[i].type) in ("int", "bool", "SymInt")
        }
        signature = cls(op, tuple(arguments), tuple(results), positions, numbers)
        signature._check_itself(schema)
        return signature

    def _check_itself(self, schema: Any) -> None:
        """Raises for a line that no call could be checked by."""
        described: list[str] = []
        bound = set(self.numbers)

        def check(pattern: Pattern, like: str) -> None:
            for name in (*pattern.broadcast, *[like] * bool(like)):
                if name not in described:
                    fail(self.op, f"its signature names no argument {name!r}")

        def check_size(size: str, bound: set[str]) -> None:
            match = SIZE.fullmatch(size)
            if match is None:
                fail(self.op, f"its signature must have sizes such as N, 4, N+1 or 2*N, got {size!r}")
            for name in NAME.findall(size):
                if name not in bound:
                    before = f" before {size!r}" if match[2] else ""
                    fail(self.op, f"its signature must say {name!r} of an argument{before}")

        for argument in self.arguments:
            for pattern in argument.patterns:
                check(pattern, argument.like)
                said = set(bound)  # Not by another alternative, which may be that of no tensor.
                for size in pattern.sizes:
                    said |= {size} if NAME.fullmatch(size) else set()
                    check_size(size, said)
            bound.update(name for pattern in argument.patterns for name in pattern.names)
            described.append(argument.name)
            parts = argument.parts
            if len(parts) == 1 or re.search("[<=>!]", "".join(parts)):
                fail(self.op, f"its signature must have conditions such as 1 <= K <= N, got {argument.condition!r}")
            for size in parts:
                check_size(size, bound)
        for result in self.results:
            check(result.pattern, result.like)
            if result.pattern.pack and not any(p.pack for a in self.arguments for p in a.patterns):
                fail(self.op, "its signature must say '...' of an argument")
            for size in result.pattern.sizes:
                if size != "?":
                    check_size(size, bound)
        patterns = [p for a in self.arguments for p in a.patterns] + [r.pattern for r in self.results]
        every = [size for p in patterns for size in p.sizes] + [size for a in self.arguments for size in a.parts]
        if len({name for size in every for name in NAME.findall(size)}) > MAX_NAMES:
            fail(self.op, f"its signature must have at most {MAX_NAMES} names")
        for known in schema.arguments:
            if "Tensor" in str(known.type) and known.name not in described:
                fail(self.op, f"its signature must describe its tensors, got none of {known.name}")
        if len(self.results) != len(schema.returns):
            wanted = f"as many results as its schema, {len(schema.returns)}"
            fail(self.op, f"its signature must have {wanted}, got {len(self.results)}")

    @cached_property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Those that a call can be in: of the first tensor that may be floating, or of the first."""
        free = [argument.dtypes for argument in self.arguments if not argument.like]
        return next((dtypes for dtypes in free if {*dtypes} & {*FLOATING}), self.arguments[0].dtypes)

    @cached_property
    def broadcasts(self) -> bool:
        """Whether arguments that are "..." may differ in shape."""
        patterns = [p for a in self.arguments for p in a.patterns] + [r.pattern for r in self.results]
        return any(pattern.broadcast for pattern in patterns)

    @cached_property
    def elementwise(self) -> bool:
        """Whether an element of the results depends on one of each argument only."""
        patterns = [p for a in self.arguments for p in a.patterns] + [r.pattern for r in self.results]
        return all((pattern.pack or pattern.broadcast) and not pattern.sizes for pattern in patterns)

    @cached_property
    def dynamic_size(self) -> bool:
        """Whether the size of a result depends on values."""
        return any("?" in result.pattern.sizes for result in self.results)

    @staticmethod
    def pattern_of(argument: Argument, dims: int) -> Pattern:
        """Of the alternatives, the one that a tensor of so many dimensions has."""
        return next((p for p in argument.patterns if p.pack or len(p.sizes) == dims), argument.patterns[0])

    def tensors(self, args: Sequence[Any]) -> Iterator[tuple[Argument, Any]]:
        for argument in self.arguments:
            at = self.positions[argument.name]
            yield argument, args[at] if at < len(args) else None

    def check(self, args: Sequence[Any], op: str = "") -> Sizes:
        """The sizes in a call; raises RuntimeError for what the kernels refuse, in their words."""
        op = op or self.op
        sizes: Sizes = {name: args[at] for name, at in self.numbers.items() if at < len(args)}
        given: dict[str, Tensor] = {}
        first = ""
        for argument, t in self.tensors(args):
            if t is None and argument.optional:
                continue
            if t is None:
                fail(op, f"{argument.name} must be a tensor, got None")
            if t.layout != torch.strided or t.is_nested:
                fail(op, f"{argument.name} must be a strided tensor, got {'a nested one' if t.is_nested else t.layout}")
        pack_of = ""
        for argument, t in self.tensors(args):
            if t is None:
                continue
            first = first or argument.name
            given[argument.name] = t
            self._check_tensor(op, argument, t, first, given)
            bound = self._check_shape(op, argument, t, given, sizes, pack_of)
            pack_of = pack_of or bound
        if self.broadcasts:
            for pattern in [p for a in self.arguments for p in a.patterns] + [r.pattern for r in self.results]:
                if pattern.broadcast:
                    self.broadcast(op, pattern, given)
        self._check_overlap(op, given)
        return sizes

    def _check_tensor(self, op: str, argument: Argument, t: Tensor, first: str, given: dict[str, Tensor]) -> None:
        """The dtype, the device, and the number of dimensions that kernels can have."""
        described = argument  # In place of an argument that is None stands what is said of it.
        while described.like and described.like not in given:
            described = next(other for other in self.arguments if other.name == described.like)
        if described.like:
            want = given[described.like].dtype
            if t.dtype != want:
                said = f"{argument.name} must have the dtype of {described.like}, {dtype_name(want)}"
                fail(op, f"{said}, got {dtype_name(t.dtype)}")
        elif t.dtype not in described.dtypes:
            *names, last = map(dtype_name, described.dtypes)
            wanted = f"{', '.join(names)} or {last}" if names else last
            fail(op, f"{argument.name} must have dtype {wanted}, got {dtype_name(t.dtype)}")
        device = given[first].device
        if t.device != device:
            fail(op, f"{argument.name} must be on the device of {first}, {device}, got {t.device}")
        if t.dim() > MAX_DIMS:
            fail(op, f"{argument.name} must have at most {MAX_DIMS} dimensions, got {t.dim()}")

    def _check_shape(
        self, op: str, argument: Argument, t: Tensor, given: dict[str, Tensor], sizes: Sizes, pack_of: str
    ) -> str:
        """Raises for another shape; enters what it binds into `sizes`. Returns whether it binds "..."."""
        pattern = argument.patterns[0]
        if pattern.broadcast:
            shape = self.broadcast(op, pattern, given)
            wanted = f"the shape that {' and '.join(pattern.broadcast)} broadcast to"
            require(
                t.shape == shape, op, lambda: f"{argument.name} must have {wanted}, {text(shape)}, got {text(t.shape)}"
            )
            return ""
        if pattern.pack and not pattern.sizes:
            if self.broadcasts:
                return ""
            shape = sizes.setdefault("...", t.shape)
            wanted = f"the shape of {pack_of or argument.name}"
            require(
                t.shape == shape, op, lambda: f"{argument.name} must have {wanted}, {text(shape)}, got {text(t.shape)}"
            )
            return argument.name
        known = dict(sizes)

        def refusal_of(condition: str) -> Callable[[], str]:
            def words() -> str:
                names = ["..."] * any(p.pack for p in argument.patterns)
                names += [name for p in argument.patterns for name in p.names] + NAME.findall(condition)
                bound = [f"{n} = {text(known[n])}" for n in dict.fromkeys(names) if n in known]
                extra = " and ".join([condition] * bool(condition) + bound)
                shapes = " or ".join(map(str, argument.patterns))
                return (
                    f"{argument.name} must have shape {shapes}{f' with {extra}' if extra else ''}, got {text(t.shape)}"
                )

            return words

        refusal = refusal_of("")
        fitting = [
            p
            for p in argument.patterns
            if (t.dim() >= len(p.sizes) if p.pack else t.dim() == len(p.sizes))
            and all(differs(n, int(s)) is not True for n, s in zip(t.shape[::-1], p.sizes[::-1]) if s.isdigit())
        ]
        if not fitting:
            fail(op, refusal())
        pattern = fitting[0]
        leading = t.dim() - len(pattern.sizes)
        if pattern.pack:
            require(t.shape[:leading] == sizes.setdefault("...", t.shape[:leading]), op, refusal)
        for got, size in zip(t.shape[leading:], pattern.sizes):
            if size.isidentifier() and size not in sizes:
                sizes[size] = got
            else:
                require(got == known_value(op, size, sizes), op, refusal)
        for low, high in pairwise(argument.parts):
            require(known_value(op, low, sizes) <= known_value(op, high, sizes), op, refusal_of(argument.condition))
        return argument.name if pattern.pack else ""

    def broadcast(self, op: str, pattern: Pattern, given: dict[str, Tensor]) -> torch.Size:
        names = [name for name in pattern.broadcast if name in given]
        first = given[names[0]].shape
        if all(type(given[name]) is Tensor and given[name].shape == first for name in names):  # No size is a symbol.
            return first
        try:
            return torch.broadcast_shapes(*(given[name].shape for name in names))
        except RuntimeError as error:
            if type(error) is not RuntimeError:  # A question about a symbolic size, for torch.compile to answer.
                raise
            got = " and ".join(text(given[name].shape) for name in names)
            fail(op, f"{' and '.join(names)} must have shapes that broadcast, got {got}")

    def _check_overlap(self, op: str, given: dict[str, Tensor]) -> None:
        """Only of tensors that repeat an element: the kernels find the rest, exactly."""
        for argument in self.arguments:
            t = given.get(argument.name) if argument.written else None
            if t is None or is_symbolic(t) or 0 in t.shape:
                continue
            if any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride())):
                got = f"shape {text(t.shape)} with strides {text(t.stride())}"
                fail(op, f"{argument.name} must not overlap itself, got {got}")

    def operations(self, args: Sequence[Any], terms: str) -> int:
        """Of a call, by "2 M N K + M N" as in a declaration; one an element if elementwise and nothing is said."""
        sizes = self.check(args)
        leading = [t.shape for argument, t in self.tensors(args) if t is not None and argument.patterns[0].pack]
        sizes["..."] = (
            math.prod(torch.broadcast_shapes(*leading)) if self.broadcasts else math.prod(sizes.get("...", ()))
        )
        return sum(
            math.prod(sizes[size] if size == "..." else int(value(size, sizes)) for size in term.split())
            for term in (terms or ("..." if self.elementwise else "0")).split(" + ")
        )

    def empty(self, args: Sequence[Any], sizes: Sizes) -> Any:
        """The results of a call whose arguments were checked, uninitialised."""
        given = {argument.name: t for argument, t in self.tensors(args) if t is not None}
        return self.pack_results([self._empty_result(result, given, sizes) for result in self.results])

    def _empty_result(self, result: Result, given: dict[str, Tensor], sizes: Sizes) -> Tensor:
        dtype, pattern = self.dtype_of(result, given), result.pattern
        if pattern.broadcast or (pattern.pack and self.elementwise):
            names = pattern.broadcast or [a.name for a in self.arguments if a.patterns[0].pack]
            return empty_elementwise(*(given[name] for name in names if name in given), dtype=dtype)
        shape = [
            torch.library.get_ctx().new_dynamic_size() if size == "?" else known_value(self.op, size, sizes)
            for size in pattern.sizes
        ]
        leading = sizes.get("...") if pattern.pack else ()
        if leading is None:
            fail(self.op, "its size ... has no value: no tensor of this call has it")
        return next(iter(given.values())).new_empty([*leading, *shape], dtype=dtype)

    def dtype_of(self, result: Result, given: dict[str, Tensor]) -> torch.dtype:
        if result.dtype:
            return result.dtype
        if result.like and result.like not in given:
            fail(self.op, f"{result.like} must be a tensor, as a result has its dtype, got None")
        return (given[result.like] if result.like else next(iter(given.values()))).dtype

    @staticmethod
    def pack_results(results: list[Tensor]) -> Any:
        """As a function returns them."""
        return results[0] if len(results) == 1 else tuple(results) if results else None


def known_value(op: str, size: str, sizes: Sizes) -> Any:
    """:func:`value`; raises for a name that has none: of a tensor that is None, or of another alternative."""
    try:
        return value(size, sizes)
    except KeyError as error:
        fail(op, f"its size {error.args[0]} has no value: no tensor of this call has it")


def read_dtype(op: str, name: str) -> torch.dtype:
    if not isinstance(dtype := getattr(torch, name, None), torch.dtype):
        fail(op, f"its signature has no dtype {name!r}")
    return dtype


def read_dtypes(op: str, text: str) -> tuple[torch.dtype, ...]:
    names = map(str.strip, text.split("|"))
    return tuple(dtype for name in names for dtype in (GROUPS[name] if name in GROUPS else (read_dtype(op, name),)))


def text(value: Any) -> str:
    """As an error message has it: a number, or a shape."""
    return str(value) if isinstance(value, int | torch.SymInt) else str(tuple(value))


def require(condition: Any, op: str, message: Callable[[], str]) -> None:
    """Raise unless it holds; of a symbolic size, assume that it does from here on."""
    if condition is True:
        return
    if isinstance(condition, bool):
        fail(op, message())
    torch._check(condition, lambda: f"{op}: {message()}")


def differs(size: Any, other: int) -> bool | None:
    """Whether a size is another, None where that is not known yet."""
    return size != other if isinstance(size, int) else None


def empty_elementwise(*tensors: Tensor, dtype: torch.dtype) -> Tensor:
    """What an elementwise operator on tensors returns, uninitialised: broadcast shape, and TensorIterator's strides."""
    first = tensors[0]
    symbolic = type(first) is not Tensor and is_symbolic(*tensors)
    if not symbolic and all(t.shape == first.shape and t.is_contiguous() for t in tensors):
        return torch.empty(first.shape, dtype=dtype, device=first.device)
    expanded = torch.broadcast_tensors(*tensors)
    shape = expanded[0].shape
    if symbolic:
        from torch._prims_common import compute_elementwise_output_strides

        strides = compute_elementwise_output_strides(*expanded)
    else:
        strides = elementwise_strides(shape, tensors)
        if max(strides, default=0) >= 2**63:  # Of an empty tensor; its kernel says the same.
            raise RuntimeError("Stride calculation overflowed")
    return torch.empty_strided(shape, strides, dtype=dtype, device=first.device)


def elementwise_strides(shape: torch.Size, tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """As csrc/common/loop.h has them, where not all are contiguous.

    PyTorch's function for fake tensors takes dimensions of size 1 otherwise.
    """
    if all(t.shape == shape for t in tensors):
        if all(t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) for t in tensors):
            return dense_strides(shape, (1, 3, 2, 0))
        if all(t.stride() == tensors[0].stride() for t in tensors) and is_dense(tensors[0]):
            return tensors[0].stride()
    given = []
    for t in tensors:
        missing = len(shape) - t.dim()
        pairs = zip(t.shape, t.stride(), shape[missing:])
        given.append([0] * missing + [0 if size == 1 and out != 1 else stride for size, stride, out in pairs])

    def compare(x: int, y: int) -> int:
        for strides in given:
            if strides[x] == 0 or strides[y] == 0:
                continue
            if strides[x] != strides[y]:
                return -1 if strides[x] < strides[y] else 1
            if shape[x] > shape[y]:
                return 1
        return 0

    order = list(reversed(range(len(shape))))
    for k in range(1, len(shape)):
        moving = k
        for below in range(k - 1, -1, -1):
            found = compare(order[below], order[moving])
            if found < 0:
                break
            if found > 0:
                order[below], order[moving] = order[moving], order[below]
                moving = below
    return dense_strides(shape, order)


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Of a tensor whose dimensions vary in this order, the fastest first."""
    strides, step = [0] * len(shape), 1
    for d in order:
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def is_dense(t: Tensor) -> bool:
    """Whether the elements lie one after another in some order of the dimensions, and none twice."""
    step = 1
    for stride, size in sorted((stride, size) for size, stride in zip(t.shape, t.stride()) if size > 1):
        if stride != step:
            return False
        step *= size
    return True


def is_symbolic(*tensors: Tensor) -> bool:
    """Whether a size or stride is a symbol, of which nothing exact can be asked without specialising on it."""
    numbers = (n for t in tensors for n in (*t.shape, *t.stride(), t.storage_offset()))
    return any(isinstance(n, torch.SymInt) for n in numbers)
