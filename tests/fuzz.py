"""Calls every operator with arguments that its declaration leads to, right and wrong ones, and looks at what comes of it.

A call is right if the signature takes its arguments: its results are then those of the reference, as exactly as the
contract of the operator asks for. A wrong call is an error that names the operator and an argument. Either way nothing but
the arguments that the operator writes is changed. Hypothesis draws the calls and makes those that fail small. A call is
plain data: its line of JSON makes it again in any process, and corpus.jsonl has what was ever found. Options: --help.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from extension_cpp import testing
from extension_cpp.ops._signature import Argument, Pattern, Signature, value
from extension_cpp.testing import (
    Case,
    Contract,
    fake_args,
    of_any_size,
    of_tensors,
    ramp,
    same_bits,
    significant_strides,
)

HERE = Path(__file__).parent
CORPUS = HERE / "corpus.jsonl"
Call = dict[str, Any]
"""`op`, `way`, `args`, what JSON has; of a tensor what :func:`make_tensor` reads; `batch` for vmap."""

SIZES = [0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 129, 257, 513, 1030]
HUGE = [2**31, 2**46, 2**47 + 1, 2**61, 2**62]
BEYOND = 2**47
"""Bytes that no process can address: to allocate so many fails everywhere, and takes no time."""
MOST = 2**24
"""Operations that a call may take: a fraction of a second."""
NUMBERS = [0.0, -0.0, 1.0, -1.0, 0.5, 1 / 3, 2.0, 1e-20, math.inf, -math.inf, math.nan]
SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan]
PLAIN = ("function", "torch.ops", "keywords")
DERIVATIVES = ("backward", "double backward", "jvp")
WITHOUT_VALUES = ("fake", "meta")
KINDS = ("sparse", "csr", "mkldnn", "nested", "jagged", "zero", "freed", "quantized", "functional")
"""What a tensor can be that no kernel reads."""
OF_PARTS = ("nested", "jagged", "functional")
DTYPES = ("float16", "bfloat16", "float32", "float64", "int64", "uint8", "bool", "complex64", "float8_e4m3fn")
FAMILIES = tuple[Contract, ...]


HUNG = 98
"""Exit status where a call took minutes; of a sanitizer it is 99, and 1 where a call gave what it must not."""


class Found(AssertionError):
    """What a call must not do."""


# Tensors from data.


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements of memory that a view takes."""
    return 0 if 0 in shape else 1 + sum((n - 1) * stride for n, stride in zip(shape, strides))


def make_storage(sharing: list[Call], device: str) -> Tensor:
    """Memory for the tensors that share it, and no more, so that a sanitizer sees the first byte outside of it."""
    first, dtype = sharing[0], getattr(torch, sharing[0]["dtype"])
    n = max(t["offset"] + extent(t["shape"], t["strides"]) for t in sharing)
    generator = torch.Generator().manual_seed(first["seed"])
    if first["values"] == "whole":
        values = torch.randint(-3, 4, (n,), generator=generator).double()
    elif first["values"] == "unit":
        values = 1.8 * torch.rand(n, generator=generator, dtype=torch.float64) - 0.9
    else:
        values = torch.randn(n, generator=generator, dtype=torch.float64)
    if first["values"] == "special" and n:
        info = torch.finfo(dtype if dtype.is_floating_point else torch.float32)
        every = torch.tensor([*SPECIAL, info.max, info.min, info.tiny, info.smallest_normal / 4], dtype=torch.float64)
        at = torch.rand(n, generator=generator) < 0.3
        values[at] = every[torch.randint(len(every), (n,), generator=generator)][at]
    if not dtype.is_floating_point and not dtype.is_complex:
        values = values.nan_to_num(0, 3, -3).clamp(-100, 100).round()
    # A clone: the memory of `to` may be that of the values.
    return values.abs().to(dtype).to(device).clone() if dtype == torch.uint8 else values.to(dtype).to(device).clone()


def make_tensor(t: Call, storage: Tensor) -> Tensor:
    return torch.as_strided(storage, t["shape"], t["strides"], t["offset"])


def of_kind(kind: str, t: Tensor) -> Tensor:
    """The tensor as another layout or state has it; itself where PyTorch can't make one."""
    if numel(t) > 2**20:
        return t
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of layouts in beta.
        try:
            if kind == "sparse":
                return t.to_sparse()
            if kind == "csr":
                return t.to_sparse_csr()
            if kind == "mkldnn":
                return t.to_mkldnn()
            if kind == "quantized":
                return torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8)
            if kind in ("nested", "jagged"):
                layout = torch.jagged if kind == "jagged" else torch.strided
                return torch.nested.nested_tensor([t, t], layout=layout)
            if kind == "zero":
                return torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device)
            if kind == "functional":
                return torch._to_functional_tensor(t)
            if kind == "freed" and t.numel():
                t = t.clone()
                t.untyped_storage().resize_(0)
        except (RuntimeError, NotImplementedError, ValueError, IndexError):
            pass
    return t


