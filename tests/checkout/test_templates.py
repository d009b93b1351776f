"""`make new-distribution`, `make op` and `make op-remove`: what they write passes every test, and leaves no trace."""

import dis
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import copier
import pytest
import torch
from clones import ROOT, clone, commit, environment, git

import extension_cpp
from extension_cpp import _build
from extension_cpp.ops import _backends, _operator
from templates import check, op
from templates import distribution as made_by

NAME = "my_extensions"  # As long as the original's, so that lines are broken where the guide shows them.
# Names of which some make lines longer than they may be.
OPERATORS = {
    "scale": ("cpp", "one-output"),
    "in_two_parts": ("cpp", "two-outputs"),
    "scale_in_place": ("cpp", "in-place"),
    "scale_and_shift_by_what_is_optional_or": ("cpp", "optional"),
    "positive": ("cpp", "data-dependent"),
    "rows_of_root_mean_square_one": ("cpp", "row-wise"),
    "logarithm_of_the_sum_of_exponentials": ("cpp", "reduce"),
    "gated_through_time": ("cpp", "recurrence"),
    "convolved_through_time": ("cpp", "convolved"),
}
OPERATORS |= {"in_triton": ("triton", op.SHAPES[0])}
COMPILED = ("scale", "in_triton")  # By the tests that aren't long: a shape in either kind.

NAMES = {
    "Scale-It": "be in snake_case, of at most 40 characters, got 'Scale-It': try NAME=scale_it",
    "scaleIt": "be in snake_case, of at most 40 characters, got 'scaleIt': try NAME=scale_it",
    "2d": "be in snake_case, of at most 40 characters, got '2d': try NAME=d",
    "_private": "be in snake_case, of at most 40 characters, got '_private': try NAME=private",
    "größe": "be in snake_case, of at most 40 characters, got 'größe': try NAME=gr_e",
    "": "be in snake_case, of at most 40 characters, got '': try NAME=my_op",
    "x" * 41: f"be in snake_case, of at most 40 characters, got '{'x' * 41}': try NAME={'x' * 40}",
    "lambda": "not be a word of Python, got 'lambda': try NAME=my_lambda",
    "scale": "not be taken, as by benchmarks/bench_scale.py, got 'scale': try NAME=my_scale",
    "contract": "not be taken, as by tests/test_contract.py, got 'contract': try NAME=my_contract",
    "report": f"not be taken, as by {NAME}/doctor/report.py, got 'report': try NAME=my_report",
    "triton": f"not be taken, as by {NAME}/triton, got 'triton': try NAME=my_triton",
    "grad": "not be taken, as by another name in the code, got 'grad': try NAME=my_grad",
    "double": "not be a word of C++, got 'double': try NAME=my_double",
    "input": "not be taken, as by another name in the code, got 'input': try NAME=my_input",
    "times": "not be taken, as by the C++ of csrc/common/check.h, got 'times': try NAME=my_times",
    "empty": "not be taken, as by the C++ of csrc/common/memory.h, got 'empty': try NAME=my_empty",
    "detail": "not be taken, as by the C++ of csrc/common/cpu_dtypes.h, got 'detail': try NAME=my_detail",
    "simd": "not be taken, as by the C++ of csrc/common/simd.h, got 'simd': try NAME=my_simd",
    "errno": "not be a word of C++, got 'errno': try NAME=my_errno",
}
"""Names that an operator can't have, and why."""


def contents(folder: Path) -> dict[Path, bytes]:
    """What git would see."""
    left_out = re.compile(
        r"\.so$|^build/|^compile_commands\.json$|^\.git/|\.egg-info/|__pycache__|\.\w+_cache/|\.hypothesis/"
    )
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in paths if not left_out.search(str(path.relative_to(folder)))}


