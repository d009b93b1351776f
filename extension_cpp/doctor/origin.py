"""Where the package came from, its other copies, and what conda's solver was told, by the records of the installers."""

import base64
import csv
import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from extension_cpp import _elf
from extension_cpp._machine import text_of

NAME = "extension_cpp"


@dataclass
class Origin:
    """Where the package came from."""

    method: str
    """Of installation: conda, wheel, source, just in time, or unknown."""
    text: str
    source: str = ""
    """The channel, URL or checkout to install it from again."""
    altered: list[str] = field(default_factory=list)
    """Files that are gone or were changed since."""


@dataclass
class Preference:
    """Something that told conda's solver to prefer CPU."""

    where: str
    what: str
    undo: str


def find_origin(package: Path, prefix: Path, loaded: Path | None) -> Origin:
    """By the record of conda or pip that lists the package's files; `loaded` is where _C came from."""
    folder = package.parent
    for file in (prefix / "conda-meta").glob(f"{NAME}-[0-9]*.json"):
        record = json.loads(text_of(file))
        if package / "_loader.py" in (prefix / name for name in record.get("files", ())):
            channel = re.sub(r"/(linux|osx|win|noarch)[^/]*/[^/]*$", "", record.get("url") or record["channel"])
            text = f"conda: {record['version']} {record['build']} from {channel}"
            return Origin("conda", text, channel, list(altered(conda_digests(record, package, prefix))))
    if loaded and package.resolve() not in loaded.resolve().parents:
        return Origin("just in time", f"compiled just in time, in {loaded.parent}", str(loaded.parent))
    if (folder / "setup.py").exists() and (folder / "csrc").is_dir():
        return Origin("source", f"source: the checkout {folder}", str(folder))
    for distribution in importlib.metadata.distributions(name=NAME, path=[str(folder)]):
        # distribution.files leaves out files that are gone, since Python 3.12.
        rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
        digests = {
            folder / name: base64.urlsafe_b64decode(digest.removeprefix("sha256=") + "==")
            for name, digest, _ in rows
            if name.startswith(f"{NAME}/") and not name.endswith(".pyc")
        }
        direct = json.loads(distribution.read_text("direct_url.json") or "{}")
        url, repository = direct.get("url", ""), direct.get("vcs_info")
        url = f"{repository['vcs']}+{url}@{repository['commit_id']}" if repository else url
        by = (distribution.read_text("INSTALLER") or "an unknown installer").strip()
        text = f"wheel: {distribution.version}, installed by {by}{f' from {url}' if url else ''}"
        return Origin("wheel", text, url, list(altered(digests)))
    return Origin("unknown", f"unknown: {package} is in no record of conda or pip")


def conda_digests(record: dict, package: Path, prefix: Path) -> dict[Path, bytes]:
    """The files of the package with their SHA-256 digests, if they have one.

    `files` has the path of each file in the environment. In `paths_data` conda keeps the path in the archive, which for a
    package that suits every Python begins with site-packages/; mamba and rattler have that of the environment there too.
    """
    entries = {entry["_path"]: entry for entry in record.get("paths_data", {}).get("paths", [])}
    digests = {}
    for name in record["files"]:
        path = prefix / name
        if package in path.parents and path.suffix != ".pyc":
            archived = f"site-packages/{path.relative_to(package.parent).as_posix()}"
            entry = entries.get(name) or entries.get(archived) or {}
            digests[path] = bytes.fromhex(entry.get("sha256_in_prefix") or entry.get("sha256") or "")
    return digests


def altered(digests: dict[Path, bytes]) -> Iterator[str]:
    """Which files differ from their SHA-256 digests, or are gone."""
    for path, digest in digests.items():
        if not path.exists():
            yield f"{path.name} is gone"
        elif digest and (not path.is_file() or hashlib.sha256(_elf.read(path)).digest() != digest):
            yield f"{path.name} was changed"


