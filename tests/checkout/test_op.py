"""`make op` and `make op-remove`: what they write passes every test as it is, and leaves no trace."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from templates import op

ROOT = Path(__file__).parents[2]
PYTHONPATH = [path for path in [os.environ.get("PYTHONPATH")] if path]
# Names of which some make lines longer than they may be.
OPERATORS = {
    "scale": ("cpp", "one-output"),
    "in_two_parts": ("cpp", "two-outputs"),
    "scale_in_place": ("cpp", "in-place"),
    "scale_and_shift_by_what_is_optional_or": ("cpp", "optional"),
    "positive": ("cpp", "data-dependent"),
}
OPERATORS |= {f"t{i}": ("triton", shape) for i, shape in enumerate(op.SHAPES)}


def contents(folder: Path) -> dict[Path, bytes]:
    """What git would see."""
    left_out = re.compile(r"\.so$|^build/|\.egg-info/|__pycache__|\.\w+_cache/|\.hypothesis/")
    paths = (path for path in folder.rglob("*") if path.is_file())
    found = {path: path.read_bytes() for path in paths if not left_out.search(str(path.relative_to(folder)))}
    # Another matplotlib than that of the committed pictures draws otherwise.
    return {path: b"" if path.suffix == ".svg" else content for path, content in found.items()}


class Checkout:
    """A copy of this one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        shutil.copytree(ROOT, path, ignore=shutil.ignore_patterns(".git", ".venv*", "dist", "*.so", "build", "*_cache"))
        self.before = contents(path)

    def run(self, *arguments: str, fails: bool = False, **variables: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=self.path,
            env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join([str(self.path), *PYTHONPATH])},
            capture_output=True,
            text=True,
        )
        assert (done.returncode != 0) == fails, done.stdout[-8000:] + done.stderr[-4000:]
        return done.stdout + done.stderr

    def build(self) -> None:
        variables = {**os.environ, "TORCH_CUDA_ARCH_LIST": "9.0+PTX"}  # One is quick.
        build = [sys.executable, "setup.py", "build_ext", "--inplace"]
        done = subprocess.run(build, cwd=self.path, env=variables, capture_output=True, text=True)
        assert done.returncode == 0 and "warning" not in done.stdout, done.stdout[-8000:]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Checkout:
    """With an operator of each kind and shape, built."""
    made = Checkout(tmp_path_factory.mktemp("op") / "checkout")
    for name, (kind, shape) in OPERATORS.items():
        said = made.run("templates.op", "add", name, "--kind", kind, "--shape", shape)
        assert f"csrc/{name}.cpp" in said
    made.build()
    return made


