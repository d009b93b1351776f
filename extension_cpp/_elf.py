"""Reads what this package needs to know of libraries from their files, without loading them.

A damaged file can have any offset and any count in it, and a pipe in place of a file never ends: each read is of a regular
file, lies inside of it and is bounded. pyelftools follows whatever a file says, for minutes in some files.
"""

import re
import struct
from collections.abc import Iterator
from pathlib import Path

MACHINES = {3: "x86", 21: "ppc64le", 22: "s390x", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
FORMATS = {b"MZ": "Windows", b"\xcf\xfa\xed\xfe": "Darwin", b"\xca\xfe\xba\xbe": "Darwin"}
# PyTorch's largest library has a tenth of these symbols, and no name of more than 600 bytes.
MOST_BYTES, MOST_SYMBOLS, LONGEST_NAME = 1 << 30, 1 << 20, 1 << 12
DYNAMIC_SYMBOLS = 11  # SHT_DYNSYM


def read(path: Path, size: int = MOST_BYTES, offset: int = 0) -> bytes:
    """At most `size` bytes of a regular file."""
    if not path.is_file():
        raise OSError(f"{path} is not a regular file")
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(min(size, MOST_BYTES))


def platform_of(content: bytes) -> str:
    """Where a library or program runs, by its first bytes: "Linux x86_64", "Darwin"; empty for anything else."""
    if not content.startswith(b"\x7fELF") or len(content) < 20:
        return next((name for magic, name in FORMATS.items() if content.startswith(magic)), "")
    number = int.from_bytes(content[18:20], "little" if content[5] == 1 else "big")
    return f"Linux {MACHINES.get(number, f'machine {number}')}"


def damage(path: Path) -> str:
    """Why a file can't be a whole library, or nothing. To map a file that ends too early kills the process."""
    if not path.is_file():
        return "it is not a regular file"
    size, header = path.stat().st_size, read(path, 64)
    if not platform_of(header):
        return f"it is no library, but {size} bytes of something else" if size else "it is empty"
    if header.startswith(b"\x7fELF\x02"):
        if len(header) < 64:
            return f"it ends too early, after {size} bytes"
        _, offset, entry, count = section_table(header)
        if size < offset + entry * count:
            return f"it ends too early, after {size} bytes"
    return ""


def section_table(header: bytes) -> tuple[str, int, int, int]:
    """The byte order of a file of 64 bits, and where its table of sections is: offset, size of an entry, count."""
    order = "<" if header[5] == 1 else ">"
    return order, *struct.unpack(f"{order}Q10xHH", header[40:62])


def built_for(path: Path) -> tuple[int, list[str]]:
    """The CUDA runtime in a library, 13000 for 13.0, and its architectures, as csrc/launch.cuh wrote them; 0 for none."""
    found = re.search(rb"extension_cpp: CUDA (\d{1,6}), architectures ([^;]{1,500});", read(path))
    return (int(found[1]), found[2].decode(errors="replace").split("/")) if found else (0, [])


def dynamic_symbols(path: Path) -> Iterator[tuple[bytes, bool]]:
    """The names that a library of 64 bits looks up or offers when it is loaded, and whether it defines them itself.

    Raises ValueError where they can't be read.
    """
    size = path.stat().st_size

    def part(offset: int, length: int) -> bytes:
        if offset + length > size or length > MOST_BYTES:
            raise ValueError(f"{length} bytes at {offset} are not in the file")
        return read(path, length, offset)

    header = part(0, 64)
    if header[:5] != b"\x7fELF\x02":
        return
    order, offset, entry, count = section_table(header)
    section, symbol = struct.Struct(f"{order}4xI16xQQI20x"), struct.Struct(f"{order}I2xH16x")
    if count and entry != section.size:
        raise ValueError(f"its sections are described in {entry} bytes each, not {section.size}")
    sections = list(section.iter_unpack(part(offset, entry * count)))
    for section_type, offset, length, link in sections:
        if section_type == DYNAMIC_SYMBOLS:
            if length % symbol.size or length > MOST_SYMBOLS * symbol.size or link >= len(sections):
                raise ValueError(f"{length} bytes of symbols, with names in section {link} of {len(sections)}")
            names = part(*sections[link][1:3])
            for start, defined_in in symbol.iter_unpack(part(offset, length)):
                end = names.find(b"\0", start, start + LONGEST_NAME)
                yield names[start : max(start, end)], defined_in != 0
            return
    if sections:
        raise ValueError("none of its sections has dynamic symbols")
