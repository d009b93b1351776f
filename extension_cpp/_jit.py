"""What extension_cpp.jit does."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path

from extension_cpp import _build, _loader
from extension_cpp._build import BuildError

_loaded: dict[Path, bytes] = {}


def load(sources: Sequence[str | os.PathLike], name: str | None) -> None:
    """As extension_cpp.jit.load."""
    if sources:
        paths = [Path(source).resolve() for source in sources]
        for path in paths:
            if path.suffix not in (".cpp", ".cu"):
                raise ValueError(f"extension_cpp.jit.load: sources must be .cpp and .cu files, got {path}")
            if not path.is_file():
                raise FileNotFoundError(f"extension_cpp.jit.load: there is no file {path}")
        load_all(compile_libraries(paths, name or paths[0].stem))
        return
    if _loader.libraries:
        raise RuntimeError(
            f"extension_cpp.jit.load: the operators are registered by {_loader.libraries['_C']}, and a process can "
            "register them once; EXTENSION_CPP_JIT=1 before the import makes the sources take its place"
        )
    load_package()
    _loader.just_in_time = True
    # The operators become functions of the package.
    importlib.reload(sys.modules[__name__.partition(".")[0]])


def load_package() -> dict[str, str]:
    """Compile and load this package's own libraries; return why one is missing."""
    folder = source_folder()
    # module.cpp only makes a Python module of _C.
    sources = [path for path in (*folder.glob("*.cpp"), *folder.glob("*.cu")) if path.name != "module.cpp"]
    libraries = compile_libraries(sorted(sources), "_C")
    load_all(libraries)
    _loader.libraries.update({library.stem: library for library in libraries})
    import torch

    if torch.version.cuda and "_C_cuda" not in _loader.libraries:
        return {"_C_cuda": f"compiled just in time without CUDA: {_build.find_nvcc()[1]}"}
    return {}


def source_folder() -> Path:
    """csrc/ of a checkout, or the copy of it in the package."""
    packaged, checkout = _loader.FOLDER / "csrc", _loader.FOLDER.parent / "csrc"
    folder = packaged if packaged.is_dir() else checkout
    if not (folder / "module.cpp").exists():
        raise BuildError(f"extension_cpp.jit.load: the sources are neither in {packaged} nor in {checkout}")
    return folder


def load_all(libraries: list[Path]) -> None:
    """Load libraries and raise BuildError for what PyTorch accepts and no call could reach: kernels without an operator."""
    import torch

    before = {*torch._C._dispatch_find_dangling_impls()}
    for library in libraries:
        load_once(library)
    if wrong := "\n".join(filter(None, map(_loader.registration_errors, libraries))):
        raise BuildError(f"extension_cpp.jit.load: correct the source and start Python again\n{wrong}")
    lost = "".join(impl for impl in torch._C._dispatch_find_dangling_impls() if impl not in before)
    if lost:
        names = {name.removesuffix(".kernel"): None for name in re.findall(r"^name: (\S+)", lost, flags=re.MULTILINE)}
        files = dict.fromkeys(re.findall(r"registered at (.*?):\d+", lost))
        raise BuildError(
            f"extension_cpp.jit.load: {', '.join(files)} registers kernels for {', '.join(names)}, and no library has "
            "a schema of that name; correct the name, or load the source with the schema first"
        )


def load_once(library: Path) -> None:
    import torch

    content = hashlib.sha256(library.read_bytes()).digest()
    if _loaded.get(library, content) != content:
        raise RuntimeError(
            f"extension_cpp.jit.load: {library.name} was loaded and has been compiled again since, and a process can "
            "register operators once; start Python again"
        )
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise BuildError(f"extension_cpp.jit.load: {unresolved(library, str(error.__cause__ or error))}") from None
    _loaded[library] = content


def unresolved(library: Path, error: str) -> str:
    """Why a library can't be loaded; of a symbol that none of its sources defines, its name in C++ and who uses it."""
    match = re.search(r"undefined symbol: (\w+)", error)
    if not match:
        return error
    objects = library.parent.rglob("*.cu.o" if library.stem.endswith("_cuda") else "*.cpp.o")
    users = " and ".join(sorted(path.stem for path in objects if match[1].encode() in path.read_bytes()))
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_char_p
    name = (demangle(match[1].encode(), None, None, None) or match[1].encode()).decode()
    return (
        f"{users} uses {name}, which no source of {library.name} defines (undefined symbol {match[1]}): define it, or give "
        "jit.load the .cpp that does; .cpp and .cu files make two libraries, and what both need belongs in a header"
    )


