"""Loads the native libraries.

``_C`` has the schemas and the CPU kernels and loads under every torch >= 2.10. ``_C_cuda`` has the CUDA kernels; it is
loaded where the package has it, torch was built with CUDA and the driver serves the CUDA it was built with. Loading
initialises no device and never fails for lack of one: without its CUDA library the package still works, and operators on
CUDA tensors run their PyTorch reference.
"""

import ctypes
import importlib
import os
import platform
import re
import struct
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
MINIMUM_TORCH = (2, 10)

libraries: dict[str, Path] = {}
"""What was loaded, and from where."""

load_errors: dict[str, str] = {}
"""Why a native library of this package isn't used: library to reason."""

just_in_time = os.environ.get("EXTENSION_CPP_JIT", "0") not in ("", "0")
"""Whether the sources are compiled and loaded, be there compiled libraries or not."""


def is_program() -> bool:
    """Whether this import is part of `python -m extension_cpp`, which works where nothing can be loaded.

    While Python looks for what -m names, sys.argv[0] is "-m"; the name comes before the arguments in sys.orig_argv, which
    tells it from another program's package that imports this one.
    """
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] in ("extension_cpp", "-mextension_cpp")


def load() -> dict[str, str]:
    """Load what can be loaded; return the reasons for what can't. Raises ImportError where nothing can serve."""
    try:
        import torch
    except ImportError as error:
        how = "pip install torch, or conda install -c conda-forge pytorch"
        raise ImportError(f"extension_cpp needs PyTorch >= 2.10, and importing torch failed: {error}. {how}") from error
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MINIMUM_TORCH:
        found = f"{torch.__version__} in {Path(torch.__file__).parent}"
        how = "pip install -U torch, or conda install -c conda-forge 'pytorch>=2.10'"
        raise ImportError(f"extension_cpp needs PyTorch >= 2.10, found {found}: {how}")
    if just_in_time:
        from extension_cpp import jit

        return jit.load_package()
    try:
        for library in FOLDER.glob("_C.*"):
            check_complete(library)
        libraries["_C"] = Path(str(importlib.import_module("extension_cpp._C").__file__))
    except ImportError as error:
        if not any(FOLDER.glob("_C.*")) and (FOLDER.parent / "csrc" / "module.cpp").exists():
            return {"_C": explain(error, torch)}  # A checkout, which extension_cpp.jit can compile.
        raise ImportError(explain(error, torch)) from error
    if torch.version.cuda is None:
        return {}
    library = FOLDER / "_C_cuda.so"
    if not library.exists():
        how = "conda install 'extension_cpp=*=cuda*', or USE_CUDA=1 pip install . in a checkout"
        return {"_C_cuda": f"this is the CPU build of extension_cpp, without CUDA kernels: {how}"}
    try:
        check_complete(library)
        check_driver(library)
        torch.ops.load_library(library)
        libraries["_C_cuda"] = library
    except (ImportError, OSError) as error:
        return {"_C_cuda": f"_C_cuda.so can't serve under torch {torch.__version__}: {error.__cause__ or error}"}
    return {}


def check_complete(library: Path) -> None:
    """Raise ImportError for an ELF file that ends early: mapping such a file kills the process instead."""
    header = library.read_bytes()[:64]
    if len(header) == 64 and header[:5] == b"\x7fELF\x02":
        section_table, entry_size, entries = struct.unpack("<Q10xHH", header[40:62])
        if library.stat().st_size < section_table + entry_size * entries:
            how = "conda install --force-reinstall extension_cpp, or pip install --force-reinstall"
            raise ImportError(f"{library} is damaged, it ends too early: {how}")


def check_driver(library: Path) -> None:
    """Raise ImportError where the driver is older than the CUDA runtime in `library`, whose every launch would fail.

    The runtime is linked statically, so it is the driver that decides, whatever CUDA torch was built with.
    """
    found = re.search(rb"extension_cpp: CUDA (\d+)", library.read_bytes())
    served = driver_version()
    if found is None or served is None:  # Without a driver there is no CUDA tensor to serve.
        return
    built = int(found[1])
    if served // 1000 < built // 1000:
        runtime, driver = (f"{version // 1000}.{version % 1000 // 10}" for version in (built, served))
        how = f"update the driver, or conda install 'extension_cpp=*=cuda{served // 1000}*'"
        raise ImportError(
            f"it was built with CUDA {runtime}, and the NVIDIA driver serves CUDA {driver} at most: {how}"
        )


def driver_version() -> int | None:
    """The newest CUDA that the NVIDIA driver serves, 12040 for 12.4; None where there is none. Initialises no device."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        version = ctypes.c_int()
        return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None
    except (OSError, AttributeError):
        return None


def explain(error: ImportError, torch) -> str:
    """What an import of _C that failed most likely means on this machine."""
    there = ", ".join(sorted(path.name for path in FOLDER.glob("_C*"))) or "no library"
    libc = " ".join(platform.libc_ver()) or "unknown"
    return f"""extension_cpp could not load its library _C: {error}
This is Python {platform.python_version()} ({sys.executable}), torch {torch.__version__}, {platform.platform()}.
Likely causes:
  - not compiled: {FOLDER} has {there}. In a source checkout: pip install -e . --no-build-isolation,
    or extension_cpp.jit.load(), or EXTENSION_CPP_JIT=1 in the environment
  - 'undefined symbol': the library wants a newer torch than {torch.__version__}, or torch is damaged; reinstall both
  - 'GLIBC_... not found': the C library here ({libc}) is older than the one that extension_cpp was built for
  - 'invalid ELF header', 'file too short', 'damaged': a package of another platform, or a damaged one; reinstall it"""
