"""What is loaded where, and what a user reads when something can't be."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import extension_cpp
from extension_cpp.ops import _register

PACKAGE = Path(extension_cpp.__file__).parent


def python(code: str, path: Path = PACKAGE.parent) -> subprocess.CompletedProcess:
    # An editable install would find the libraries that a copy lacks.
    start = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]"
    code = f"{start}\nsys.path.insert(0, {str(path)!r})\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")


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


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "text"])
def test_damaged_c(copy, damage):
    library = copy / "_C.abi3.so"
    content = library.read_bytes()
    library.unlink()
    if damage != "missing":
        library.write_bytes({"empty": b"", "truncated": content[: len(content) // 2], "text": b"not a library"}[damage])
    done = python("import extension_cpp", copy.parent)
    assert done.returncode == 1
    message = done.stderr[done.stderr.rindex("ImportError: extension_cpp could not load its library _C") :]
    assert f"torch {torch.__version__}" in message and sys.executable in message
    assert "undefined symbol" in message and "GLIBC" in message and "another platform" in message
    if damage == "missing":
        assert f"not compiled: {copy} has" in message


CUDA_TORCH = "import torch; torch.version.cuda = torch.version.cuda or '13.0'; import extension_cpp"


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_damaged_c_cuda(copy, damage):
    """The import succeeds, the CPU works, and the reason is there to be read."""
    library = copy / "_C_cuda.so"
    library.unlink(missing_ok=True)
    if damage == "truncated":
        library.write_bytes(b"\x7fELF, but not for long")
    use = "print(extension_cpp.load_errors['_C_cuda'], extension_cpp.mymul(torch.ones(2), torch.ones(2)).tolist())"
    done = python(f"{CUDA_TORCH}; {use}", copy.parent)
    reason = {
        "missing": "this is the CPU build of extension_cpp",
        "truncated": "_C_cuda.so could not be loaded under torch",
    }
    reason = reason[damage]
    assert reason in done.stdout and "[1.0, 1.0]" in done.stdout, done.stderr


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


def test_reference_serves_other_devices_and_warns_once(monkeypatch):
    """XPU stands for any device type without a kernel: its dispatch key leads to the reference."""
    monkeypatch.setattr(_register, "_warned", set())
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


@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
def test_every_vector_width(level):
    """The contract's values hold for the code of each instruction set that this machine has."""
    selected = "(parity or layouts or touched or half_values or torch_mul or fused) and cpu"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_muladd.py", "-k", selected],
        env={**os.environ, "EXTENSION_CPP_SIMD": level},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