def compile_libraries(sources: list[Path], name: str) -> list[Path]:
    """The libraries of `sources`, of .cpp files and, with CUDA, of .cu files; only what the cache lacks is compiled."""
    import torch

    from extension_cpp import _machine

    try:
        nvcc, why_not = _build.find_nvcc()
        cuda = bool(torch.version.cuda) and any(path.suffix == ".cu" for path in sources)
        if cuda and not nvcc and not any(path.suffix == ".cpp" for path in sources):
            raise BuildError(f"{sources[0].name} needs nvcc: {why_not}")
        nvcc = nvcc if cuda else None
        folder = source_folder()
        compiled_for = _build.architectures(gpu.architecture for gpu in _machine.nvidia().gpus)[0] if nvcc else ()
        commands = _build.rules(nvcc, [str(folder)], compiled_for)
        compiler = commands["cxx"].split()[0]
        if not shutil.which(compiler):
            raise BuildError(f"there is no compiler {compiler}: install g++ 11 or newer, or set CXX")
        libraries = {f"{name}.so": [str(path) for path in sources if path.suffix == ".cpp"]}
        libraries |= {f"{name}_cuda.so": [str(path) for path in sources if path.suffix == ".cu"]} if nvcc else {}
        common = [str(path) for path in sorted((folder / "common").glob("*.cpp"))]
        libraries = {library: files + common for library, files in libraries.items() if files}
        # Of ninja too: one that can't read another's log takes old objects for new.
        versions = [version(program) for program in (compiler, nvcc, "ninja")]
        key = json.dumps([commands, libraries, torch.__version__, torch.version.cuda, versions])
        cache = cache_folder() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        cache.mkdir(parents=True, exist_ok=True)
        refuse_writable_by_others(cache)
        with _build.alone(cache):
            _build.write_ninja(cache / "build.ninja", commands, libraries)
            show(name, _build.run_ninja(cache / "build.ninja", cache))
        return [cache / library for library in libraries]
    except BuildError as error:
        raise BuildError(f"extension_cpp.jit.load: {error}") from None


def cache_folder() -> Path:
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "extension_cpp"


def refuse_writable_by_others(folder: Path) -> None:
    """Raise unless only this user, and root, can put a library there: what lies in the cache is loaded as it is."""
    for path in (folder, *folder.resolve().parents):
        status = path.stat()
        shared = stat.S_IWOTH if status.st_gid == os.getgid() else stat.S_IWGRP | stat.S_IWOTH  # A group of one's own.
        sticky = status.st_mode & stat.S_ISVTX and path != folder  # As /tmp is: nobody replaces what is another's.
        if status.st_uid not in (0, os.getuid()) or (status.st_mode & shared and not sticky):
            raise BuildError(
                f"another user can write into {path}, from where libraries would be loaded: let TORCH_EXTENSIONS_DIR name "
                "a folder of yours alone, or change its permissions (chmod go-w)"
            )


def version(program: str | None) -> str:
    """The time and size of a program's file, which differ after another version is installed in its place."""
    found = shutil.which(program) if program else None
    return f"{os.stat(found).st_mtime_ns} {os.stat(found).st_size}" if found else ""


def show(name: str, lines: Generator[str]) -> None:
    """Show ninja's progress and the compiler's warnings; if it fails, raise BuildError with the compiler's message."""
    from rich.console import Console
    from rich.progress import Progress

    said: list[str] = []
    console = Console(stderr=True)
    with closing(lines), Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = None
        try:
            for line in lines:
                step = re.match(r"\[(\d+)/(\d+)\] \w+ (.*)\n", line)
                if not step:
                    said += [line] if line != "ninja: no work to do.\n" else []
                    continue
                done, total, made = int(step[1]), int(step[2]), Path(step[3]).name.removesuffix(".o")
                if task is None:
                    task = progress.add_task(f"compiling {name}")
                progress.update(task, completed=done, total=total, description=f"compiled {made}")
                if not console.is_terminal:
                    console.print(f"extension_cpp.jit: compiled {made}, {done} of {total}")
        except BuildError as error:
            raise BuildError(f"the compiler found errors\n{''.join(said)}" if said else str(error)) from None
    sys.stderr.write("".join(said))