class TestAdd:
    def test_contract(self, checkout):
        """Of each, and in Triton's interpreter where Triton is."""
        quiet = ("pytest", "-q", "-p", "no:cacheprovider")
        files = [f"tests/test_{name}.py" for name in OPERATORS]
        checkout.run(*quiet, "--write-answers", "-k", "answers", *files)
        in_triton = [f"tests/test_{name}.py" for name, (kind, _) in OPERATORS.items() if kind == "triton"]
        parallel = (*quiet, "--quick", "-n", "2", "--dist", "loadfile")
        said = checkout.run(*parallel, *sorted(set(files) - set(in_triton)))
        assert int(re.search(r"(\d+) passed", said)[1]) > 100
        if find_spec("triton"):  # Their C++ is that of the others.
            said = checkout.run(*parallel, "-k", "triton", *in_triton, TRITON_INTERPRET="1")
            assert int(re.search(r"(\d+) passed", said)[1]) > 50

    def test_what_every_operator_must_have(self, checkout):
        """Kernels, examples in docstrings, a row in the README, a benchmark; and the results that others have still count."""
        files = ["tests/test_libraries.py", *(f"tests/checkout/test_{name}.py" for name in ("docs", "report"))]
        files.append("tests/checkout/test_bench.py::TestBadInput::test_every_operator_is_measured")
        checkout.run("pytest", "-q", "-p", "no:cacheprovider", *files)

    def test_style(self, checkout):
        checkout.run("ruff", "check", "--no-cache", ".")
        checkout.run("ruff", "format", "--no-cache", "--check", ".")
        checkout.run("mypy")
        sources = [str(path) for path in (checkout.path / "csrc").iterdir()]
        clang_format = Path(sys.executable).with_name("clang-format")
        subprocess.run([clang_format, "--dry-run", "--Werror", *sources], check=True)

    def test_benchmark(self, checkout):
        """Each case's contenders compute what the reference does."""
        verify = f"""
from benchmarks import harness
from benchmarks.__main__ import cases
for name in {list(OPERATORS)}:
    case = next(cases(name, "cpu"))
    harness.verify(case, case.inputs())
"""
        (checkout.path / "verify.py").write_text(verify)
        checkout.run("verify")
        (checkout.path / "verify.py").unlink()

    def test_the_guide_shows_what_is_written(self, checkout):
        """Each block of code stands in the file that it names, and each shape has the schema that the table says."""
        guide = (ROOT / "docs" / "add-an-operator.md").read_text()
        blocks = re.findall(r"^`([\w/.]+)`:\n\n```\w+\n(.*?)```", guide, re.DOTALL | re.MULTILINE)
        for path, block in blocks:
            assert block in (checkout.path / path).read_text(), path
        assert len(blocks) == len(re.findall("^```[a-z]+$", guide, re.MULTILINE)) > 5
        schemas = dict(re.findall(r"^\| `make op NAME=scale(?: SHAPE=)?([\w-]*)` \| `(.*?)`", guide, re.MULTILINE))
        assert [schema or op.SHAPES[0] for schema in schemas] == op.SHAPES
        for name, (_, shape) in OPERATORS.items():
            wanted = schemas.get(shape, schemas[""])
            assert f'm.def("{name}{wanted}");' in (checkout.path / "csrc" / f"{name}.cpp").read_text()

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("Scale-It", "be in snake_case, of at most 40 characters, got 'Scale-It': try NAME=scale_it"),
            ("scaleIt", "be in snake_case, of at most 40 characters, got 'scaleIt': try NAME=scale_it"),
            ("2d", "be in snake_case, of at most 40 characters, got '2d': try NAME=d"),
            ("_private", "be in snake_case, of at most 40 characters, got '_private': try NAME=private"),
            ("größe", "be in snake_case, of at most 40 characters, got 'größe': try NAME=gr_e"),
            ("", "be in snake_case, of at most 40 characters, got '': try NAME=my_op"),
            ("x" * 41, f"be in snake_case, of at most 40 characters, got '{'x' * 41}': try NAME={'x' * 40}"),
            ("lambda", "not be a word of Python, got 'lambda': try NAME=my_lambda"),
            ("nms", "not be taken, as by benchmarks/bench_nms.py, got 'nms': try NAME=my_nms"),
            ("scale", "not be taken, as by benchmarks/bench_scale.py, got 'scale': try NAME=my_scale"),
            ("contract", "not be taken, as by tests/test_contract.py, got 'contract': try NAME=my_contract"),
            ("build", "not be taken, as by tests/checkout/test_build.py, got 'build': try NAME=my_build"),
            ("overview", "not be taken, as by benchmarks/pictures/overview-dark.svg, got 'overview'"),
            ("triton", "not be taken, as by extension_cpp/triton, got 'triton': try NAME=my_triton"),
            ("mymul_backward", "not be taken, as by another name in the code, got 'mymul_backward'"),
            ("torch", "not be taken, as by another name in the code, got 'torch': try NAME=my_torch"),
            ("input", "not be taken, as by another name in the code, got 'input': try NAME=my_input"),
        ],
    )
    def test_names(self, checkout, name, message):
        before = contents(checkout.path)
        assert f"templates.op: NAME must {message}" in checkout.run("templates.op", "add", name, fails=True)
        assert contents(checkout.path) == before


class TestRemove:
    """After all others: these take the operators out."""

    def test_what_was_changed_is_kept(self, checkout):
        path = checkout.path / "csrc" / "scale.h"
        written = path.read_text()
        path.write_text(written + "// Mine.\n")
        before = contents(checkout.path)
        said = checkout.run("templates.op", "remove", "scale", fails=True)
        assert "NAME must be of files as `make op` writes them, as changes would be lost (FORCE=1 removes" in said
        assert contents(checkout.path) == before
        path.write_text(written)

    def test_no_such_operator(self, checkout):
        for name in ("absent", "", "*", "../x"):
            said = checkout.run("templates.op", "remove", name, fails=True)
            assert f"NAME must be that of an operator's files, got {name!r}" in said

    def test_no_trace_is_left(self, checkout):
        """Not of results, pictures and answers either."""
        results = checkout.path / "benchmarks" / "results"
        measured = (results / "muladd-cpu.jsonl").read_text()
        (results / "scale-cpu.jsonl").write_text(re.sub("mymuladd|muladd", "scale", measured))
        checkout.run("benchmarks.report")
        assert (checkout.path / "benchmarks" / "pictures" / "scale-dark.svg").exists()
        (checkout.path / "csrc" / "positive.cpp").open("a").write("// Mine.\n")
        for name in OPERATORS:
            checkout.run("templates.op", "remove", name, *(["--force"] if name == "positive" else []))
        after = contents(checkout.path)
        assert {path for path in {*after, *checkout.before} if after.get(path) != checkout.before.get(path)} == set()


def test_make_passes_them_on():
    """The Makefile's targets call the commands that the tests call."""
    for target, wanted in (
        ("op NAME=scale KIND=triton SHAPE=in-place", 'templates.op add "scale" --kind "triton" --shape "in-place"'),
        ("op-remove NAME=scale FORCE=1", 'templates.op remove "scale" --force'),
    ):
        done = subprocess.run(["make", "-n", *target.split()], cwd=ROOT, capture_output=True, text=True)
        assert wanted in done.stdout
    assert op.KINDS == ["cpp", "triton"] and len(op.SHAPES) == 5