def make_arguments(call: Call, device: str) -> tuple[list[Any], list[Tensor | None]]:
    """The arguments of a call, and the memory of each that is a tensor."""
    given = call["args"]
    storages: list[Tensor | None] = [None] * len(given)
    for i, arg in enumerate(given):
        if isinstance(arg, dict) and "of" not in arg:
            sharing = [arg, *(t for t in given if isinstance(t, dict) and t.get("of") == i)]
            storages[i] = make_storage(sharing, device)
    for i, arg in enumerate(given):
        if isinstance(arg, dict) and "of" in arg:
            storages[i] = storages[arg["of"]]
    args: list[Any] = [
        make_tensor(arg, storage) if storage is not None else arg for arg, storage in zip(given, storages)
    ]
    for i, arg in enumerate(given):
        if isinstance(arg, dict) and "kind" in arg:
            args[i] = of_kind(arg["kind"], args[i])
    return args, storages


# Calls, as hypothesis draws them.


@st.composite
def calls(draw: Any, cases: Sequence[Case], device: str) -> Call:
    case = draw(st.sampled_from(cases))
    operator, signature = case.operator, case.operator.signature
    huge = draw(st.integers(0, 15)) == 15
    sharing = bool(operator.written) and draw(st.booleans())
    numbers = {
        argument.name: draw(number(argument))
        for argument in operator.schema.arguments
        if "Tensor" not in str(argument.type)
    }
    shapes = Shapes(draw, signature, numbers, huge)
    dtypes: dict[str, str] = {}
    tensors: dict[str, Any] = {}
    for argument in signature.arguments:
        if argument.optional and draw(st.booleans()):
            tensors[argument.name] = None
            continue
        dtype = dtypes.get(argument.like) or draw(st.sampled_from([str(d)[6:] for d in argument.dtypes]))
        dtypes[argument.name] = dtype
        tensors[argument.name] = draw(tensor(tuple(shapes.of(argument)), dtype, signature.elementwise or case.exact))
    args = [{**numbers, **tensors}[name] for name in operator.names]
    if sharing:
        share(draw, args, operator.written[0])
    ways = [*PLAIN, "backward", *WITHOUT_VALUES] if huge else [*PLAIN, *DERIVATIVES, "vmap", "vmap", *WITHOUT_VALUES]
    call: Call = {"op": operator.qualified, "way": draw(st.sampled_from(ways)), "args": args}
    if draw(st.integers(0, 3)) == 3:
        spoil(draw, call, operator)
    if call["way"] == "vmap":
        add_batch(draw, call)
    return call


def number(argument: Any) -> st.SearchStrategy:
    kind = str(argument.type)
    if kind == "bool":
        return st.booleans()
    if kind == "int":
        return st.integers(-3, 9)
    return st.sampled_from(NUMBERS) | st.floats(width=32) | st.integers(-3, 3)


class Shapes:
    """Of the tensors of one call, in the order of the signature."""

    def __init__(self, draw: Any, signature: Signature, numbers: dict[str, Any], huge: bool) -> None:
        self.draw, self.signature, self.huge = draw, signature, huge
        self.sizes: dict[str, Any] = {name: n for name, n in numbers.items() if isinstance(n, int)}
        self.budget = draw(st.sampled_from([2**4, 2**6, 2**6, 2**8, 2**8, 2**10, 2**12, 2**16]))
        self.shapes: dict[str, list[int]] = {}

    def one(self, low: int = 0, high: int | None = None) -> int:
        if self.huge and self.draw(st.booleans()):
            return self.draw(st.sampled_from(HUGE))
        n = self.draw(st.sampled_from(SIZES))
        n = max(min(n, self.budget, n if high is None else high), low)
        self.budget //= max(n, 1)
        return n

    def of(self, argument: Argument) -> list[int]:
        pattern = self.draw(st.sampled_from(argument.patterns))
        shape = (
            self.broadcast(pattern) if pattern.broadcast else [*self.leading(pattern), *self.named(pattern, argument)]
        )
        self.shapes[argument.name] = shape
        return shape

    def leading(self, pattern: Pattern) -> list[int]:
        if not pattern.pack:
            return []
        if "..." not in self.sizes:
            dims = self.draw(st.sampled_from([0, 1, 1, 2, 2, 3, 4, 5]))
            self.sizes["..."] = [self.one() for _ in range(dims)]
        shape = list(self.sizes["..."])
        if self.signature.broadcasts and not pattern.sizes:
            shape = shape[self.draw(st.sampled_from([0, 0, 0, 1, 2])) :]
            return [1 if self.draw(st.integers(0, 4)) == 4 else n for n in shape]
        return shape

    def named(self, pattern: Pattern, argument: Argument) -> list[int]:
        for name in pattern.sizes:
            if name.isidentifier() and name not in self.sizes:
                self.sizes[name] = self.one(*self.bounds(name, argument.condition))
        return [int(value(size, self.sizes)) for size in pattern.sizes]

    def bounds(self, name: str, condition: str) -> tuple[int, int | None]:
        """What a condition of the signature leaves to a size, now and then more."""
        parts = [part.strip() for part in condition.split("<=")]
        if name not in parts or self.draw(st.integers(0, 15)) == 15:
            return 0, None
        at = parts.index(name)
        ends = [self.number_of(p) for p in (parts[at - 1] if at else "0", parts[at + 1] if at + 1 < len(parts) else "")]
        return ends[0] or 0, ends[1]

    def number_of(self, size: str) -> int | None:
        try:
            return int(value(size, self.sizes))
        except (KeyError, AttributeError):
            return None

    def broadcast(self, pattern: Pattern) -> list[int]:
        """Theirs; that of the first where they don't broadcast, which is an error of theirs."""
        shapes = [self.shapes[name] for name in pattern.broadcast if name in self.shapes]
        try:
            return list(torch.broadcast_shapes(*shapes))
        except RuntimeError:
            return shapes[0]


