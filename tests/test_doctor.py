"""What the doctor finds. Each test makes one state in an environment of its own and reads the findings.

The environment is a real one, with its own sys.prefix: a copy of the package, and links to all else that is installed here.
Small libraries, found before the machine's own, say which driver and GPUs there are.
"""

import base64
import hashlib
import json
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import extension_cpp
from extension_cpp import _machine
from extension_cpp.doctor import report

rich = pytest.importorskip("rich", reason="rich is not installed")
COMPILER = shlex.split(os.environ.get("CC", "cc"))
PACKAGE = Path(extension_cpp.__file__).parent
SITE = Path(torch.__file__).parents[1]
SITES = dict.fromkeys(Path(module.__file__).parents[1] for module in (torch, rich))
ARCHITECTURE = next(n for n in (62, 183) if n != int.from_bytes((PACKAGE / "_C.abi3.so").read_bytes()[18:20], "little"))
OTHER_MACHINE = {62: "x86_64", 183: "aarch64"}[ARCHITECTURE]
NVML = """
#include <string.h>
int nvmlInit_v2(void) { return %(error)d; }
int nvmlShutdown(void) { return 0; }
const char* nvmlErrorString(int code) { return "Driver/library version mismatch"; }
int nvmlSystemGetDriverVersion(char* text, unsigned size) { strcpy(text, "550.54.14"); return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void** device) { *device = 0; return 0; }
int nvmlDeviceGetName(void* device, char* text, unsigned size) { strcpy(text, "Test GPU"); return 0; }
int nvmlDeviceGetCudaComputeCapability(void* device, int* major, int* minor) {
  *major = %(major)d; *minor = %(minor)d; return 0;
}
"""

pytestmark = pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason="no C compiler, to make drivers with")


def compile_library(file: Path, source: str, *options: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    command = [*COMPILER, "-shared", "-fPIC", "-o", file, "-x", "c", "-", "-x", "none", *options]
    subprocess.run(command, input=source, text=True, check=True)
    return file


class Environment:
    def __init__(self, prefix: Path) -> None:
        venv.create(prefix, symlinks=True)
        self.prefix = prefix
        (self.site,) = prefix.glob("lib/python*/site-packages")
        for path in (path for folder in SITES for path in folder.iterdir()):
            if not path.name.startswith(("extension_cpp", "__editable__", "__pycache__")) and path.suffix != ".pth":
                with suppress(FileExistsError):
                    (self.site / path.name).symlink_to(path)
        self.package = self.site / "extension_cpp"
        shutil.copytree(PACKAGE, self.package, ignore=shutil.ignore_patterns("__pycache__"))
        dropped = ("PYTHONPATH", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "CONDA_OVERRIDE_CUDA", "EXTENSION_CPP_SIMD")
        self.variables = {name: value for name, value in os.environ.items() if name not in dropped}
        self.variables |= {"HOME": str(prefix), "PATH": str(prefix / "bin")}  # No .condarc, no conda of this machine.
        self.machine()

    def machine(self, cuda: int | None = None, gpu: tuple[int, int] | None = None, error: int = 0) -> None:
        """Which CUDA the driver supports, and the GPU's architecture; by default there is neither."""
        drivers = self.prefix / "drivers"
        says = f"int cuDriverGetVersion(int* version) {{ *version = {cuda}; return 0; }}" if cuda else ""
        compile_library(drivers / "libcuda.so.1", says)
        major, minor = gpu or (0, 0)
        nvml = NVML % {"error": error, "major": major, "minor": minor} if gpu or error else ""
        compile_library(drivers / "libnvidia-ml.so.1", nvml)
        self.variables["LD_LIBRARY_PATH"] = os.pathsep.join([str(drivers), os.environ.get("LD_LIBRARY_PATH", "")])

    def own_torch(self, **fields: str) -> Path:
        """A torch whose own files a test may change: a folder of links; `fields` of its version.py say otherwise."""
        folder = self.site / "torch"
        original = folder.resolve()
        folder.unlink()
        folder.mkdir()
        for path in original.iterdir():
            if path.name not in ("version.py", "__pycache__"):
                (folder / path.name).symlink_to(path)
        text = (original / "version.py").read_text()
        for name, value in fields.items():
            text = re.sub(rf"^({name}\b.*?) = .*$", rf"\g<1> = {value}", text, flags=re.MULTILINE)
        (folder / "version.py").write_text(text)
        return folder

    def torch_to_look_at(self, **fields: str) -> None:
        """Its version and its libraries, but nothing to import: the doctor answers in a fraction of the time."""
        folder = self.own_torch(**fields)
        (folder / "__init__.py").unlink()
        (folder / "__init__.py").write_text("raise ImportError('only to be looked at')")

    def cuda_library(self, cuda: int = 13000, architectures: str = "9.0a/12.0+PTX", source: str = "") -> None:
        """A _C_cuda.so that says what it was built for."""
        says = f"extension_cpp: CUDA {cuda}, architectures {architectures};"
        (self.package / "_C_cuda.so").unlink(missing_ok=True)
        compile_library(self.package / "_C_cuda.so", f'const char built_for[] = "{says}";\n{source}')

    def cpu_package(self) -> None:
        (self.package / "_C_cuda.so").unlink(missing_ok=True)

    def python(self, *arguments: str, cwd: str | Path = "/", **variables: str) -> subprocess.CompletedProcess:
        command = [self.prefix / "bin" / "python", *arguments]
        variables = {**self.variables, **variables}
        return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)

    def doctor(self, cwd: str | Path = "/", **variables: str) -> dict[str, dict]:
        """Its findings by name; that it says so in its exit code too."""
        done = self.python("-m", "extension_cpp", "doctor", "--json", cwd=cwd, **variables)
        assert done.stdout, done.stderr
        said = json.loads(done.stdout)
        found = {finding["name"]: finding for finding in said["findings"]}
        assert done.returncode == (1 if found else 0) and not done.stderr, done.stderr
        for finding in found.values():
            assert all(finding.values()), finding
        self.said = said
        return found

    def conda_package(self, build: str = "cpu_h0123456_0", installer: str = "rattler") -> Path:
        """The record that conda, mamba or rattler writes of the package, which suits every Python: the fields of each."""
        site = self.site.relative_to(self.prefix).as_posix()
        files = [path for path in self.package.rglob("*") if path.is_file()]
        paths = []
        for path in files:
            installed = path.relative_to(self.prefix).as_posix()
            archived = installed.replace(site, "site-packages", 1)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            entry = {"sha256": digest, "size_in_bytes": path.stat().st_size, "path_type": "hardlink"}
            paths.append(
                {
                    "conda": {"_path": archived, **entry, "sha256_in_prefix": digest},
                    "mamba": {"_path": installed, **entry, "sha256_in_prefix": digest},
                    "rattler": {"_path": installed, **entry, "original_path": archived},
                }[installer]
            )
        compiled = [f"{site}/extension_cpp/__pycache__/_loader.cpython-311.pyc"]
        if installer == "conda":
            paths += [{"_path": path, "path_type": "pyc_file"} for path in compiled]
        record = {
            **{"name": "extension_cpp", "version": "0.1.0", "build": build, "noarch": "python"},
            **({"requested_spec": "None"} if installer == "conda" else {"requested_specs": []}),
            "url": f"https://example.org/channel/linux-64/extension_cpp-0.1.0-{build}.conda",
            "files": [*(path.relative_to(self.prefix).as_posix() for path in files), *compiled],
            "paths_data": {"paths_version": 1, "paths": paths},
        }
        meta = self.prefix / "conda-meta"
        meta.mkdir(exist_ok=True)
        file = meta / f"extension_cpp-0.1.0-{build}.json"
        file.write_text(json.dumps(record))
        return file


