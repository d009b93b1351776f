"""What the package's two libraries are: read from their files, as ELF data, without loading them."""

import re
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from extension_cpp import _loader

MACHINES = {3: "x86", 21: "ppc64le", 22: "s390x", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
FORMATS = {b"MZ": "Windows", b"\xcf\xfa\xed\xfe": "Darwin", b"\xca\xfe\xba\xbe": "Darwin"}
# The functions of torch's stable shim that came after 2.10, by the release that has them first.
NEWER = {
    "2.11": r"torch_from_blob|torch_dtype_float(4_e2m1fn_x2|8_e8m0fnu)",
    "2.12": r"torch_tag_\w+|torch_library_def_with_tags|aoti_torch_dtype_float(4_e2m1fn_x2|8_e8m0fnu)",
    "2.13": r"torch_\w*(generator|stable_ivalue|exception)\w*|torch_library_set_python_module|torch_stream_native_handle",
    "2.14": r"torch_has_storage|torch_mps_set_arg_bytes|torch_tensor_(from|to)_pyobject",
}


@dataclass
class Library:
    """One of the package's two libraries, as its file has it."""

    path: Path
    damage: str = ""
    platform: str = ""
    """Where it runs: "Linux x86_64", "Darwin"."""
    cuda: int = 0
    """The CUDA runtime in it, 13000 for 13.0; 0 for none."""
    architectures: list[str] = field(default_factory=list)
    """As TORCH_CUDA_ARCH_LIST has them."""
    undefined: list[str] = field(default_factory=list)
    """Symbols of torch that no library of the torch here defines."""


def read_library(path: Path, here: str, torch: Path | None, unread: list[str]) -> Library:
    """Of a machine that is `here`, with a torch in that folder; what can't be looked at goes to `unread`."""
    library = Library(path)
    content = path.read_bytes()
    if not platform_of(content):
        library.damage = f"it is no library, but {len(content)} bytes of something else" if content else "it is empty"
        return library
    library.platform = platform_of(content)
    try:
        _loader.check_complete(path)
    except ImportError:
        library.damage = f"it ends too early, after {len(content)} bytes"
        return library
    built = re.search(rb"extension_cpp: CUDA (\d+), architectures ([^;]+);", content)
    if built:
        library.cuda, library.architectures = int(built[1]), built[2].decode().split("/")
    if content.startswith(b"\x7fELF") and library.platform == here and torch:
        try:
            library.undefined = undefined(path, torch, unread)
        except Exception as error:
            library.damage = f"its symbols can't be read: {type(error).__name__}: {error}"
    return library


def platform_of(content: bytes) -> str:
    """Where a library or program runs, by its first bytes; empty for anything else."""
    if not content.startswith(b"\x7fELF") or len(content) < 20:
        return next((name for magic, name in FORMATS.items() if content.startswith(magic)), "")
    number = int.from_bytes(content[18:20], "little" if content[5] == 1 else "big")
    return f"Linux {MACHINES.get(number, f'machine {number}')}"


def undefined(path: Path, torch: Path, unread: list[str]) -> list[str]:
    """The symbols of torch that a library needs and that none of torch's libraries has."""
    try:
        from elftools.elf.elffile import ELFFile
    except ImportError:
        unread.append(f"the symbols of {path.name}: pyelftools is not installed")
        return []

    with path.open("rb") as stream:
        table: Any = ELFFile(stream).get_section_by_name(".dynsym")
        wanted = sorted(s.name for s in table.iter_symbols() if s["st_shndx"] == "SHN_UNDEF") if table else []
    wanted = [name for name in wanted if re.match(r"(aoti_)?torch_\w+$|_ZNK?(2at|3c10|5torch)", name)]
    if not wanted:
        return []
    try:
        tables = symbol_tables(torch)
    except Exception as error:
        unread.append(f"which symbols torch has: {type(error).__name__}: {error}")
        return []
    if not tables:
        unread.append(f"which symbols torch has: no library in {torch / 'lib'}")
        return []
    return [name for name in wanted if not any(table.get_symbol(name) for table in tables)]


@cache
def symbol_tables(torch: Path) -> list[Any]:
    """Of torch's libraries: by hash, as the largest has a hundred thousand symbols."""
    from elftools.elf.elffile import ELFFile

    files = [file for folder in (torch / "lib", Path(sys.prefix) / "lib") for file in folder.glob("lib*.so")]
    elves = [ELFFile(f.open("rb")) for f in files if re.match(r"lib(torch|c10)", f.name) and f.stat().st_size]
    return [section for elf in elves if (section := elf.get_section_by_name(".gnu.hash"))]


def who_has(symbol: str) -> str | None:
    """The first release of torch with a function that came after 2.10, or None where that is not known."""
    return next((version for version, names in NEWER.items() if re.fullmatch(names, symbol)), None)


def serves(library: Library, gpu: tuple[int, int], driver: int | None) -> tuple[bool, bool]:
    """Whether a GPU can run the library's machine code, and whether its driver can compile its PTX."""
    code = ptx = False
    for name in library.architectures:
        match = re.match(r"(\d+)\.(\d)([af]?)", name)
        if match:
            built = int(match[1]), int(match[2])
            same = built == gpu
            code |= same if match[3] == "a" else built[0] == gpu[0] and built <= gpu
            ptx |= name.endswith("+PTX") and (same if match[3] else built <= gpu)
    return code, ptx and (driver is None or driver >= library.cuda)  # An older driver doesn't know that PTX.
