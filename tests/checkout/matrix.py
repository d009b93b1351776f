"""`make matrix`: one build of the two libraries, under every torch and Python that it is meant for.

Builds one wheel, installs that same file beside each version of torch in an environment of its own, runs the suite in
each, and prints a table of what ran where. Environments stay in build/matrix, so that a second run only tests.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "matrix"
COMBINATIONS = [
    ("3.11", "2.10.0"),
    ("3.11", "2.13.0"),
    ("3.11", "2.14.1"),
    ("3.13", "2.14.1"),
]
REQUIRED = ["numpy", "pytest", "hypothesis", "expecttest"]


def python(version: str) -> str | None:
    """An interpreter of that version: this one, one of pyenv's, or one on PATH."""
    if version == ".".join(map(str, sys.version_info[:2])):
        return sys.executable
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(pyenv[-1]) if pyenv else shutil.which(f"python{version}")


def build_wheel() -> Path:
    """The wheel that all combinations share."""
    out = FOLDER / "wheel"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, ROOT]
    subprocess.run(command, check=True)
    (wheel,) = out.iterdir()
    return wheel


def environment(version: str, torch: str) -> Path:
    """The interpreter of an environment with that torch and what the tests need."""
    path = FOLDER / f"python{version}-torch{torch}"
    interpreter = path / "bin" / "python"
    if not (path / "ready").exists():
        found = python(version)
        if found is None:
            raise LookupError(f"no Python {version} here")
        subprocess.run([found, "-m", "venv", "--clear", path], check=True)
        pip = [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, f"torch=={torch}", *REQUIRED], check=True, stderr=subprocess.PIPE)
        (path / "ready").touch()
    return interpreter


def run(interpreter: Path, wheel: Path) -> tuple[int, str, str]:
    """Install the wheel and run the tests, from a folder with nothing of the checkout in it but them."""
    pip = [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--force-reinstall", wheel], check=True)
    tests = interpreter.parent.parent / "tests"
    shutil.rmtree(tests, ignore_errors=True)
    shutil.copytree(ROOT / "tests", tests, ignore=shutil.ignore_patterns("__pycache__", "checkout"))
    what = "import torch; print(torch.__version__, 'CUDA', torch.version.cuda)"
    torch = subprocess.run([interpreter, "-c", what], capture_output=True, text=True, check=True).stdout.strip()
    command = [interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:warnings"]
    done = subprocess.run(command, cwd=tests, capture_output=True, text=True)
    (tests.parent / "log").write_text(done.stdout + done.stderr)
    return done.returncode, torch, done.stdout.strip().splitlines()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--torch", action="append", help="only this version of torch; may be repeated")
    parser.add_argument("--python", action="append", help="only this version of Python; may be repeated")
    options = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 120)
    wheel = build_wheel()
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    table = Table(
        "Python", "torch", "result", "time", title=f"{wheel.name}, sha256 {digest[:16]}", title_justify="left"
    )
    failed = 0
    for version, torch in COMBINATIONS:
        if torch not in (options.torch or [torch]) or version not in (options.python or [version]):
            continue
        with console.status(f"Python {version}, torch {torch}"):
            start = time.monotonic()
            try:
                code, found, summary = run(environment(version, torch), wheel)
            except (LookupError, subprocess.CalledProcessError) as error:
                detail = getattr(error, "stderr", None) or str(error)
                code, found, summary = 1, torch, detail.decode() if isinstance(detail, bytes) else detail
        failed += code != 0
        summary = re.sub(r" in [\d.]+s.*", "", summary.strip("= "))
        table.add_row(version, found, f"[red]{summary}" if code else summary, f"{time.monotonic() - start:.0f} s")
        console.print(f"Python {version}, torch {found}: {summary}", highlight=False)
    console.print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