@st.composite
def tensor(draw: Any, shape: tuple[int, ...], dtype: str, special: bool) -> Call:
    """Contiguous; or permuted, with steps and broadcast dimensions; or with any strides, elements more than once in it."""
    dims = len(shape)
    kind = draw(st.sampled_from(["contiguous", "permuted", "permuted", "any"]))
    strides = [0] * dims
    step = 1
    order = list(range(dims))[::-1] if kind == "contiguous" else draw(st.permutations(range(dims)))
    for d in order:
        if kind == "any":
            strides[d] = draw(st.integers(0, 9))
            continue
        stored = kind == "contiguous" or draw(st.integers(0, 7)) < 7
        strides[d] = step * (1 if kind == "contiguous" else draw(st.sampled_from([1, 1, 1, 2, 3]))) if stored else 0
        step = max(step, strides[d] * max(shape[d], 1))
    if 0 in shape:  # Which strides can be anything.
        strides = [
            draw(st.sampled_from([stride, 2**62])) if kind == "any" else min(stride, 2**62) for stride in strides
        ]
    elif extent(shape, strides) > 2**21:
        strides = [0 if n > 2**10 else min(stride, 2**10) for n, stride in zip(shape, strides)]
        strides = [0] * dims if extent(shape, strides) > 2**21 else strides
    values = draw(st.sampled_from(["normal", "unit", "whole", *["special"] * special]))
    offset, seed = draw(st.integers(0, 3)), draw(st.integers(0, 99))
    return {"shape": list(shape), "strides": strides, "offset": offset, "dtype": dtype, "values": values, "seed": seed}


def share(draw: Any, args: list[Any], at: int) -> None:
    """Let one of the arguments lie in the memory of what is written, as the same view or as another."""
    others = [i for i, arg in enumerate(args) if isinstance(arg, dict) and i != at]
    other, out = args[draw(st.sampled_from(others))], args[at]
    if other["dtype"] != out["dtype"]:
        return
    other["of"] = at
    if other["shape"] == out["shape"] and draw(st.booleans()):
        other["strides"], other["offset"] = out["strides"], out["offset"] + draw(st.sampled_from([0, 0, 0, 1]))


def spoil(draw: Any, call: Call, operator: Any) -> None:
    """Make one argument, or their number, another than the signature says; mostly wrong."""
    args = call["args"]
    what = draw(st.sampled_from(["dtype", "shape", "size", "thing", "kind", "kind", "count", "dimensions"]))
    at = draw(st.sampled_from([i for i, arg in enumerate(args) if isinstance(arg, dict)]))
    t = args[at] = {**args[at]}
    shape, strides = t["shape"], t["strides"]
    if what == "dtype":
        t["dtype"] = draw(st.sampled_from(DTYPES))
        for other in args:
            if isinstance(other, dict) and other.get("of") == at:
                other["dtype"] = t["dtype"]
        t.pop("of", None)
    elif what == "shape":
        other = draw(st.sampled_from([(shape[1:], strides[1:]), ([1, *shape], [0, *strides])]))
        if extent(*other) <= 2**22:  # Else of a tensor without elements, whose strides can be anything.
            t["shape"], t["strides"] = other
    elif what == "size" and shape:
        d = draw(st.integers(0, len(shape) - 1))
        if shape[d] < 2**20 and (0 not in shape or max(strides) < 2**20) and max(shape) < 2**20:
            t["shape"] = [n + (i == d) for i, n in enumerate(shape)]
    elif what == "dimensions":
        t["shape"], t["strides"] = [1] * (65 - len(shape)) + shape, [1] * (65 - len(shape)) + strides
    elif what == "kind":
        t["kind"] = draw(st.sampled_from(KINDS))
        t.pop("of", None)
        if call["way"] not in PLAIN:  # Where PyTorch's own functions meet such tensors first, and not all survive it.
            call["way"] = "function"
    elif what == "thing":
        args[at] = draw(st.sampled_from([None, 1, 1.5, "text", [1.0]]))
    elif what == "count":
        call["args"] = draw(st.sampled_from([args[:-1], [], [*args, 1]])) if call["way"] != "keywords" else args
    for i, other in enumerate(call["args"]):
        if isinstance(other, dict) and "of" in other and other["of"] != i:
            of = call["args"][other["of"]] if other["of"] < len(call["args"]) else None
            if not isinstance(of, dict) or "kind" in of or "of" in of or of["dtype"] != other["dtype"]:
                del other["of"]


