"""How the sources are compiled: flags, architectures and ninja's file, for setup.py and extension_cpp.jit.

Imports only the standard library: setup.py loads this file before the package can be imported.
Environment variables:

USE_CUDA               1: compile for CUDA, 0: don't; unset: do if nvcc is found and torch is built with CUDA
CUDA_HOME              where to look for bin/nvcc before PATH
TORCH_CUDA_ARCH_LIST   "8.0;9.0+PTX"; "all": Turing to Blackwell, as packages have; by default the GPUs of this machine
DEBUG                  1: no optimisation, with debug information
MAX_JOBS               how many files to compile at a time; as many as there are cores by default
CXX CXXFLAGS LDFLAGS   the compiler and flags to add
"""

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

# A GPU runs the code of its architecture and of the lower ones with the same first number: 8.0 is for 8.6 and 8.9 too.
# Every GPU of 9.0 runs 9.0a, which has Hopper's own instructions.
ARCHITECTURES = "7.5;8.0+PTX;9.0a;10.0;12.0"
# Machine code that is made of another architecture's PTX, where the list has that one too: no source has code for these
# alone, and nvcc would compile the same again, in a fifth of the build's time. If a source asks whether __CUDA_ARCH__ is 1000
# or more, take them out.
MADE_FROM = {"10.0": "8.0", "12.0": "8.0"}
WITHOUT_GPU = "8.0+PTX"  # of a checkout: it runs on nearly all GPUs, and compiles in half the time of 9.0a
STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DPy_LIMITED_API=0x030a0000"]


class BuildError(RuntimeError):
    """What the compilation lacks, or the compiler's message."""


