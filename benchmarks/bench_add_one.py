"""add_one and my_op compared with what one would use instead."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import extension_cpp
from benchmarks.contenders import CALL, DTYPES, RECORD, backward, batched_call, calls, compiled, sizes, vectors
from benchmarks.harness import OURS, Case, Function, time_calls
from extension_cpp.ops._operator import reference_of

SCALAR = 1.5


def my_op(input: Tensor) -> Tensor:
    return extension_cpp.my_op(input, SCALAR)


def plus_one(input: Tensor) -> Tensor:
    return input + 1


def scaled(input: Tensor) -> Tensor:
    return input * SCALAR


def reference(input: Tensor) -> Tensor:
    return reference_of(extension_cpp.my_op)(input, SCALAR)


PEERS: dict[str, tuple[Function, Function, dict[str, Function]]] = {
    "add_one": (extension_cpp.add_one, reference_of(extension_cpp.add_one), {"input + 1": plus_one}),
    "my_op": (my_op, reference, {"input * scalar": scaled}),
}


def peers(op: str) -> dict[str, Function]:
    ours, _, others = PEERS[op]
    # What the compiler makes of one it makes of the other.
    made = {f"compiled {name}": compiled(function) for name, function in others.items()} if op == "add_one" else {}
    return {OURS: ours, **others, **made}


def cases(device: str) -> Iterator[Case]:
    """All cases of a device."""
    for op, (ours, expected, _) in PEERS.items():
        sixteen = vectors(device, torch.float32, 16, 1)
        call = {"workload": "a call on 16 elements", "timer": time_calls, "reason": CALL}
        yield Case(op, device, peers(op), sixteen, expected, **call)
        yield from calls(op, device, ours, expected, sixteen)
        for dtype in DTYPES:
            for log2 in sizes(device, dtype):
                n = 2**log2
                common = {"dtype": dtype, "size": f"2^{log2}", "x": n, "operations": n}
                inputs = vectors(device, dtype, n, 1)
                short = log2 == 20 and op == "add_one"
                moved = 2 * dtype.itemsize * n
                yield Case(op, device, peers(op), inputs, expected, bytes=moved, short=short, **common)
    yield batched_call("add_one", device, extension_cpp.add_one, plus_one, lambda: (torch.randn(2, 16, device=device),))
    for log2 in (20, 24) if device == "cuda" else (20,):
        n = 2**log2

        def leaf(n: int = n) -> tuple[Tensor, Tensor]:
            grad, input = vectors(device, torch.float32, n, 2)()
            return grad, input.requires_grad_()

        steps = {OURS: backward(my_op), "input * scalar": backward(scaled)}
        common = {"workload": "forward and backward", "dtype": torch.float32, "size": f"2^{log2}", "bytes": 16 * n}
        common["reason"] = RECORD if device == "cuda" else ""
        if device == "cuda" and log2 == 20:  # The host takes longer than the device, and than flushing the cache hides.
            common["timer"] = time_calls
        yield Case("my_op", device, steps, leaf, backward(reference), operations=2 * n, **common)
