"""What users wait for apart from the operators: import, builds, the solver, an installation, a download's size."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.harness import OURS, Case, Unavailable, reported
from benchmarks.records import ROOT

DIST = Path(os.environ.get("DIST", ROOT / "dist"))
CONDA = ROOT / ".venv-conda" / "bin" / "python"
# Prints the seconds of a step. The end is abrupt as py-rattler's threads make Python's own crash now and then.
SOLVER = """
import asyncio, os, sys, time
import rattler

step, prefix, *specs = sys.argv[1:]

async def main():
    start = time.perf_counter()
    found = await rattler.solve(os.environ["CHANNELS"].split(), specs, virtual_packages=rattler.VirtualPackage.detect())
    if step == "install":
        start = time.perf_counter()
        await rattler.install(found, prefix, show_progress=False)
    print(time.perf_counter() - start, flush=True)

asyncio.run(main())
os._exit(0)
"""


def seconds(command: list, **options) -> float:
    """What a process prints last; Unavailable with its own words where it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if done.returncode:
        raise Unavailable((done.stderr or done.stdout).strip().splitlines()[-1])
    return float(done.stdout.split()[-1])


def importing(module: str, after: str) -> float:
    """How long a new process takes to import a module after another."""
    code = f"import sys, time, {after}; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    # With its bytecode, as what is installed has it.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return seconds([sys.executable, "-c", code], env=variables)


def package(title: str, contenders: Mapping[str, Callable[..., object]], device: str = "cpu", **options) -> Case:
    return Case("package", device, contenders, workload=title, timer=reported, **options)


def packages() -> Iterator[Case]:
    """What `make package` made last, and how long that took: a build of all architectures is minutes."""
    file = DIST / "packages.json"
    states = json.loads(file.read_text()) if file.exists() else {}

    def took(variant: str) -> float:
        return states.get(variant, {}).get("seconds", {}).get("build") or needs_package()

    def size(variant: str) -> float:
        path = DIST / "conda" / "linux-64" / states.get(variant, {}).get("package", "none")
        return float(path.stat().st_size) if path.exists() else needs_package()

    for variant in sorted(states) or ["cpu"]:
        yield package(f"the last build of the package, {variant}", {OURS: lambda v=variant: took(v)}, rounds=1)
        yield package(f"size, {variant}", {OURS: lambda v=variant: size(v)}, unit="B", rounds=1)


def needs_package() -> float:
    raise Unavailable(f"there is no package in {os.path.relpath(DIST / 'conda', ROOT)}: make package")


def environments() -> Iterator[Case]:
    """The solver and the installation, compared with an environment that has PyTorch alone."""
    wanted = {OURS: ("extension_cpp * cpu*", "python"), "pytorch alone": ("pytorch * cpu*", "python")}
    local = DIST / "channel"
    channels = [DIST / "conda", *([local] if (local / "noarch").exists() else [])]
    names = [path.resolve().as_uri() for path in channels] + ([] if len(channels) > 1 else ["conda-forge"])

    def run(step: str, specs: tuple[str, ...]) -> float:
        if not CONDA.exists() or not list((DIST / "conda").glob("*/extension_cpp-*.conda")):
            needs_package()
        with tempfile.TemporaryDirectory(dir=DIST) as prefix:
            variables = {**os.environ, "CHANNELS": " ".join(names)}
            return seconds([CONDA, "-c", SOLVER, step, Path(prefix, "env"), *specs], env=variables)

    for step, title in (("solve", "solving an environment"), ("install", "installing it")):
        contenders = {name: lambda step=step, specs=specs: run(step, specs) for name, specs in wanted.items()}
        yield package(title, contenders, rounds=3)


def builds() -> Iterator[Case]:
    """Of a copy, so that this checkout's libraries stay as they are."""
    folder = tempfile.TemporaryDirectory()
    checkout = Path(folder.name) / "checkout"

    def build(*touched: str) -> float:
        needed = {"setup.py": (ROOT / "setup.py").exists(), "ninja": importlib.util.find_spec("ninja")}
        if missing := [name for name, there in needed.items() if not there]:
            raise Unavailable(f"there is no {' and no '.join(missing)} here")
        if not checkout.exists():
            ignored = shutil.ignore_patterns("*.so", "build", "*.egg-info", ".*", "dist", "__pycache__")
            shutil.copytree(ROOT, checkout, ignore=ignored)
        for path in touched:
            (checkout / path).touch()
        if not touched:
            shutil.rmtree(checkout / "build", ignore_errors=True)
        start = time.perf_counter()
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        variables = {**os.environ, "USE_CUDA": "0"}
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, env=variables)
        if done.returncode:
            raise Unavailable(f"the build failed: {done.stderr.strip().splitlines()[-1]}")
        return time.perf_counter() - start

    sources = sorted((ROOT / "csrc").glob("*.cpp"), key=lambda path: path.stat().st_size) or [Path("none.cpp")]
    usual = sources[(len(sources) - 1) // 2]
    for title, touched, rounds in (
        ("clean build", (), 1),
        ("build, nothing changed", ("README.md",), 1),
        ("build, one .cpp changed", (f"csrc/{usual.name}",), 1),
    ):
        # The folder lives as long as the last of these.
        contenders = {OURS: lambda touched=touched, _=folder: build(*touched)}
        yield package(f"{title}, CPU only", contenders, rounds=rounds)


def cases(device: str) -> Iterator[Case]:
    """All cases; with a GPU only the import is another, as torch is."""
    yield package("import, after torch", {OURS: lambda: importing("extension_cpp", after="torch")}, device, rounds=3)
    if device == "cpu":
        yield from builds()
        yield from packages()
        yield from environments()
