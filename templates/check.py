"""`make check NAME=...`: compiles what has changed, runs an operator's contract, and times it. It saves nothing.

All in one process: in each of three, most of the time would go into importing PyTorch.
"""

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]


def stem_of(name: str) -> str:
    """The family of an operator, which is not imported before it is compiled."""
    sources = {path.stem: path.read_text() for path in sorted((ROOT / "extension_cpp" / "ops").glob("[!_]*.py"))}
    stems = [stem for stem, text in sources.items() if re.search(rf"^def {re.escape(name)}\(", text, re.MULTILINE)]
    if name not in sources and not stems:
        sys.exit(
            f"templates.check: NAME must be an operator or a family, got {name!r}: families are {', '.join(sources)}"
        )
    return name if name in sources else stems[0]


def build() -> None:
    """As `make build`, but of CUDA code only what this machine can run."""
    if not torch.cuda.is_available():
        os.environ.setdefault("USE_CUDA", "0")
    sys.argv[:] = ["setup.py", "--quiet", "build_ext", "--inplace"]
    runpy.run_path(str(ROOT / "setup.py"), run_name="__main__")


class Only:
    """Of a family's tests the contract of an operator, in two dtypes; of every operator if the name is the family's.

    The reference, which is PyTorch, is not checked against itself. What needs PyTorch's compiler comes last: half of the time
    goes into importing that.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def keeps(self, item: pytest.Item) -> bool:
        case, params = getattr(getattr(item, "cls", None), "op", None), getattr(item, "callspec", None)
        if case is None or self.name not in (case.name, case.operator.stem):
            return False
        chosen = params.params if params else {}
        few = {torch.float32, torch.bfloat16} & {*case.dtypes} or {*case.dtypes}
        return chosen.get("chosen") != "reference" and ("dtype" not in chosen or chosen["dtype"] in few)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            filter(self.keeps, items), key=lambda item: item.name.startswith(("test_opcheck", "test_compile"))
        )


def measure(name: str, stem: str) -> None:
    """The short form, of the family if the operator has none; without the machine's limits, which take long to measure."""
    from benchmarks import harness, records
    from benchmarks.__main__ import cases, devices
    from benchmarks.report import words

    console = Console(width=None if Console().is_terminal else 150)
    for device in devices():
        found: list[dict] = []
        listed = [*harness.short_form(cases(stem, device))]
        for case in [case for case in listed if case.op == name] or listed:
            try:
                found += [record | {"bytes": 0, "operations": 0} for record in harness.measure(case)]
            except harness.Unavailable as reason:
                console.print(f"not measured: {case.op}: {case.name}: {reason}", highlight=False, markup=False)
            except harness.Disagreement as error:
                sys.exit(f"templates.check: {error}")
        if found:
            console.print(words.table(records.Results(records.header(stem, device, records.commit(), {}), found)))


def main(name: str) -> None:
    stem = stem_of(name)
    build()
    test = f"tests/test_{stem}.py"
    if status := pytest.main(["-q", "-x", "-rfE", "-p", "no:warnings", test], plugins=[Only(name)]):
        sys.exit(int(status))
    measure(name, stem)
    print(f"checked in two dtypes; all of the family's tests: {sys.executable} -m pytest {test}; everything: make test")


if __name__ == "__main__":
    os.chdir(ROOT)
    main(sys.argv[1])
