"""Writes conda packages: one pass from where the files are, a wheel or a folder, with no copy of them on the disk."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import _bootstrap_external  # type: ignore[attr-defined]
from pathlib import Path
from typing import IO

try:
    import compression.zstd as zstd
except ImportError:
    import backports.zstd as zstd

TIME = 1_704_067_200  # Of every file, so that a package made twice has the same bytes.
LEVEL = 1  # Packages are read as often as they are written, on this machine alone.
BUFFER = 1 << 20


@dataclass(frozen=True)
class File:
    """A file of a package, or a link where `target` is set."""

    path: str
    size: int = 0
    open: Callable[[], IO[bytes]] = io.BytesIO
    executable: bool = False
    target: str = ""
    prefix: str = ""
    """What an installer replaces in the file with the folder of the environment."""

    @classmethod
    def of(cls, path: str, content: bytes, executable: bool = False) -> File:
        return cls(path, len(content), lambda: io.BytesIO(content), executable)

    def read(self) -> bytes:
        with self.open() as stream:
            return stream.read()


@dataclass(frozen=True)
class Package:
    """The metadata of a package."""

    name: str
    version: str
    build: str
    subdir: str
    depends: Sequence[str] = ()
    constrains: Sequence[str] = ()
    run_exports: dict[str, list[str]] = field(default_factory=dict)
    number: int = 0

    @property
    def stem(self) -> str:
        return f"{self.name}-{self.version}-{self.build}"

    def info(self, paths: list[dict]) -> dict[str, object]:
        """The files below info/."""
        index: dict[str, object] = {
            **{"name": self.name, "version": self.version, "build": self.build, "build_number": self.number},
            **{"subdir": self.subdir, "depends": list(self.depends), "constrains": list(self.constrains)},
            "timestamp": TIME * 1000,
        }
        files: dict[str, object] = {"about.json": {}, "paths.json": {"paths": paths, "paths_version": 1}}
        if self.subdir == "noarch":
            index["noarch"] = "python"
            files["link.json"] = {"noarch": {"type": "python"}, "package_metadata_version": 1}
        if self.run_exports:
            files["run_exports.json"] = self.run_exports
        return {"index.json": index, **files}


class Hashing(io.RawIOBase):
    """Passes a stream on and keeps its digest."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.digest = stream, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(size)
        self.digest.update(data)
        return data


def write(package: Package, files: Iterable[File], folder: Path) -> Path:
    """Write `package` into `folder`; returns its path."""
    path = folder / f"{package.stem}.conda"
    paths: list[dict] = []
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(entry("metadata.json"), json.dumps({"conda_pkg_format_version": 2}))
        with component(archive, f"pkg-{package.stem}.tar.zst") as tar:
            for file in files:
                paths.append(add(tar, file))
        with component(archive, f"info-{package.stem}.tar.zst") as tar:
            for name, content in package.info(paths).items():
                add(tar, File.of(f"info/{name}", json.dumps(content).encode()))
    return path


def index_json(package: Path) -> dict:
    """The metadata that a package carries."""
    with (
        zipfile.ZipFile(package) as archive,
        archive.open(f"info-{package.stem}.tar.zst") as stream,
        zstd.ZstdFile(stream) as plain,
        tarfile.open(fileobj=plain, mode="r|") as tar,
    ):
        for member in tar:
            if member.name == "info/index.json" and (file := tar.extractfile(member)):
                return json.loads(file.read())
    raise OSError(f"{package} has no info/index.json")


def entry(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(name, (2024, 1, 1, 0, 0, 0))


@contextmanager
def component(archive: zipfile.ZipFile, name: str) -> Iterator[tarfile.TarFile]:
    """One of the two compressed tar files that a package consists of."""
    options = {zstd.CompressionParameter.compression_level: LEVEL, zstd.CompressionParameter.nb_workers: 2}
    with (
        archive.open(entry(name), "w", force_zip64=True) as stream,
        zstd.ZstdFile(stream, "w", options=options) as compressed,
        tarfile.open(fileobj=compressed, mode="w|", bufsize=BUFFER, copybufsize=BUFFER) as tar,  # type: ignore[call-overload]
    ):
        yield tar


def add(tar: tarfile.TarFile, file: File) -> dict:
    """Write a file; returns what paths.json says of it."""
    member = tarfile.TarInfo(file.path)
    member.mtime, member.mode = TIME, 0o755 if file.executable else 0o644
    if file.target:
        member.type, member.linkname = tarfile.SYMTYPE, file.target
        tar.addfile(member)
        return {"_path": file.path, "path_type": "softlink"}
    member.size = file.size
    with file.open() as stream:
        tar.addfile(member, hashing := Hashing(stream))
    prefix = {"prefix_placeholder": file.prefix, "file_mode": "text"} if file.prefix else {}
    digest = hashing.digest.hexdigest()
    return {"_path": file.path, "path_type": "hardlink", "sha256": digest, "size_in_bytes": file.size, **prefix}


def with_bytecode(files: Sequence[File], pool: Executor, tag: str) -> Iterable[File]:
    """The files, then the .pyc of each module, which the pool compiles in the meantime."""
    # What an installer changes would differ from its bytecode.
    modules = [file for file in files if file.path.endswith(".py") and not file.prefix]
    compiled = pool.map(bytecode, (file.read() for file in modules), (file.path for file in modules), chunksize=32)
    yield from files
    for module, content in zip(modules, compiled):
        if content is not None:
            folder, name = os.path.split(module.path)
            yield File.of(f"{folder}/__pycache__/{name.removesuffix('.py')}.{tag}.pyc", content)


def bytecode(source: bytes, path: str) -> bytes | None:
    """The .pyc that Python uses without a look at the source; None for what is no valid Python, as tests of parsers have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            code = compile(source, path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return None
    return bytes(_bootstrap_external._code_to_hash_pyc(code, importlib.util.source_hash(source), False))
