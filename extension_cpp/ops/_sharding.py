"""How DTensor splits an operator over a mesh of devices, from its signature.

Registered at an operator's first use with DTensor, of which the fake kernel knows first: DTensor asks it for the shape of the
results before it looks for a rule. So nothing here imports torch.distributed.tensor unless the program has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from extension_cpp.ops._backends import fail

_registered: set[Any] = set()


def register(operator: Any, overload: Any) -> None:
    """Tell DTensor the rule of an overload, if DTensor is in use and hasn't been told."""
    if overload in _registered or "torch.distributed.tensor" not in sys.modules:
        return
    _registered.add(overload)
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(overload)(partial(shardings, operator))
    if operator.written:  # To move what is written elsewhere first would lose it.
        rules = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
        rules[overload] = partial(_leave_written, operator, rules[overload])


def shardings(operator: Any, *args: Any) -> list[tuple[list[Any], list[Any]]]:
    """The placements of results and arguments, on one dimension of a mesh, with which each device computes its part."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    signature, declared = operator.signature, operator.declared
    results = [result.pattern for result in signature.results]
    tensors = {
        operator.names.index(argument.name): (argument, t) for argument, t in signature.tensors(args) if t is not None
    }
    found: list[tuple[list[Any], list[Any]]] = []

    def add(dims: dict[int, int], outs: list[Any]) -> None:
        """With arguments sharded along these dimensions, by position."""
        inputs = [Shard(dims[i]) if i in dims else Replicate() if i in tensors else None for i in range(len(args))]
        found.append((outs, inputs))

    add({}, [Replicate() for _ in results])
    if signature.elementwise:
        shape = torch.broadcast_shapes(*(t.shape for _, t in tensors.values()))
        for d, size in enumerate(shape):
            places = {i: d - len(shape) + len(t.shape) for i, (_, t) in tensors.items()}
            dims = {i: at for i, at in places.items() if at >= 0 and tensors[i][1].shape[at] == size}
            full = all({operator.names.index(name) for name in p.broadcast} & {*dims} for p in results if p.broadcast)
            if size != 1 and full:
                add(dims, [Shard(d) for _ in results])
        return found
    patterns = {i: signature.pattern_of(argument, len(t.shape)) for i, (argument, t) in tensors.items()}
    leading = max(
        (len(t.shape) - len(patterns[i].sizes) for i, (_, t) in tensors.items() if patterns[i].pack), default=0
    )

    def dim_of(pattern: Any, name: str | int) -> int | None:
        """Where a shape has a dimension of this name, or this one of its leading ones."""
        if isinstance(name, int):
            return name if pattern.pack else None
        return pattern.sizes.index(name) + leading * pattern.pack if name in pattern.sizes else None

    every = [*patterns.values(), *results]
    summed = declared.summed.split()
    for part in dict.fromkeys([*declared.independent.split(), *summed]):
        if any(p.names.count(part) != p.sizes.count(part) or p.sizes.count(part) > 1 for p in every):
            continue  # Of "T+1" no device has its part alone.
        for name in range(leading) if part == "..." else [part]:
            named = {i: dim_of(p, name) for i, p in patterns.items()}
            outs = [dim_of(p, name) for p in results]
            if part in summed or None not in outs:
                dims = {i: at for i, at in named.items() if at is not None}
                add(dims, [Partial() if at is None else Shard(at) for at in outs])
    return found


def _leave_written(operator: Any, rule: Any, call: Any) -> Any:
    """Of the shardings, those in which what is written stays where it is."""
    strategy = rule(call)
    tensors = [i for i, arg in enumerate(call.args_schema) if i in operator.tensors and arg is not None]
    for i in {*operator.written} & {*tensors}:
        now, at = call.args_schema[i].strategies[0].output_spec.placements, tensors.index(i)
        strategy.strategies = [s for s in strategy.strategies if s.input_specs[at].placements == now]
        if not strategy.strategies:
            wanted = "replicated, or sharded where each part can be written alone"
            fail(operator.name, f"{operator.names[i]} must be {wanted}, got {now}")
    return strategy


def is_sharded(args: Iterable[Any]) -> bool:
    """Whether a tensor among these is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(arg, module.DTensor) for arg in args)


def on_each_device(function: Callable, args: Sequence[Any]) -> Any:
    """The results of whole arguments, the same on each device."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = next(arg.device_mesh for arg in args if isinstance(arg, DTensor))
    found = function(*(arg.full_tensor() if isinstance(arg, DTensor) else arg for arg in args))
    replicated = [Replicate()] * mesh.ndim
    return tuple(t if t is None else DTensor.from_local(t, mesh, replicated, run_check=False) for t in found)