def add_batch(draw: Any, call: Call) -> None:
    """A dimension more, somewhere, in some of the tensors."""
    tensors = [
        i for i, arg in enumerate(call["args"]) if isinstance(arg, dict) and "kind" not in arg and "of" not in arg
    ]
    chosen = [i for i in tensors if draw(st.booleans())] or tensors[:1]
    if not chosen:
        call["way"] = "torch.ops"
        return
    n, batch = draw(st.integers(1, 3)), [None] * len(call["args"])
    for i in chosen:
        t = call["args"][i]
        d = batch[i] = draw(st.integers(0, len(t["shape"])))
        stride = 0 if draw(st.booleans()) else min(max(extent(t["shape"], t["strides"]), 1), 2**20)
        t["shape"] = [*t["shape"][:d], n, *t["shape"][d:]]
        t["strides"] = [*t["strides"][:d], stride, *t["strides"][d:]]
    call["batch"] = batch


# What must come of a call.


@cache
def find_contracts(folder: Path) -> dict[str, Contract]:
    """Of the operators that have one in the tests of a folder: tolerances, and what a test may know of the operator."""
    sys.path.insert(0, str(folder))
    return {contract.op.operator.qualified: contract for contract in testing.contracts(folder)}


def check(call: Call, contracts: dict[str, Contract], device: str) -> None:
    """Raise Found unless the call gives what the module says."""
    contract = contracts[call["op"]]
    case = contract.op
    try:
        args, storages = make_arguments(call, device)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        return  # PyTorch has no tensor of more than 2^63 elements.
    before = [storage.clone() if storage is not None else None for storage in storages]
    refusal = refused_by_signature(case, args, call)
    if refusal is None and not is_affordable(case, args, call):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", message="(?s).*(functorch|vmap|deprecated|batching rule).*")
            CHECKS[call["way"]](contract, call, args, device, refusal)
    except Found:
        raise
    except AssertionError as error:
        raise Found(str(error)) from error
    except (RuntimeError, TypeError, NotImplementedError, ValueError) as error:
        check_error(case, call, args, error, refusal, storages)
        written = []
    else:
        written = case.writes
        # PyTorch takes some of them apart, and calls the operator for what they are made of.
        of_parts = any(isinstance(t, dict) and t.get("kind") in OF_PARTS for t in call["args"])
        if refusal is not None and not of_parts:
            raise Found(f"no error, expected {refusal or 'one'}")
        if must_be_refused(case, args, storages) and call["way"] in PLAIN:
            raise Found("no error, and what is written shares elements with an argument, or with itself")
    for i, (was, now) in enumerate(zip(before, storages)):
        if was is None or now is None or (now.untyped_storage().nbytes() == 0):
            continue
        for k in written:  # By the views that it was told to write.
            if k < len(args) and storages[k] is now and isinstance(args[k], Tensor):
                t = call["args"][k]
                make_tensor(t, was).copy_(make_tensor(t, now))
        if not torch.equal(as_bytes(was), as_bytes(now)):
            raise Found(f"memory of argument {i} was changed outside of what is written")


def as_bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8) if t.dim() else t


def refused_by_signature(case: Case, args: list[Any], call: Call) -> str | None:
    """What the error must say, or "" for any; None for arguments that are right."""
    operator = case.operator
    required = sum(1 for a in operator.schema.arguments if not a.has_default_value())
    if len(args) > len(operator.names) or len(args) < required:
        return ""
    every = list(operator.all_arguments(args))
    for i, (arg, argument) in enumerate(zip(every, operator.schema.arguments)):
        if "Tensor" in str(argument.type) and not isinstance(arg, Tensor):
            if arg is None and "Optional" in str(argument.type):
                continue
            return ""
        described = call["args"][i] if i < len(call["args"]) else None
        if isinstance(described, dict) and "kind" in described and not is_readable(arg):
            return ""
    each = every
    if call["way"] == "vmap":
        each = [a if d is None else a.select(d, 0) for a, d in zip(every, batch_of(call, every))]
    try:
        operator.signature.check(each)
    except RuntimeError as error:
        return str(error)
    return None


def is_readable(t: Tensor) -> bool:
    try:
        if t._is_zerotensor():  # PyTorch makes it a usual one.
            return True
        return t.layout == torch.strided and (0 in t.shape or t.data_ptr() != 0) and not t.is_nested
    except RuntimeError:
        return False


def batch_of(call: Call, every: Sequence[Any]) -> list[int | None]:
    return [*call["batch"], *[None] * (len(every) - len(call["batch"]))]


def bytes_of_results(case: Case, args: list[Any]) -> int:
    """The largest of the results, by their shapes."""
    operator = case.operator
    every = operator.all_arguments(args)
    sizes = operator.signature.check(every)
    if operator.signature.dynamic_size:
        return 0
    meta = [
        torch.empty((), device="meta", dtype=a.dtype).expand(a.shape) if isinstance(a, Tensor) else a for a in every
    ]
    try:
        return max(
            (t.numel() * t.element_size() for t in testing.tensors(operator.signature.empty(meta, sizes))), default=0
        )
    except RuntimeError:  # More than 2^63 bytes.
        return 2**63