class Checkout:
    before: dict[Path, bytes]

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, *arguments: str, fails: bool = False, **variables: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=self.path,
            env=environment(self.path, **variables),
            capture_output=True,
            text=True,
        )
        assert (done.returncode != 0) == fails, done.stdout[-8000:] + done.stderr[-4000:]
        return done.stdout + done.stderr

    def add(self, name: str, kind: str, shape: str) -> None:
        assert f"csrc/{name}.cpp" in self.run("templates.op", "add", name, "--kind", kind, "--shape", shape)

    def run_code(self, code: str) -> str:
        """In one process, which imports what it needs once."""
        (self.path / "run_code.py").write_text(code)
        try:
            return self.run("run_code")
        finally:
            (self.path / "run_code.py").unlink()

    def build(self, **variables: str) -> None:
        variables = {**os.environ, "TORCH_CUDA_ARCH_LIST": "9.0+PTX", **variables}  # One is quick.
        build = [sys.executable, "setup.py", "build_ext", "--inplace"]
        done = subprocess.run(build, cwd=self.path, env=variables, capture_output=True, text=True)
        assert done.returncode == 0 and "warning" not in done.stdout, done.stdout[-8000:]

    def lint(self) -> None:
        self.run("ruff", "check", "--no-cache", ".")
        self.run("ruff", "format", "--no-cache", "--check", ".")
        sources = [str(path) for path in (self.path / "csrc").rglob("*") if path.is_file()]
        clang_format = Path(sys.executable).with_name("clang-format")
        subprocess.run([clang_format, "--dry-run", "--Werror", *sources], check=True)


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return clone(tmp_path_factory.mktemp("original") / "extension_cpp")


def generate(original: Path, path: Path, name: str = NAME) -> Checkout:
    """A new distribution, committed."""
    copier.run_copy(str(original), path, {"name": name}, defaults=True, unsafe=True, quiet=True, vcs_ref="HEAD")
    git(path, "init", "--quiet", "--initial-branch", "main")
    commit(path, "A distribution of operators")
    return Checkout(path)


@pytest.fixture(scope="module")
def checkout(original, tmp_path_factory) -> Checkout:
    """A distribution with an operator of each kind, built."""
    made = generate(original, tmp_path_factory.mktemp("made") / NAME)
    made.run("templates.op", "remove", made_by.EXAMPLE)
    made.before = contents(made.path)
    for name in COMPILED:
        made.add(name, *OPERATORS[name])
    # Without optimisation, and without CUDA where no GPU would run it; what takes long compiles as a user does.
    made.build(DEBUG="1", **({} if torch.cuda.is_available() else {"USE_CUDA": "0"}))
    return made


