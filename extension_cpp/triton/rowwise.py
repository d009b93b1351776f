"""Row-wise operators in Triton: a formula of a row is all that an author writes.

    @rowwise
    @triton.jit
    def softmax(x, inside):
        terms = tl.where(inside, tl.exp(x - tl.max(tl.where(inside, x, float("-inf")))), 0)
        return terms / tl.sum(terms)

It has the operator's name. It takes arguments of its schema by their names, the size of a row by its name in the signature,
and `inside`, which says which elements of a block are in the row. What a tensor is to a row, the signature says:

    ... N     the elements of the row, and 0 behind them; as a result, those of its row
    N         the same for every row, as a weight; as a result, a sum over the rows
    ...       one value

All are in float32, or float64 for float64, but integers. Several results are a tuple.

A program of the kernel that is made of it has some rows in turn, each as one block.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from extension_cpp.ops import _backends, _signature
from extension_cpp.triton.elementwise import bits_of, make, pointer, reader

MOST_SUMS = 3 if _backends.interpreted else 1024
"""Programs that each add up some of the rows. In the interpreter every kernel has so few, as what precedes the rows takes
longer there than a row."""
LONGEST = 2**20
"""Elements of a block in Triton."""
BLOCKS = (256, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
"""Elements of a block, the smallest first, as csrc/common/triton.cuh takes those that are compiled ahead of time."""
ROLES = {(True, 1): "kRows", (False, 1): "kColumns", (True, 0): "kValues"}


class Formula:
    """What row-wise operators and recurrences share: the tensors and numbers of an operator, in a kernel."""

    sums: list[bool]
    """Of the results: whether the kernel writes a part of a sum for each of its programs."""

    wide = "widen"
    """The function of kernels that says in which type the computation is."""

    def __init__(self, formula: Any) -> None:
        self.formula = formula

    def read(self, operator: Any) -> None:
        """Look at the operator's schema and signature."""
        self.operator = operator
        self.kernels = [self]
        signature = operator.signature
        if operator.written or any(argument.optional for argument in signature.arguments):
            _backends.fail(
                operator.name, f"{type(self).__name__} is for operators that return all and need all tensors"
            )
        self.tensors = [argument.name for argument in signature.arguments]
        self.numbers = [name for name in operator.names if name not in self.tensors]
        at = map(operator.names.index, self.numbers)
        self.numbers_at = {i: reader(operator.types[i]) for i in at}  # To how each is read.
        self.outs = [f"out{i}_" for i in range(len(signature.results))]
        self.halves = [f"{number}_{half}_" for number in self.numbers for half in ("high", "low")]

    def call(self, given: dict[str, str], *before: str) -> list[str]:
        """The lines of the kernel that take the results of the formula: value0_, value1_, ... after those named."""
        given = given | {name: f"{name}_value_" for name in self.numbers}
        for name in self.formula.arg_names:
            if name not in given:
                wanted = f"its Triton formula must take {', '.join(given)}"
                _backends.fail(self.operator.name, f"{wanted}; got {name}")
        results = ", ".join([*before, *(f"value{i}_" for i in range(len(self.outs)))])
        return [f"{results} = {self.formula.fn.__name__}({', '.join(given[name] for name in self.formula.arg_names)})"]

    def make(self, first: str, parameters: list[str], body: list[str], *constants: str) -> None:
        """Make the kernel, whose computation is in the type for the tensor `first`."""
        before = [f"wide_ = {self.wide}(tl.full((), 0, {first}.dtype.element_ty))"]
        reads = zip(self.numbers, self.numbers_at.values())
        before += [f"{name}_value_ = {read}({name}_high_, {name}_low_).to(wide_.dtype)" for name, read in reads]
        self.parameters = [*self.outs, *self.tensors, *self.halves, *parameters]
        unspecialized = [*self.halves, "rows_", "elements_", "of_program_"]
        constants = tuple(f"{name}: tl.constexpr" for name in (*constants, "BLOCK"))
        kind = type(self).__name__
        self.plain = make(kind, self.formula, [*self.parameters, *constants], before + body, unspecialized)

    def load(self, name: str, place: str) -> str:
        """A line that loads an argument, in the type of the computation unless it is an index."""
        argument = next(a for a in self.operator.signature.arguments if a.name == name)
        is_index = set(argument.dtypes) <= {*_signature.INTEGER} and not argument.like
        return f"{name}_value_ = tl.load({place})" + ("" if is_index else ".to(wide_.dtype)")

    def halves_of(self, args: tuple) -> list[int]:
        return [half for i, read in self.numbers_at.items() for half in bits_of(args[i], read)]

    # Ahead of time.

    def fits(self) -> bool:
        """Whether the dtype of the first argument decides all others'."""
        first, *others = self.operator.signature.arguments
        return not first.like and all(a.like == first.name or (not a.like and len(a.dtypes) == 1) for a in others)

    def types(self, dtype: torch.dtype) -> dict[str, str]:
        """Triton's, of the parameters."""
        signature = self.operator.signature
        result = dict.fromkeys(self.parameters, "i64") | dict.fromkeys((*self.halves, "n_"), "i32")
        for argument in signature.arguments:
            result[argument.name] = pointer(dtype if argument.like or len(argument.dtypes) > 1 else argument.dtypes[0])
        for name, out, is_sum in zip(self.outs, signature.results, self.sums):
            result[name] = pointer(wide_type(dtype) if is_sum else out.dtype or dtype)
        return {name: result[name] for name in self.parameters}


