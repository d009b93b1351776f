"""How many floating-point operations a call has, for torch.utils.flop_counter.FlopCounterMode."""

from __future__ import annotations

import importlib.util
import math
import sys
from typing import Any

import torch

from extension_cpp.ops import _backends

COUNTER = "torch.utils.flop_counter"


def add(operator: Any) -> None:
    """Enter the formula of an operator, now or as soon as PyTorch's counter is imported."""
    if COUNTER in sys.modules:
        _register(operator)
    elif _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    """Enters all formulas when PyTorch's counter is imported: it imports Triton, which takes longer than this package."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name != COUNTER:
            return None
        sys.meta_path.remove(_Finder)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_register(module: Any) -> None:
            execute(module)
            for operator in [*_backends.operators.values()]:
                _register(operator)

        spec.loader.exec_module = execute_and_register
        return spec


def _register(operator: Any) -> None:
    def formula(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return count(operator, operator.all_arguments(args))

    sys.modules[COUNTER].register_flop_formula(operator.packet, get_raw=True)(formula)


def count(operator: Any, args: Any) -> int:
    """Of a call, by the declaration: a sum of products of sizes, "2 M N K + M N"; one an element if elementwise."""
    from extension_cpp.ops._signature import value

    signature = operator.signature
    sizes = signature.check(args)
    leading = [t.shape for argument, t in signature.tensors(args) if t is not None and argument.patterns[0].pack]
    sizes["..."] = torch.broadcast_shapes(*leading).numel() if signature.broadcasts else math.prod(sizes.get("...", ()))
    terms = operator.declared.flops or ("..." if signature.elementwise else "0")
    return sum(
        math.prod(sizes[size] if size == "..." else int(value(size, sizes)) for size in term.split())
        for term in terms.split(" + ")
    )