@pytest.fixture
def environment(tmp_path) -> Environment:
    return Environment(tmp_path / "environment")


@pytest.mark.quick
def test_nothing_wrong(environment):
    """In words too; and the report, which is the same without arguments."""
    assert environment.doctor() == {} and environment.said["unread"] == []
    done = environment.python("-m", "extension_cpp")
    assert done.returncode == 0 and "\x1b" not in done.stdout, done.stderr
    rows = dict(re.findall(r"^  (\S+(?: \S+)?) {2,}(.+)$", done.stdout, re.MULTILINE))
    assert rows["version"] == extension_cpp.__version__ and rows["folder"] == str(environment.package)
    assert rows["torch"].startswith(f"{torch.__version__} in {environment.site}")
    assert rows["CUDA driver"] == rows["GPUs"] == "none"
    assert rows["threads"].startswith(f"{torch.get_num_threads()} of ")
    cuda = (PACKAGE / "_C_cuda.so").exists()
    assert rows["variant"].startswith("CUDA 1" if cuda else "CPU") and rows["architectures"].startswith("none") != cuda
    for name in extension_cpp.ops.__all__:
        assert rows[name].split()[0] == "native"
    assert done.stdout.endswith("nothing to fix\n")


def test_wrong_usage(environment):
    done = environment.python("-m", "extension_cpp", "nurse")
    assert done.returncode == 2 and "nurse" in done.stderr


def test_only_its_own_program_goes_on_without_a_library(environment):
    """An import raises as ever, in another program that is a package too."""
    (environment.package / "_C.abi3.so").unlink()
    (environment.site / "program").mkdir()
    (environment.site / "program" / "__init__.py").write_text("import extension_cpp")
    done = environment.python("-m", "program", "extension_cpp")
    assert "ImportError: extension_cpp could not load its library _C" in done.stderr
    found = environment.doctor()
    assert list(found) == ["no-library"] and str(environment.package) in found["no-library"]["how"]


@pytest.mark.quick
def test_no_torch(environment):
    (environment.site / "torch").unlink()
    found = environment.doctor()
    assert list(found) == ["no-torch"]
    assert found["no-torch"]["fix"] == f"{environment.prefix}/bin/python -m pip install --upgrade 'torch>=2.10'"
    (environment.prefix / "conda-meta").mkdir()
    assert environment.doctor()["no-torch"]["fix"].endswith("-c conda-forge 'pytorch>=2.10'")
    done = environment.python("-m", "extension_cpp")
    assert done.returncode == 0 and "not installed" in done.stdout and "1 thing to fix" in done.stdout


