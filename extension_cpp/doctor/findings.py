"""What is wrong, or slower than it could be: one function for each cause, which judges the facts."""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from extension_cpp import _loader
from extension_cpp._build import architecture_for, runs_on
from extension_cpp.doctor.facts import Facts
from extension_cpp.doctor.fixes import (
    install_package,
    install_torch,
    prefer_cuda,
    reinstall_openmp,
    remove,
    unhide,
    update_driver,
)
from extension_cpp.doctor.libraries import first_release
from extension_cpp.doctor.origin import NAME


@dataclass
class Finding:
    name: str
    """For machines: it stays the same if the words change."""
    what: str
    how: str
    """The numbers, paths and versions that show it."""
    fix: str
    """A command."""
    severity: Literal["error", "warning"] = "error"
    """An error keeps torch or a library from being loaded; a warning is of something that works, but not as it could."""


COMPILED = ("native", "triton (compiled)")
"""What a backend of compiled code is called."""
warning = partial(Finding, severity="warning")
Check = Callable[[Facts], Iterator[Finding]]


def diagnose(facts: Facts) -> list[Finding]:
    findings = [finding for check in CHECKS for finding in check(facts)]
    errors = {finding.name for finding in findings if finding.severity == "error"}
    return findings + [finding for check in REMAINING for finding in check(facts, errors)]


def cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def show_gpus(facts: Facts) -> str:
    return ", ".join(f"{gpu.name} (architecture {gpu.arch})" for gpu in facts.gpus)


def torch_is_there(facts: Facts) -> Iterator[Finding]:
    if facts.torch is None:
        how = f"{sys.executable} finds no torch in the {len(sys.path)} folders of sys.path"
        yield Finding("no-torch", "PyTorch is not installed", how, install_torch(facts))
    elif not facts.torch.number:
        what = "PyTorch is damaged"
        how = f"{facts.torch.folder} has no version.py with a version"
        yield Finding("torch-fails", what, how, install_torch(facts, again=True))
    elif facts.torch.number < _loader.MINIMUM_TORCH:
        how = f"torch {facts.torch.version} in {facts.torch.folder}; the libraries need the stable ABI of 2.10"
        yield Finding("old-torch", "PyTorch is older than 2.10", how, install_torch(facts))
    elif (error := facts.probe.get("torch_error", "")) and not missing_openmp(error):
        what = f"PyTorch {facts.torch.version} can't be imported"
        yield Finding("torch-fails", what, error, install_torch(facts, again=True))


def libraries_are_whole(facts: Facts) -> Iterator[Finding]:
    for library in facts.libraries:
        if library.damage:
            what, how = f"{library.path.name} is damaged", f"{library.path}: {library.damage}"
            yield Finding("damaged", what, how, install_package(facts, built_as(facts)))
        elif library.platform != facts.platform:
            what = f"{library.path.name} is for another platform"
            how = f"{library.path} is for {library.platform}, this is {facts.platform}"
            yield Finding("other-platform", what, how, install_package(facts, same=False))
    if facts.library("_C") is None and facts.origin.method != "just in time":
        what = "the package has no library _C: it was not compiled, or not all of it was copied"
        yield Finding("no-library", what, f"{facts.package} has no _C.*", install_package(facts))
    known = {library.path.name for library in facts.libraries if library.damage}
    changed = [words for words in facts.origin.altered if words.split()[0] not in known]
    if changed:
        what = "files of the package were changed since it was installed"
        how = f"{', '.join(changed)} in {facts.package}, by the hashes of its {facts.origin.method} record"
        yield warning("altered", what, how, install_package(facts))


def built_as(facts: Facts) -> str:
    """The variant that the package should be: CUDA if it has a CUDA library, however damaged."""
    return "cuda" if facts.library("_C_cuda") and facts.origin.method != "conda" else ""


def one_copy(facts: Facts) -> Iterator[Finding]:
    if not facts.others:
        return
    others = ", ".join(map(str, facts.others))
    hiding = "a source checkout" if (facts.package.parent / "setup.py").exists() else "this copy"
    how = f"Python imports {facts.package}, which comes first on sys.path"
    yield warning("shadowed", f"{hiding} hides the package in {others}", how, unhide(facts))


def symbols_are_there(facts: Facts) -> Iterator[Finding]:
    torch = facts.torch
    if torch is None or torch.number < _loader.MINIMUM_TORCH:
        return
    for library in facts.libraries:
        if library.undefined and (library.path.stem != "_C_cuda" or torch.cuda):
            names = library.undefined
            listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            owners = {name: first_release(name) for name in names}
            newest = max((o for o in owners.values() if o), key=lambda v: tuple(map(int, v.split("."))), default=None)
            unknown = [name for name, owner in owners.items() if owner is None]
            has = f"torch {newest} is the first that has {'them' if not unknown else 'some of them'}" if newest else ""
            none = f"no known release of torch has {', '.join(unknown[:4])}" if unknown else ""
            how = f"{listed} in no library of {torch.folder / 'lib'}; {'; '.join(filter(None, (has, none)))}"
            what = f"{library.path.name} needs symbols that torch {torch.version} doesn't have"
            fix = install_package(facts, built_as(facts), same=False)
            if newest and not unknown:
                fix = install_torch(facts, version=newest)
            yield Finding("undefined-symbols", what, how, fix)


