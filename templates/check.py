"""`make check NAME=...`: compiles what has changed, runs an operator's contract, and times it. It saves nothing.

Most of the time goes into importing PyTorch: one process imports it, while another compiles; and where the tests begin it
becomes two, of which one imports PyTorch's compiler.
"""

import argparse
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from mmap import mmap
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]


def stem_of(name: str) -> str:
    """The family of an operator, which is not imported before it is compiled."""
    sources = {path.stem: path.read_text() for path in sorted((ROOT / "extension_cpp" / "ops").glob("[!_]*.py"))}
    stems = [stem for stem, text in sources.items() if re.search(rf"^def {re.escape(name)}\(", text, re.MULTILINE)]
    if name not in sources and not stems:
        sys.exit(
            f"templates.check: NAME must be an operator or a family, got {name!r}: families are {', '.join(sources)}"
        )
    stem = name if name in sources else stems[0]
    imported = f"from extension_cpp.ops.{stem} import"
    if imported not in (ROOT / "extension_cpp" / "ops" / "__init__.py").read_text():
        sys.exit(f"templates.check: extension_cpp/ops/__init__.py must have what makes {name} public: {imported} ...")
    return stem


# Neither the package, which is imported once it is compiled, nor Triton, which the tests import with its interpreter.
IMPORTED = ("hypothesis", "pytest", "rich.console", "torch")
COMPILER = ("sympy", "torch._dynamo", "torch.export", "torch._inductor.compile_fx")


