"""Imports torch and then the package, and prints what can only be seen from inside: one JSON object a step.

The doctor runs this file in a process of its own, which may fail or die; the steps before that were printed.
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
    """The files in this process whose name matches; None where the system doesn't say."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split()) > 5}
    return sorted(path for path in paths if re.match(pattern, path.rsplit("/", 1)[-1]))


def backends(torch: Any, extension_cpp: Any) -> dict[str, dict[str, str]]:
    """Which implementation serves each operator on each type of device."""
    if hasattr(extension_cpp, "backends"):
        return extension_cpp.backends()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    kinds = ["cpu", *(["cuda"] if torch.version.cuda else [])]
    return {
        name: {kind: "native" if has(f"extension_cpp::{name}", kind.upper()) else "reference" for kind in kinds}
        for name in extension_cpp.ops.__all__
    }


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
