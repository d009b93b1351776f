"""What each operator has besides kernels, from its declaration, and the check that proves it: docs/features.md.

A check of the contract `proves` features. For an operator that lacks them it is skipped, for the reason that the table gives;
for any other it runs. So the table says what the tests do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
HEAD = """\
# Features

Written by `make features`, from the operators' declarations. A check of [the contract](../extension_cpp/testing.py)
runs for each operator that has the feature it proves, and is skipped for the others, for the reason that is given
here. A feature that names no torch works with each torch ≥ 2.10.
"""
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "features.md"


@dataclass(frozen=True)
class Feature:
    """Of an operator, which is an extension_cpp.ops._operator.Operator."""

    name: str
    how: Callable[[Any], str] = lambda op: "yes"
    """What an operator that has it has of it."""
    lacks: Callable[[Any], str] = lambda op: ""
    """Why an operator doesn't have it, if it doesn't."""
    since: tuple[int, int] = (2, 10)
    """The torch that it needs."""
    test: str = ""
    """The file of the test that proves it for all operators, where that is no check of the contract."""


def no_derivative(op: Any) -> str:
    if op.written:
        return "it writes into an argument, which has no derivative"
    if op.differentiable:
        return ""
    return "it takes no floating tensor" if op.declared.differentiable else "it is declared with `differentiable=False`"


def no_second_derivative(op: Any) -> str:
    once = op.declared.differentiable == "once"
    return no_derivative(op) or ('it is declared with `differentiable="once"`' if once else "")


def dynamic(op: Any) -> str:
    return "the size of the result depends on values" if op.signature.dynamic_size else ""


def no_halves(op: Any) -> str:
    there = {torch.bfloat16, torch.float32} <= {*op.signature.dtypes}
    return "" if there else "it doesn't take both bfloat16 and float32"


def no_symbols(op: Any) -> str:
    if "float" not in op.types:
        return "no argument is a float"
    if op.written:
        return "it writes into an argument"
    return "its `fake=` may ask for the value" if op.declared.fake else ""


def not_nested(op: Any) -> str:
    if not op.signature.elementwise or len(op.signature.results) != 1:
        return "PyTorch takes elementwise operators with one result"
    return "" if op.tensors in ([0], [0, 1]) else "PyTorch takes one or two tensors, which come first"


def vmap(op: Any) -> str:
    """In how many calls; `Contract.check_calls_of_vmap` counts them."""
    if op.written:
        return "if PyTorch batches its reference"
    if op.signature.elementwise:
        return "one call"
    along = one_call_along(op)
    other = "its own rule" if op.declared.vmap else "batched reference" if op.differentiable else "a call each"
    return f"one call along {', '.join(along)}, else {other}" if along else other


def one_call_along(op: Any) -> list[str]:
    """The dimensions that a batch can be a part of: of results that all have them."""
    every = op.declared.independent.split()
    return [name for name in every if all(name in result.pattern.sizes for result in op.signature.results)]


def autocast(op: Any) -> str:
    policies = {"promote": "widest dtype", "lower": "autocast's dtype", "float32": "float32", "": "no cast"}
    return "no cast" if op.written else policies[op.declared.autocast]


def sharding(op: Any) -> str:
    if op.signature.elementwise:
        return "any dimension, torch ≥ 2.11" if op.written else "any dimension"  # 2.10 takes none without results.
    summed = [f"sums over {names(op.declared.summed)}"] if op.declared.summed else []
    return ", ".join([names(op.declared.independent), *summed] if op.declared.independent else summed) or "replicated"


def names(sizes: str) -> str:
    return ", ".join(sizes.split())


ROWS = [
    Feature("gradients", lambda op: "formula" if op.backward else "of the reference", no_derivative),
    Feature("second derivatives", lacks=no_second_derivative),
    Feature("forward mode: `jvp`, `jacfwd`", lambda op: "of the reference", no_derivative),
    Feature("`torch.func`: `grad`, `vjp`, `jacrev`", lacks=no_derivative),
    Feature(
        "transforms of transforms: `hessian`",
        lacks=lambda op: no_second_derivative(op) or dynamic(op),
        test="test_opinfo.py",
    ),
    Feature("`vmap`", vmap, dynamic),
    Feature("autocast casts to", autocast, no_halves),
    Feature(
        "autocast by a user's rule", lacks=lambda op: "it writes into an argument" if op.written else no_halves(op)
    ),
    Feature("fake tensors"),
    Feature("`torch.compile`, one graph", lambda op: "if dynamic shapes are captured" if dynamic(op) else "yes"),
    Feature("`torch.compile`, one graph for all sizes"),
    Feature(
        "fused by Inductor",
        lambda op: "float32, float64",
        lambda op: "" if op.declared.fused else "it is declared without `fused`, so that it stays a call of the kernel",
    ),
    Feature("numbers as symbols: one graph for all values", lacks=no_symbols, since=(2, 13)),
    Feature(
        "`torch.export`, `run_decompositions`",
        lambda op: "kept for ONNX" if op.declared.onnx else "PyTorch's operators",
    ),
    Feature(
        "ONNX",
        lambda op: "translation" if op.declared.onnx else "decomposition",
        test="checkout/test_exporters.py",
    ),
    Feature("AOTInductor without Python", test="checkout/test_aoti.py"),
    Feature("DTensor: sharded along", sharding, dynamic, test="test_sharding.py"),
    Feature(
        "operations, for `FlopCounterMode`",
        lambda op: f"`{op.declared.flops}`" if op.declared.flops else "one an element",
        lambda op: "" if op.declared.flops or op.signature.elementwise else "it is declared without `flops`",
    ),
    Feature("names in a profile"),
    Feature("tags", lambda op: ", ".join(f"`{tag.name}`" for tag in op.default.tags)),
    Feature("deterministic algorithms"),
    Feature("jagged nested tensors", lacks=not_nested),
    Feature("dispatch modes"),
    Feature("a user's kernel is used"),
    Feature("Triton kernel", lacks=lambda op: "" if op.declared.triton else "it is declared without `triton=True`"),
    Feature("CUDA graphs", lacks=dynamic),
]
FEATURES = {feature.name: feature for feature in ROWS}


def proves(*names: str, refused: bool = False) -> Callable[[Callable], Callable]:
    """Of a check of the contract: the features that it proves, of an operator that has one of them; or of every operator,
    if the check also says what one without them does."""
    features = [FEATURES[name] for name in names]

    def decorate(check: Callable) -> Callable:
        @wraps(check)
        def run(self: Any, *args: Any, **kwargs: Any) -> None:
            operator = self.op.operator
            reasons = [feature.lacks(operator) for feature in features]
            if all(reasons) and not refused:
                pytest.skip(f"not of this operator: {reasons[0]}")
            oldest = min(feature.since for feature in features)
            if oldest > TORCH:
                pytest.skip(f"{names[0]}: it needs torch {'.'.join(map(str, oldest))}")
            check(self, *args, **kwargs)

        run.proves = names  # type: ignore[attr-defined]
        return run

    return decorate


def proofs(contract: type) -> dict[str, list[str]]:
    """The checks, or the other test, that prove each feature."""
    found = {row.name: [row.test] if row.test and (ROOT / "tests" / row.test).exists() else [] for row in ROWS}
    for check in vars(contract).values():
        for name in getattr(check, "proves", ()):
            found[name].append(check.__name__)
    return found


def rows(operators: list[Any], by: dict[str, list[str]], reasons: list[str]) -> Iterator[list[str]]:
    """Of what is proved here; adds to the reasons."""
    for feature in filter(lambda feature: by[feature.name], ROWS):
        cells = []
        for operator in operators:
            if reason := feature.lacks(operator):
                if reason not in reasons:
                    reasons.append(reason)
                cells.append(f"no ({reasons.index(reason) + 1})")
            else:
                cells.append(feature.how(operator))
        newer = f", torch ≥ {'.'.join(map(str, feature.since))}" if feature.since > (2, 10) else ""
        yield [feature.name + newer, *cells, ", ".join(f"`{name}`" for name in by[feature.name])]


def document(contracts: Iterable[Any], contract: type) -> str:
    """docs/features.md, of the operators that have a contract."""
    operators = [found.op.operator for found in contracts if found.op.operator.public]
    reasons: list[str] = []
    lines = [*rows(operators, proofs(contract), reasons)]
    head = ["feature", *(f"`{operator.name}`" for operator in operators), "proved by"]
    table = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)]
    text = [
        HEAD,
        *table,
        "\nWhy an operator lacks a feature:\n",
        *(f"{i}. {reason}" for i, reason in enumerate(reasons, 1)),
    ]
    return "\n".join(text) + "\n"