class TestDistribution:
    def test_nothing_of_the_original(self, checkout):
        """Neither its name nor its operators."""
        ops = "|".join(path.stem for path in ROOT.glob("extension_cpp/ops/[!_]*.py"))
        for path, content in contents(checkout.path).items():
            where = path.relative_to(checkout.path)
            assert not re.search(rf"extension_cpp|\b({ops})\b", str(where))
            found = re.search(rf"(?i)extension_cpp|(?<!torch\.)\b({ops})\b", content.decode())
            kept = where.name == ".copier-answers.yml" or (
                where.name == "LICENSE" and found and found[0] == "extension_cpp"
            )
            assert not found or kept, f"{found[0]} in {where}"

    def test_licence(self, checkout):
        """The original's notice stays, as its licence asks, and stands next to the distribution's."""
        holders = re.findall(
            r"^Copyright .* the (\w+) developers$", (checkout.path / "LICENSE").read_text(), re.MULTILINE
        )
        assert holders == ["extension_cpp", NAME]

    def test_documents_are_there(self, checkout):
        """Those that something names. The guides stay with the original, whose address the README has."""
        for path, content in contents(checkout.path).items():
            if not path.is_relative_to(checkout.path / "tests"):
                named = re.findall(r"[\w./-]+\.md\b", re.sub(r"wildcard \S+", "", content.decode()))
                here = [name for name in named if not name.endswith("features.md")]  # `make features` writes it.
                lost = [name for name in here if not any((at / name).exists() for at in (checkout.path, path.parent))]
                assert not lost, f"{path.relative_to(checkout.path)} names {lost}"

    def test_same_layout(self, original, checkout):
        there, here = (
            {path.split("/")[0].replace(NAME, "extension_cpp") for path in git(folder, "ls-files", "-z").split("\0")}
            for folder in (original, checkout.path)
        )
        left_out = {"docs", "examples", "CONTRIBUTING.md", "copier.yml", "~[ _copier_conf.answers_file ]~"}
        assert there - here == left_out and here - there == {".copier-answers.yml"}

    @pytest.mark.long
    @pytest.mark.parametrize("name", ["a_distribution_of_20", "ops"])
    def test_style_whatever_the_name(self, original, tmp_path, name):
        """With an operator of each shape and kind."""
        made = generate(original, tmp_path / name, name)
        added = {other: choice for other, choice in OPERATORS.items() if choice != ("cpp", op.SHAPES[0])}
        made.run_code(f"from templates import op\nfor name, choice in {added}.items():\n    op.add(name, *choice)\n")
        made.lint()
        made.run("mypy", "--cache-dir", str(ROOT / ".mypy_cache"))  # Where `make lint` has torch.

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("My-Ops", "be in snake_case, of at most 20 characters, got 'My-Ops': try my_ops"),
            ("", "be in snake_case, of at most 20 characters, got '': try my_ops"),
            ("x" * 21, f"be in snake_case, of at most 20 characters, got '{'x' * 21}': try {'x' * 20}"),
            ("json", "not be taken, as by a module of Python, torch or a folder here, got 'json': try json_ops"),
            ("class", "not be taken, as by a module of Python, torch or a folder here, got 'class': try class_ops"),
            ("tests", "not be taken, as by a module of Python, torch or a folder here, got 'tests': try tests_ops"),
            ("torch", "not be taken, as by a module of Python, torch or a folder here, got 'torch': try torch_ops"),
        ],
    )
    def test_names(self, original, tmp_path, name, message):
        with pytest.raises(ValueError, match=re.escape(f"name must {message}")):
            generate(original, tmp_path / "made", name)
        assert not (tmp_path / "made").exists()

    @pytest.mark.long
    def test_update(self, original, tmp_path):
        """What became better there comes here; what was changed here stays, the example that was taken out is not back."""
        template = tmp_path / "template"
        git(tmp_path, "clone", "--quiet", str(original), str(template))
        made = generate(template, tmp_path / "ops", "ops")
        made.run("templates.op", "remove", "scale")
        made.run("templates.op", "add", "mine")
        (made.path / "csrc" / "common" / "launch.cuh").open("a").write("// Mine.\n")
        commit(made.path, "An operator of mine")
        header = template / "csrc" / "common" / "check.h"
        header.write_text(header.read_text() + "// Better, for extension_cpp.\n")
        (template / "csrc" / "common" / "new.h").write_text("#pragma once\n")
        (template / "csrc" / "common" / "huge_pages.h").unlink()
        ours = template / "csrc" / "matmul.h"
        ours.write_text(ours.read_text() + "// Ours alone.\n")
        commit(template, "Better")
        copier.run_update(made.path, defaults=True, overwrite=True, unsafe=True, quiet=True, vcs_ref="HEAD")
        changed = dict(
            reversed(line.split(maxsplit=1)) for line in git(made.path, "status", "--porcelain").splitlines()
        )
        common = {"csrc/common/check.h": "M", "csrc/common/new.h": "??", "csrc/common/huge_pages.h": "D"}
        there = {".copier-answers.yml": "M", **common}
        assert changed == there
        assert (made.path / "csrc" / "common" / "check.h").read_text().endswith("// Better, for ops.\n")

    @pytest.mark.long
    def test_package_next_to_the_original(self, packages, original, tmp_path):
        """Built with CUDA, tested, and installed by a solver: both packages' operators in one process."""
        channels = {"CHANNEL": (ROOT / "dist" / "channel").as_uri(), "RATTLER_CACHE_DIR": str(ROOT / "dist" / "cache")}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        variables = {**channels, "PATH": path, "VARIANT": "cuda"}
        made = generate(original, tmp_path / "made")
        said = made.run("package", **variables)
        assert "1 of 1 operators do as documented under torch 2.14.1+cu130, with CUDA kernels" in said
        wanted = [
            (tmp_path / "made" / "dist" / "conda").as_uri(),
            (ROOT / "dist" / "conda").as_uri(),
            channels["CHANNEL"],
        ]
        install = f"""
import asyncio, json
from pathlib import Path
from package.__main__ import leave
from package.install import install
asyncio.run(install(["{NAME} * cuda*", "extension_cpp * cuda*", "python"], {wanted}, Path({str(tmp_path / "env")!r})))
leave(0)
"""
        (tmp_path / "install.py").write_text(install)
        done = subprocess.run(
            [sys.executable, tmp_path / "install.py"],
            env=environment(ROOT, CONDA_OVERRIDE_CUDA="13.0", **channels),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        call = f"""
import torch, extension_cpp, {NAME}
x = torch.ones(3)
torch.testing.assert_close({NAME}.scale(x, 2.0), extension_cpp.my_op(x, 2.0))
step = torch.compile(lambda x: extension_cpp.mymul({NAME}.scale(x, 2.0), x), fullgraph=True, backend="aot_eager")
assert step(x).tolist() == [2.0] * 3
both = extension_cpp.backends()["mymul"]["cuda"], {NAME}.backends()["scale"]["cuda"]
assert both == ("native", "native") and not {NAME}.load_errors and not extension_cpp.load_errors, both
"""
        done = subprocess.run(
            [tmp_path / "env" / "bin" / "python", "-c", call], capture_output=True, text=True, cwd="/"
        )
        assert done.returncode == 0, done.stderr


class TestAdd:
    @staticmethod
    def contract(checkout: Checkout, names: Iterable[str]) -> None:
        """Of each; of what has a Triton kernel the kernel's part, as their C++ is that of the others."""
        quiet = ("pytest", "-q", "-p", "no:cacheprovider")
        native, in_triton = (
            [f"tests/test_{name}.py" for name in names if OPERATORS[name][0] == kind] for kind in op.KINDS
        )
        if native:
            said = checkout.run(*quiet, *native)
            assert int(re.search(r"(\d+) passed", said)[1]) > 40 * len(native)
        if find_spec("triton"):
            said = checkout.run(*quiet, "-k", "cpu-triton", *in_triton)
            assert int(re.search(r"(\d+) passed", said)[1]) >= 3 * len(in_triton)

    def test_contract(self, checkout):
        """Of one shape in either kind."""
        self.contract(checkout, COMPILED)

    @pytest.mark.long
    def test_contract_of_all(self, checkout, monkeypatch):
        """Of every shape in either kind, as a user compiles them."""
        others = {name: choice for name, choice in OPERATORS.items() if name not in COMPILED}
        others |= {f"t{i}": ("triton", shape) for i, shape in enumerate(op.IN_TRITON[1:])}
        monkeypatch.setattr(sys.modules[__name__], "OPERATORS", {**OPERATORS, **others})
        for name, choice in others.items():
            checkout.add(name, *choice)
        ahead = bool(find_spec("triton") and shutil.which("nvcc"))
        checkout.build(USE_CUDA=str(int(ahead)))
        checkout.lint()
        if ahead:  # What is a formula in Triton is compiled with the package.
            (made,) = checkout.path.glob("build/**/triton.cu")
            formulas = {name for name, (kind, _) in OPERATORS.items() if kind == "triton"}
            assert formulas <= {*re.findall(r"^// (\w+)$", made.read_text(), re.MULTILINE)}
        self.contract(checkout, OPERATORS)
        checkout.run("pytest", "-q", "-p", "no:cacheprovider", "tests/test_opinfo.py")
        self.verify(checkout, OPERATORS)
        for name in others:
            checkout.run("templates.op", "remove", name)
        checkout.build(DEBUG="1", USE_CUDA="0")

    def test_check(self, checkout):
        """`make check`: the contract of the operator alone and its times, or the first failure; nothing is saved."""
        before = contents(checkout.path)
        variables = {"DEBUG": "1", "USE_CUDA": "0"}
        said = checkout.run("templates.check", "in_triton", **variables)
        passed = [int(count) for count in re.findall(r"(\d+) passed", said)]  # Of two processes.
        assert "ninja: no work to do." in said and len(passed) == 2 and sum(passed) >= 20
        assert (
            re.search(r"in_triton +│ forward, float32, 2\^20, one thread", said)
            and "pytest tests/test_in_triton.py" in said
        )
        formula = checkout.path / NAME / "triton" / "in_triton.py"
        written = formula.read_text()
        formula.write_text(written.replace("input * scalar_arg\n", "input * scalar_arg + 1\n"))
        said = checkout.run("templates.check", "in_triton", **variables, fails=True)
        assert (
            "FAILED tests/test_in_triton.py::TestInTriton::test_parity[cpu-triton-" in said and "one thread" not in said
        )
        formula.write_text(written)
        assert contents(checkout.path) == before

    def test_watch(self, monkeypatch, capfd):
        """`make check WATCH=1`: once for what is there and once for each other state of the sources, failed or not."""

        def main(name: str, compiled: bool, running: check.Running) -> None:
            sys.exit(f"{name} is wrong" if state == {"a": 2} else 0)

        def sources() -> dict[str, int]:
            nonlocal state
            state = next(states)
            return state

        state, states = {}, iter([{"a": 1}, {"a": 1}, {"a": 2}, {"a": 2}, {"a": 2, "b": 1}])
        monkeypatch.setattr(check, "main", main)
        monkeypatch.setattr(check, "sources", sources)
        with pytest.raises(StopIteration):
            check.watch("scale", False)
        said = capfd.readouterr()
        assert re.findall("^(passed|failed) after", said.out, re.MULTILINE) == ["passed", "failed", "passed"]
        assert said.err.count("scale is wrong") == 1

    @pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
    @pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU Triton isn't interpreted")
    def test_watch_interprets_triton(self):
        """Also what Triton itself defines, as tl.sum: it is imported before the tests are."""
        code = "from templates import check; check.prepare(); from triton import language; print(type(language.sum).__name__)"
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True
        )
        assert done.stdout.strip() == "InterpretedFunction"

    def test_crash(self, monkeypatch, capfd):
        """A kernel that ends the process: which operator it was, and in which test."""

        def main(name: str, compiled: bool, running: check.Running) -> None:
            running.note("test_parity[cpu-float32]")
            signal.raise_signal(signal.SIGKILL)  # Which pytest says nothing about.

        monkeypatch.setattr(check, "main", main)
        assert check.in_a_process("scale", False) == -signal.SIGKILL
        assert "check: scale: Killed in test_parity[cpu-float32]; " in capfd.readouterr().err

    def test_sources(self):
        """What a check depends on."""
        found = {str(path.relative_to(op.ROOT)) for path in check.sources()}
        assert {"csrc/module.cpp", "extension_cpp/testing.py", "tests/conftest.py"} <= found
        assert not any(path.endswith(".so") for path in found)

    def test_what_every_operator_must_have(self, checkout):
        """Kernels, and examples in docstrings."""
        files = ["tests/test_libraries.py", *(f"tests/checkout/test_{name}.py" for name in ("docs", "report"))]
        checkout.run("pytest", "-q", "-p", "no:cacheprovider", *files)

    @staticmethod
    def verify(checkout: Checkout, names: Iterable[str]) -> None:
        """Of those in C++, as the others have the same."""
        verify = f"""
from benchmarks import harness
from benchmarks.__main__ import cases
for name in {[name for name in names if OPERATORS[name][0] == "cpp"]}:
    case = next(cases(name, "cpu"))
    harness.verify(case, case.inputs())
"""
        checkout.run_code(verify)

    def test_benchmark(self, checkout):
        """Each case's contenders compute what the reference does."""
        self.verify(checkout, COMPILED)

    def test_names(self, checkout):
        """One as the command says it, all others in one process."""
        before = contents(checkout.path)
        name, message = next(iter(NAMES.items()))
        assert f"templates.op: NAME must {message}" in checkout.run("templates.op", "add", name, fails=True)
        ask = f"""
import json
from templates import op
for name in {[*NAMES]}:
    try:
        op.add(name, "cpp", "one-output")
        print()
    except SystemExit as error:
        print(error)
"""
        said = checkout.run_code(ask).splitlines()
        assert said == [f"templates.op: NAME must {message}" for message in NAMES.values()]
        assert contents(checkout.path) == before

    def test_operators_that_are_checked(self, tmp_path, monkeypatch):
        """By their own name or the family's."""
        assert [check.stem_of(name) for name in ("muladd", "mymul", "my_op")] == ["muladd", "muladd", "add_one"]
        message = "templates.check: NAME must be an operator or a family, got 'absent': families are add_one, "
        with pytest.raises(SystemExit, match=re.escape(message)):
            check.stem_of("absent")
        monkeypatch.setattr(check, "ROOT", tmp_path)
        (tmp_path / "extension_cpp" / "ops").mkdir(parents=True)
        for name, text in (("scale", "def scale(input):\n"), ("__init__", "")):
            (tmp_path / "extension_cpp" / "ops" / f"{name}.py").write_text(text)
        with pytest.raises(
            SystemExit, match=r"ops/__init__.py must have what makes scale public: from .*\.ops\.scale import"
        ):
            check.stem_of("scale")

    @pytest.mark.parametrize(
        ("name", "by"),
        [
            ("nms", "benchmarks/bench_nms.py"),
            ("overview", "benchmarks/pictures/overview-speed.svg"),
            ("mymul_backward", "another name in the code"),
        ],
    )
    def test_names_of_this_project(self, name, by):
        with pytest.raises(SystemExit, match=re.escape(f"not be taken, as by {by}, got {name!r}: try NAME=my_{name}")):
            op.check_name(name, "cpp", "one-output")


