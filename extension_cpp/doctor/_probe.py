"""Imports torch and then the package, and prints what can only be seen after that: one JSON object after each step.

The doctor runs this file in another process. If that fails or dies, the steps before were printed.
"""

import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any


def tell(**facts: Any) -> None:
    print("\n" + json.dumps({"extension_cpp": facts}), flush=True)


def mapped(pattern: str) -> list[str] | None:
    """The files that this process has mapped and whose name matches; None if the system doesn't tell."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split()) > 5}
    return sorted(path for path in paths if re.match(pattern, path.rsplit("/", 1)[-1]))


def backends(torch: Any, extension_cpp: Any) -> dict[str, dict[str, str]]:
    """The backend of each operator on each device type that this torch can have."""
    without = () if torch.version.cuda or torch.version.hip else ("cuda",)
    return {
        name: {device_type: backend for device_type, backend in used.items() if device_type not in without}
        for name, used in extension_cpp.backends().items()
    }


def install_compat(extension_cpp: Any) -> dict[str, str]:
    """The libraries that are to run kernels of this package, each with why it doesn't; nothing where it does."""
    found = {}
    for name in extension_cpp.compat._environment.named():
        try:
            getattr(extension_cpp.compat, name).install()
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def main() -> None:
    sys.path[:] = json.loads(sys.argv[1])
    try:
        import torch
    except BaseException as error:
        tell(torch_error=f"{type(error).__name__}: {error}")
    else:
        tell(threads=torch.get_num_threads())
        tell(openmp=mapped(r"lib(gomp|iomp5|omp)\b"))
        try:
            import extension_cpp
        except BaseException as error:
            tell(error=f"{type(error).__name__}: {error}")
        else:
            tell(compat=install_compat(extension_cpp))
            tell(load_errors=extension_cpp.load_errors, backends=backends(torch, extension_cpp))
            tell(openmp=mapped(r"lib(gomp|iomp5|omp)\b"), library=str(extension_cpp._loader.libraries["_C"]))
        if torch.version.cuda:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            tell(cuda_devices=count, cuda_said=" ".join(str(warning.message) for warning in caught[:1]))
    tell(finished=True)


if __name__ == "__main__":
    main()
