"""What holds of each operator's backends, whatever the operators are: Triton's kernels, and other types of device."""

import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from processes import PACKAGE, python

import extension_cpp
from extension_cpp import _machine, use_backend
from extension_cpp.ops import _backends

HERE = Path(__file__).parent
OPERATORS = [op for op in _backends.operators.values() if op.reference.__module__.startswith("extension_cpp.ops.")]
CUDA = bool(torch.version.cuda)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
needs_triton_here = pytest.mark.skipif(bool(_backends.why_no_triton()), reason=_backends.why_no_triton())


def test_initialises_and_imports_nothing():
    """Neither CUDA nor Triton, the compiler or DTensor, each of which takes longer than this package's import."""
    done = python("""
import torch
before = set(sys.modules)
import extension_cpp
extension_cpp.backends()
print({"triton", "torch._dynamo", "torch.distributed.tensor"} & (set(sys.modules) - before), torch.cuda.is_initialized())
""")
    assert done.stdout.strip() == "set() False", done.stderr


@pytest.mark.parametrize("imports", ["", "import torch._dynamo"])
def test_a_public_function_before_its_first_call(imports):
    """Its code is written out then, or once torch.compile can read it; its parameters are the same before and after."""
    done = python(f"""
import inspect
import torch
import extension_cpp
from extension_cpp.ops._backends import operators
functions = {{op.name: op.function for op in operators.values()}}
codes = {{name: function.__code__ for name, function in functions.items()}}
before = {{name: inspect.signature(function) for name, function in functions.items()}}
{imports}
for name, function in functions.items():
    if {not imports}:
        try:
            function()
        except TypeError as error:
            assert str(error).startswith(f"{{name}}() missing "), error
    assert function.__code__ is not codes[name]
    assert inspect.signature(function) == before[name]
    assert [*before[name].parameters] == [*function.__code__.co_varnames[: len(before[name].parameters)]]
print(len(functions))
""")
    assert int(done.stdout or 0) >= len(OPERATORS), done.stderr


def test_an_overload_each_with_the_same_schema():
    for packet in (operator.packet for operator in OPERATORS):
        for backend in ("native", "reference"):
            use_backend(backend)
            schema = str(getattr(packet, backend)._schema).replace(f".{backend}(", "(")
            assert schema == str(packet.default._schema)


@needs_triton_here
def test_triton_has_the_schema_too():
    """Inferred from the Python function by triton_op, written in C++ for the operator."""
    use_backend("triton")
    for operator in (operator for operator in OPERATORS if operator.triton):
        described = [
            [(a.name, str(a.type)) for a in overload._schema.arguments]
            + [str(r.type) for r in overload._schema.returns]
            for overload in (operator.packet.default, operator.packet.triton)
        ]
        assert described[0] == described[1], operator.name


def test_triton_kernels_are_declared():
    """With triton=True; without it nothing calls them, and nothing tests them."""
    files = {path.stem for path in (PACKAGE / "triton").glob("*.py")}
    files -= {"__init__", "_ahead", "elementwise", "recurrence", "rowwise", "selection"}
    undeclared = files - {operator.stem for operator in OPERATORS if operator.triton}
    assert not undeclared, f"no operator of {', '.join(sorted(undeclared))} is declared with triton=True"


@needs_triton
def test_triton_kernels_name_what_they_call():
    """Inductor writes the source of each function down, not the name that a kernel has for it."""
    for operator in (operator for operator in OPERATORS if operator.triton):
        function = getattr(import_module(f"extension_cpp.triton.{operator.stem}"), operator.name)
        if hasattr(function, "prepare"):  # A formula under @elementwise.
            function.prepare(operator)
            for kernel in function.kernels:
                code, scope = kernel.plain.fn.__code__, kernel.plain.fn.__globals__
                called = {name: scope[name].fn.__name__ for name in code.co_names if hasattr(scope.get(name), "fn")}
                assert called and all(name == own for name, own in called.items()), called


@pytest.fixture
def compiled(monkeypatch):
    """As if _C_cuda had Triton's kernel of an operator, for 8.0 and with PTX for 9.0."""
    operator = next(operator for operator in OPERATORS if operator.public)
    name = operator.qualified
    monkeypatch.setattr(_backends, "compiled", lambda: (["8.0", "9.0+PTX"], frozenset({name})))
    monkeypatch.setattr(operator, "native", ["cpu", "cuda"])
    monkeypatch.setattr(operator, "triton", True)
    return operator


