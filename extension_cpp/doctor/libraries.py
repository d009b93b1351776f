"""What the package's two libraries are, by their files."""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from extension_cpp import _elf

# The functions of torch's stable shim that came after 2.10, by the first release that has them.
NEWER = {
    "2.11": r"torch_from_blob|torch_dtype_float(4_e2m1fn_x2|8_e8m0fnu)",
    "2.12": r"torch_tag_\w+|torch_library_def_with_tags|aoti_torch_dtype_float(4_e2m1fn_x2|8_e8m0fnu)",
    "2.13": r"torch_\w*(generator|stable_ivalue|exception)\w*|torch_library_set_python_module|torch_stream_native_handle",
    "2.14": r"torch_has_storage|torch_mps_set_arg_bytes|torch_tensor_(from|to)_pyobject",
}


@dataclass
class Library:
    """One of the package's two libraries."""

    path: Path
    damage: str = ""
    platform: str = ""
    """Where it runs: "Linux x86_64", "Darwin"."""
    cuda: int = 0
    """The CUDA runtime in it, 13000 for 13.0; 0 for none."""
    architectures: list[str] = field(default_factory=list)
    """As TORCH_CUDA_ARCH_LIST has them."""
    undefined: list[str] = field(default_factory=list)
    """Symbols of torch that no library of the installed torch defines."""


def read_library(path: Path, here: str, torch: Path | None, unread: list[str]) -> Library:
    """Read a library on the platform `here`, with torch in the folder `torch`; `unread` gets what can't be read."""
    library = Library(path, damage=_elf.damage(path))
    if library.damage:
        return library
    library.platform = _elf.platform_of(_elf.read(path, 64))
    library.cuda, library.architectures = _elf.built_for(path)
    if library.platform != here or not here.startswith("Linux") or torch is None:
        return library
    try:
        wanted = {name for name, defined in _elf.dynamic_symbols(path) if not defined}
    except (OSError, ValueError) as error:
        library.damage = f"its symbols can't be read: {error}"
        return library
    library.undefined = undefined(wanted, torch, unread)
    return library


def undefined(wanted: set[bytes], torch: Path, unread: list[str]) -> list[str]:
    """The symbols of torch among those `wanted` that none of torch's libraries defines."""
    wanted = {name for name in wanted if re.match(rb"(aoti_)?torch_\w+$|_ZNK?(2at|3c10|5torch)", name)}
    folders = (torch / "lib", Path(sys.prefix) / "lib")  # The second is that of conda's libtorch.
    files = [file for folder in folders for file in folder.glob("lib*.so") if re.match(r"lib(torch|c10)", file.name)]
    if wanted and not files:
        unread.append(f"which symbols torch has: no library in {torch / 'lib'}")
        return []
    try:
        for file in files if wanted else ():
            wanted.difference_update(name for name, defined in _elf.dynamic_symbols(file) if defined)
    except (OSError, ValueError) as error:
        unread.append(f"which symbols torch has: {file}: {error}")
        return []
    return sorted(name.decode(errors="replace") for name in wanted)


def first_release(symbol: str) -> str | None:
    """The first release of torch with a function that came after 2.10, or None if it is not known."""
    return next((version for version, names in NEWER.items() if re.fullmatch(names, symbol)), None)
