"""Downloads wheels, and lays their files out as an installed conda package has them."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from packaging.metadata import Metadata
from packaging.utils import parse_wheel_filename

from channel.archive import File
from channel.pins import Cuda, Pin, Pins, conda_name

TARGET = "targets/x86_64-linux"

# A script that finds its interpreter in its own folder, wherever the environment is.
SCRIPT = """#!/bin/sh
'''exec' "$(dirname "$(readlink -f "$0")")/python" "$0" "$@"
' '''
import sys
from {module} import {name}
sys.exit({call}())
"""


class DownloadError(Exception):
    """What pip said."""


def download(folder: Path, pins: Sequence[Pin]) -> list[tuple[Pin, Path]]:
    """The wheels of `pins`, checked against their hashes, the largest first; what is there is not fetched again."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = folder / "wanted.txt"
    listed.write_text("".join(f"{pin.line}\n" for pin in pins))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", "--requirement", str(listed)]
    command += ["--dest", str(folder), "--find-links", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise DownloadError("\n".join(x for x in done.stderr.splitlines() if x.startswith(("ERROR", "    "))))
    wheels: dict[tuple[str, str], Path] = {}
    for path in folder.glob("*.whl"):
        name, version, _, _ = parse_wheel_filename(path.name)
        wheels[name, str(version)] = path
    found = [(pin, wheels[pin.wheel, pin.full_version]) for pin in pins]
    return sorted(found, key=lambda pair: -pair[1].stat().st_size)


class Wheel:
    """An open wheel."""

    def __init__(self, path: Path, python: str) -> None:
        _, _, _, tags = parse_wheel_filename(path.name)
        self.pure = all(tag.platform == "any" for tag in tags)
        self.site = "site-packages" if self.pure else f"lib/python{python}/site-packages"
        self.scripts = "python-scripts" if self.pure else "bin"
        self.archive = zipfile.ZipFile(path)
        members = [member for member in self.archive.infolist() if not member.is_dir()]
        (self.info,) = {m.filename.split("/")[0] for m in members if m.filename.split("/")[0].endswith(".dist-info")}
        self.members = {member.filename: member for member in members}
        self.metadata = Metadata.from_email(self.archive.read(f"{self.info}/METADATA"), validate=False)

    def files(self) -> Iterator[File]:
        """As pip installs them."""
        for name, member in self.members.items():
            if name in (f"{self.info}/RECORD", f"{self.info}/INSTALLER"):
                continue
            path = self.installed(name)
            executable = bool(member.external_attr >> 16 & 0o111) or path.startswith(f"{self.scripts}/")
            yield File(path, member.file_size, partial(self.archive.open, member), executable)
        yield File.of(f"{self.site}/{self.info}/INSTALLER", b"conda\n")
        yield from self.entry_points()

    def installed(self, name: str) -> str:
        """Where a file of the wheel is in an environment."""
        data = re.match(r"[^/]+\.data/(\w+)/", name)
        if data is None:
            return f"{self.site}/{name}"
        folder = {"scripts": f"{self.scripts}/", "data": ""}.get(data[1], f"{self.site}/")
        return folder + name[data.end() :]

    def entry_points(self) -> Iterator[File]:
        entries = configparser.ConfigParser(delimiters="=")
        entries.optionxform = str  # type: ignore[assignment,method-assign]
        name = f"{self.info}/entry_points.txt"
        if name in self.members:
            entries.read_string(self.archive.read(name).decode())
        for script, target in entries["console_scripts"].items() if entries.has_section("console_scripts") else ():
            module, _, call = target.split("[")[0].strip().partition(":")
            content = SCRIPT.format(module=module, name=call.split(".")[0], call=call)
            yield File.of(f"{self.scripts}/{script}", content.encode(), executable=True)

    def toolkit(self) -> Iterator[File]:
        """The part of the CUDA toolkit that a wheel has, where conda-forge's nvcc expects it; nothing for Python."""
        folders = {"bin": "bin", "nvvm": "nvvm", "include": f"{TARGET}/include", "lib": f"{TARGET}/lib"}
        for name, member in self.members.items():
            vendor, _, path = name.partition("/")
            folder, _, rest = path.partition("/")[2].partition("/")
            if vendor == "nvidia" and folder in folders:
                source = partial(self.archive.open, member)
                yield File(f"{folders[folder]}/{rest}", member.file_size, source, executable="/bin/" in name)

    def requirements(self, pins: Pins, cuda: Cuda | None) -> list[str]:
        """The requirements on this platform, as conda writes them."""
        # PyPI's cuda-toolkit is a list of extras, of which torch asks for the libraries that are pinned.
        everything = self.metadata.name == "cuda-toolkit"
        libraries = {pin.name for pin in pins.cuda[cuda].libraries} if everything and cuda else set()
        found = []
        for requirement in self.metadata.requires_dist or ():
            name = conda_name(requirement.name, pins.names)
            if everything and name not in libraries:
                continue
            if requirement.marker is None or requirement.marker.evaluate({"extra": "all" if everything else ""}):
                found.append(f"{name} {requirement.specifier}".strip())
        return sorted(found)