def find_nvcc() -> tuple[str | None, str]:
    """The path of nvcc, or None for a build without CUDA, and why."""
    wanted = os.environ.get("USE_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise BuildError(f"USE_CUDA must be 0 or 1, got {wanted!r}")
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")
    if wanted == "1" and not nvcc:
        raise BuildError(
            f"USE_CUDA=1 needs nvcc, and there is none {f'in {home}/bin' if home else 'on PATH'}: install "
            "the CUDA toolkit 12.8 or newer (conda install -c conda-forge cuda-nvcc cuda-cudart-dev) or set CUDA_HOME"
        )
    if wanted == "0":
        return None, "USE_CUDA=0"
    if nvcc and not wanted and not torch_has_cuda():
        return None, "this torch is built without CUDA; USE_CUDA=1 compiles for it all the same"
    return nvcc, f"nvcc is {nvcc}" if nvcc else "no nvcc on PATH; USE_CUDA=1 makes that an error"


def torch_folder() -> Path:
    """Where torch is installed. It is not imported, which takes longer than to find that nothing has changed."""
    torch = find_spec("torch")
    if torch is None or not torch.submodule_search_locations:
        raise BuildError("the build needs torch: pip install torch")
    return Path(torch.submodule_search_locations[0])


def torch_has_cuda() -> bool:
    return bool(re.search(r"^cuda\b.*= *['\"]", (torch_folder() / "version.py").read_text(), re.MULTILINE))


def architecture_for(gpu: str) -> str:
    """The architecture to compile for a GPU of the architecture `gpu`."""
    return "9.0a" if gpu == "9.0" else gpu


def runs_on(architectures: Iterable[str], gpu: tuple[int, int]) -> tuple[bool, bool]:
    """Whether a GPU can run machine code of one of these architectures, and whether it can run PTX of one."""
    code = ptx = False
    for name in architectures:
        match = re.match(r"(\d+)\.(\d)([af]?)", name)
        if match:
            built = int(match[1]), int(match[2])
            same = built == gpu
            code |= same if match[3] == "a" else built[0] == gpu[0] and built <= gpu
            ptx |= name.endswith("+PTX") and (same if match[3] else built <= gpu)
    return code, ptx


def architectures(gpus: Iterable[tuple[int, int]], without: str = "all") -> tuple[list[str], str]:
    """What to compile for, as TORCH_CUDA_ARCH_LIST has it, and why: these GPUs, or `without` if there are none."""
    wanted, why = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip(), "as the environment says"
    if not wanted:
        there = sorted({gpu for gpu in gpus if gpu >= (7, 5)})  # CUDA 13 compiles for no older one.
        wanted, why = ";".join(architecture_for("{}.{}".format(*gpu)) for gpu in there), "the GPUs of this machine"
        wanted += "+PTX" if wanted else ""
    if not wanted:
        wanted, why = without, "no GPU of 7.5 or newer is here"
    return re.split(r"[;,\s]+", ARCHITECTURES if wanted == "all" else wanted), why


def architecture_flags(architectures: Iterable[str]) -> list[str]:
    """nvcc's -gencode flags, and the list itself, which the library contains as text."""
    listed = [*architectures]
    flags = [f"-DEXTENSION_CPP_ARCHITECTURES={'/'.join(listed)}"]
    numbers = {arch.removesuffix("+PTX") for arch in listed}
    for arch in listed:
        match = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", arch)
        if not match:
            raise BuildError(f'TORCH_CUDA_ARCH_LIST must be like "8.0;9.0+PTX", got {arch!r} in it')
        number = match[1] + match[2]
        source = MADE_FROM.get(arch, "")
        compiled = source.replace(".", "") if source in numbers else number
        flags.append(f"-gencode=arch=compute_{compiled},code=sm_{number}")
        if match[3]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def rules(nvcc: str | None, includes: Iterable[str], architectures: Iterable[str] = ()) -> dict[str, str]:
    """The commands of ninja's file, by name: cxx and nvcc compile a file, link_cxx and link_nvcc make a library."""
    debug = os.environ.get("DEBUG", "0") not in ("", "0")
    include, library = (f"{torch_folder()}/{folder}" for folder in ("include", "lib"))
    # The libraries contain no path of this machine: messages name csrc/... and include/torch/...
    host = ["-fPIC", "-fvisibility=hidden", "-g" if debug else "-g0", f"-ffile-prefix-map={include}=include"]
    host += ["-Wall", "-Wno-unknown-pragmas"]  # Clang knows none of GCC's pragmas, which only help it to vectorize.
    # As PyTorch: errno, which nobody reads, would keep std::sqrt and others from being vectorized.
    host += ["-fno-math-errno"]
    optimise = "-O0" if debug else "-O3"
    common = ["-std=c++20", "-isystem", include, *STABLE_ABI]
    headers = [flag for path in includes for flag in ("-isystem", path)]
    cxx = shlex.split(os.environ.get("CXX", "c++"))
    # libtorch.so brings libtorch_cuda.so into scope at load time; a CPU build of torch has no such file.
    # A build ID would be a hash of this build's paths, which nothing else in the file depends on.
    plain = [] if debug else ["-Wl,-s", "-Wl,--build-id=none"]
    # libstdc++ comes first: PyTorch's wheels export some of its newer symbols too, but without a version. Where a compiler
    # has only the static one, its symbols stay inside: streams that share some with PyTorch's copy lose text, or crash.
    libraries = ["-Wl,-lstdc++", "-Wl,--exclude-libs,libstdc++.a"]
    libraries += [f"-L{library}", "-Wl,--no-as-needed,-ltorch,--as-needed", "-ltorch_cpu", *plain]
    output = "-MD -MF $out.d -c $in -o $out"  # -MMD would leave out csrc, which jit has by -isystem.
    env = {name: os.environ.get(name, "") for name in ("CXXFLAGS", "LDFLAGS")}
    commands = {
        # The last optimization level counts. Conda's flags have -O2, with which GCC vectorizes few of the kernels' loops.
        "cxx": f"{shlex.join([*cxx, *common, *host, *headers])} {env['CXXFLAGS']} {optimise} {output}",
        "link_cxx": f"{shlex.join(cxx)} -shared $in -o $out {shlex.join(libraries)} {env['LDFLAGS']}",
    }
    if nvcc:
        # conda-forge's nvcc gets its host compiler from these flags.
        given = "-ccbin" in os.environ.get("NVCC_PREPEND_FLAGS", "")
        compiler = [nvcc, *([] if given else ["-ccbin", cxx[0]])]
        device = [optimise, *architecture_flags(architectures), "--threads=2", "-DUSE_CUDA"]
        device += ["-G"] if debug else ["--compress-mode=size"]
        passed = [option for option in host if " " not in option]  # nvcc can't pass a space on.
        wrapped = [flag for option in passed for flag in ("-Xcompiler", option)]
        linked = [option.replace("-Wl,", "-Xlinker=") for option in libraries]
        # In NVIDIA's wheels the runtime is in lib, where their nvcc doesn't look.
        runtime = Path(nvcc).resolve().parents[1] / "lib"
        linked += [f"-L{runtime}"] if (runtime / "libcudart_static.a").exists() else []
        # nvcc names internal symbols by a random number and the folder; named by the file alone, they are the same in
        # every build.
        names = "--frandom-seed=$in -Xcudafe --orig_src_path_name=$in"
        commands["nvcc"] = f"{shlex.join([*compiler, *common, *device, *wrapped, *headers])} {names} {output}"
        commands["link_nvcc"] = (
            f"{shlex.join(compiler)} -shared -cudart=static --no-device-link $in -o $out {shlex.join(linked)}"
        )
    return commands


def triton_version() -> str:
    """Of the Triton that compiles kernels ahead of time; empty without it."""
    try:
        return metadata.version("triton") if find_spec("triton") else ""
    except metadata.PackageNotFoundError:
        return "unknown"


def ahead(
    nvcc: str | None, architectures: Iterable[str], libraries: dict[str, list[str]], needed: Iterable[str], folder: str
) -> list[str]:
    """Lines of ninja's file for what Triton compiles: two sources in `folder`, which become sources of the second library.

    They are made of the first one, again where one of the files in `needed` has changed.
    """
    version = triton_version()
    if not nvcc or not version:
        return []
    cpu, cuda = libraries  # _C and _C_cuda.
    made = [f"{folder}/triton.cu", f"{folder}/triton.cpp"]
    libraries[cuda] = [*libraries[cuda], *made]
    command = [sys.executable, "extension_cpp/triton/_ahead.py", version, nvcc, f"{folder}/triton", f"{folder}/{cpu}"]
    outputs, files = (" ".join(map(escaped, paths)) for paths in (made, needed))
    return [
        "rule triton",
        f"  command = {shlex.join([*command, *architectures])}",
        "  description = triton $out",
        "  restat = 1",
        f"build {outputs}: triton {escaped(folder)}/{escaped(cpu)} | {files}",
    ]


def escaped(path: Path | str) -> str:
    """A path as ninja's file has it."""
    return re.sub(r"([$ :])", r"$\1", str(path))


def write_ninja(
    file: Path,
    commands: Mapping[str, str],
    libraries: Mapping[str, Iterable[str]],
    folder: str = "",
    more: Iterable[str] = (),
) -> None:
    """Write the file that makes `libraries` in `folder`, each from its sources, .cpp or .cu; with `more` lines."""
    prefix = f"{escaped(folder)}/" if folder else ""
    lines = [f"builddir = {escaped(folder) or '.'}"]
    for name, command in commands.items():
        lines += [f"rule {name}", f"  command = {command}", f"  description = {name} $out"]
        lines += [] if name.startswith("link") else ["  depfile = $out.d", "  deps = gcc"]
    lines += more
    objects: dict[str, str] = {}  # By source: both libraries have what csrc/common/ compiles once.
    for library, sources in libraries.items():
        for source in sources:
            if source in objects:
                continue
            path = Path(source)
            # Files of one name, of several folders, have objects in folders of a number.
            same = sum(Path(other).name == path.name for other in objects)
            objects[source] = f"{prefix}{f'{same + 1}/' if same else ''}{escaped(path.name)}.o"
            lines.append(f"build {objects[source]}: {'nvcc' if path.suffix == '.cu' else 'cxx'} {escaped(source)}")
        linker = "nvcc" if any(source.endswith(".cu") for source in sources) else "cxx"
        linked = " ".join(dict.fromkeys(objects[source] for source in sources))
        lines.append(f"build {prefix}{escaped(library)}: link_{linker} {linked}")
    text = "\n".join(lines) + "\n"
    if not file.exists() or file.read_text() != text:
        file.write_text(text)


def contents(folder: Path, cuda: bool) -> dict[str, str]:
    """A hash of each file that is compiled. Its time says less, as git writes anew what it had changed."""
    kinds = ["csrc/**/*.cpp", "csrc/**/*.h"]
    kinds += ["csrc/**/*.cu", "csrc/**/*.cuh", "extension_cpp/triton/*.py"] if cuda else []
    paths = (path for kind in kinds for path in folder.glob(kind))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def readable(lines: Iterable[str]) -> Iterator[str]:
    """Of ninja's lines the steps that succeeded and what the compilers say: not the command of a step that failed."""
    step = ""  # Held back: only the next line tells whether it failed.
    lines = iter(lines)
    for line in lines:
        if line.startswith("FAILED: "):
            step = ""
            next(lines, "")  # The command.
            continue
        if step:
            yield step
        step = line if re.match(r"\[\d+/\d+\] ", line) else ""
        if not step and not line.startswith("ninja: build stopped"):
            yield line
    if step:
        yield step


def once(lines: Iterable[str]) -> Iterator[str]:
    """Without a compiler's warnings that were shown: a template has each for every type, and every set of instructions."""
    seen: set[str] = set()
    where: list[str] = []  # Lines that come before a warning.
    skips = False
    for line in lines:
        if re.match(r"In |\S+: In |\s+(inlined )?from |\S+:\s+(recursively )?required ", line):
            where.append(line)
            skips = False
        elif skips and re.match(r"\s|\S+: note: ", line):
            where.clear()
        else:
            skips = " warning: " in line and line in seen
            if not skips:
                yield from where
                yield line
            where.clear()
            seen.add(line)
    yield from where


def start_ninja(file: Path, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = ["ninja", "-f", str(file), *arguments]
    try:
        return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except FileNotFoundError:
        raise BuildError("the build needs ninja: pip install ninja") from None


def compile_commands(file: Path, folder: Path) -> str:
    """How each source is compiled, as editors and clangd read it: compile_commands.json."""
    return start_ninja(file, folder, "-t", "compdb", "cxx", "nvcc").communicate()[0]


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process at a time: when two write ninja's logs, it can't read them again."""
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # Until the file is closed.
        yield


def run_ninja(file: Path, folder: Path) -> Generator[str]:
    """Compile what has changed; yield what :func:`readable` leaves of ninja's lines. Raises BuildError if a step fails."""
    # Ninja's default is two more than there are cores, and nvcc uses two threads.
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    with start_ninja(file, folder, "-j", jobs) as ninja:
        assert ninja.stdout
        damaged = False
        for line in once(readable(ninja.stdout)):
            damaged |= "premature end of file" in line
            yield line
    if damaged:  # Ninja 1.13 leaves the damaged entry in, and would compile everything every time.
        (file.parent / ".ninja_deps").unlink(missing_ok=True)
    if ninja.returncode:
        raise BuildError("the compilation failed; the compiler's own message is above")
