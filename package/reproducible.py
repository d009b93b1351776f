"""Writes a package, or the wheel that it is given, anew without what differs between builds."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

from conda_package_streaming.create import anonymize, conda_builder
from conda_package_streaming.package_streaming import CondaComponent, stream_conda_component


def make_reproducible(package: Path, epoch: int) -> None:
    """Times and owners, the modes that the builder's umask gives, the order of requirements, the path of a local channel."""
    entries = []
    for component in CondaComponent:
        for archive, member in stream_conda_component(package, component=component):
            stream = archive.extractfile(member)
            content = None if stream is None else constant(member.name, stream.read(), epoch)
            entries.append((member, content))
    with tempfile.TemporaryDirectory(dir=package.parent) as folder:
        with conda_builder(package.stem, folder) as target:
            for member, content in sorted(entries, key=lambda entry: entry[0].name):
                target.addfile(
                    constant_member(member, epoch, content), None if content is None else io.BytesIO(content)
                )
        final = Path(folder, "final.conda")
        with zipfile.ZipFile(Path(folder, package.name)) as written, zipfile.ZipFile(final, "w") as target:
            for name in written.namelist():
                target.writestr(zipfile.ZipInfo(name, time.gmtime(epoch)[:6]), written.read(name))
        os.replace(final, package)


def constant_member(member: tarfile.TarInfo, epoch: int, content: bytes | None) -> tarfile.TarInfo:
    member = anonymize(member)
    member.mtime, member.size = epoch, len(content or b"")
    if member.isfile():
        member.mode = 0o755 if member.mode & 0o100 else 0o644
    return member


def constant(name: str, content: bytes, epoch: int) -> bytes:
    if name not in ("info/index.json", "info/about.json"):
        return content
    fields = json.loads(content)
    if "timestamp" in fields:
        fields["timestamp"] = epoch * 1000
    if "depends" in fields:
        fields["depends"].sort()  # The requirements that run_exports add come in any order.
    if "channels" in fields:
        fields["channels"] = ["conda-forge" if url.startswith("file:") else url for url in fields["channels"]]
    return json.dumps(fields, indent=2, sort_keys=True).encode()


def constant_modes(wheel: Path) -> None:
    """Of a wheel's files, which have those of the checkout's, and so of its umask. SOURCE_DATE_EPOCH does all the rest."""
    final = wheel.with_suffix(".new")
    with zipfile.ZipFile(wheel) as written, zipfile.ZipFile(final, "w") as target:
        for member in written.infolist():
            mode = 0o755 if member.external_attr >> 16 & 0o100 else 0o644
            member.external_attr = member.external_attr & ~(0o777 << 16) | mode << 16
            target.writestr(member, written.read(member))
    os.replace(final, wheel)


if __name__ == "__main__":
    constant_modes(Path(sys.argv[1]))