def is_affordable(case: Case, args: list[Any], call: Call) -> bool:
    """Whether the call takes no longer than a test may; what no memory can hold is refused at once."""
    if call["way"] in WITHOUT_VALUES:
        return True
    each = [a.select(d, 0) if d is not None else a for a, d in zip(args, call.get("batch", [None] * len(args)))]
    if bytes_of_results(case, each) >= BEYOND:
        return True
    operator = case.operator
    work = [operator.signature.operations(operator.all_arguments(each), operator.declared.flops), *map(numel, each)]
    return max(work) <= MOST and (largest(each) <= 2**20 or call["way"] in PLAIN)


def numel(arg: Any) -> int:
    """Of a tensor of any size: PyTorch counts to 2^63."""
    return math.prod(arg.shape) if isinstance(arg, Tensor) else 0


def largest(args: Sequence[Any]) -> int:
    """Of the sizes."""
    return max((n for t in args if isinstance(t, Tensor) for n in t.shape), default=0)


def must_be_refused(case: Case, args: list[Any], storages: list[Tensor | None]) -> bool:
    """Whether two elements that are written, or one of them and another that is read, are one, found by counting."""
    for k in case.writes:
        if k >= len(args) or not 0 < numel(args[k]) <= 2**20:
            continue
        out = args[k]
        elements = places(out)
        if overlaps_itself(out):
            return True
        for i, arg in enumerate(args):
            if i == k or storages[i] is not storages[k] or not 0 < numel(arg) <= 2**20:
                continue
            same = significant_strides(arg) == significant_strides(out)
            same = same and [n for n in arg.shape if n != 1] == [n for n in out.shape if n != 1]
            same = same and arg.storage_offset() == out.storage_offset()
            if not same and torch.isin(places(arg), elements).any():
                return True
    return False


def overlaps_itself(t: Tensor) -> bool:
    return len(places(t).unique()) < numel(t)


def places(t: Tensor) -> Tensor:
    """Of the elements in memory."""
    every = torch.arange(t.storage_offset() + extent(t.shape, t.stride()))
    return every.as_strided(t.shape, t.stride(), t.storage_offset()).flatten()


def check_error(
    case: Case, call: Call, args: list[Any], error: Exception, refusal: str | None, storages: list[Tensor | None]
) -> None:
    """An error names the operator and an argument, and says what the signature says where that refuses."""
    said, operator, way = str(error), case.operator, call["way"]
    if way in DERIVATIVES and is_too_large(error) and max(map(numel, args), default=0) >= BEYOND // 8:
        return  # PyTorch's of a gradient of that size.
    if isinstance(error, torch.OutOfMemoryError) and way in DERIVATIVES and max(map(numel, args), default=0) >= 2**30:
        return  # The same, of a GPU.
    if "invalid storage offset" in said or "cannot be represented as a SymInt" in said:
        return  # PyTorch's of a part or a batch of a tensor, where an index times a stride is more than 2^63.
    if case.writes and way != "function" and "ZeroTensors are immutable" in said:
        return  # The dispatcher's, before any code of ours.
    if case.writes and "We only support functionalizing" in said:
        return  # Likewise.
    if "NYI: broadcasting NT" in said:
        return  # Nested tensors', likewise.
    if not re.search(rf"\b{operator.name}\b", said):
        raise Found(f"an error that doesn't name the operator: {type(error).__name__}: {said}") from error
    if case.dynamic_size and ((way == "meta" and "data-dependent" in said) or (way == "vmap" and "vmap" in said)):
        return
    if refusal is None:
        if "overlap" in said and must_be_refused(case, args, storages):
            return
        if is_too_large(error) and (bytes_of_results(case, args) >= BEYOND or way in DERIVATIVES):
            return
        if case.writes and "ZeroTensors are immutable" in said:
            return
        if case.writes and ((way == "vmap" and "vmap" in said) or way in DERIVATIVES):
            return
        if way == "jvp" and not operator.differentiable:
            return
        if way == "double backward" and operator.declared.differentiable == "once":
            return
        raise Found(f"an error for arguments that are right: {type(error).__name__}: {said}") from error
    if refusal and way in (*PLAIN, *WITHOUT_VALUES) and said != refusal:
        raise Found(f"the error is {said!r}, and by the signature {refusal!r}") from error
    of_a_subclass = any(isinstance(t, dict) and t.get("kind") == "jagged" for t in call["args"])
    counted = len(args) <= len(operator.names)
    if counted and not of_a_subclass and not any(re.search(rf"\b{name}\b", said) for name in operator.names):
        raise Found(f"an error that names no argument: {said}") from error


def is_too_large(error: Exception) -> bool:
    return (
        isinstance(error, torch.OutOfMemoryError)
        or "allocate" in str(error)
        or "too large" in str(error)
        or "overflow" in str(error)
    )


