"""Loads the native libraries.

``_C`` has the schemas and the CPU kernels and loads under every torch >= 2.10. ``_C_cuda`` has the CUDA kernels; it is
loaded where the package has it and torch was built with CUDA. Loading initialises no device and never fails for lack of
one: without its CUDA library the package still works, and operators on CUDA tensors run their PyTorch reference.
"""

import platform
import sys
from pathlib import Path

MINIMUM_TORCH = (2, 10)


def load() -> dict[str, str]:
    """Load what can be loaded; return the reasons for what can't. Raises ImportError where nothing can serve."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"extension_cpp needs PyTorch >= 2.10, and importing torch failed: {error}. Install it (pip install torch, or "
            "conda install -c conda-forge pytorch)"
        ) from error
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MINIMUM_TORCH:
        raise ImportError(
            f"extension_cpp needs PyTorch >= 2.10, found {torch.__version__} in {Path(torch.__file__).parent}: upgrade it "
            "(pip install -U torch, or conda install -c conda-forge 'pytorch>=2.10')"
        )
    try:
        from extension_cpp import _C  # noqa: F401
    except ImportError as error:
        raise ImportError(_explain(error, torch)) from error
    if torch.version.cuda is None:
        return {}
    library = Path(__file__).with_name("_C_cuda.so")
    if not library.exists():
        return {"_C_cuda": "this is the CPU build of extension_cpp: it has no CUDA kernels"}
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return {"_C_cuda": f"{library.name} could not be loaded under torch {torch.__version__}: {error}"}
    return {}


def _explain(error: ImportError, torch) -> str:
    """What an import of _C that failed most likely means on this machine."""
    folder = Path(__file__).parent
    built = sorted(path.name for path in folder.glob("_C*"))
    here = f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()} {platform.machine()}"
    libc = " ".join(platform.libc_ver())
    causes = [
        f"not compiled: {folder} has {', '.join(built) or 'no library'}"
        + (". In a source checkout, run: pip install -e . --no-build-isolation" if not built else ""),
        "'undefined symbol': the library was built for a newer torch than this one, or torch is damaged; reinstall both",
        f"'GLIBC_... not found': the system's C library ({libc or 'unknown'}) is older than the one it was built for",
        "'wrong ELF class' or 'invalid ELF header': the package is for another platform, or the file is damaged",
    ]
    lines = [f"extension_cpp could not load its library _C: {error}", f"This is {here}, {sys.executable}.", "Likely causes:"]
    return "\n".join(lines + [f"  - {cause}" for cause in causes])
