"""What is loaded where, and what a user reads when something can't be."""

import ast
import os
import re
import shutil
import subprocess
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from modulefinder import ModuleFinder
from pathlib import Path
from unittest import mock

import pytest
import torch
from processes import PACKAGE, python

import extension_cpp
from extension_cpp.ops import _backends
from extension_cpp.ops._later import when_imported


@pytest.fixture
def copy(tmp_path) -> Path:
    """A copy of the package that a test may break."""
    shutil.copytree(PACKAGE, tmp_path / "extension_cpp", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "extension_cpp"


def test_import_initialises_no_device():
    maps = "import os, extension_cpp, torch; maps = open('/proc/self/maps').read()"
    done = python(f"{maps}; print(torch.cuda.is_initialized(), '_C.abi3.so' in maps, '_C_cuda.so' in maps)")
    cuda = torch.version.cuda is not None and (PACKAGE / "_C_cuda.so").exists()
    assert done.stdout.split() == ["False", "True", str(cuda)], done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_fork_after_import_can_use_cuda():
    done = python("""
import os, torch, extension_cpp
pid = os.fork()
if pid == 0:
    a = torch.ones(3, device="cuda")
    os._exit(0 if extension_cpp.mymuladd(a, a, 1.0).tolist() == [2.0] * 3 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
a = torch.ones(3, device="cuda")
assert extension_cpp.mymuladd(a, a, 1.0).tolist() == [2.0] * 3
""")
    assert done.returncode == 0, done.stderr


def test_operators_are_exported():
    for name in extension_cpp.ops.__all__:
        assert getattr(extension_cpp, name) is getattr(extension_cpp.ops, name)
        assert name in extension_cpp.__all__
        assert getattr(extension_cpp, name).__doc__


def test_what_waits_for_an_import_runs_when_the_module_is_executed(tmp_path, monkeypatch):
    """Not when its spec is looked for, nor after an import that fails; a folder of the name is no such module."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    (tmp_path / "awaited_folder").mkdir()
    (tmp_path / "awaited.py").write_text("1 / 0")
    ran: list[str] = []
    for name in ("awaited", "awaited_folder", "awaited_and_missing"):
        when_imported(name, lambda module: ran.append(module.__name__))
    assert find_spec("awaited") and find_spec("awaited_folder") and not find_spec("awaited_and_missing")
    with pytest.raises(ZeroDivisionError):
        import_module("awaited")
    assert not ran
    (tmp_path / "awaited.py").write_text("fixed = True")
    for _ in range(2):
        find_spec("awaited")
        import_module("awaited")
    import_module("awaited_folder")
    assert ran == ["awaited"]


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "text", "pipe"])
def test_damaged_c(copy, damage):
    library = copy / "_C.abi3.so"
    content = library.read_bytes()
    library.unlink()
    if damage == "pipe":
        os.mkfifo(library)
    elif damage != "missing":
        library.write_bytes({"empty": b"", "truncated": content[: len(content) // 2], "text": b"not a library"}[damage])
    done = python("import extension_cpp", copy.parent)
    assert done.returncode == 1
    message = done.stderr[done.stderr.rindex("ImportError: extension_cpp could not load its library _C") :]
    assert f"torch {torch.__version__}" in message and sys.executable in message
    assert "undefined symbol" in message and "GLIBC" in message and "another platform" in message
    if damage == "missing":
        assert f"not compiled: {copy} has" in message
    else:
        assert f"{library} is damaged, " in message


CUDA_TORCH = "import torch; torch.version.cuda = torch.version.cuda or '13.0'; import extension_cpp"
WITHOUT_TRITON = "sys.modules['triton'] = None; "
# What a user then sees. The dispatcher leads a call on CUDA tensors where it leads these, on tensors that any machine can
# make; as they really are on the CPU, it is there that the reason must stand.
CALLS_ON_CUDA = """
import warnings
extension_cpp.load_errors["_C_cpu"] = extension_cpp.load_errors["_C_cuda"]
print("reason:", extension_cpp.load_errors.get("_C_cuda"))
print("cpu:", extension_cpp.mymul(torch.ones(2), torch.ones(2)).tolist())
key = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
ops = torch.ops.extension_cpp
a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        results = ops.mymuladd.default.redispatch(key, a, b, 0.5), ops.mymul.default.redispatch(key, a, b)
        print("cuda:", *(t.tolist() for t in results))
print("warnings:", len(caught), *(w.message for w in caught))
"""


def check_fallback(done: subprocess.CompletedProcess, *reasons: str) -> None:
    """CPU kernels work, CUDA tensors get the reference's right answers, and one warning in the process says why."""
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1:4] == ["cpu: [1.0, 1.0]", *["cuda: [3.5, 6.5] [3.0, 6.0]"] * 2]
    assert lines[4].startswith("warnings: 1 extension_cpp: mymuladd and all other operators run their slower PyTorch")
    for reason in reasons:
        assert reason in lines[0] and reason in lines[4]