def build() -> None:
    """As `make build`, but of CUDA code only what this machine can run."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # As in tests/conftest.py, which comes after PyTorch.
    environment = dict(os.environ)
    if not runpy.run_path(str(ROOT / "extension_cpp" / "_machine.py"))["nvidia"]().gpus:
        environment.setdefault("USE_CUDA", "0")
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
        for module in IMPORTED:
            import_module(module)
    if process.returncode:
        sys.exit(process.returncode)


class Running:
    """What a process does, for another that finds it dead: memory of both."""

    def __init__(self) -> None:
        self.text = mmap(-1, 4096)

    def note(self, what: str) -> None:
        self.text[:] = what.encode()[:4096].ljust(4096)

    def crash(self, name: str, status: int) -> str:
        """What to say of a process that a signal ended."""
        what = f"{signal.strsignal(-status)} in {self.text[:].decode(errors='replace').strip()}"
        return f'templates.check: {name}: {what}; "A kernel crashes" in the guide says what to do'


class Only:
    """Of a family's tests the contract of an operator, in two dtypes and an integer one, if it takes any; of every operator
    if the name is the family's.

    Of the reference, which is PyTorch, only the results are checked: that none is in an argument's memory. What PyTorch's
    compiler makes of the operator follows from its declaration and takes longer than all else: that is checked only if it is
    asked for.
    """

    def __init__(self, name: str, compiled: bool, traced: bool, running: Running) -> None:
        self.name, self.compiled, self.traced, self.running = name, compiled, traced, running

    def keeps(self, item: Any) -> bool:
        import torch

        from extension_cpp.testing import IMPORTS_THE_COMPILER, OF_THE_COMPILER

        case, params = getattr(getattr(item, "cls", None), "op", None), getattr(item, "callspec", None)
        if case is None or self.name not in (case.name, case.operator.stem):
            return False
        chosen = params.params if params else {}
        others = [dtype for dtype in case.dtypes if not dtype.is_floating_point]
        test = item.function.__name__
        of_other = test in OF_THE_COMPILER | IMPORTS_THE_COMPILER
        few = {torch.float32, torch.bfloat16} & {*case.dtypes} | {*others[:1]} or {*case.dtypes}
        return (
            (chosen.get("chosen") != "reference" or test == "test_parity")
            and ("dtype" not in chosen or chosen["dtype"] in few)
            and (self.compiled or test not in OF_THE_COMPILER)
            and self.traced == of_other
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running.note(nodeid)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = filter(self.keeps, items)


def contract(test: str, name: str, compiled: bool, running: Running, measure: Callable[[], str]) -> int:
    """Run the checks: what traces the operator in another process, which shows its results after those of this one. As it
    takes longer, this one measures meanwhile; a core stays free for that, as a case of the short form has one thread.
    """
    import pytest

    def run(traced: bool, running: Running) -> int:
        options = ["-q", "-x", "-rfE", "-p", "no:warnings", "-p", "no:cacheprovider"]
        return int(pytest.main([*options, test], plugins=[Only(name, compiled, traced, running)]))

    running.note(f"the import of {test}")
    elsewhere, measured, stopped = Running(), "", None

    with TemporaryFile("w+") as said:
        sys.stdout.flush()
        if not (process := os.fork()):
            for stream in (1, 2):
                os.dup2(said.fileno(), stream)
            status = run(True, elsewhere)
            sys.stdout.flush()
            os._exit(status)
        try:
            if not (status := run(False, running)):
                running.note(f"the benchmark of {name}")
                measured = measure()
        except SystemExit as error:  # Of the benchmark, which may follow from what the other process finds.
            stopped = error
        finally:
            other = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        said.seek(0)
        if not status:  # Else the other one failed too, for the same reason or one that follows from it.
            print(said.read(), end="", flush=True)
    if other < 0 and not status:
        sys.exit(elsewhere.crash(name, other))
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        sys.exit(f"templates.check: {test} has no contract of {name}: a subclass of Contract with its Case")
    if stopped and not other:
        raise stopped
    if not (status or other):
        print(measured, end="", flush=True)
    return status or other


def measure(name: str, stem: str) -> str:
    """The table of the short form, of the family if the operator has none; without the machine's limits, and on inputs that
    stay in the CPU's caches: to measure those, and to turn through more memory than these, takes longer than all else.
    """
    from rich.console import Console

    from benchmarks import harness, records
    from benchmarks.__main__ import cases, devices
    from benchmarks.report import words

    console = Console(width=None if Console().is_terminal else 150)
    console.begin_capture()
    for device in devices():
        found: list[dict] = []
        listed = [*harness.short_form(cases(stem, device))]
        for case in [case for case in listed if case.op == name] or listed:
            try:
                found += harness.measure(replace(case, rounds=min(3, case.rounds), bytes=0, operations=0))
            except harness.Unavailable as reason:
                console.print(f"not measured: {case.op}: {case.name}: {reason}", highlight=False, markup=False)
            except harness.Disagreement as error:
                sys.exit(f"templates.check: {error}")
            except Exception as error:
                what = f"benchmarks/bench_{stem}.py can't call {case.op}: {type(error).__name__}: {error}"
                sys.exit(f"templates.check: {what}; correct its arguments if you changed the schema")
        if found:
            console.print(words.table(records.Results(records.header(stem, device, records.commit(), {}), found)))
    return console.end_capture()


def main(name: str, compiled: bool, running: Running) -> None:
    stem = stem_of(name)
    build()
    test = f"tests/test_{stem}.py"
    if status := contract(test, name, compiled, running, lambda: measure(name, stem)):
        sys.exit(status)
    left = "" if compiled else f"torch.compile and torch.export too: make check NAME={name} ALL=1; "
    print(f"checked in two dtypes; {left}every dtype: {sys.executable} -m pytest {test}; everything: make test")


def in_a_process(name: str, compiled: bool) -> int:
    """The check in a process of its own, as a kernel may crash. Returns its status."""
    running = Running()

    def run() -> None:
        with suppress(KeyboardInterrupt):
            main(name, compiled, running)

    process = get_context("fork").Process(target=run)
    process.start()
    process.join()
    status = process.exitcode or 0
    if status < 0:
        print(running.crash(name, status), file=sys.stderr)
    return status


def sources() -> dict[Path, int]:
    """The files that a check depends on, and when each was written."""
    found = {}
    for folder in ("csrc", "extension_cpp", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cpp", ".cu", ".h", ".cuh"):
                with suppress(FileNotFoundError):  # An editor's, between two writes.
                    found[path] = path.stat().st_mtime_ns
    return found


def prepare() -> None:
    """Import PyTorch and its compiler, and with it Triton, which is told then whether it is interpreted."""
    for module in IMPORTED:
        import_module(module)
    interpreted = {} if sys.modules["torch"].cuda.is_available() else {"TRITON_INTERPRET": "1"}
    with patch.dict(os.environ, interpreted | os.environ):
        for module in COMPILER:
            import_module(module)


def watch(name: str, compiled: bool) -> None:
    """Check again after each edit, in a process that has imported all that is the same for each."""
    prepare()
    seen: dict[Path, int] = {}
    while True:
        if (now := sources()) != seen:
            start, seen = time.monotonic(), now
            said = "failed" if in_a_process(name, compiled) else "passed"
            print(f"{said} after {time.monotonic() - start:.1f} s; waiting for the next edit, until Ctrl+C", flush=True)
        time.sleep(0.1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m templates.check", description=__doc__)
    parser.add_argument("name", help="of an operator or a family")
    parser.add_argument("--all", action="store_true", help="also what torch.compile and torch.export make of it")
    parser.add_argument("--watch", action="store_true", help="check again after each edit, until Ctrl+C")
    given = parser.parse_args()
    os.chdir(ROOT)
    try:
        sys.exit((watch if given.watch else in_a_process)(given.name, given.all))
    except KeyboardInterrupt:
        sys.exit(130)
