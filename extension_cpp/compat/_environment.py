"""The environment variable EXTENSION_CPP_COMPAT, read when the package is imported: libraries, separated by commas."""

import os
import warnings
from functools import partial
from types import ModuleType

from extension_cpp import compat
from extension_cpp.ops._later import when_imported

VARIABLE = "EXTENSION_CPP_COMPAT"


def named() -> list[str]:
    """The libraries that the environment asks for."""
    return [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]


def install() -> None:
    """Install the module of each library that the environment names, as soon as that library is imported."""
    for name in named():
        if name not in compat.__all__:
            wanted = f"names must be {' or '.join(compat.__all__)}" if compat.__all__ else "there must be no names"
            raise ImportError(f"extension_cpp: in the environment variable {VARIABLE} {wanted}, got {name!r}")
        when_imported(name, partial(_install, name))


def _install(name: str, library: ModuleType) -> None:
    """A library that can be imported without its operators is used without ours."""
    try:
        getattr(compat, name).install()
    except (ImportError, RuntimeError) as error:
        warnings.warn(f"extension_cpp: {VARIABLE}={name} has no effect: {error}", stacklevel=2)