DAMAGES = {
    "missing": ("this is the CPU build of extension_cpp", "conda install 'extension_cpp=*=cuda*'"),
    "truncated": ("is damaged, it ends too early", "conda install --force-reinstall extension_cpp"),
    "text": ("_C_cuda.so can't be used with torch", "is damaged, it is no library, but 10 bytes of something else"),
    "pipe": ("_C_cuda.so can't be used with torch", "is damaged, it is not a regular file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_c_cuda(copy, damage):
    library = copy / "_C_cuda.so"
    library.unlink(missing_ok=True)
    content = (copy / "_C.abi3.so").read_bytes()
    if damage == "pipe":
        os.mkfifo(library)
    elif damage != "missing":
        library.write_bytes({"truncated": content[: len(content) // 2], "text": b"no library"}[damage])
    check_fallback(python(WITHOUT_TRITON + CUDA_TORCH + CALLS_ON_CUDA, copy.parent), *DAMAGES[damage])


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_triton_is_used_without_c_cuda(copy):
    """With one warning in the process. The interpreter takes tensors of the CPU."""
    (copy / "_C_cuda.so").unlink(missing_ok=True)
    told = 'print(extension_cpp.backends()["mymul"]["cuda"])'
    done = python(CUDA_TORCH + CALLS_ON_CUDA + told, copy.parent, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[2:4] == ["cuda: [3.5, 6.5] [3.0, 6.0]"] * 2 and lines[5] == "triton"
    others = "as do all other operators that can; those that can't run their slower PyTorch reference"
    said = (
        f"warnings: 1 extension_cpp: mymuladd runs in Triton on cuda, {others}: this is the CPU build of extension_cpp"
    )
    assert lines[4].startswith(said)


def fake_driver(folder: Path, version: int) -> str:
    """A libcuda.so.1 that says which CUDA it supports and can do nothing else; returns where to look for it."""
    folder.mkdir()
    source = folder / "driver.c"
    source.write_text(f"int cuDriverGetVersion(int* version) {{ *version = {version}; return 0; }}\n")
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", folder / "libcuda.so.1"], check=True)
    return os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")])


def test_driver_older_than_the_library(copy, tmp_path):
    """Every launch would fail: the library is not loaded."""
    if not (copy / "_C_cuda.so").exists():
        shutil.copy(copy / "_C.abi3.so", copy / "_C_cuda.so")
        with (copy / "_C_cuda.so").open("ab") as stream:
            stream.write(b"extension_cpp: CUDA 13000, architectures 9.0+PTX;")
    path = fake_driver(tmp_path / "driver", 12040)
    done = python(WITHOUT_TRITON + CUDA_TORCH + CALLS_ON_CUDA, copy.parent, LD_LIBRARY_PATH=path)
    runtime = "it was built with CUDA 13.0, and the NVIDIA driver supports CUDA 12.4 at most"
    check_fallback(done, runtime, "update the driver, or conda install 'extension_cpp=*=cuda12*'")


@pytest.mark.parametrize("version", [13000, 13020, 14000])
def test_driver_as_new_as_the_library(copy, tmp_path, version):
    """Any driver of that major version or a newer one will do."""
    path = fake_driver(tmp_path / "driver", version)
    (copy / "library").write_text("extension_cpp: CUDA 13000, architectures 9.0+PTX;")
    ask = "_machine.driver_version(), _loader.check_driver(_loader.FOLDER / 'library')"
    done = python(
        f"import torch; from extension_cpp import _loader, _machine; print({ask})", copy.parent, LD_LIBRARY_PATH=path
    )
    assert done.stdout.split() == [str(version), "None"], done.stderr


@pytest.mark.skipif(torch.version.cuda is not None, reason="under a CUDA torch the library loads")
@pytest.mark.skipif(not (PACKAGE / "_C_cuda.so").exists(), reason="built for CPU only")
def test_c_cuda_under_a_torch_without_cuda():
    """Were torch mistaken for a CUDA build, the reason would name the missing symbol."""
    done = python(f"{CUDA_TORCH}; print(extension_cpp.load_errors['_C_cuda'])")
    assert "undefined symbol" in done.stdout, done.stderr


def test_old_torch():
    done = python("import torch; torch.__version__ = '2.9.1'; import extension_cpp")
    assert "ImportError: extension_cpp needs PyTorch >= 2.10, found 2.9.1 in" in done.stderr
    assert "pip install -U torch" in done.stderr


def test_no_torch():
    done = python("sys.modules['torch'] = None; import extension_cpp")
    assert "ImportError: extension_cpp needs PyTorch >= 2.10, and importing torch failed" in done.stderr
    assert "pip install torch" in done.stderr


def test_old_python():
    """Says so, before it imports a module that such a Python can't read."""
    code = "sys.version_info = (3, 9, 18, 'final', 0)\ntry:\n    import extension_cpp\nfinally:\n    print(list(sys.modules))"
    done = python(code)
    assert f"ImportError: extension_cpp needs Python >= 3.10, and {sys.executable} is Python" in done.stderr
    assert "extension_cpp." not in done.stdout
    ast.parse((PACKAGE / "__init__.py").read_text(), feature_version=(3, 9))


def test_reference_is_used_on_other_devices_and_warns_once(monkeypatch):
    """XPU stands for any device type without a kernel: its dispatch key leads to the reference."""
    monkeypatch.setattr(_backends, "_warned", set())
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.XPU)
    a, b, out = torch.tensor([1.0, 2.0]), torch.tensor([3.0]), torch.empty(2)
    ops = torch.ops.extension_cpp
    with pytest.warns(UserWarning, match="mymuladd: runs its slower PyTorch reference on cpu"):
        assert ops.mymuladd.default.redispatch(key, a, b, 0.5).tolist() == [3.5, 6.5]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.mymuladd.default.redispatch(key, a, b, 0.5)
    with pytest.warns(UserWarning, match="myadd_out"):
        ops.myadd_out.default.redispatch(key, a, b, out)
    assert out.tolist() == [4.0, 5.0]
    with pytest.raises(RuntimeError, match=r"mymuladd: a and b must have shapes that broadcast, got \(2,\) and \(3,\)"):
        ops.mymuladd.default.redispatch(key, a, torch.ones(3), 0.5)


def test_sparse_is_refused():
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(RuntimeError, match=r"mymul: a must be a strided tensor, got torch\.sparse_coo"):
        extension_cpp.mymul(sparse, sparse)


@pytest.mark.slow
@pytest.mark.parametrize(
    "level", ["baseline", *(pytest.param(level, marks=pytest.mark.long) for level in ("avx2", "avx512", "avx512_bf16"))]
)
def test_every_vector_width(level):
    """The values hold for the code of each instruction set that this machine has; the other tests see the best one."""
    here = Path(__file__).parent
    files = ["test_convrnn.py", "test_matmul.py", "test_muladd.py", "test_nms.py"]
    chosen = "parity or layouts or touched or half_values or torch_mul or one_rounding or any_strides or any_product"
    chosen += " or sizes or scales or small_sets or long_sums or rounding or of_reference or element_by_element or tanh"
    command = ["-q", "--quick", "-p", "no:cacheprovider", "-p", "no:warnings", *files]
    command += ["-k", f"({chosen}) and cpu and not reference and not triton"]
    done = python(
        f"import os; os.chdir({str(here)!r}); sys.path.insert(0, {str(here)!r})\n"
        f"import pytest; sys.exit(pytest.main({command}))",
        EXTENSION_CPP_SIMD=level,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 60


def test_what_collects_imports_finds_the_library():
    """A tool that makes a program of what a script imports reads statements, as this module of Python's own does."""
    finder = ModuleFinder(path=[])  # What they name is enough: it follows none.
    with mock.patch.object(finder, "import_hook", wraps=finder.import_hook) as imported:
        finder.load_file(str(PACKAGE / "_loader.py"))
    assert "extension_cpp._C" in {call.args[0] for call in imported.call_args_list}
