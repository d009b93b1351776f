"""Copies of this checkout, for tests that change one."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def git(checkout: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    return subprocess.check_output(["git", "-C", checkout, *identity, *arguments], text=True)


def commit(checkout: Path, message: str) -> None:
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--allow-empty", "--message", message)


def clone(checkout: Path) -> Path:
    """The committed state and, over it, what this checkout has changed, committed too."""
    subprocess.run(["git", "clone", "--quiet", ROOT, checkout], check=True)
    for name in filter(None, git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")):
        source, target = ROOT / name, checkout / name
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
        else:
            target.unlink(missing_ok=True)
    commit(checkout, "as it is")
    return checkout


def environment(*paths: Path, **variables: str) -> dict[str, str]:
    """In which Python imports from `paths` first."""
    given = [path for path in [os.environ.get("PYTHONPATH")] if path]
    return {**os.environ, **variables, "PYTHONPATH": os.pathsep.join([*map(str, paths), *given])}
