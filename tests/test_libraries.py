"""What the two libraries need of a machine, and what they bring: read from the files that are installed."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import extension_cpp
from extension_cpp import jit
from extension_cpp.ops import _backends

elftools = pytest.importorskip("elftools.elf.elffile", reason="pyelftools is not installed")

PACKAGE = Path(extension_cpp.__file__).parent
LIBRARIES = sorted(PACKAGE.glob("_C*.so"))
C_CUDA = PACKAGE / "_C_cuda.so"
# What the C++ runtime of a GCC brings, by its major version.
GLIBCXX = {11: "3.4.29", 12: "3.4.30", 13: "3.4.32", 14: "3.4.33", 15: "3.4.34"}
CPP_RUNTIME = r"GLIBC_|GLIBCXX_|CXXABI_|GCC_"
STABLE_ABI = r"aoti_torch_\w+|torch_\w+|Py\w+|_Py\w+"
WEAK = {"__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__cxa_finalize"}


def undefined_symbols(library: Path) -> dict[str, str]:
    """The symbols that a library leaves to others, with the version that it asks for."""
    with library.open("rb") as stream:
        elf = elftools.ELFFile(stream)
        needed = {
            auxiliary["vna_other"]: auxiliary.name
            for _, auxiliaries in elf.get_section_by_name(".gnu.version_r").iter_versions()
            for auxiliary in auxiliaries
        }
        versions = elf.get_section_by_name(".gnu.version")
        symbols = elf.get_section_by_name(".dynsym")
        return {
            symbol.name: needed.get(versions.get_symbol(i)["ndx"], "")
            for i, symbol in enumerate(symbols.iter_symbols())
            if symbol.name and symbol["st_shndx"] == "SHN_UNDEF"
        }


def declared_floors() -> dict[str, str]:
    """The glibc and libstdc++ that the conda package asks for."""
    records = [json.loads(path.read_text()) for path in Path(sys.prefix).glob("conda-meta/extension_cpp-*.json")]
    if not records:
        pytest.skip("not installed by conda: no sysroot was declared")
    depends = " ".join(records[0]["depends"])
    glibc = re.search(r"__glibc >=([\d.]+)", depends)
    gcc = re.search(r"libstdcxx >=(\d+)", depends)
    assert glibc and gcc, f"the package does not say which C and C++ runtime it needs: {depends}"
    return {"GLIBC": glibc[1], "GLIBCXX": GLIBCXX[int(gcc[1])]}


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_every_kernel_is_of_an_operator():
    """PyTorch takes a kernel under any name."""
    assert [impl for impl in torch._C._dispatch_find_dangling_impls() if "extension_cpp::" in impl] == []


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
class TestSymbols:
    def test_only_stable_interfaces(self, library):
        """Every symbol that must come from elsewhere is of the C or C++ runtime or of a stable ABI."""
        others = {
            name: version
            for name, version in undefined_symbols(library).items()
            if not re.match(CPP_RUNTIME, version) and not re.fullmatch(STABLE_ABI, name) and name not in WEAK
        }
        assert not others, f"{library.name} leaves to others: {others}"

    def test_loads_without_python(self, library):
        """A C++ program that binds all symbols at once has none of Python's."""
        with library.open("rb") as stream:
            symbols = [*elftools.ELFFile(stream).get_section_by_name(".dynsym").iter_symbols()]
        bindings = {s.name: s["st_info"]["bind"] for s in symbols if re.fullmatch(r"_?Py\w+", s.name)}
        needed = [name for name, bind in bindings.items() if bind != "STB_WEAK" and not name.startswith("PyInit_")]
        assert not needed, f"{library.name} can't be loaded without Python's {needed}"

    def test_runtime_versions(self, library):
        """No newer C or C++ runtime is needed than the package asks for."""
        floors = declared_floors()
        for name, version in undefined_symbols(library).items():
            family, _, wanted = version.partition("_")
            if family in floors and wanted[:1].isdigit():
                assert number(wanted) <= number(floors[family]), f"{name} needs {version}, declared: {floors[family]}"