class TestRemove:
    """After all others: these take the operators out."""

    def test_what_was_changed_is_kept(self, checkout):
        path = checkout.path / "csrc" / "scale.cpp"
        written = path.read_text()
        path.write_text(written + "// Mine.\n")
        before = contents(checkout.path)
        said = checkout.run("templates.op", "remove", "scale", fails=True)
        assert "NAME must be of files as `make op` writes them, as changes would be lost (FORCE=1 removes" in said
        assert contents(checkout.path) == before
        path.write_text(written)

    def test_rename(self, checkout):
        """There and back; in between it is what `make op` writes under the other name."""
        before = contents(checkout.path)
        said = checkout.run("templates.op", "rename", "scale", "--to", "multiplied_by_a_number")
        assert f"{NAME}/ops/multiplied_by_a_number.py" in said
        assert not [path for path in contents(checkout.path) if re.search(r"(^|_)scale\.", path.name)]
        written = checkout.path / "tests" / "test_multiplied_by_a_number.py"
        assert "class TestMultipliedByANumber(Contract)" in written.read_text()
        same = "from templates.op import *; files = render('multiplied_by_a_number', 'cpp', 'one-output')"
        same += "; assert all(path.read_text() == text for path, text in files.items())"
        (checkout.path / "same.py").write_text(same)
        checkout.run("same")
        (checkout.path / "same.py").unlink()
        said = checkout.run("templates.op", "rename", "multiplied_by_a_number", "--to", "input", fails=True)
        assert (
            "templates.op: TO must not be taken, as by another name in the code, got 'input': try TO=my_input" in said
        )
        checkout.run("templates.op", "rename", "multiplied_by_a_number", "--to", "scale")
        assert contents(checkout.path) == before

    def test_no_such_operator(self, checkout):
        """Nor the name of other files, as of tests/test_signature.py, csrc/common/ and the package's modules."""
        before = contents(checkout.path)
        names = ("absent", "", "*", "../x", "signature", "common", "facts", "elementwise", "_operator", "module")
        ask = f"""
from templates import op
for name in {names}:
    for act in (lambda: op.remove(name, True), lambda: op.rename(name, "other")):
        try:
            act()
            print()
        except SystemExit as error:
            print(error)
"""
        said = checkout.run_code(ask).splitlines()
        files = f"{NAME}/ops/NAME.py and csrc/NAME.cpp"
        wanted = [f"templates.op: NAME must be that of an operator's files, {files}, got {name!r}: " for name in names]
        assert len(said) == 2 * len(wanted) and all(map(str.startswith, said, [w for w in wanted for _ in range(2)]))
        assert contents(checkout.path) == before

    def test_no_trace_is_left(self, checkout):
        """Not of results and pictures either."""
        results = checkout.path / "benchmarks" / "results"
        results.mkdir()
        measured = next((ROOT / "benchmarks" / "results").glob("muladd-cpu-*.jsonl")).read_text()
        (results / "scale-cpu.jsonl").write_text(re.sub("mymuladd|muladd", "scale", measured))
        checkout.run("benchmarks.report")
        assert (checkout.path / "benchmarks" / "pictures" / "scale-speed.svg").exists()
        added = {name: choice for name, choice in OPERATORS.items() if name not in COMPILED}
        checkout.run_code(
            f"from templates import op\nfor name, choice in {added}.items():\n    op.add(name, *choice)\n"
        )
        (checkout.path / "csrc" / "positive.cpp").open("a").write("// Mine.\n")
        checkout.run("templates.op", "remove", "positive", "--force")
        names = [
            *(name for name in added if name != "positive"),
            *COMPILED,
        ]  # What is not compiled can't be reported on.
        checkout.run_code(f"from templates import op\nfor name in {names}:\n    op.remove(name, False)\n")
        after = contents(checkout.path)
        assert {path for path in {*after, *checkout.before} if after.get(path) != checkout.before.get(path)} == set()


