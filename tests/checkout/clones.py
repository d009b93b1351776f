"""Copies of this checkout, for tests that change one, and what is made of it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROCS = ("cpu", "cuda130")  # Of the local channel.


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


def lean(checkout: Path, family: str) -> Path:
    """With one family of operators alone, for tests that compile: what they test is the same with any number."""
    folders = (".git", ".venv*", "build", "dist", "results", "pictures", "*.egg-info", "*_cache")
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(*folders, "*.so", "__pycache__"))
    (checkout / "extension_cpp" / "nn" / "__init__.py").write_text("")
    for other in (path.stem for path in ROOT.glob("extension_cpp/ops/[!_]*.py") if path.stem != family):
        command = [sys.executable, "-m", "templates.op", "remove", other, "--force"]
        subprocess.run(command, cwd=checkout, env=environment(checkout), check=True, stdout=subprocess.DEVNULL)
    return checkout


def make(*command: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    command = command or (sys.executable, "-m", "package")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**os.environ, "PATH": path, "CHANNEL": "local", **variables}
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)
