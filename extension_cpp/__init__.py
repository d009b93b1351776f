"""PyTorch operators for CPU and CUDA, from one binary a backend for every Python >= 3.10 and every torch >= 2.10.

The operators are functions of this module and of ``extension_cpp.ops``; the dispatcher has them as
``torch.ops.extension_cpp.<name>``. ``extension_cpp.nn`` has modules made of them.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

# Before the other modules of the package, which an older Python can't read.
if sys.version_info < (3, 10):  # noqa: UP036
    raise ImportError(f"extension_cpp needs Python >= 3.10, and {sys.executable} is Python {sys.version.split()[0]}")

from extension_cpp import _loader, jit
from extension_cpp._loader import load_errors
from extension_cpp._version import __version__

__all__ = ["__version__", "jit", "load_errors"]

# `python -m extension_cpp` imports this module too, and must work if torch or a library can't be imported.
if not _loader.is_program():
    _loader.load(lambda: importlib.import_module("extension_cpp._jit").load_package())

if _loader.libraries:
    from extension_cpp import compat, nn, ops  # The schemas must be there first.
    from extension_cpp.compat import _environment
    from extension_cpp.ops import *  # noqa: F403
    from extension_cpp.ops._backends import backends, use_backend, watch_gpus
    from extension_cpp.ops._export import decompositions, onnx_translations
    from extension_cpp.ops._operator import operator

    watch_gpus()
    # In the two forms that type checkers read.
    __all__ += ["backends", "compat", "decompositions", "nn", "onnx_translations", "operator", "ops", "use_backend"]
    __all__ += ops.__all__
    _environment.install()
elif not TYPE_CHECKING:  # Where it would stand for any name. Python reads an attribute slower where a module has this.

    def __getattr__(name: str) -> Any:
        """A checkout that was not compiled has nothing but jit."""
        if "_C" in load_errors and not name.startswith("_"):
            raise ImportError(load_errors["_C"])
        raise AttributeError(f"module 'extension_cpp' has no attribute '{name}'")
