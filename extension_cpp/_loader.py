"""Loads the native libraries.

``_C`` has the schemas and the CPU kernels and loads under every torch >= 2.10. ``_C_cuda`` has the CUDA kernels; it is
loaded if the package has it, torch was built with CUDA, and the driver supports the CUDA it was built with. Loading
initializes no device and never fails because a device is missing: without its CUDA library the package still works, and
operators on CUDA tensors run in Triton or their PyTorch reference.
"""

import ctypes
import os
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path

from extension_cpp import _elf

FOLDER = Path(__file__).parent
MINIMUM_TORCH = (2, 10)

libraries: dict[str, Path] = {}
"""What was loaded, and from where."""

load_errors: dict[str, str] = {}
"""Why a native library of this package can't be used: library to reason. Empty if all that is there was loaded."""

just_in_time = os.environ.get("EXTENSION_CPP_JIT", "0") not in ("", "0")
"""Whether the sources are compiled and loaded, even where there are compiled libraries."""


def is_program() -> bool:
    """Whether this import is part of `python -m extension_cpp`, which works even if nothing can be loaded.

    While Python looks for the module that -m names, sys.argv[0] is "-m". The name is in sys.orig_argv, before the
    arguments; it is another one if another program's package imports this one.
    """
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] in ("extension_cpp", "-mextension_cpp")


def load(compile_package: Callable[[], dict[str, str]]) -> None:
    """Load what can be loaded, and fill `load_errors`. Raises ImportError if no operator could run.

    `compile_package` compiles and loads the sources instead, for `just_in_time`.
    """
    load_errors.clear()
    try:
        import torch
    except ImportError as error:
        how = "pip install torch, or conda install -c conda-forge pytorch"
        what = f"extension_cpp needs PyTorch >= 2.10, and importing torch failed: {error}"
        raise ImportError(f"{what}. {how}") from error
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MINIMUM_TORCH:
        found = f"{torch.__version__} in {Path(torch.__file__).parent}"
        how = "pip install -U torch, or conda install -c conda-forge 'pytorch>=2.10'"
        raise ImportError(f"extension_cpp needs PyTorch >= 2.10, found {found}: {how}")
    if just_in_time:
        load_errors.update(compile_package())
        return
    load_installed(torch)
    for library in libraries.values():
        if wrong := registration_errors(library):
            raise ImportError(
                f"{library.name} could not register its operators; correct the source and make build\n{wrong}"
            )


def load_installed(torch) -> None:
    """Load the compiled libraries next to this file, and enter them in `libraries` or what is wrong in `load_errors`."""
    try:
        for library in FOLDER.glob("_C.*"):
            check_complete(library)
        import extension_cpp._C as compiled  # A statement, which programs that collect what a program imports can see.

        libraries["_C"] = Path(str(compiled.__file__))
    except ImportError as error:
        if any(FOLDER.glob("_C.*")) or not (FOLDER.parent / "csrc" / "module.cpp").exists():
            raise ImportError(explain(error, torch)) from error
        load_errors["_C"] = explain(error, torch)  # A checkout, which extension_cpp.jit can compile.
        return
    if torch.version.cuda is None:
        return
    library = FOLDER / "_C_cuda.so"
    if not library.exists():
        how = "conda install 'extension_cpp=*=cuda*', or USE_CUDA=1 pip install . in a checkout"
        load_errors["_C_cuda"] = f"this is the CPU build of extension_cpp, without CUDA kernels: {how}"
        return
    try:
        check_complete(library)
        check_driver(library)
        torch.ops.load_library(library)
        libraries["_C_cuda"] = library
    except (ImportError, OSError) as error:
        reason = error.__cause__ or error
        load_errors["_C_cuda"] = f"_C_cuda.so can't be used with torch {torch.__version__}: {reason}"


def check_complete(library: Path) -> None:
    """Raise ImportError for a file that is no whole library; to map one that ends early would kill the process."""
    if damage := _elf.damage(library):
        how = "conda install --force-reinstall extension_cpp, or pip install --force-reinstall"
        raise ImportError(f"{library} is damaged, {damage}: {how}")


def registration_errors(library: Path) -> str:
    """What was wrong with the operators of a library that is loaded, a line for each file; empty if they are registered."""
    import torch

    ask = getattr(ctypes.CDLL(str(library)), "extension_cpp_registration_errors", None)
    if ask is None:  # A checkout's, from before its sources had it.
        return ""
    ask.restype = ctypes.c_char_p

    def reason(refused: re.Match) -> str:
        try:
            torch._C.parse_schema(refused[1])
        except RuntimeError as error:
            return f"{refused[0]}\n{str(error).strip()}"
        return f"{refused[0]}: an operator of this name is registered already"

    said = ask().decode().strip()
    return re.sub(r"PyTorch refuses the schema (.*)", reason, said) if said else ""


def check_driver(library: Path) -> None:
    """Raise ImportError if the driver is older than the CUDA runtime in `library`: every launch would fail.

    The runtime is linked statically, so that it needs a driver of its own CUDA version, not of torch's.
    """
    from extension_cpp import _machine  # Which only a library for CUDA needs.

    built, _ = _elf.built_for(library)
    supported = _machine.driver_version()
    if supported is None:  # Without a driver there are no CUDA tensors.
        return
    if supported // 1000 < built // 1000:
        runtime, driver = (f"{version // 1000}.{version % 1000 // 10}" for version in (built, supported))
        how = f"update the driver, or conda install 'extension_cpp=*=cuda{supported // 1000}*'"
        raise ImportError(
            f"it was built with CUDA {runtime}, and the NVIDIA driver supports CUDA {driver} at most: {how}"
        )


def explain(error: ImportError, torch) -> str:
    """The likely causes if _C can't be imported on this machine."""
    there = ", ".join(sorted(path.name for path in FOLDER.glob("_C*"))) or "no library"
    libc = " ".join(platform.libc_ver()) or "unknown"
    return f"""extension_cpp could not load its library _C: {error}
This is Python {platform.python_version()} ({sys.executable}), torch {torch.__version__}, {platform.platform()}.
Likely causes:
  - not compiled: {FOLDER} has {there}. In a source checkout: pip install -e . --no-build-isolation,
    or extension_cpp.jit.load(), or EXTENSION_CPP_JIT=1 in the environment
  - 'undefined symbol': the library needs a newer torch than {torch.__version__}, or torch is damaged; reinstall both
  - 'GLIBC_... not found': the C library here ({libc}) is older than the one that extension_cpp was built for
  - 'invalid ELF header', 'file too short', 'damaged': the package is for another platform, or damaged; reinstall it"""