def test_make_passes_them_on():
    """The Makefile's targets call the commands that the tests call."""
    for target, wanted in (
        ("op NAME=scale KIND=triton SHAPE=in-place", 'templates.op add "scale" --kind "triton" --shape "in-place"'),
        ("check NAME=scale", 'templates.check "scale"'),
        ("check NAME=scale ALL=1", 'templates.check "scale" --all'),
        ("check NAME=scale WATCH=1", 'templates.check "scale"  --watch'),
        ("op-rename NAME=scale TO=scaled", 'templates.op rename "scale" --to "scaled"'),
        ("op-remove NAME=scale FORCE=1", 'templates.op remove "scale" --force'),
        ("new-distribution NAME=my_ops DEST=../my_ops", f'--data "name=my_ops" --defaults "{ROOT}" "../my_ops"'),
    ):
        done = subprocess.run(["make", "-n", *target.split()], cwd=ROOT, capture_output=True, text=True)
        assert wanted in done.stdout
    assert op.KINDS == ["cpp", "triton"] and len(op.SHAPES) == 9
    done = subprocess.run(["make", "-n", "op"], cwd=ROOT, capture_output=True, text=True)
    assert "templates.op list" in done.stdout and "templates.op add" not in done.stdout


@pytest.mark.parametrize(
    ("given", "message"),
    (
        ("", "NAME must be in snake_case, of at most 20 characters, got '': try my_ops"),
        (
            "NAME=My-Ops DEST=../my_ops",
            "NAME must be in snake_case, of at most 20 characters, got 'My-Ops': try my_ops",
        ),
        ("NAME=json DEST=../json", "NAME must not be taken"),
        ("NAME=my_ops", "DEST must be a new folder, got ''"),
    ),
)
def test_new_distributions_that_are_refused(given, message):
    """In a line, before anything is copied; without DEST it would be into this folder."""
    done = subprocess.run(["make", "new-distribution", *given.split()], cwd=ROOT, capture_output=True, text=True)
    assert (
        done.returncode != 0 and f"templates.distribution: {message}" in done.stderr and "Traceback" not in done.stderr
    )
    assert "(make new-distribution NAME=my_ops DEST=../my_ops)" in done.stderr and "copier copy" not in done.stdout


