"""Compiles operators just in time: this package's own sources, or yours with the same flags and headers.

For developing a kernel, and for machines that no package was built for. It needs a C++20 compiler and ninja, and nvcc for
CUDA. Compiled libraries are kept in a cache, so that the next process only loads them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from extension_cpp._build import BuildError
    from extension_cpp._jit import source_folder

__all__ = ["BuildError", "load", "source_folder"]


def load(*sources: str | os.PathLike, name: str | None = None) -> None:
    """Compile and load operators, or only load them if nothing has changed since they were compiled.

    Without arguments: the operators of this package, from its own sources, if it was imported without being compiled.
    If compiled libraries are installed, ``EXTENSION_CPP_JIT=1`` in the environment, before the import, makes the
    libraries that are compiled just in time take their place.

    Args:
        sources: ``.cpp`` and ``.cu`` files that register your operators, on the LibTorch stable ABI. They can include
            this package's headers. The ``.cpp`` files make one library, the ``.cu`` files another, which is left out if
            torch was built without CUDA. EXTENSION_CPP_REGISTER registers operators: under PyTorch's own macros a
            schema that can't be read ends the process.
        name: the name of the libraries; by default that of the first source.

    The cache is in ``TORCH_EXTENSIONS_DIR``, or else in ``~/.cache/extension_cpp``: a folder for each set of sources,
    flags, compilers and versions of torch and CUDA. Only what has changed is compiled again, by one process at a time.
    CUDA code is compiled for the GPUs in the machine; ``TORCH_CUDA_ARCH_LIST`` names others. ``USE_CUDA``, ``CUDA_HOME``,
    ``DEBUG``, ``MAX_JOBS``, ``CXX``, ``CXXFLAGS`` and ``LDFLAGS`` mean what they mean for ``pip install .``.

    Raises:
        BuildError: if a compiler or ninja is missing; with the compiler's message if it finds an error; if a source uses
            what none defines, registers an operator with a schema or signature that can't be read, or a kernel for an
            operator that no library has; if another user can write into the cache.
        RuntimeError: if the operators are registered already; a process can register them once.
        ValueError: if a source is neither a ``.cpp`` nor a ``.cu`` file.
        FileNotFoundError: if there is no such file.

    Example:
        >>> extension_cpp.jit.load("scale.cpp", "scale.cu")
        >>> torch.ops.my_ops.scale(torch.ones(3), 2.0)
        tensor([2., 2., 2.])
    """
    from extension_cpp import _jit

    _jit.load(sources, name)


def __getattr__(name: str) -> Any:
    """The rest of what is public: each import of the package imports this module, and few compile."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from extension_cpp import _jit

    return getattr(_jit, name)