# The ways to call an operator. Each raises what the call raises, and Found if it returns what it must not.


def public(case: Case, args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments that the public function has."""
    filled = case.operator.declared.filled
    known = [a for name, a in zip(case.operator.names, args) if name not in filled]
    return (*known, *args[len(case.operator.names) :])


def plain(contract: Contract, call: Call, args: list[Any], device: str, refusal: str | None) -> None:
    case, operator = contract.op, contract.op.operator
    if call["way"] == "function":
        if refusal is None and is_compared(case, call, args, device):
            try:
                contract.compare_with_reference(public(case, args))
            except AssertionError:
                if is_steady(case, args):
                    raise
        else:
            case.function(*public(case, args))
        return
    plainly = refusal is None and not case.writes and not any("kind" in t for t in call["args"] if isinstance(t, dict))
    copies = testing.map_tensors(testing.clone, args) if plainly else None
    entry = operator.packet.default
    by_name = call["way"] == "keywords" and len(args) <= len(operator.names)
    got = entry(**dict(zip(operator.names, args))) if by_name else entry(*args)
    if copies is not None and is_compared(case, call, args, device):
        for x, y in zip(testing.tensors(got), testing.tensors(case.function(*public(case, copies)))):
            if not (same_bits(x, y) if x.is_floating_point() else torch.equal(x, y)):
                raise Found(f"torch.ops gives {x}, and the function {y}")


def is_steady(case: Case, args: list[Any]) -> bool:
    """Whether an error of one unit in the last place of the arguments stays small. In a recurrence with large weights it
    grows with every step, and so do the roundings of its states."""
    floating = [t for t in testing.tensors(args) if t.is_floating_point()]
    unit = max((torch.finfo(t.dtype).eps for t in floating), default=0.0)

    def result(factor: float) -> list[Tensor]:
        wide = testing.map_tensors(lambda t: t.double() * factor if t.is_floating_point() else t, args)
        return testing.tensors([case.reference(*wide)])

    pairs = [(a, b) for a, b in zip(result(1 + unit), result(1.0)) if a.is_floating_point()]
    return not any(bool(((a - b).abs() > 64 * unit * (1 + b.abs())).any()) for a, b in pairs)


def is_compared(case: Case, call: Call, args: list[Any], device: str) -> bool:
    """Whether values are. Not those of numbers that may choose another precision on CUDA; and of an operator that only
    derivatives call, those of arguments that they may have."""
    operator = case.operator
    if max([largest(args), *map(numel, args)]) > 2**20 or any("kind" in t for t in call["args"] if isinstance(t, dict)):
        return False
    if any(t.dtype == torch.float64 and bool((t.isfinite() & (t.abs() > 1e150)).any()) for t in testing.tensors(args)):
        return False  # What the reference computes in between can be infinite.
    if not operator.public and any(t["values"] != "unit" for t in call["args"] if isinstance(t, dict)):
        return False
    chosen = [(a, d) for a, d in zip(args, operator.defaults) if isinstance(d, bool)]
    filled = [name in operator.declared.filled for name in operator.names]
    return (not any(filled) and (device == "cpu" or all(a == d for a, d in chosen))) or call["way"] in (
        "function",
        "vmap",
    )


def derivatives(contract: Contract, call: Call, args: list[Any], device: str, refusal: str | None) -> None:
    case, operator = contract.op, contract.op.operator
    at = [i for i in operator.differentiable_arguments if i < len(args) and isinstance(args[i], Tensor)]
    at = [i for i in at if args[i].is_floating_point() and is_readable(args[i])]
    if not at or len(args) > len(operator.names) or (call["way"] == "jvp" and not operator.schema.returns):
        case.function(*public(case, args))
        return
    dense = call["way"] == "jvp"  # PyTorch makes no dual tensor of one whose elements share memory.
    compared = refusal is None and not case.writes and operator.differentiable and is_compared(case, call, args, device)
    given = [*args]
    for i in at:
        t = args[i].detach()
        given[i] = (t.contiguous() if dense and overlaps_itself(t) else t).requires_grad_()
    filled = [i for i, name in enumerate(operator.names) if name in operator.declared.filled]
    at = [i - sum(k < i for k in filled) for i in at]
    way = partial(derivative_of, call["way"], at)
    got = way(case.function, public(case, given))
    if not compared or got is None or not is_smooth(args):
        return

    def wanted(factor: float) -> list[Tensor]:
        """The reference's, in float64, of these arguments times a factor."""
        wide = [
            a.detach().double() * factor if isinstance(a, Tensor) and a.is_floating_point() else a
            for a in given[: len(operator.names)]
        ]
        for i in operator.differentiable_arguments:
            if i < len(wide) and isinstance(wide[i], Tensor):
                wide[i].requires_grad_()
        return way(case.reference, wide) or []

    single = any(t.dtype == torch.float32 for t in testing.tensors(args))
    # A forward derivative of float32 without dimensions is of float64, as PyTorch's.
    got = [g.float() if single else g for g in got]
    want = wanted(1.0)
    if wrong := next(((g, w) for g, w in zip(got, want) if not is_close(g, w)), None):
        # In a recurrence with large weights an error of one unit of the arguments grows with every step.
        near = wanted(1 + torch.finfo(torch.float32 if single else torch.float64).eps)
        if all(is_close(n.to(g.dtype), w) for n, g, w in zip(near, got, want)):
            raise Found(f"{call['way']} of {operator.name}: {wrong[0]}, expected {wrong[1]}")


def is_smooth(args: Sequence[Any]) -> bool:
    """Whether derivatives are compared: in float64 and float32, of moderate values."""
    every = [t for t in testing.tensors(args) if t.is_floating_point()]
    exact = all(t.dtype in (torch.float64, torch.float32) and bool((t.abs() < 1e3).all()) for t in every)
    return exact and all(abs(a) < 1e3 for a in args if isinstance(a, float))


def derivative_of(way: str, at: list[int], function: Callable, args: Sequence[Any]) -> list[Tensor] | None:
    leaves = [args[i] for i in at]
    if way == "jvp":
        primals = tuple(t.detach() for t in leaves)
        tangents = tuple(map(ramp, primals))
        return testing.tensors(torch.func.jvp(of_tensors(function, tuple(args), at), primals, tangents))
    results = [t for t in testing.tensors(function(*args)) if t.requires_grad]
    if not results:
        return None
    seeds = [ramp(t.detach()) if numel(t) <= 2**20 else t.detach() for t in results]
    twice = way == "double backward"
    grads = torch.autograd.grad(results, leaves, seeds, materialize_grads=True, create_graph=twice)
    once = [g for g in grads if g.requires_grad]
    if not twice or not once:
        return list(grads)
    return list(torch.autograd.grad(once, leaves, [ramp(g.detach()) for g in once], materialize_grads=True))


def is_close(got: Tensor, want: Tensor) -> bool:
    tolerance = 1e-8 if got.dtype == torch.float64 else 1e-3
    most = want.abs().max().item() if want.numel() else 0.0
    return got.shape == want.shape and torch.allclose(
        got.detach().double(), want.detach().double(), tolerance, tolerance * (1 + most), equal_nan=True
    )


def batched(contract: Contract, call: Call, args: list[Any], device: str, refusal: str | None) -> None:
    case = contract.op
    batch = batch_of(call, args)
    n = next(args[i].shape[d] for i, d in enumerate(batch) if d is not None)
    given = testing.map_tensors(torch.clone, args) if case.writes else args
    at = [i for i, a in enumerate(args) if isinstance(a, Tensor)]

    def inner(*ts: Tensor) -> tuple[Tensor, ...]:
        every = [*given]
        for i, t in zip(at, ts):
            every[i] = t
        every = list(public(case, every))
        return tuple(testing.run(case, case.function, tuple(every)))

    got = torch.vmap(inner, tuple(batch[i] for i in at))(*(given[i] for i in at))
    if refusal is not None or not is_compared(case, call, args, device) or not is_smooth(args):
        return

    def widened(a: Any, d: int | None, k: int) -> Any:
        if not isinstance(a, Tensor):
            return a
        t = a if d is None else a.select(d, k)
        return t.double() if t.is_floating_point() else t

    for k in range(n):
        each = tuple(widened(a, d, k) for a, d in zip(args, batch))
        for g, w in zip(got, testing.run(case, case.reference, testing.map_tensors(torch.clone, each))):
            if not is_close(g[k], w):
                raise Found(f"vmap of {case.name}: {g[k]}, expected {w}")


def without_values(contract: Contract, call: Call, args: list[Any], device: str, refusal: str | None) -> None:
    case = contract.op
    given = public(case, args)
    if call["way"] == "fake":
        with of_any_size() if case.dynamic_size else FakeTensorMode() as mode:
            got = case.function(*fake_args(mode, given))
    else:
        got = case.function(*testing.map_tensors(on_meta, given))
    plainly = {**call, "way": "function"}
    if refusal is not None or case.dynamic_size or not is_affordable(case, args, plainly):
        return
    if bytes_of_results(case, args) >= BEYOND or case.writes:
        return
    want = testing.tensors(case.function(*testing.map_tensors(testing.clone, given)))
    for g, w in zip(testing.tensors(got), want):
        if g.shape != w.shape or g.dtype != w.dtype or significant_strides(g) != significant_strides(w):
            raise Found(f"{call['way']}: {tuple(g.shape)} {g.stride()}, and the kernel {tuple(w.shape)} {w.stride()}")


def on_meta(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


CHECKS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(PLAIN, plain),
    **dict.fromkeys(DERIVATIVES, derivatives),
    **dict.fromkeys(WITHOUT_VALUES, without_values),
    "vmap": batched,
}


# Runs.


def fuzz(
    contracts: dict[str, Contract], device: str, seed: int | None, most: int, stop: Callable[[], bool] = lambda: False
) -> tuple[int, Call | None, str]:
    """Draw and check calls until one fails or `most` did not; the number, and of the smallest that fails why.

    The same calls for one seed.
    """
    cases = [contract.op for contract in contracts.values()]
    failed: list[tuple[Call, str]] = []
    done = 0

    @hypothesis.settings(
        max_examples=most,
        database=None,
        deadline=None,
        derandomize=False,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(calls(cases, device))
    def one(call: Call) -> None:
        nonlocal done
        if stop():
            return
        done += 1
        note(call)
        try:
            check(call, contracts, device)
        except Exception as error:
            failed.append((call, f"{type(error).__name__}: {error}"))
            raise

    try:
        hypothesis.seed(seed)(one)()
    except Exception as error:
        return done, failed[-1][0] if failed else None, failed[-1][1] if failed else repr(error)
    return done, None, ""


_noted: list[int] = []


def note(call: Call) -> None:
    """Write down the call that is about to run, for who finds out that it ended the process."""
    for file in _noted:
        text = (json.dumps(call) + "\n").encode()
        os.ftruncate(file, 0)
        os.pwrite(file, text, 0)


def corpus() -> list[Call]:
    """Empty in a distribution that is new."""
    return [json.loads(line) for line in CORPUS.read_text().splitlines()] if CORPUS.exists() else []


def compile_sanitized(folder: Path) -> dict[str, str]:
    """The environment of a process that compiles csrc/ with ASan and UBSan, and uses that."""
    compiler = os.environ.get("CXX", "c++").split()[0]
    libraries = []
    for name in ("libasan.so", "libubsan.so"):
        found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        if not os.path.isabs(found):
            raise SystemExit(f"fuzz: {compiler} has no {name}: install it, or leave out --sanitize")
        libraries.append(found)
    flags = "-fsanitize=address,undefined"
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        "EXTENSION_CPP_JIT": "1",
        "TORCH_EXTENSIONS_DIR": str(folder.resolve()),
        "DEBUG": "1",
        "USE_CUDA": "0",
        "CXXFLAGS": f"{flags} -fno-sanitize-recover=undefined -fno-omit-frame-pointer",
        "LDFLAGS": flags,
        # Python never frees all; a tensor too large is an error of PyTorch's; its libraries are compiled without.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:detect_container_overflow=0:exitcode=99",
        "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=99",
    }


def supervise(arguments: Sequence[str], environment: dict[str, str], seconds: float) -> int:
    """Run this file with other options, and say which call it was if it doesn't end as it should; the exit status."""
    last = Path("build", "fuzz", "last.jsonl")
    last.parent.mkdir(parents=True, exist_ok=True)
    last.write_text("")
    command = [sys.executable, __file__, *arguments, "--note", str(last)]
    try:
        status = subprocess.run(command, env=environment, timeout=seconds + 600).returncode
    except subprocess.TimeoutExpired:
        status = HUNG
    if status not in (0, 1):
        what = "doesn't end" if status == HUNG else "ended the process"
        print(f"fuzz: the call that {what}; once it is right, add it to {CORPUS.name}\n{last.read_text().strip()}")
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="for how long; 60")
    parser.add_argument("--calls", type=int, default=sys.maxsize, help="how many calls at most")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same calls; 0")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--family", default="", help="only operators whose Python file has this name")
    parser.add_argument("--tests", type=Path, default=HERE, help="folder of the test modules with the contracts")
    parser.add_argument("--call", type=Path, help="a file of calls, to make these alone")
    parser.add_argument("--sanitize", action="store_true", help="compile for sanitizers, in build/asan, and run so")
    parser.add_argument("--note", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sanitize:
        environment = compile_sanitized(Path("build", "asan"))
        print("fuzz: compiling with sanitizers what has changed; all of it takes a minute", flush=True)
        warm = subprocess.run([sys.executable, "-c", "import extension_cpp"], env=environment)
        given = [a for a in sys.argv[1:] if a != "--sanitize"]
        return warm.returncode or supervise(given, environment, options.seconds)
    if options.note:
        _noted.append(os.open(options.note, os.O_WRONLY | os.O_CREAT))
    contracts = {
        name: contract
        for name, contract in find_contracts(options.tests.resolve()).items()
        if options.family in ("", contract.op.operator.stem)
    }
    known = [json.loads(line) for line in options.call.read_text().splitlines()] if options.call else corpus()
    for call in known:
        if call["op"] in contracts:
            note(call)
            try:
                check(call, contracts, options.device)
            except Found as error:
                print(f"fuzz: {error}\n{json.dumps(call)}")
                return 1
    start, total, seed = time.monotonic(), 0, options.seed
    over = lambda: time.monotonic() - start > options.seconds  # noqa: E731
    while not options.call and not over() and total < options.calls:
        done, call, why = fuzz(contracts, options.device, seed, min(1000, options.calls - total), over)
        total, seed = total + done, seed + 1
        if why:
            print(f"fuzz: {why}")
            print(f"{json.dumps(call)}\nfuzz: found by seed {seed - 1}, call {total}")
            return 1
    print(f"fuzz: {total} calls of {len(contracts)} operators on {options.device}, and {len(known)} of {CORPUS.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