def test_old_torch(environment):
    folder = environment.own_torch(__version__="'2.9.1'")
    found = environment.doctor()
    assert list(found) == ["old-torch"]
    assert found["old-torch"]["how"].startswith(f"torch 2.9.1 in {folder}")


@pytest.mark.parametrize("what", ["no version", "no libraries", "no library at all", "half a library"])
def test_damaged_torch(environment, what):
    folder = environment.own_torch()
    libraries = (folder / "lib").resolve()
    (folder / "lib").unlink()
    (folder / "lib").mkdir()
    for path in libraries.iterdir() if what != "no libraries" else ():
        (folder / "lib" / path.name).symlink_to(path)
    if what == "no version":
        (folder / "version.py").unlink()
    elif what != "no libraries":
        content = (libraries / "libc10.so").read_bytes()
        (folder / "lib" / "libc10.so").unlink()
        (folder / "lib" / "libc10.so").write_bytes(content[: len(content) // 2] if "half" in what else b"text")
    found = environment.doctor()
    (name,) = found  # Half a library may kill the process that maps it.
    assert name == "torch-fails" or (name == "died" and what == "half a library" and "SIG" in found["died"]["how"])
    assert "pip install --force-reinstall 'torch>=2.10'" in found[name]["fix"]
    missing = {
        "no version": "no version.py",
        "no libraries": "libtorch_global_deps.so",
        "no library at all": "libc10.so",
    }
    assert missing.get(what, "") in found[name]["how"]


DAMAGES = {"empty": "it is empty", "truncated": "it ends too early, after", "text": "it is no library, but 13 bytes"}


@pytest.mark.parametrize("library", ["_C.abi3.so", "_C_cuda.so"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_library(environment, library, damage):
    content = (PACKAGE / "_C.abi3.so").read_bytes()
    made = {"empty": b"", "truncated": content[: len(content) // 2], "text": b"not a library"}[damage]
    (environment.package / library).write_bytes(made)
    if library == "_C.abi3.so":
        assert list(found := environment.doctor()) == ["damaged"]
    else:
        environment.torch_to_look_at()
        assert list(found := environment.doctor()) == ["torch-fails", "damaged"]
    assert found["damaged"]["what"] == f"{library} is damaged"
    assert found["damaged"]["how"].startswith(f"{environment.package / library}: {DAMAGES[damage]}")


def hostile_library(what: str) -> bytes:
    """Of the right length, but its tables say what can't be, or what would take minutes to read."""
    content = bytearray((PACKAGE / "_C.abi3.so").read_bytes())
    table, count = int.from_bytes(content[40:48], "little"), int.from_bytes(content[60:62], "little")
    header = struct.Struct("<IIQQQQIIQQ")
    sections = [list(header.unpack_from(content, table + header.size * i)) for i in range(count)]
    symbols = next(section for section in sections if section[1] == 11)
    names = sections[symbols[6]]
    many = 1 << 20
    if what == "tables of nonsense":
        content[table:] = b"\xff" * len(content[table:])
        return bytes(content)
    if what == "sections of no size":
        content[58:62] = b"\0\0\xff\xff"
    elif what == "symbols outside of the file":
        symbols[4:6] = 1 << 62, 24 << 40
    elif what == "names outside of the file":
        names[4] = 1 << 62
    elif what == "names in no section":
        symbols[6] = 999
    else:
        added = many + 1 if what == "too many symbols" else many
        symbols[4:6], names[4:6] = (len(content), 24 * added), (len(content) + 24 * added, 32 << 20)
        content += bytes(24 * added) + b"t" * (32 << 20)
    for i, section in enumerate(sections):
        header.pack_into(content, table + header.size * i, *section)
    return bytes(content)


@pytest.mark.parametrize(
    "what",
    [
        "tables of nonsense",
        "sections of no size",
        "symbols outside of the file",
        "names outside of the file",
        "names in no section",
        "too many symbols",
        "names without an end",
    ],
)
def test_damaged_inside(environment, what):
    """It is found, or what can be read is; in seconds of a CPU, however busy that is."""
    library = environment.package / "_C_cuda.so"
    library.unlink(missing_ok=True)
    library.write_bytes(hostile_library(what))
    environment.torch_to_look_at()
    before = sum(os.times()[2:4])  # Of the processes that this one has started.
    found = environment.doctor()
    assert sum(os.times()[2:4]) - before < 20
    if what != "names without an end":
        assert list(found) == ["torch-fails", "damaged"]
        assert f"{library}: its symbols can't be read: " in found["damaged"]["how"]


@pytest.mark.parametrize("library", ["_C.abi3.so", "_C_cuda.so"])
def test_not_a_file(environment, library):
    """A pipe, from which a read would wait forever, for the doctor and for the import."""
    environment.conda_package()
    (environment.package / library).unlink(missing_ok=True)
    os.mkfifo(environment.package / library)
    environment.own_torch(cuda="'13.0'")
    found = environment.doctor()
    assert found["damaged"]["how"] == f"{environment.package / library}: it is not a regular file"


@pytest.mark.parametrize("platform", ["machine", "macOS"])
def test_package_of_another_platform(environment, platform):
    library = environment.package / "_C.abi3.so"
    content = bytearray(library.read_bytes())
    if platform == "machine":
        content[18:20] = ARCHITECTURE.to_bytes(2, "little")
    else:
        content[:4] = b"\xcf\xfa\xed\xfe"
        environment.torch_to_look_at()
    library.write_bytes(content)
    found = environment.doctor()
    assert list(found) == [*(["torch-fails"] if platform == "macOS" else []), "other-platform"]
    built = f"Linux {OTHER_MACHINE}" if platform == "machine" else "Darwin"
    assert f"{library} is for {built}, this is Linux" in found["other-platform"]["how"]


def test_runtime_that_is_too_old(environment):
    """A cause that the doctor has no check for: the loader's own words."""
    library = environment.package / "_C.abi3.so"
    library.write_bytes(re.sub(rb"GLIBCXX_3\.4\.\d\d\0", b"GLIBCXX_3.9.99\0", library.read_bytes()))
    found = environment.doctor()
    assert list(found) == ["import-fails"]
    assert "version `GLIBCXX_3.9.99' not found" in found["import-fails"]["how"]
    assert found["import-fails"]["fix"].startswith("in a checkout of extension_cpp")


def test_library_that_kills(environment):
    """The doctor outlives it, and says how far it came."""
    library = environment.package / "_C.abi3.so"
    compile_library(library, "#include <stdlib.h>\n__attribute__((constructor)) void load(void) { abort(); }")
    found = environment.doctor()
    assert list(found) == ["died"] and "SIGABRT" in found["died"]["how"]
    assert environment.said["facts"]["probe"]["threads"] == torch.get_num_threads()


@pytest.mark.quick
def test_cpu_build_on_a_machine_with_a_gpu(environment):
    environment.cpu_package()
    environment.machine(13000, gpu=(9, 0))
    environment.torch_to_look_at(cuda="'13.0'")
    finding = environment.doctor()["cpu-build"]
    assert finding["how"].startswith("Test GPU (architecture 9.0); ")
    assert "USE_CUDA=1" in finding["fix"] and finding["fix"].startswith("in a checkout of extension_cpp")
    environment.conda_package()
    finding = environment.doctor()["cpu-build"]
    channels = "-c https://example.org/channel -c conda-forge"
    assert finding["fix"] == f"conda install -p {environment.prefix} {channels} 'extension_cpp=*=cuda13*'"


@pytest.mark.quick
def test_torch_without_cuda(environment):
    environment.machine(12040, gpu=(9, 0))
    environment.cuda_library(12090)
    environment.torch_to_look_at(cuda="None")
    found = environment.doctor()
    assert list(found) == ["torch-fails", "cpu-torch"]
    assert found["cpu-torch"]["fix"].endswith("pip install --force-reinstall 'torch==2.10.*'")
    environment.conda_package("cuda129_h0123456_212")
    assert environment.doctor()["cpu-torch"]["fix"].endswith("-c conda-forge 'pytorch>=2.10=*cuda*'")


def test_driver_too_old(environment):
    environment.machine(12040, gpu=(9, 0))
    environment.cuda_library(13000)
    environment.own_torch(cuda="'13.0'")
    found = environment.doctor()
    assert {"driver-torch", "driver-library"} <= set(found) <= {"driver-torch", "driver-library", "hidden-gpu"}
    supported = "driver 550.54.14 supports CUDA 12.4 at most"
    assert found["driver-torch"]["how"] == f"{supported}, torch {torch.__version__} was built with 13.0"
    assert found["driver-library"]["how"] == f"{supported}, {environment.package}/_C_cuda.so was built with 13.0"
    assert "NVIDIA driver >= 580" in found["driver-torch"]["fix"] and "'torch==2.10.*'" in found["driver-torch"]["fix"]


def test_driver_that_does_not_answer(environment):
    """As after an update of its files, until the machine is rebooted."""
    environment.machine(13000, error=18)
    environment.torch_to_look_at()
    found = environment.doctor()
    assert "'Driver/library version mismatch' (18)" in found["driver-fails"]["how"]
    environment.machine(error=9)  # Files of a driver on a machine without a GPU.
    displays = [path for path in Path("/sys/bus/pci/devices").glob("*/class") if path.read_text().startswith("0x03")]
    if "0x10de\n" not in [path.with_name("vendor").read_text() for path in displays]:
        assert "driver-fails" not in environment.doctor()


def test_cuda_library_that_can_not_be_loaded(environment, tmp_path):
    """As it was linked to a CUDA that isn't here: what the loader of the system says."""
    runtime = compile_library(tmp_path / "libcudart.so.99", "int cuda_nothing;", "-Wl,-soname,libcudart.so.99")
    (environment.package / "_C_cuda.so").unlink(missing_ok=True)
    command = [*COMPILER, "-shared", "-o", environment.package / "_C_cuda.so", "-Wl,--no-as-needed", runtime]
    subprocess.run(command, check=True)
    runtime.unlink()
    environment.own_torch(cuda="'13.0'")
    found = environment.doctor()
    assert list(found) == ["not-loaded"] and "libcudart.so.99: cannot open" in found["not-loaded"]["how"]


def test_hidden_gpu(environment):
    environment.machine(13000, gpu=(9, 0))
    environment.cuda_library(13000)
    environment.own_torch(cuda="'13.0'")
    found = environment.doctor(CUDA_VISIBLE_DEVICES="")
    assert found["hidden-gpu"]["fix"] == "unset CUDA_VISIBLE_DEVICES"
    # That library has no kernels.
    assert list(found) == ["not-native", "hidden-gpu"] and "mymuladd" in found["not-native"]["how"]
    assert "modprobe" in environment.doctor(CUDA_VISIBLE_DEVICES="0")["hidden-gpu"]["fix"]


@pytest.mark.parametrize(
    ("gpu", "architectures", "what"),
    [
        pytest.param((8, 6), "8.0/9.0+PTX", None, marks=pytest.mark.quick),
        ((8, 9), "8.0/9.0", None),  # Machine code runs on later GPUs of its major version.
        ((9, 0), "8.0/9.0a", None),
        ((9, 0), "8.0/9.0+PTX", "has no code with Hopper's own instructions for Test GPU"),
        pytest.param((8, 0), "8.6/9.0", "has no code for Test GPU", marks=pytest.mark.quick),
        ((12, 1), "9.0/10.0+PTX", "has no code for Test GPU: the driver compiles its PTX at the first call"),
        ((9, 0), "8.0/10.0+PTX", "has no code for Test GPU"),
        ((12, 1), "9.0/10.0+PTX older", "has no code for Test GPU"),  # The driver doesn't know PTX of a later CUDA.
        ((10, 3), "9.0/10.0a", "has no code for Test GPU"),  # That is for one GPU alone.
        ((7, 0), "7.5/12.0+PTX", "has no code for Test GPU"),
    ],
)
def test_architecture(environment, gpu, architectures, what):
    environment.machine(13000, gpu=gpu)
    environment.cuda_library(13020 if "older" in architectures else 13000, architectures.removesuffix(" older"))
    (environment.site / "torch").unlink()  # Not needed to know it.
    found = environment.doctor()
    if what is None:
        assert list(found) == ["no-torch"]
    else:
        finding = found["architecture"]
        assert finding["what"] == f"_C_cuda.so {what}"
        assert "Test GPU is of architecture {}.{}".format(*gpu) in finding["how"]
        assert "{}.{}".format(*gpu) in finding["fix"] and ("nvcc of CUDA 12" in finding["fix"]) == (gpu < (7, 5))


@pytest.mark.quick
def test_undefined_symbols(environment):
    """One that a later torch has, and one that none has: which, and which torch."""
    environment.torch_to_look_at(cuda="'13.0'")
    declared = (
        "void aoti_torch_empty_strided(void); void torch_has_storage(void); void aoti_torch_does_not_exist(void);"
    )
    calls = "aoti_torch_empty_strided(); torch_has_storage();"
    environment.cuda_library(source=f"{declared} void use(void) {{ {calls} aoti_torch_does_not_exist(); }}")
    finding = environment.doctor()["undefined-symbols"]
    assert finding["what"] == f"_C_cuda.so needs symbols that torch {torch.__version__} doesn't have"
    assert "aoti_torch_empty_strided" not in finding["how"]
    assert "no known release of torch has aoti_torch_does_not_exist" in finding["how"]
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):
        environment.cuda_library(source=f"{declared} void use(void) {{ {calls} }}")
        finding = environment.doctor()["undefined-symbols"]
        assert finding["how"].startswith("torch_has_storage in no library of ")
        assert "torch 2.14 is the first that has them" in finding["how"] and "torch>=2.14" in finding["fix"]


def test_two_copies(environment, tmp_path):
    shutil.copytree(environment.package, tmp_path / "first" / "extension_cpp")
    found = environment.doctor(PYTHONPATH=str(tmp_path / "first"))
    assert list(found) == ["shadowed"]
    assert found["shadowed"]["what"] == f"this copy hides the package in {environment.package}"
    assert found["shadowed"]["how"].startswith(f"Python imports {tmp_path / 'first' / 'extension_cpp'}, ")
    assert found["shadowed"]["fix"] == "unset PYTHONPATH"


def test_checkout_that_hides_the_package(environment, tmp_path):
    shutil.copytree(environment.package, tmp_path / "extension_cpp")
    (tmp_path / "setup.py").touch()
    (tmp_path / "csrc").mkdir()
    found = environment.doctor(cwd=tmp_path)
    assert list(found) == ["shadowed"]
    assert found["shadowed"]["what"] == f"a source checkout hides the package in {environment.package}"
    assert found["shadowed"]["fix"] == f"cd / && {environment.prefix}/bin/python -m extension_cpp"
    assert environment.said["facts"]["origin"]["method"] == "source"


@pytest.mark.parametrize("installer", ["conda", "mamba", "rattler"])
def test_altered_files(environment, installer):
    """By the digests of conda's record, whoever wrote it."""
    environment.conda_package(installer=installer)
    environment.torch_to_look_at()
    assert list(environment.doctor()) == ["torch-fails"]
    with (environment.package / "ops" / "muladd.py").open("a") as stream:
        stream.write("\n")
    (environment.package / "py.typed").unlink()
    finding = environment.doctor()["altered"]
    assert sorted(environment.said["facts"]["origin"]["altered"]) == ["muladd.py was changed", "py.typed is gone"]
    assert "py.typed is gone" in finding["how"] and str(environment.package) in finding["how"]
    text = "conda: 0.1.0 cpu_h0123456_0 from https://example.org/channel"
    assert environment.said["facts"]["origin"]["text"] == text
    assert "--force-reinstall extension_cpp=0.1.0" in finding["fix"]


@pytest.mark.skipif(not (SITE / "pip").exists(), reason="pip is not installed")
def test_wheel(environment, tmp_path):
    """Installed by pip, then damaged; the command that is printed fixes it."""

    def line(path: Path) -> str:
        digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode().rstrip("=")
        return f"{path.relative_to(environment.site)},sha256={digest},{path.stat().st_size}\n"

    info = environment.site / "extension_cpp-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extension_cpp\nVersion: 0.1.0\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: py3-none-any\n")
    files = [path for folder in (environment.package, info) for path in folder.rglob("*") if path.is_file()]
    (info / "RECORD").write_text("".join(map(line, files)) + "extension_cpp-0.1.0.dist-info/RECORD,,\n")
    wheel = tmp_path / "extension_cpp-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in [*files, info / "RECORD"]:
            archive.write(path, path.relative_to(environment.site))
    for folder in (environment.package, info):
        shutil.rmtree(folder)
    done = environment.python("-m", "pip", "install", "--no-index", "--no-deps", str(wheel))
    assert done.returncode == 0, done.stderr
    os.truncate(environment.package / "ops" / "_signature.py", 0)
    (environment.package / "_C.abi3.so").unlink()
    environment.torch_to_look_at()
    found = environment.doctor()
    assert list(found) == ["torch-fails", "no-library", "altered"]
    how = f"_C.abi3.so is gone, _signature.py was changed in {environment.package}, by the hashes of its wheel record"
    assert found["altered"]["how"] == how
    text = f"wheel: 0.1.0, installed by pip from {wheel.as_uri()}"
    assert environment.said["facts"]["origin"]["text"] == text
    subprocess.run(found["altered"]["fix"], shell=True, check=True, env=environment.variables, cwd="/")
    assert list(environment.doctor()) == ["torch-fails"]


def test_wheel_of_a_repository(environment):
    """As pip names it, so that the same commit comes again."""
    info = environment.site / "extension_cpp-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extension_cpp\nVersion: 0.1.0\n")
    (info / "RECORD").write_text("extension_cpp/_C.abi3.so,,\nextension_cpp/gone.py,,\n")
    direct = {"url": "https://example.org/extension_cpp.git", "vcs_info": {"vcs": "git", "commit_id": "0123abc"}}
    (info / "direct_url.json").write_text(json.dumps(direct))
    (environment.site / "torch").unlink()
    found = environment.doctor()
    assert found["altered"]["how"].startswith("gone.py is gone in ")
    assert found["altered"]["fix"].endswith("--no-deps git+https://example.org/extension_cpp.git@0123abc")


def test_compiled_just_in_time(environment, tmp_path):
    """The library is not in the package, but in a folder that was added to it."""
    (tmp_path / "cache").mkdir()
    (environment.package / "_C.abi3.so").rename(tmp_path / "cache" / "_C.abi3.so")
    environment.cpu_package()
    start = environment.package / "__init__.py"
    start.write_text(f"__path__.append({str(tmp_path / 'cache')!r})\n{start.read_text()}")
    assert environment.doctor() == {}
    assert environment.said["facts"]["origin"]["text"] == f"compiled just in time, in {tmp_path / 'cache'}"


def test_mixed_openmp(environment, tmp_path):
    library = compile_library(tmp_path / "libiomp5.so", "int omp_nothing;")
    found = environment.doctor(LD_PRELOAD=str(library))
    assert list(found) == ["openmp-mixed"]
    assert str(library) in found["openmp-mixed"]["how"] and "libgomp" in found["openmp-mixed"]["how"]
    assert found["openmp-mixed"]["fix"] == "unset LD_PRELOAD"


def test_second_openmp_of_a_package(environment):
    """Loaded when Python starts, by a package that can be removed."""
    library = compile_library(environment.site / "accelerator" / "libiomp5.so", "int omp_nothing;")
    (environment.site / "accelerator.pth").write_text(f"import ctypes; ctypes.CDLL({str(library)!r})\n")
    info = environment.site / "accelerator-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerator\nVersion: 1.0\n")
    (info / "RECORD").write_text("accelerator/libiomp5.so,,\n")
    assert environment.doctor()["openmp-mixed"]["fix"].endswith("/bin/python -m pip uninstall accelerator")


def test_missing_openmp(environment, tmp_path):
    """Torch needs a runtime that is not there, as the loader says it."""
    folder = environment.own_torch()
    original = (folder / "lib").resolve()
    (folder / "lib").unlink()
    (folder / "lib").mkdir()
    for path in original.iterdir():
        (folder / "lib" / path.name).symlink_to(path)
    runtime = compile_library(
        tmp_path / "libgomp-8f2c1a9b.so.1", "int omp_nothing;", "-Wl,-soname,libgomp-8f2c1a9b.so.1"
    )
    (folder / "lib" / "libtorch_global_deps.so").unlink()
    needs = "extern int omp_nothing; int use(void) { return omp_nothing; }"
    compile_library(folder / "lib" / "libtorch_global_deps.so", needs, str(runtime))
    runtime.unlink()
    found = environment.doctor()
    assert list(found) == ["openmp-missing"]
    assert found["openmp-missing"]["what"] == "PyTorch's OpenMP runtime libgomp-8f2c1a9b.so.1 is missing"


def test_no_openmp_at_all(environment):
    """A torch that brings none: here one that does nothing."""
    (environment.site / "torch").unlink()
    folder = environment.site / "torch"
    folder.mkdir()
    (folder / "version.py").write_text("__version__ = '2.13.0'\ncuda = None\n")
    (folder / "__init__.py").write_text("from torch import version\ndef get_num_threads(): return 1\n")
    assert environment.doctor()["openmp-missing"]["what"].startswith("no OpenMP runtime is loaded")


WISHES = {
    "history": ("conda-meta/history", "# update specs: ['python', 'pytorch=*=cpu*']\n", "'pytorch=*=cpu*'"),
    "cpuonly": ("conda-meta/history", '# update specs: ["pytorch::cpuonly"]\n', "conda remove -p {prefix} cpuonly && "),
    "pinned": (
        "conda-meta/pinned",
        "python\nextension_cpp =*=cpu*\n",
        "sed -i.bak ",
    ),
    "condarc": (".condarc", "pinned_packages:\n  - pytorch=*=cpu*\n", "sed -i.bak "),
    "state": ("conda-meta/state", '{"env_vars": {"CONDA_OVERRIDE_CUDA": ""}}', "conda env config vars unset"),
    "pixi": ("pixi.toml", '[workspace]\nplatforms = ["linux-64"]\n', "pixi workspace system-requirements add"),
}
NO_WISHES = {
    "removed since": ("conda-meta/history", "# update specs: ['cpuonly']\n# remove specs: ['cpuonly']\n"),
    "asked otherwise since": (
        "conda-meta/history",
        "# update specs: ['pytorch=*=cpu*']\n# update specs: ['pytorch']\n",
    ),
    "another package": ("conda-meta/pinned", "faiss=*=cpu*\npytorch-cpu-tools\npytorch=2.13\n"),
    "pixi with CUDA": ("pixi.toml", '[workspace]\nplatforms = [{ platform = "linux-64", cuda = "12" }]\n'),
}


@pytest.mark.parametrize(
    "wish", [pytest.param("history", marks=pytest.mark.quick), *list(WISHES)[1:], "environment", *NO_WISHES]
)
def test_solver_that_prefers_cpu(environment, wish):
    environment.machine(13000, gpu=(9, 0))
    environment.conda_package()
    (environment.site / "torch").unlink()
    if "pixi" in wish:
        manifest = {"manifest_path": str(environment.prefix / "pixi.toml")}
        (environment.prefix / "conda-meta" / "pixi").write_text(json.dumps(manifest))
    if wish in {**WISHES, **NO_WISHES}:
        file, text = {**WISHES, **NO_WISHES}[wish][:2]
        (environment.prefix / file).write_text(text)
    found = environment.doctor(**({"CONDA_OVERRIDE_CUDA": ""} if wish == "environment" else {}))
    if wish in NO_WISHES:
        assert "solver" not in found
    elif wish == "environment":
        assert found["solver"]["fix"].startswith("unset CONDA_OVERRIDE_CUDA && conda install ")
    else:
        assert str(environment.prefix / WISHES[wish][0]) in found["solver"]["how"]
        assert WISHES[wish][2].format(prefix=environment.prefix) in found["solver"]["how"] + found["solver"]["fix"]
        assert "'extension_cpp=*=cuda*' 'pytorch=*=cuda*'" in found["solver"]["fix"]
        undo, _, then = found["solver"]["fix"].partition(" && ")
        assert then.startswith("pixi add " if wish == "pixi" else "conda install ") or wish == "history"
        if undo.startswith("sed "):  # The command works as it is printed.
            subprocess.run(undo, shell=True, check=True)
            assert "solver" not in environment.doctor() and "p" in (environment.prefix / file).read_text()


def test_damaged_records_keep_nothing_back(environment):
    environment.conda_package().write_text("{")
    (environment.site / "torch").unlink()
    (environment.package / "_C.abi3.so").write_bytes(b"")
    assert list(environment.doctor()) == ["no-torch", "damaged"]
    assert any("where the package came from" in what for what in environment.said["unread"])


AVX512 = "avx512f avx512bw avx512dq avx512vl"


@pytest.mark.parametrize(
    "vendor, flags, wanted, said",
    [
        ("AMD", "sse2", "", "128 bits"),
        ("AMD", "avx2 fma f16c", "", "256 bits (AVX2)"),
        ("AMD", f"avx2 fma f16c {AVX512}", "", "512 bits (AVX-512)"),
        ("AMD", f"avx2 fma f16c {AVX512} avx512_bf16", "", "512 bits (AVX-512, bfloat16)"),
        ("Intel", f"avx2 fma f16c {AVX512} avx512_bf16", "", "512 bits (AVX-512)"),
        ("Intel", f"avx2 fma f16c {AVX512} avx512_bf16", "avx512_bf16", "512 bits (AVX-512, bfloat16)"),
        (
            "Intel",
            f"avx2 fma f16c {AVX512} avx512_bf16 amx_tile amx_bf16",
            "",
            "512 bits (AVX-512), tiles of bfloat16 (AMX)",
        ),
        ("Intel", f"avx2 fma f16c {AVX512} avx512_bf16 amx_tile amx_bf16", "avx512", "512 bits (AVX-512)"),
        (
            "Intel",
            f"avx2 fma f16c {AVX512} avx512_bf16 amx_tile amx_bf16",
            "avx512_bf16",
            "512 bits (AVX-512, bfloat16)",
        ),
        ("AMD", f"avx2 fma f16c {AVX512} avx512_bf16", "avx2", "256 bits (AVX2)"),
    ],
)
def test_vectors_are_named(monkeypatch, vendor, flags, wanted, said):
    ids = {"AMD": "AuthenticAMD", "Intel": "GenuineIntel"}
    monkeypatch.setattr(_machine, "text_of", lambda file: f"vendor_id : {ids[vendor]}\nflags : {flags}")
    monkeypatch.setattr(_machine.platform, "machine", lambda: "x86_64")
    assert report.VECTORS[_machine.simd(wanted)] == said


def test_held_to_narrow_vectors(environment):
    if " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no wider vectors")
    (environment.site / "torch").unlink()
    found = environment.doctor(EXTENSION_CPP_SIMD="baseline")
    assert list(found) == ["no-torch", "simd"] and found["simd"]["fix"] == "unset EXTENSION_CPP_SIMD"


def test_without_rich(environment):
    environment.torch_to_look_at()
    (environment.package / "_C.abi3.so").write_bytes(b"")
    plain = environment.python("-m", "extension_cpp", "doctor").stdout
    (environment.site / "rich").unlink()
    done = environment.python("-m", "extension_cpp", "doctor")
    assert done.returncode == 1 and done.stdout == plain and "2. _C.abi3.so is damaged\n" in plain


def read_all(terminal: int) -> Iterator[bytes]:
    """What was written to a terminal that no process has open any more."""
    try:
        while part := os.read(terminal, 1000):
            yield part
    except OSError:
        return


def test_for_people(environment):
    """On a terminal coloured and broken to its width, a command never; in a pipe plain."""
    environment.torch_to_look_at()
    (environment.package / "_C.abi3.so").write_bytes(b"")
    piped = environment.python("-m", "extension_cpp", "doctor").stdout
    lines = piped.splitlines()
    starts = ["  seen by  ", "  fix      ", ""]
    assert [line[:11] for line in lines] == ["1. PyTorch ", *starts, "2. _C.abi3.", *starts]
    ours, theirs = pty.openpty()
    command = [environment.prefix / "bin" / "python", "-m", "extension_cpp", "doctor"]
    variables = {**environment.variables, "TERM": "xterm", "COLUMNS": "60"}
    subprocess.run(command, cwd="/", env=variables, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b"".join(read_all(ours)).decode().replace("\r\n", "\n")
    os.close(ours)
    assert "\x1b[" in shown
    bare = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert " ".join(bare.split()) == " ".join(piped.split())
    assert lines[2] in bare and lines[6] in bare and len(bare.splitlines()) > len(lines)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_device_is_initialised(environment):
    """The process of the doctor itself imports neither torch nor a kernel library."""
    code = "from extension_cpp.doctor import facts; facts.gather(); maps = open('/proc/self/maps').read()"
    done = environment.python(
        "-c",
        f"import sys; sys.argv[0] = '-m'; sys.orig_argv[:] = ['-mextension_cpp']\n{code}\n"
        "print('torch' in sys.modules, 'extension_cpp/_C' in maps)",
    )
    assert done.stdout.split() == ["False", "False"], done.stderr


@pytest.mark.parametrize("backend", ["reference", "fast"])
def test_held_backend(environment, backend):
    """Also where there is no such backend, and the package can't be imported for it."""
    found = environment.doctor(EXTENSION_CPP_BACKEND=backend)
    assert list(found) == ["backend"] and f"'{backend}'" in found["backend"]["what"]
    assert found["backend"]["fix"] == "unset EXTENSION_CPP_BACKEND"
