"""Selections in Triton: results whose size depends on the values, of a formula of scalars.

    @selection
    @triton.jit
    def positive(input, scalar_arg):
        return input > 0, input * scalar_arg

It has the operator's name and takes arguments of its schema by their names, tensors of one shape (...). It returns whether an
element is kept, and then a value for each result (?), which has those of the elements that are kept, in their order.

Each program of a kernel has some elements. All count what they keep, the host waits for how many these are together, and the
same programs write theirs behind those of the programs before them.
"""

from typing import Any

import torch
import triton

from extension_cpp.ops import _backends, _signature
from extension_cpp.triton.rowwise import Formula, launch

BLOCK, WARPS = 2048, 8
MOST = 4 if _backends.interpreted else 1024  # programs


class selection(Formula):
    """What <op>.triton runs: the kernel of a formula of an element."""

    wide = "widen_floating"

    def load(self, name: str, place: str) -> str:
        """A line that loads an argument in the type that it is computed in, as an elementwise formula has it."""
        return f"{name}_value_ = {self.wide}(tl.load({place}))"

    def prepare(self, operator: Any) -> None:
        """Make the kernel, for the operator that was declared."""
        self.read(operator)
        signature = operator.signature
        every = [p for a in signature.arguments for p in a.patterns] + [r.pattern for r in signature.results]
        first = signature.arguments[0].name
        kept = all(
            r.pattern.sizes == ("?",) and not r.pattern.pack and not r.dtype and r.like in ("", first)
            for r in signature.results
        )
        if not kept or not all(p.pack and not p.sizes for p in every[: len(self.tensors)]):
            wanted = f"selection takes tensors of shape (...) and returns some (?) of the dtype of {first}"
            _backends.fail(operator.name, f"{wanted}, got {', '.join(map(str, every))}")
        self.sums = [False] * len(self.outs)
        loop = ["at_ = start_ + tl.arange(0, BLOCK)", "inside_ = at_ < end_"]
        loop += [self.load(name, f"{name} + at_, inside_, other=0") for name in self.tensors]
        loop += self.call({name: f"{name}_value_" for name in self.tensors}, "keep_")
        loop += [
            "kept_ = ((keep_ != 0) & inside_).to(tl.int32)",
            "if WRITE:",
            "    place_ = before_ + tl.cumsum(kept_, 0) - kept_",
        ]
        for i, out in enumerate(self.outs):
            loop.append(f"    tl.store({out} + place_, value{i}_.to({out}.dtype.element_ty), kept_ != 0)")
        loop.append("before_ += tl.sum(kept_, 0)")
        body = [
            "program_ = tl.program_id(0)",
            "begin_ = program_.to(tl.int64) * of_program_",
            "end_ = tl.minimum(begin_ + of_program_, elements_)",
            f"programs_ = tl.arange(0, {MOST})",
            # Of none where they are counted.
            "before_ = tl.sum(tl.load(counts_ + programs_, (programs_ < program_) & WRITE, other=0))",
            "for start_ in range(begin_, end_, BLOCK):",
            *(f"    {line}" for line in loop),
            "if not WRITE:",
            "    tl.store(counts_ + program_, before_)",
            "    tl.atomic_add(counts_ + tl.num_programs(0), before_)",
        ]
        self.make(self.tensors[0], ["counts_", "elements_", "of_program_"], body, "WRITE")

    def __call__(self, *args: Any) -> Any:
        operator = self.operator
        args = tuple(operator.all_arguments(args))
        operator.signature.check(args)
        given = [args[operator.names.index(name)].contiguous() for name in self.tensors]
        first = given[0]
        n = first.numel()
        of_program = triton.cdiv(triton.cdiv(n, MOST), BLOCK) * BLOCK
        programs = triton.cdiv(n, of_program) if n else 0
        counts = torch.zeros(programs + 1, dtype=torch.int64, device=first.device)
        arguments = (*given, *self.halves_of(args), counts, n, of_program)
        outs = [first.new_empty(0) for _ in self.outs]
        launch(self.plain, programs, BLOCK, WARPS, *outs, *arguments, WRITE=False)
        kept = counts[-1].item()
        torch._check(kept >= 0)  # For torch.compile, to which it is a symbol.
        outs = [first.new_empty(kept) for _ in self.outs]
        launch(self.plain, programs, BLOCK, WARPS, *outs, *arguments, WRITE=True)
        return _signature.Signature.pack_results(outs)

    # Ahead of time.

    def variants(self, configuration: Any) -> list[tuple[tuple[bool, bool], int, int]]:
        """Whether it writes, and whether its tensors are aligned."""
        return [((write, is_aligned), BLOCK, WARPS) for write in (False, True) for is_aligned in (True, False)]

    def constants(self, variant: tuple[bool, bool], block: int) -> dict[str, Any]:
        return {"WRITE": variant[0], "BLOCK": block}

    def types(self, dtype: torch.dtype) -> dict[str, str]:
        return super().types(dtype) | {"counts_": "*i64"}

    def aligned(self, variant: tuple[bool, bool]) -> list[str]:
        """The parameters that 16 divides."""
        return [*self.outs, "counts_", "of_program_", *(self.tensors if variant[1] else [])]

    @property
    def host(self) -> str:
        """The function of csrc/common/triton.cuh."""
        return f"selection<{len(self.outs)}>"