def cuda_build(facts: Facts) -> Iterator[Finding]:
    if facts.gpus and not any(library.path.stem == "_C_cuda" for library in facts.libraries):
        how = f"{show_gpus(facts)}; {facts.package} has no _C_cuda.so"
        build = f"cuda{facts.driver // 1000}" if facts.driver else "cuda"
        fix = install_package(facts, build)
        yield warning("cpu-build", f"this is the CPU build of {NAME}, on a machine with a GPU", how, fix)


def cuda_torch(facts: Facts) -> Iterator[Finding]:
    if facts.gpus and facts.torch and facts.torch.cuda is None:
        how = f"{show_gpus(facts)}; torch {facts.torch.version} in {facts.torch.folder} was built without CUDA"
        fix = install_torch(facts, "cuda", (facts.driver or 13000) // 1000)
        yield warning("cpu-torch", "PyTorch is a build without CUDA, on a machine with a GPU", how, fix)


def driver(facts: Facts) -> Iterator[Finding]:
    if facts.driver_error:
        what = "there is an NVIDIA driver, but it doesn't answer"
        yield Finding(
            "driver-fails", what, facts.driver_error, "sudo reboot; if that doesn't help, reinstall the driver"
        )
    if facts.driver is None:
        return
    name = f"driver {facts.driver_name}" if facts.driver_name else "the driver"
    supported, major = f"{name} supports CUDA {cuda_version(facts.driver)} at most", facts.driver // 1000
    library = facts.library("_C_cuda")
    torch = facts.torch.cuda if facts.torch else None
    if torch and int(torch.split(".")[0]) > major:
        fix = f"{update_driver(torch)}; or {install_torch(facts, f'cuda{major}', major)}"
        how = f"{supported}, torch {facts.torch.version} was built with {torch}"  # type: ignore[union-attr]
        yield Finding("driver-torch", "the NVIDIA driver is too old for PyTorch", how, fix)
    if library and library.cuda // 1000 > major:
        built = cuda_version(library.cuda)
        fix = f"{update_driver(built)}; or {install_package(facts, f'cuda{major}')}"
        how = f"{supported}, {library.path} was built with {built}"
        yield Finding("driver-library", "the NVIDIA driver is too old for the CUDA runtime in _C_cuda.so", how, fix)


def architectures(facts: Facts) -> Iterator[Finding]:
    library = facts.library("_C_cuda")
    if library is None or not library.architectures:
        return
    for gpu in {gpu.arch: gpu for gpu in facts.gpus}.values():
        code, ptx = runs_on(library.architectures, gpu.architecture)
        # A driver compiles no PTX of a newer CUDA than its own.
        ptx &= facts.driver is None or facts.driver >= library.cuda
        wanted = architecture_for(gpu.arch)
        if code and (wanted == gpu.arch or any(name.startswith(wanted) for name in library.architectures)):
            continue
        how = f"{gpu.name} is of architecture {gpu.arch}, {library.path} has {', '.join(library.architectures)}"
        what = f"{library.path.name} has no code for {gpu.name}"
        if code:
            what = f"{library.path.name} has no code with Hopper's own instructions for {gpu.name}"
        elif ptx:
            what += ": the driver compiles its PTX at the first call"
        elif any("triton" in used.get("cuda", "") for used in facts.probe.get("backends", {}).values()):
            how += "; operators in Triton are compiled just in time if Triton is installed, else run their reference"
        others = [name for name in library.architectures if name != gpu.arch]
        listed = ";".join([*others, wanted] if gpu.architecture >= (7, 5) else [wanted])
        fix = install_package(facts, "", same=False, TORCH_CUDA_ARCH_LIST=listed, USE_CUDA="1")
        if gpu.architecture < (7, 5):
            fix += " (with nvcc of CUDA 12)"
        yield warning("architecture", what, how, fix)


def missing_openmp(error: str) -> str:
    match = re.search(r"(lib(?:gomp|iomp5|omp)[\w.-]*): cannot open shared object file", error)
    return match[1] if match else ""


def openmp(facts: Facts) -> Iterator[Finding]:
    if name := missing_openmp(facts.probe.get("torch_error", "")):
        what = f"PyTorch's OpenMP runtime {name} is missing"
        yield Finding("openmp-missing", what, facts.probe["torch_error"], reinstall_openmp(facts))
    found = facts.probe.get("openmp")
    if found == []:
        what = "no OpenMP runtime is loaded: CPU kernels run on one thread"
        how = "torch was imported, and no libgomp, libiomp5 or libomp is mapped"
        yield warning("openmp-missing", what, how, install_torch(facts))
    elif found and len(found) > 1:
        folder = facts.torch.folder if facts.torch else Path()
        homes = {folder.resolve(), (folder / "lib").resolve(), folder.with_name("torch.libs").resolve()}
        # A wheel of torch has its own; conda's torch uses that of the environment.
        own = [path for path in found if Path(path).parent in homes]
        own = own or [path for path in found if Path(path).parent == (facts.prefix / "lib").resolve()]
        extra = [path for path in found if path not in own] or found[1:]
        what = f"{len(found)} OpenMP runtimes in one process: their threads compete, and results may be wrong"
        how = f"torch and {NAME} were imported, and these are mapped: {', '.join(found)}"
        yield warning("openmp-mixed", what, how, remove(Path(extra[0]), facts))


def solver(facts: Facts) -> Iterator[Finding]:
    for preference in facts.preferences if facts.gpus else ():
        what = "conda's solver was told to prefer CPU, on a machine with a GPU"
        how = f"{preference.where}: {preference.what}; {show_gpus(facts)}"
        fix = f"{preference.undo} && {prefer_cuda(facts)}" if preference.undo else prefer_cuda(facts)
        yield warning("solver", what, how, fix)


def settings(facts: Facts) -> Iterator[Finding]:
    if facts.simd != facts.simd_possible:
        what = f"the CPU kernels are limited to {facts.simd}, and this machine has {facts.simd_possible}"
        yield warning("simd", what, "the environment variable EXTENSION_CPP_SIMD", "unset EXTENSION_CPP_SIMD")
    if facts.backend:
        what = f"every operator is limited to the backend '{facts.backend}'"
        find = Finding if "EXTENSION_CPP_BACKEND" in facts.probe.get("error", "") else warning
        yield find("backend", what, "the environment variable EXTENSION_CPP_BACKEND", "unset EXTENSION_CPP_BACKEND")
    for name, error in facts.probe.get("compat", {}).items():
        if error:
            what = f"{name} doesn't run the kernels of {NAME}, as the environment variable EXTENSION_CPP_COMPAT asks"
            yield warning("compat", what, error, "unset EXTENSION_CPP_COMPAT")
    if "EXTENSION_CPP_COMPAT" in (error := facts.probe.get("error", "")):
        what = "the environment variable EXTENSION_CPP_COMPAT names an unknown library"
        yield Finding("compat", what, error, "unset EXTENSION_CPP_COMPAT")


# What fails without an error above as its cause is reported in the words of its own message.


def dies(facts: Facts, errors: set[str]) -> Iterator[Finding]:
    if facts.probe.get("died"):
        torch = "threads" not in facts.probe  # The first thing that is printed after torch was imported.
        fix = install_torch(facts, again=True) if torch else install_package(facts, built_as(facts))
        yield Finding("died", f"importing {'torch' if torch else NAME} ends the process", facts.probe["died"], fix)


def import_fails(facts: Facts, errors: set[str]) -> Iterator[Finding]:
    error = facts.probe.get("error", "")
    if error and not errors:
        # If the C or C++ runtime here is too old, the same file can't be loaded.
        fix = install_package(facts, same="not found (required by" not in error)
        yield Finding("import-fails", f"{NAME} can't be imported", error.splitlines()[0], fix)
    for library, error in facts.probe.get("load_errors", {}).items():
        if facts.library(library) and not errors:
            yield Finding("not-loaded", f"{library} is not loaded", error, install_package(facts, built_as(facts)))


def no_kernels(facts: Facts, errors: set[str]) -> Iterator[Finding]:
    """One operator may have no kernel for a device type. If none has one, something is wrong, unless it was asked for."""
    if facts.backend:
        return
    backends, load_errors = facts.probe.get("backends", {}), facts.probe.get("load_errors", {})
    cuda = facts.gpus and facts.library("_C_cuda") and not errors and not load_errors
    for device_type in ("cpu", "cuda") if cuda else ("cpu",):
        if backends and not any(used.get(device_type) in COMPILED for used in backends.values()):
            how = f"none of {', '.join(backends)} does, though no library failed to load"
            fix = install_package(facts, built_as(facts))
            yield warning("not-native", f"no operator runs compiled code on {device_type}", how, fix)


def hidden_gpus(facts: Facts, errors: set[str]) -> Iterator[Finding]:
    if facts.gpus and facts.probe.get("cuda_devices") == 0 and not errors & {"driver-torch", "driver-fails"}:
        said = facts.probe.get("cuda_said") or "torch gives no reason"
        how = f"{show_gpus(facts)}; torch.cuda.is_available() is false: {said}"
        fix = "sudo modprobe nvidia_uvm; with NVSwitch also sudo systemctl start nvidia-fabricmanager"
        first = (facts.visible_devices or "").split(",")[0].strip()
        shown = first.startswith(("GPU-", "MIG-")) or (first.isdigit() and int(first) < len(facts.gpus))
        if facts.visible_devices is not None and not shown:
            how += f"; CUDA_VISIBLE_DEVICES is '{facts.visible_devices}'"
            fix = "unset CUDA_VISIBLE_DEVICES"
        yield warning("hidden-gpu", "PyTorch sees no GPU", how, fix)


CHECKS: list[Check] = [
    torch_is_there,
    libraries_are_whole,
    one_copy,
    symbols_are_there,
    cuda_build,
    cuda_torch,
    driver,
    architectures,
    openmp,
    solver,
    settings,
]
REMAINING = [dies, import_fails, no_kernels, hidden_gpus]
