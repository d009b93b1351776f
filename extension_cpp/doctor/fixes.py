"""The commands that fix what is wrong: of conda or pixi for what they have installed, else of pip."""

import importlib.metadata
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from extension_cpp._machine import text_of
from extension_cpp.doctor.facts import Facts
from extension_cpp.doctor.origin import NAME

DRIVERS = {12: 525, 13: 580}  # The first driver that supports CUDA of that major version.


def pip(arguments: str) -> str:
    return f"{shlex.quote(sys.executable)} -m pip {arguments}"


def conda(facts: Facts, *specs: str, again: bool = False) -> str:
    """Install with what manages this environment; with `again`, what is installed already."""
    wanted = " ".join(shlex.quote(spec) for spec in specs)
    if facts.pixi and again:
        names = " ".join(re.split("[=<>]", spec)[0] for spec in specs)
        return f"pixi reinstall --manifest-path {facts.pixi} {names}"
    if facts.pixi:
        return f"pixi add --manifest-path {facts.pixi} {wanted}"
    tool = next((name for name in ("conda", "mamba", "micromamba") if shutil.which(name)), "conda")
    ours = facts.origin.method == "conda" and not facts.origin.source.endswith("conda-forge")
    channel = f"-c {facts.origin.source} " if ours else ""
    option = "--force-reinstall " if again else ""
    return f"{tool} install -p {facts.prefix} {channel}-c conda-forge {option}{wanted}"


def by_conda(facts: Facts) -> bool:
    """Whether torch is conda's, or would be."""
    return facts.conda and (facts.torch is None or facts.prefix in facts.torch.folder.parents)


def install_torch(
    facts: Facts, build: str = "", cuda: int | None = None, version: str = "2.10", again: bool = False
) -> str:
    """A torch that is new enough, of that build of conda's or for that CUDA major version of pip's; or this one `again`."""
    if by_conda(facts):
        return conda(facts, f"pytorch>={version}=*{build}*" if build else f"pytorch>={version}", again=again)
    if cuda is None:
        return pip(f"install {'--force-reinstall' if again else '--upgrade'} 'torch>={version}'")
    # On PyPI torch 2.10 is built with CUDA 12.8, later versions with CUDA 13.
    return pip(f"install --force-reinstall 'torch{f'>={version}' if cuda >= 13 else '==2.10.*'}'")


def install_package(facts: Facts, build: str = "", same: bool = True, **variables: str) -> str:
    """The package again, in the variant `build` if given; compiled here if it must not be the `same`, or with variables."""
    origin = facts.origin
    if origin.method == "conda" and not variables:
        return conda(facts, f"{NAME}=*={build}*") if build else conda(facts, f"{NAME}={facts.version}", again=True)
    if build.startswith("cuda"):
        variables["USE_CUDA"] = "1"
    settings = "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items())
    if origin.method == "source":
        return f"cd {origin.source} && {settings}{pip('install --no-build-isolation --no-deps -e .')}"
    if origin.source and same and not settings:
        return pip(f"install --force-reinstall --no-deps {origin.source}")
    if facts.conda and origin.method == "unknown" and not settings:
        return conda(facts, NAME, again=True)
    return f"in a checkout of {NAME} {facts.version}: {settings}{pip('install --force-reinstall --no-deps .')}"


def prefer_cuda(facts: Facts) -> str:
    return conda(facts, f"{NAME}=*=cuda*", "pytorch=*=cuda*")


def reinstall_openmp(facts: Facts) -> str:
    if by_conda(facts):
        return conda(facts, "_openmp_mutex", "libgomp", again=True)
    return pip(f"install --force-reinstall --no-deps torch=={facts.torch.version if facts.torch else ''}")


def update_driver(cuda: str) -> str:
    major = int(cuda.split(".")[0])
    needed = next((number for known, number in sorted(DRIVERS.items()) if known >= major), max(DRIVERS.values()))
    return f"install an NVIDIA driver >= {needed}, on Ubuntu: sudo ubuntu-drivers install nvidia:{needed}"


def unhide(facts: Facts) -> str:
    """Let Python find the package that this copy hides."""
    folder = facts.package.parent
    entries = [Path(entry or ".").resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    if "PYTHONPATH" in os.environ and folder in entries:
        return "unset PYTHONPATH"
    if folder == Path.cwd():
        return f"cd / && {shlex.quote(sys.executable)} -m {NAME}"
    return pip(f"uninstall {NAME}") if facts.origin.method == "wheel" else f"mv {facts.package} {facts.package}.off"


def remove(file: Path, facts: Facts) -> str:
    """Keep a library out of the process, through the variable or the package that brings it."""
    for variable in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        named = [Path(entry) for entry in re.split("[: ]", os.environ.get(variable, "")) if entry]
        if file in named or file.parent in named:
            return f"unset {variable}"
    for record in (facts.prefix / "conda-meta").glob("*.json"):
        if f'"{os.path.relpath(file, facts.prefix)}"' in text_of(record):
            return f"conda remove -p {facts.prefix} --force {record.stem.rsplit('-', 2)[0]}"
    for distribution in importlib.metadata.distributions():
        if file.name not in (
            distribution.read_text("RECORD") or ""
        ):  # `files` takes long for some, with ten thousand lines.
            continue
        named = [
            Path(str(distribution.locate_file(entry))) for entry in distribution.files or () if entry.name == file.name
        ]
        if file.resolve() in [path.resolve() for path in named]:
            return pip(f"uninstall {distribution.metadata['Name']}")
    return f"mv {file} {file}.off"
