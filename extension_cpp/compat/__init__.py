"""Operators of other libraries that run the kernels of this package: one module for each library.

Nothing is on unless a program asks for it: by `install()` of a module, or for a whole process by an environment variable
(_environment.py). Nothing is imported before.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from extension_cpp.compat import torchvision

__all__ = ["torchvision"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