def test_choices():
    """`make op` without a name: a line for each."""
    said = subprocess.run([sys.executable, "-m", "templates.op", "list"], cwd=ROOT, capture_output=True, text=True)
    for word, choices in (("KIND", op.KINDS), ("SHAPE", op.SHAPES)):
        assert re.findall(rf"^  {word}=(\S+) +\S", said.stdout, re.MULTILINE) == choices


def test_a_shape_without_triton():
    with pytest.raises(SystemExit) as refused:
        op.add("mine", "triton", "convolved")
    assert "SHAPE=convolved must have KIND=cpp, as it has no form in Triton, got KIND=triton" in str(refused.value)
    assert not op.find("mine", *op.SOURCES)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
@pytest.mark.parametrize(
    "shape", [pytest.param(s, marks=[pytest.mark.long] * (s != "data-dependent")) for s in op.SHAPES]
)
@pytest.mark.builds
def test_compiles_for_cuda(shape, tmp_path):
    """The kernels too that have a .cu of their own, which a machine without a GPU compiles for packages only."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "common").symlink_to(ROOT / "csrc" / "common")
    for path, text in op.render("for_cuda", "cpp", shape).items():
        if path.parent.name == "csrc":
            (folder / path.name).write_text(text)
    command = _build.rules("nvcc", [], ["9.0"])["nvcc"].replace("$in", "csrc/for_cuda.cu").replace("$out", "for_cuda.o")
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def instructions(function) -> list[str]:
    """Without what only says how long the argument of the next one is."""
    return [i.opname for i in dis.get_instructions(function) if i.opname != "EXTENDED_ARG"]


@pytest.fixture
def library(monkeypatch):
    with torch.library._scoped_library("extension_cpp", "FRAGMENT") as library:
        before = dict(_backends.operators)
        # No kernel stays in the process that later tests share.
        monkeypatch.setattr(_operator, "_libraries", lambda namespace: (library, library))
        yield library
        _backends.operators.clear()
        _backends.operators.update(before)


def declared(library, shape: str):
    """The public function of an operator as `make op` writes it, declared without its kernels."""
    name = f"called_{shape.replace('-', '_')}"
    files = op.render(name, "cpp", shape)
    sources = "".join(text for path, text in files.items() if path.parent.name == "csrc")
    for operator, schema in re.findall(rf'"({name}(?:_backward)?)(\(.*?)"[,)]', re.sub(r'"\s*"', "", sources)):
        library.define(f"{operator}{schema}")
        library.define(f"{operator}.kernel{schema}")
    source = next(text for path, text in files.items() if path.parent.name == "ops")
    made: dict = {"__name__": f"extension_cpp.ops.{name}"}
    exec(compile(source, f"{name}.py", "exec", dont_inherit=True), made)
    return made[name].operator.write_out()


def without_exact(function: Any) -> Any:
    """As if its declaration had no exact=, which adds what comes after the call of the kernel."""
    operator = copy(function.operator)
    operator.declared = replace(operator.declared, exact=False)
    operator.function = operator._make_function()
    return operator.write_out()


def as_if_it_wrote(function: Any) -> Any:
    """Into its first argument."""
    operator = copy(function.operator)
    operator.written, operator.differentiable = [0], False
    operator.function = operator._make_function()
    return operator.write_out()


@pytest.mark.parametrize("shape", op.SHAPES)
def test_a_call_takes_no_more_than_of_our_own(library, shape):
    """The instructions from a call to the dispatcher are those of our own operators, but for the number of arguments."""
    if _backends.chosen:
        pytest.skip("calls take the slower way where the environment chooses a backend")
    ours = extension_cpp.add_one, extension_cpp.my_op, extension_cpp.mymul, extension_cpp.mymuladd
    add_one, my_op, mymul, mymuladd = map(without_exact, ours)
    length = {function: len(instructions(function)) for function in (add_one, my_op, mymul)}
    number, tensor = length[my_op] - length[add_one], length[mymul] - length[add_one]
    assert number > 0 and tensor > 0
    assert len(instructions(mymuladd)) == length[mymul] + number
    made = declared(library, shape)
    if shape == "in-place":
        assert instructions(made) == instructions(as_if_it_wrote(my_op))
    elif shape == "row-wise":  # Two tensors and a number with a default: a test for it, and a call that leaves it out.
        more = Counter(instructions(made))
        more.subtract(instructions(mymuladd))
        assert min(more.values()) == 0 and more["IS_OP"] == 1 and sum(more.values()) <= 12
    elif shape == "reduce":  # One tensor.
        assert instructions(made) == instructions(add_one)
    elif shape == "recurrence":  # Four tensors, where mymul has two.
        assert len(instructions(made)) == length[mymul] + 2 * tensor
    elif shape == "convolved":
        assert len(instructions(made)) == length[mymul] + tensor
    elif shape == "optional":  # Whether it is None is asked before its type and again before its gradient.
        assert 0 < len(instructions(made)) - length[my_op] <= 2 * tensor
    else:
        assert instructions(made) == instructions(my_op)