def other_copies(package: Path) -> list[Path]:
    """Further copies that Python could find."""
    folders = [Path(entry or ".") / NAME for entry in sys.path]
    for distribution in importlib.metadata.distributions(name=NAME):
        url = json.loads(distribution.read_text("direct_url.json") or "{}")
        if url.get("dir_info", {}).get("editable"):
            folders.append(Path(url["url"].removeprefix("file://")) / NAME)
    found = {folder.resolve(): None for folder in folders if (folder / "__init__.py").exists()}
    return [folder for folder in found if folder != package.resolve()]


def wants_cpu(spec: str) -> bool:
    name, rest = re.match(r"([\w.-]*)(.*)", spec.split("::")[-1]).groups()  # type: ignore[union-attr]
    builds = ("pytorch", "libtorch", "pytorch-mutex", NAME)
    return name in ("cpuonly", "pytorch-cpu") or (name in builds and re.search(r"\bcpu", rest) is not None)


def cpu_preferences(prefix: Path) -> Iterator[Preference]:
    """What told the solver of this environment to prefer CPU, by the files of conda, mamba and pixi."""
    meta = prefix / "conda-meta"
    asked: dict[str, tuple[str, str]] = {}
    history = meta / "history"
    for action, specs in re.findall(r"^# (\w+) specs: \[(.*)\]", text_of(history), re.MULTILINE):
        for spec in re.findall(r"['\"](.+?)['\"]", specs):
            name = re.split(r"[\s=<>!\[]", spec.split("::")[-1])[0]
            asked[name] = ("" if action == "remove" else spec, str(history))
    for file in (*meta.glob("pytorch-[0-9]*.json"), *meta.glob(f"{NAME}-[0-9]*.json")):
        record = json.loads(text_of(file))
        for spec in (*record.get("requested_specs", ()), record.get("requested_spec")):
            if spec and spec != "None":
                asked.setdefault(record["name"], (spec, str(file)))
    for name, (spec, where) in asked.items():
        if wants_cpu(spec):
            remove = f"conda remove -p {prefix} {name}" if name in ("cpuonly", "pytorch-cpu") else ""
            yield Preference(where, f"it was asked for '{spec}'", remove)
    for file in (meta / "pinned", prefix / ".condarc", Path.home() / ".condarc"):
        for line in text_of(file).splitlines():
            spec = line.strip().removeprefix("- ").strip("'\" ")
            if wants_cpu(spec):
                pattern = re.sub(r"([][\\.*^$/])", r"\\\1", line)
                yield Preference(str(file), f"it pins '{spec}'", f"sed -i.bak {shlex.quote(f'/^{pattern}$/d')} {file}")
    stored = json.loads(text_of(meta / "state") or "{}").get("env_vars", {})
    if stored.get("CONDA_OVERRIDE_CUDA", "set").strip() == "":
        undo = f"conda env config vars unset CONDA_OVERRIDE_CUDA -p {prefix}"
        yield Preference(str(meta / "state"), "CONDA_OVERRIDE_CUDA is empty: the solver sees no driver", undo)
    elif os.environ.get("CONDA_OVERRIDE_CUDA", "set").strip() == "":
        what = "CONDA_OVERRIDE_CUDA is empty: the solver sees no driver"
        yield Preference("the environment variables", what, "unset CONDA_OVERRIDE_CUDA")
    manifest = pixi_manifest(prefix)
    if manifest and not re.search(r"^[^#]*\bcuda\s*=", text_of(Path(manifest)), re.MULTILINE):
        undo = f"pixi workspace system-requirements add --manifest-path {manifest} cuda 12"
        yield Preference(manifest, "it declares no CUDA, so pixi solves as for a machine without a driver", undo)


def pixi_manifest(prefix: Path) -> str:
    """The file that pixi made this environment from, or nothing if it didn't."""
    return json.loads(text_of(prefix / "conda-meta" / "pixi") or "{}").get("manifest_path", "")
