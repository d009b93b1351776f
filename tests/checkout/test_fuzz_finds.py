"""tests/fuzz.py finds faults that are planted in an operator: of each it says which call makes it again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from clones import ROOT, environment

SOURCE = """
#define EXTENSION_CPP_NAMESPACE planted
#include "common/elementwise.h"

namespace {
using namespace extension_cpp;

template <class Fault>
Tensor twice(const Operator& op, const Tensor& input, const Fault& fault) {
  const Call<1> call(op, {&input});
  const Tensor result = call.empty();
  const View& view = call.views[0];
  const float* from = static_cast<const float*>(input.const_data_ptr());
  float* to = static_cast<float*>(result.mutable_data_ptr());
  const int64_t n = view.sizes[0], stride = view.strides[0];
  for (int64_t i = 0; i < n; ++i) to[i] = 2 * from[i * stride];
  fault(const_cast<float*>(from), to, n, stride);
  return result;
}

const Operator kValue("value(Tensor input) -> Tensor", "input: N of float32 -> N");
Tensor value(const Tensor& input) {
  return twice(kValue, input, [](float*, float* to, int64_t n, int64_t) {
    if (n == 17) to[16] += 1;
  });
}
const Operator kArgument("argument(Tensor input) -> Tensor", "input: N of float32 -> N");
Tensor argument(const Tensor& input) {
  return twice(kArgument, input, [](float* from, float*, int64_t n, int64_t stride) {
    if (n > 7) from[stride] = 7;
  });
}
const Operator kStray("stray(Tensor input) -> Tensor", "input: N of float32 -> N");
Tensor stray(const Tensor& input) {
  return twice(kStray, input, [](float*, float* to, int64_t n, int64_t) {
    if (n == 33) to[n] = 0;
  });
}
const Operator kOverflow("overflow(Tensor input) -> Tensor", "input: N of float32 -> N");
Tensor overflow(const Tensor& input) {
  return twice(kOverflow, input, [](float*, float* to, int64_t n, int64_t stride) {
    if (n * n - 4 * stride > 0) to[0] += 0;
  });
}

}  // namespace

EXTENSION_CPP_REGISTER(m) {
  m.add<&value>(kValue);
  m.add<&argument>(kArgument);
  m.add<&stray>(kStray);
  m.add<&overflow>(kOverflow);
}
"""
MODULE = """
from pathlib import Path

import torch

from extension_cpp import jit
from extension_cpp.ops._operator import operator
from extension_cpp.testing import Case, Contract

jit.load(Path(__file__).with_name("planted.cpp"))


@operator(name="planted::NAME")
def NAME(input):
    return input * 2


class TestPlanted(Contract):
    op = Case(NAME, lambda device, dtype: [(torch.ones(3, device=device, dtype=dtype),)])
"""
FAULTS = {
    "value": "ulps of float32",
    "argument": "memory of argument 0 was changed",
    "stray": "heap-buffer-overflow",
    "overflow": "signed integer overflow",
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    (folder / "planted.cpp").write_text(SOURCE)
    for name in FAULTS:
        (folder / f"test_{name}.py").write_text(MODULE.replace("NAME", name))
    return folder


def fuzz(folder: Path, name: str, *options: str) -> subprocess.CompletedProcess:
    # The scripts of this environment first: its ninja is the one that pip installed.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    variables = {"PATH": path, "DEBUG": "1", "TORCH_EXTENSIONS_DIR": str(folder / "cache")}
    command = [sys.executable, "tests/fuzz.py", "--tests", str(folder), "--family", f"test_{name}", "--seconds", "300"]
    env = environment(ROOT, **variables)
    return subprocess.run([*command, *options], cwd=ROOT, env=env, capture_output=True, text=True)


def check_found(done: subprocess.CompletedProcess, name: str) -> None:
    said = done.stdout + done.stderr
    assert done.returncode != 0 and FAULTS[name] in said, said
    calls = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"op"')]
    assert calls and all(call["op"] == f"planted::{name}" for call in calls), said


@pytest.mark.long
@pytest.mark.parametrize("name", ["value", "argument"])
def test_finds(planted, name):
    """What shows in the results or the arguments, without sanitizers too."""
    check_found(fuzz(planted, name), name)


@pytest.mark.long
@pytest.mark.parametrize("name", ["stray", "overflow"])
def test_finds_with_sanitizers(planted, name):
    check_found(fuzz(planted, name, "--sanitize"), name)