def wide_type(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class rowwise(Formula):
    """What <op>.triton runs: the kernel of a formula of a row."""

    def prepare(self, operator: Any) -> None:
        """Make the kernel, for the operator that was declared."""
        self.read(operator)
        signature = operator.signature
        patterns = [argument.patterns[0] for argument in signature.arguments]
        patterns += [result.pattern for result in signature.results]
        roles = [ROLES.get((pattern.pack, len(pattern.sizes)), "") for pattern in patterns]
        of_rows = {pattern.sizes[0] for pattern, role in zip(patterns, roles) if role in ("kRows", "kColumns")}
        alternatives = any(len(argument.patterns) > 1 for argument in signature.arguments)
        if alternatives or not all(roles) or len(of_rows) != 1 or "kRows" not in roles[: len(self.tensors)]:
            wanted = "rowwise takes tensors of shape (..., N), one or more, (N,) or (...)"
            _backends.fail(operator.name, f"{wanted}, got {', '.join(str(pattern) for pattern in patterns)}")
        self.roles, self.out_roles = roles[: len(self.tensors)], roles[len(self.tensors) :]
        self.sums = [role == "kColumns" for role in self.out_roles]
        self.first = self.roles.index("kRows")
        aparts = [f"{name}_apart_" for name, role in zip(self.tensors, self.roles) if role != "kColumns"]
        (size,) = of_rows
        given = {name: f"{name}_value_" for name in self.tensors} | {size: "n_", "inside": "inside_"}
        body = ["at_ = tl.arange(0, BLOCK)", "inside_ = at_ < n_"]
        loop = []
        for name, role in zip(self.tensors, self.roles):
            # Columns are loaded for each row, from a cache: held in registers, those of long rows would spill.
            row = f" + row_ * {name}_apart_" * (role != "kColumns")
            elements = " + at_, inside_, other=0" * (role != "kValues")
            loop.append(self.load(name, f"{name}{row}{elements}"))
        loop += self.call(given)
        last = []
        for i, (out, role) in enumerate(zip(self.outs, self.out_roles)):
            stored = f"value{i}_.to({out}.dtype.element_ty)"
            if role == "kRows":
                loop.append(f"tl.store({out} + row_ * n_ + at_, {stored}, inside_)")
            elif role == "kValues":
                loop.append(f"tl.store({out} + row_, {stored})")
            else:
                body.append(f"sum{i}_ = tl.zeros((BLOCK,), wide_.dtype)")
                loop.append(f"sum{i}_ += value{i}_")
                last.append(f"tl.store({out} + program_ * n_ + at_, sum{i}_, inside_)")
        body += [
            "program_ = tl.program_id(0).to(tl.int64)",
            "begin_ = program_ * of_program_",
            "for row_ in range(begin_, tl.minimum(begin_ + of_program_, rows_)):",
            *(f"    {line}" for line in loop),
            *last,
        ]
        self.make(self.tensors[self.first], ["n_", "rows_", "of_program_", *aparts], body)

    def __call__(self, *args: Any) -> Any:
        operator = self.operator
        args = tuple(operator.all_arguments(args))
        outs = operator.fake(*args)  # Which checks the arguments.
        outs = (outs,) if isinstance(outs, Tensor) else tuple(outs)
        given = [args[operator.names.index(name)] for name in self.tensors]
        first = given[self.first]
        size, count = first.shape[-1], first.shape[:-1].numel()
        operands, aparts = [], []
        for t, role in zip(given, self.roles):
            if role == "kColumns":
                operands.append(aligned(t))
            else:
                t, apart = rows(t) if role == "kRows" else (t.contiguous(), 1)
                operands.append(t)
                aparts.append(apart)
        # The sum of these is the same on every run, as it would not be if programs added to the same memory.
        most = MOST_SUMS if any(self.sums) or _backends.interpreted else max(1, count)
        of_program = max(1, triton.cdiv(count, most))
        programs = triton.cdiv(count, of_program)
        parts = [
            out.new_empty((programs, size), dtype=wide_type(first.dtype)) if is_sum else out
            for out, is_sum in zip(outs, self.sums)
        ]
        arguments = (*parts, *operands, *self.halves_of(args), size, count, of_program, *aparts)
        block = self.block_for(size)
        launch(self.plain, programs, block, warps_of(block), *arguments)
        done = [part.sum(0).to(out.dtype) if s else out for part, out, s in zip(parts, outs, self.sums)]
        return _signature.Signature.pack_results(done)

    def block_for(self, size: int) -> int:
        block = next((block for block in BLOCKS if size <= block), triton.next_power_of_2(size))
        if block > LONGEST:
            _backends.fail(self.operator.name, f"Triton's blocks have at most {LONGEST} elements, got rows of {size}")
        return block

    # Ahead of time.

    def variants(self, configuration: Any) -> list[tuple[bool, int, int]]:
        return [(is_aligned, block, warps_of(block)) for is_aligned in (True, False) for block in BLOCKS]

    def constants(self, is_aligned: bool, block: int) -> dict[str, int]:
        return {"BLOCK": block}

    def aligned(self, is_aligned: bool) -> list[str]:
        """The parameters that 16 divides."""
        kinds = [*zip(self.outs, self.out_roles), *zip(self.tensors, self.roles)]
        names = [name for name, role in kinds if role != "kValues"]
        names += ["n_", *(f"{name}_apart_" for name, role in zip(self.tensors, self.roles) if role == "kRows")]
        return names if is_aligned else []

    @property
    def host(self) -> str:
        """The function of csrc/common/triton.cuh."""
        roles, out_roles = ", ".join(self.roles), ", ".join(self.out_roles)
        return f"rowwise<Roles<{roles}>, Roles<{out_roles}>>"


def rows(t: Tensor) -> tuple[Tensor, int]:
    """A tensor (..., N) with dense rows, and how far apart they are: as the argument's own where that is possible.

    Triton compiles a kernel for aligned rows and another for those that aren't, which add up in another order. So that the
    length of the rows alone decides which, a tensor of the other kind is copied.
    """
    size = t.shape[-1]
    dense = (size <= 1 or t.stride(-1) == 1) and (t.dim() <= 2 or t.is_contiguous())
    apart = t.stride(0) if t.dim() == 2 else size
    is_aligned = apart % 16 == 0 and t.storage_offset() * t.element_size() % 16 == 0
    if dense and is_aligned == (size % 16 == 0):
        return t, apart
    return t.clone(memory_format=torch.contiguous_format), size


def aligned(t: Tensor) -> Tensor:
    """An argument that all rows read, as a weight: dense and aligned, as how it is read decides too in which order rows are
    added up."""
    ready = t.is_contiguous() and t.storage_offset() * t.element_size() % 16 == 0
    return t if ready else t.clone(memory_format=torch.contiguous_format)


def warps_of(block: int) -> int:
    return min(32, max(1, block // 256))


def launch(kernel: Any, programs: int, block: int, warps: int, *arguments: Any, **more: Any) -> None:
    """Start so many programs of a kernel that has so many elements in its block."""
    if programs == 0:
        return
    constants = {**more, "BLOCK": block, "num_warps": warps}
    first = arguments[0]
    if type(first) is not Tensor:
        wrap_triton(kernel)[(programs,)](*arguments, **constants)
    elif first.device.type == "cpu":
        kernel[(programs,)](*arguments, **constants)
    else:
        with torch.cuda.device_of(first):  # Triton launches on the current device.
            kernel[(programs,)](*arguments, **constants)
