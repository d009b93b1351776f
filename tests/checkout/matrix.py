"""`make matrix`: the packages that `make package VARIANT=all` made, under every torch and Python that they are meant for.

Unpacks the same two files next to each version of torch in an environment of its own, runs the tests that they carry, and
writes what ran where to proven.json and into the README.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

from conda_package_streaming.extract import extract
from packaging.version import Version
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "matrix"
PROVEN = Path(__file__).parent / "proven.json"
MARKS = ("<!-- proven on: written by make matrix -->\n", "<!-- end -->\n")
NEWEST = "newest"
COMBINATIONS = [
    ("3.10", "2.10.0"),
    ("3.11", "2.13.0"),
    ("3.11", "2.14.1"),
    ("3.13", NEWEST),
]
REQUIRED = ["numpy", "pytest", "hypothesis", "expecttest", "pyelftools", "rich", "nvidia-cuda-cuobjdump"]
TORCHVISION = "torchvision>=0.25"  # Each release is for one of torch; the newest torch may have none yet.


def python(version: str) -> str | None:
    """An interpreter of that version: this one, one of pyenv's, or one on PATH."""
    if version == ".".join(map(str, sys.version_info[:2])):
        return sys.executable
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(pyenv[-1]) if pyenv else shutil.which(f"python{version}")


def newest_torch() -> str:
    """The newest release on PyPI."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch", "--disable-pip-version-check"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    versions = re.search(r"Available versions: (.*)", said)[1].split(", ")  # type: ignore[index]
    return str(max(Version(version) for version in versions))


def packages() -> dict[str, Path]:
    """Copies of what `make package` made, by variant, so that all environments get the same files."""
    states = json.loads((ROOT / "dist" / "packages.json").read_text())
    (FOLDER / "packages").mkdir(parents=True, exist_ok=True)
    made = {proc: ROOT / "dist" / "conda" / "linux-64" / state["package"] for proc, state in sorted(states.items())}
    return {proc: Path(shutil.copy2(path, FOLDER / "packages")) for proc, path in made.items()}


def environment(version: str, torch: str) -> Path:
    """The interpreter of an environment with that torch and what the tests need."""
    path = FOLDER / f"python{version}-torch{torch}"
    interpreter = path / "bin" / "python"
    if not (path / "ready").exists():
        found = python(version)
        if found is None:
            raise LookupError(f"no Python {version} here")
        subprocess.run([found, "-m", "venv", "--clear", path], check=True)
        pip = [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"torch=={torch}"]
        subprocess.run([*pip, *REQUIRED], check=True, stderr=subprocess.PIPE)
        subprocess.run([*pip, TORCHVISION], stderr=subprocess.PIPE)  # Its tests say that it is missing.
        (path / "ready").touch()
    return interpreter


def run(interpreter: Path, package: Path) -> tuple[int, str]:
    """Unpack a package into the environment and run the tests that it carries; returns the summary too."""
    prefix = interpreter.parent.parent
    unpacked = prefix / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    extract(package, unpacked)
    (site,) = prefix.glob("lib/python*/site-packages")
    for path in (unpacked / "site-packages").iterdir():
        shutil.rmtree(site / path.name, ignore_errors=True)
        (shutil.copytree if path.is_dir() else shutil.copy)(path, site / path.name)
    (tests,) = (path.parent for path in unpacked.glob("etc/conda/test-files/extension_cpp/*/tests/conftest.py"))
    command = [interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:warnings"]
    done = subprocess.run(command, cwd=tests, capture_output=True, text=True)
    log = FOLDER / f"{prefix.name}-{package.stem}.log"
    log.write_text(done.stdout + done.stderr)
    return done.returncode, re.sub(r" in [\d.]+s.*", "", done.stdout.strip().splitlines()[-1].strip("= "))


def prove(version: str, torch: str, files: dict[str, Path], keep: bool, console: Console) -> tuple[dict, bool]:
    """A row of the table: what of each package passed in one environment."""
    row = {"python": version, "torch": torch}
    good = True
    try:
        console.print(f"Python {version}, torch {torch} ...", highlight=False)
        interpreter = environment(version, torch)
        ask = "import torch; print(torch.__version__, torch.version.cuda or 'none')"
        row["torch"], row["cuda"] = subprocess.check_output([interpreter, "-c", ask], text=True).split()
        for proc, file in files.items():
            start = time.monotonic()
            code, row[proc] = run(interpreter, file)
            good = good and code == 0
            seconds = time.monotonic() - start
            console.print(
                f"Python {version}, torch {row['torch']}, {proc}: {row[proc]} ({seconds:.0f} s)", highlight=False
            )
        if not keep:
            shutil.rmtree(interpreter.parent.parent)
    except (LookupError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        console.print(f"[red]Python {version}, torch {torch}:[/red] {detail}")
        good = False
    return row, good


def markdown(proven: dict) -> str:
    """The table of the README."""
    lines = [
        f"Proven on {proven['date']}, with these two files:\n",
        *(f"- `{name}`, sha256 `{digest}`" for name, digest in proven["packages"].items()),
        "",
        "| Python | torch | its CUDA | " + " | ".join(f"{proc} package" for proc in proven["variants"]) + " |",
        "|---" * (3 + len(proven["variants"])) + "|",
        *(
            f"| {row['python']} | {row['torch']} | {row['cuda']} | "
            + " | ".join(row[proc] for proc in proven["variants"])
            + " |"
            for row in proven["rows"]
        ),
    ]
    return "\n".join(lines) + "\n"


def write_readme(proven: dict) -> None:
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(MARKS[0])
    readme.write_text(before + MARKS[0] + markdown(proven) + MARKS[1] + rest.split(MARKS[1], 1)[1])


def main() -> int:
    parser = argparse.ArgumentParser(prog="make matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--torch", action="append", help="only this version of torch; may be repeated")
    parser.add_argument("--python", action="append", help="only this version of Python; may be repeated")
    parser.add_argument("--keep", action="store_true", help="keep the environments: gigabytes each, for the next run")
    options = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 120)
    files = packages()
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files.values()}
    for name, digest in digests.items():
        console.print(f"{name}, sha256 {digest}", highlight=False, soft_wrap=True)
    chosen = [(version, newest_torch() if torch == NEWEST else torch) for version, torch in COMBINATIONS]
    chosen = [
        (version, torch)
        for version, torch in chosen
        if torch in (options.torch or [torch]) and version in (options.python or [version])
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda pair: prove(*pair, files, options.keep, console), chosen))
    rows = [row for row, _ in results]
    table = Table("Python", "torch", *files)
    for row in rows:
        table.add_row(row["python"], row["torch"], *(row.get(proc, "[red]did not run") for proc in files))
    console.print(table)
    if not all(good for _, good in results):
        return 1
    if len(rows) == len(COMBINATIONS):
        date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
        proven = {"date": date, "packages": digests, "variants": list(files), "rows": rows}
        PROVEN.write_text(json.dumps(proven, indent=1) + "\n")
        write_readme(proven)
    return 0


if __name__ == "__main__":
    sys.exit(main())
