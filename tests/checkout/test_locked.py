"""locked/ has what pyproject.toml asks for, with hashes, and names no index."""

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from clones import ROOT
from packaging.markers import Marker, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(ROOT))
from package import prepare

GROUPS = prepare.tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
FILES = ("tools", "conda")


def asked(group: str) -> Iterator[Requirement]:
    for line in GROUPS[group]:
        if isinstance(line, dict):
            yield from asked(line["include-group"])
        else:
            yield Requirement(line)


def versions(name: str, python: str) -> dict[str, str]:
    """What pip installs of a file with this Python, on Linux."""
    where = {**default_environment(), "python_version": python, "python_full_version": f"{python}.9"}
    found = {}
    for line in re.findall(r"(?m)^\S+==.*?(?= \\$)", (ROOT / "locked" / f"{name}.txt").read_text()):
        one = Requirement(line)
        if Marker.evaluate(one.marker, where) if one.marker else True:
            assert one.name not in found, f"{one.name} is there twice"
            found[one.name] = str(one.specifier).removeprefix("==")
    return found


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", FILES)
def test_covers_what_is_asked_for(name, python):
    locked = versions(name, python)
    for one in asked(name):
        if one.marker is None or one.marker.evaluate({"python_version": python}):
            version = locked.get(canonicalize_name(one.name))
            assert version and one.specifier.contains(version), f"{one}: run make lock"


@pytest.mark.parametrize("python", PYTHONS)
def test_one_version_everywhere(python):
    assert versions("conda", python).items() <= versions("tools", python).items()


@pytest.mark.parametrize("name", FILES)
def test_hashes_alone(name):
    """Each version has hashes, and nothing says where a file lies."""
    text = (ROOT / "locked" / f"{name}.txt").read_text()
    each = re.split(r"(?m)^(?=\S)", text)[1:]
    assert each and all(
        re.fullmatch(r"\S+==\S+( ; .*)? \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+", one) for one in each
    )


def test_other_bytes_are_refused(tmp_path):
    """What .venv and .venv-conda are made with takes no file that has another hash."""
    (tmp_path / "iniconfig-2.0-py3-none-any.whl").write_bytes(b"PK not this one")
    (tmp_path / "locked.txt").write_text(f"iniconfig==2.0 --hash=sha256:{'0' * 64}\n")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--find-links", str(tmp_path)]
    done = subprocess.run(
        [*command, "--require-hashes", "-r", str(tmp_path / "locked.txt")], capture_output=True, text=True
    )
    assert done.returncode == 1 and "DO NOT MATCH THE HASHES" in done.stderr
