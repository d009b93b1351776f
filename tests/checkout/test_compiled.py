"""The sources compiled otherwise than for users: all in sight of the linker, and without optimisation."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from clones import ROOT, environment

from extension_cpp import _build

pytestmark = pytest.mark.long
SOURCES = sorted([*ROOT.glob("csrc/*.cpp"), *ROOT.glob("csrc/common/*.cpp")])
# Another Operator than that of csrc/common/signature.h, which a family's file reads.
VIOLATION = """
#include <string>
#include <vector>
namespace extension_cpp {
class Operator {
 public:
  Operator(const char* schema, const char* signature);
  double schema;
  std::string signature;
};
extern const Operator kAnother("another() -> ()", "->");
}
"""


def with_lto(rule: str, sources: list[Path], target: Path) -> str:
    command = rule.replace(" -O3", " -O1").replace("-MD -MF $out.d ", "")
    command = command.replace("$in", shlex.join(map(str, sources))).replace("$out", shlex.quote(str(target)))
    done = subprocess.run(shlex.split(f"{command} -flto -Wodr -Werror"), cwd=ROOT, capture_output=True, text=True)
    return done.stderr if done.returncode else ""


@pytest.fixture(scope="module")
def objects(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("lto")
    paths = [folder / f"{source.name}.o" for source in SOURCES]
    rule = rules()["cxx"]
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        for error in pool.map(lambda source, path: with_lto(rule, [source], path), SOURCES, paths):
            assert not error, error
    return paths


def rules() -> dict[str, str]:
    return _build.rules(None, [sysconfig.get_path("include")])


def test_one_definition(objects, tmp_path):
    """What several files define is the same in each: of two the linker takes one without a word."""
    assert not (error := with_lto(rules()["link_cxx"], objects, tmp_path / "all.so")), error


def test_two_definitions_are_seen(objects, tmp_path):
    (tmp_path / "another.cpp").write_text(VIOLATION)
    another = tmp_path / "another.o"
    assert not (error := with_lto(rules()["cxx"], [tmp_path / "another.cpp"], another)), error
    few = [path for path in objects if path.name.startswith("signature")]
    error = with_lto(rules()["link_cxx"], [*few, another], tmp_path / "wrong.so")
    assert "Operator" in error and "-Werror=odr" in error, error


EVERY_OPERATOR = """
import pathlib
import torch
from extension_cpp.testing import clone, contracts, map_tensors, run, tensors
from extension_cpp import _loader
from extension_cpp.ops import _backends

assert str(_loader.libraries["_C"]).startswith(str(pathlib.Path.cwd())), _loader.libraries
called = set()
for contract in contracts(pathlib.Path("tests")):
    op = contract.op
    for dtype in {torch.float16, torch.float32, torch.float64} & {*op.dtypes}:
        for args in op.samples("cpu", dtype):
            if sum(t.numel() for t in tensors(args)) > 300:
                continue
            run(op, op.function, map_tensors(clone, args))
            if op.differentiable:
                leaves = contract.with_gradients(args)
                results = [t for t in tensors(op.function(*leaves)) if t.requires_grad]
                torch.autograd.backward(results, [torch.ones_like(t) for t in results])
    called.add(op.name)
print("called", *sorted(called))
assert called >= {name for name, op in _backends.operators.items() if "cpu" in op.native}
"""


def test_every_operator_without_optimisation(tmp_path):
    """DEBUG=1 has the assertions of the standard library's containers too, and code that only inlining made disappear."""
    copy = tmp_path / "checkout"
    left_out = (
        ".git",
        ".venv*",
        "build",
        "dist",
        "results",
        "pictures",
        "*.egg-info",
        "*_cache",
        "*.so",
        "__pycache__",
    )
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*left_out))
    variables = environment(copy, copy / "tests", DEBUG="1", USE_CUDA="0")
    variables["CXXFLAGS"] = f"{os.environ.get('CXXFLAGS', '')} -D_GLIBCXX_ASSERTIONS"
    for command in (["setup.py", "build_ext", "--inplace"], ["-c", EVERY_OPERATOR]):
        done = subprocess.run([sys.executable, *command], cwd=copy, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.startswith("called ")