def cuobjdump(*arguments: str | Path) -> str:
    folders = [f"{sys.prefix}/bin", *(f"{path}/nvidia/cu13/bin" for path in sys.path), os.environ["PATH"]]
    program = shutil.which("cuobjdump", path=os.pathsep.join(folders))
    if program is None:
        pytest.skip("cuobjdump is not installed")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout


def built_for(library: Path) -> list[str]:
    """The architectures that the library says it was compiled for, as TORCH_CUDA_ARCH_LIST has them."""
    found = re.search(rb"extension_cpp: CUDA \d+, architectures ([^;]+);", library.read_bytes())
    assert found, f"{library.name} does not say what it was built for"
    return found[1].decode().split("/")


@pytest.mark.skipif(not C_CUDA.exists(), reason="built for CPU only")
def test_architectures():
    """The machine code in _C_cuda is that of the architectures declared, of each in every kernel file; so is the PTX."""
    declared = built_for(C_CUDA)
    for code, option, wanted in (
        ("machine code", "-lelf", declared),
        ("PTX", "-lptx", [name for name in declared if name.endswith("+PTX")]),
    ):
        found = Counter(re.findall(r"\.sm_(\d+[af]?)\.", cuobjdump(option, C_CUDA)))
        names = {name.removesuffix("+PTX").replace(".", "") for name in wanted}
        assert not names - set(found), f"{code} is missing for architecture {sorted(names - set(found))}"
        assert not set(found) - names, f"{code} is there for architecture {sorted(set(found) - names)}, not declared"
        assert len(set(found.values())) == 1, f"not every file has {code} for every architecture: {dict(found)}"


@pytest.mark.skipif(not C_CUDA.exists(), reason="built for CPU only")
def test_ptx_for_newer_gpus():
    """One, which a GPU compiles that is newer than all in the list, if it is of no architecture with an "a"."""
    assert sum(name.endswith("+PTX") for name in built_for(C_CUDA)) == 1


def triton_on_cuda() -> set[str]:
    """The operators of families without a .cu file, of which Triton makes the CUDA kernels."""
    sources = [path for path in jit.source_folder().glob("*.cpp") if not path.with_suffix(".cu").exists()]
    return {name for path in sources for name in re.findall(r'Operator \w+\(\s*"(\w+)\(', path.read_text())}


def triton_kernel(name: str) -> Any:
    pytest.importorskip("triton", reason="Triton is not installed")
    return _backends.operators[name].triton_kernel()


def overloads() -> list[str]:
    """What the libraries define, by the name that the dispatcher has for it; other overloads are Python's."""
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("extension_cpp::"))
    return sorted(name for name in names if name.partition(".")[2] in ("", "kernel"))


def has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def test_every_operator_has_its_kernels():
    """One for the CPU, and one for CUDA where the library is loaded: no operator without, no kernel without operator."""
    names = overloads()
    assert len(names) >= 4
    assert [name for name in names if not has_kernel(name, "CPU")] == []
    if torch.version.cuda is not None and C_CUDA.exists():
        assert extension_cpp.load_errors == {}
        without = [name for name in names if not has_kernel(name, "CUDA")]
        left = {name.split("::")[1].split(".")[0] for name in without}
        compiled = {name.split("::")[1] for name in _backends.compiled()[1]}
        assert left <= triton_on_cuda() - compiled and compiled <= triton_on_cuda()
        if any(Path(sys.prefix).glob("conda-meta/extension_cpp-*.json")):  # Whose build has Triton.
            formulas = {name for name in triton_on_cuda() if hasattr(triton_kernel(name), "prepare")}
            assert compiled == formulas
    assert triton_on_cuda() <= {name for name, operator in _backends.operators.items() if operator.triton}
    dangling = torch._C._dispatch_find_dangling_impls()
    assert [line for line in dangling if "extension_cpp::" in line] == []
