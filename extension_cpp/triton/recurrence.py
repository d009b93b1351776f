"""Recurrences over time in Triton: a step of the cell is all that an author writes, and one of its derivative.

    @recurrence
    @triton.jit
    def gated(x, gate, weight, hidden):
        z = tl.sigmoid(gate + weight * hidden)
        return z * hidden + (1 - z) * x

It has the operator's name and takes arguments of its schema by their names. By their shapes these are, in this order: inputs
(B, T, H), of which the cell gets those of the step; weights (H); states (B, H), of which it gets those before the step. It
returns the states after it, which are the results (B, T, H): several as a tuple.

    @recurrence_backward
    @triton.jit
    def gated_backward(grad, x, gate, weight, hidden):

has the operator that takes the gradients of these results, the results, and the arguments of the first. Its formula gets the
gradient of each state after the step, with what later steps add to it, and what the cell got. It returns the gradients of
that, in the order of the arguments.

A program of the kernels has channels of a row of the batch, through time.
"""

from typing import Any

import triton
from torch import Tensor

from extension_cpp.ops import _backends, _signature
from extension_cpp.triton.rowwise import Formula, launch, wide_type

CHANNELS = 128  # of a program


class recurrence(Formula):
    """What <op>.triton runs: the kernel of a cell."""

    backward = False

    def prepare(self, operator: Any) -> None:
        """Make the kernel, for the operator that was declared."""
        self.read(operator)
        arguments = operator.signature.arguments
        by_dims: dict[int, list[str]] = {1: [], 2: [], 3: []}
        for argument in arguments:
            pattern = argument.patterns[0]
            if pattern.pack or len(argument.patterns) > 1 or len(pattern.sizes) not in by_dims:
                wanted = f"{type(self).__name__} takes tensors of shape (B, T, H), (H,) or (B, H)"
                _backends.fail(operator.name, f"{wanted}, got {', '.join(str(a.patterns[0]) for a in arguments)}")
            by_dims[len(pattern.sizes)].append(argument.name)
        self.weights, self.states, inputs = by_dims.values()
        before = 2 * len(self.states) if self.backward else 0
        self.grads, self.after = inputs[: before // 2], inputs[before // 2 : before]
        self.inputs = inputs[before:]
        ordered = [*self.grads, *self.after, *self.inputs, *self.weights, *self.states]
        if self.tensors != ordered:
            wanted = f"{type(self).__name__} takes its tensors in the order {', '.join(ordered)}"
            _backends.fail(operator.name, f"{wanted}, got {', '.join(self.tensors)}")
        of_results = [*self.inputs, *self.weights, *self.states] if self.backward else self.states
        if not self.inputs or not self.states or len(self.outs) != len(of_results):
            what = f"{type(self).__name__} has an input, a state, and a result for each of {', '.join(of_results)}"
            _backends.fail(operator.name, f"{what}; got {len(self.outs)} results of {', '.join(self.tensors)}")
        self.sums = [self.backward and name in self.weights for name in of_results]
        self.make(self.tensors[0], ["steps_", "width_"], self.body(of_results))

    def body(self, of_results: list[str]) -> list[str]:
        """The kernel's lines. `of_results` says what each result is of."""
        now = ["place_ = (b_ * steps_ + t_) * width_ + at_"]
        now += [self.load(name, f"{name} + place_, inside_, other=0") for name in (*self.grads, *self.inputs)]
        first = [self.load(name, f"{name} + at_, inside_, other=0") for name in self.weights]
        last = []
        if self.backward:
            for state, after, grad in zip(self.states, self.after, self.grads):
                first.append(f"{state}_carried_ = tl.zeros((BLOCK,), wide_.dtype)")
                now += [
                    f"{state}_from_ = {state} + b_ * width_ + at_",
                    "if t_ > 0:",
                    f"    {state}_from_ = {after} + place_ - width_",
                    self.load(state, f"{state}_from_, inside_, other=0"),
                    f"{grad}_value_ += {state}_carried_",
                ]
        else:
            first += [self.load(name, f"{name} + b_ * width_ + at_, inside_, other=0") for name in self.states]
        known = (*self.grads, *self.inputs, *self.weights, *self.states)
        now += self.call({name: f"{name}_value_" for name in known})
        for i, (out, name) in enumerate(zip(self.outs, of_results)):
            rounded = f"value{i}_.to({out}.dtype.element_ty)"
            if not self.backward:
                now += [f"rounded{i}_ = {rounded}", f"tl.store({out} + place_, rounded{i}_, inside_)"]
                now += [f"{name}_value_ = rounded{i}_.to(wide_.dtype)"]
            elif name in self.inputs:
                now.append(f"tl.store({out} + place_, {rounded}, inside_)")
            elif name in self.weights:
                first.append(f"sum{i}_ = tl.zeros((BLOCK,), wide_.dtype)")
                now.append(f"sum{i}_ += value{i}_")
                last.append(f"tl.store({out} + b_ * width_ + at_, sum{i}_, inside_)")
            else:
                now.append(f"{name}_carried_ = value{i}_")
                kept = f"{name}_carried_.to({out}.dtype.element_ty)"
                last.append(f"tl.store({out} + b_ * width_ + at_, {kept}, inside_)")
        return [
            "chunks_ = (width_ + BLOCK - 1) // BLOCK",
            "b_ = tl.program_id(0).to(tl.int64) // chunks_",
            "at_ = tl.program_id(0) % chunks_ * BLOCK + tl.arange(0, BLOCK)",
            "inside_ = at_ < width_",
            *first,
            "for step_ in tl.range(steps_, num_stages=8):",  # With loads some steps ahead.
            f"    t_ = {'steps_ - 1 - step_' if self.backward else 'step_'}",
            *(f"    {line}" for line in now),
            *last,
        ]

    def __call__(self, *args: Any) -> Any:
        operator = self.operator
        args = tuple(operator.all_arguments(args))
        outs = operator.fake(*args)  # Which checks the arguments.
        outs = (outs,) if isinstance(outs, Tensor) else tuple(outs)
        given = [args[operator.names.index(name)].contiguous() for name in self.tensors]
        batch, steps, width = given[self.tensors.index(self.inputs[0])].shape
        parts = [
            out.new_empty((batch, width), dtype=wide_type(given[0].dtype)) if is_sum else out
            for out, is_sum in zip(outs, self.sums)
        ]
        programs = batch * triton.cdiv(width, CHANNELS)
        launch(self.plain, programs, CHANNELS, 1, *parts, *given, *self.halves_of(args), steps, width)
        done = [part.sum(0).to(out.dtype) if s else out for part, out, s in zip(parts, outs, self.sums)]
        return _signature.Signature.pack_results(done)

    # Ahead of time.

    def variants(self, configuration: Any) -> list[tuple[bool, int, int]]:
        return [(is_aligned, CHANNELS, 1) for is_aligned in (True, False)]

    def constants(self, is_aligned: bool, block: int) -> dict[str, int]:
        return {"BLOCK": block}

    def aligned(self, is_aligned: bool) -> list[str]:
        """The parameters that 16 divides."""
        return [*self.outs, *self.tensors, "width_"] if is_aligned else []

    @property
    def host(self) -> str:
        """The function of csrc/common/triton.cuh."""
        return f"recurrence<{len(self.states)}, {len(self.inputs)}, {len(self.weights)}, {str(self.backward).lower()}>"


class recurrence_backward(recurrence):
    """The same of the derivative."""

    backward = True