def test_what_is_compiled_with_the_package_has_a_name(compiled):
    told = extension_cpp.backends()
    assert told[compiled.name]["cuda"] == "triton (compiled)" and told[compiled.name]["cpu"] == "native"
    others = [by_device.values() for name, by_device in told.items() if name != compiled.name]
    assert not any("triton (compiled)" in used for used in others)


@pytest.mark.parametrize(
    ("gpus", "driver", "left"),
    [
        ([(8, 0), (8, 6), (9, 0)], 13000, False),
        ([(7, 5)], 13000, True),
        ([(9, 0), (7, 5)], 13000, True),
        ([(8, 0), (12, 0)], 13000, False),
        ([(12, 0)], 13000, False),  # Which the driver compiles the PTX for.
        ([(12, 0)], 12080, True),  # That of an older CUDA doesn't.
    ],
)
def test_gpus_that_run_what_is_compiled_with_the_package(compiled, monkeypatch, gpus, driver, left):
    """If one can't, the operator does without."""
    seen = []
    monkeypatch.setattr(compiled, "leave_compiled", lambda: seen.append("left"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: gpus[i])
    monkeypatch.setattr(_machine, "driver_version", lambda: driver)
    monkeypatch.setattr(_backends._elf, "built_for", lambda library: (13000, []))
    monkeypatch.setitem(_backends._loader.libraries, "_C_cuda", PACKAGE / "_C_cuda.so")
    _backends.leave_compiled()
    assert seen == ["left"] * left


@pytest.mark.slow
def test_the_environment_names_no_backend():
    done = python("import extension_cpp", EXTENSION_CPP_BACKEND="fast")
    variable = "extension_cpp: in the environment variable EXTENSION_CPP_BACKEND the backend must be"
    assert f"{variable} native, triton or reference, got 'fast'" in done.stderr
    done = python("sys.modules['triton'] = None; import extension_cpp", EXTENSION_CPP_BACKEND="triton")
    assert f"{variable} native or reference, got 'triton': Triton is not installed" in done.stderr


def contracts(chosen: str, interpret: str) -> int:
    """How many tests of those that are chosen pass in another process, with Triton's interpreter or without."""
    others = [path for path in sorted(HERE.glob("test_*.py")) if path != Path(__file__)]
    names = [path.name for path in others if re.search(r"Contract\)|SeesInside", path.read_text())]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *names, "-k", chosen],
        env={**os.environ, "TRITON_INTERPRET": interpret},
        cwd=HERE,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return int(re.search(r"(\d+) passed", done.stdout)[1])


@pytest.mark.slow
@pytest.mark.long
@needs_triton
def test_contract_in_the_interpreter():
    """The whole contract of Triton's kernels on the CPU, of which the operators' own tests run what depends on the kernel.

    Finite differences, for which the interpreter is slow, of one alone: formulas of derivatives are those of every backend.
    """
    names = [operator.name for operator in OPERATORS if operator.triton]
    if not names:
        pytest.skip("no operator has a Triton kernel")
    first = "".join(map(str.capitalize, names[0].split("_")))  # As in the name of its test's class.
    assert contracts(f"triton and not cuda and (not gradcheck or {first})", "1") > 12 * len(names)


@needs_triton
@pytest.mark.skipif(not CUDA or not _backends.interpreted, reason="this process shows it")
def test_the_compiler_sees_inside_without_the_interpreter():
    """On fake tensors, where torch is built for CUDA and no GPU is there."""
    assert contracts("SeesInside or fake_cuda", "0") >= len(extension_cpp.ops.__all__)


@pytest.mark.long  # Half a minute, most of which compiles PyTorch's own headers.
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ninja") is None or shutil.which("c++") is None, reason="needs ninja and c++")
def test_another_type_of_device(tmp_path):
    """PyTorch's place for new devices, PrivateUse1: every operator, its derivatives and its compiled form, and warnings."""
    path = os.pathsep.join([str(PACKAGE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, HERE / "other_device.py", tmp_path],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "operators"
