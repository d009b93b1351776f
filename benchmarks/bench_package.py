"""What one waits for: the import and the build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import OURS, Case, time_reported

ROOT = Path(__file__).parent.parent


def import_seconds(module: str, after: str = "sys") -> float:
    """How long a new process takes to import a module after another."""
    code = f"import sys, time, {after}; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def build_seconds(checkout: Path) -> float:
    """How long the build in a checkout takes, Python and torch's own start included."""
    start = time.perf_counter()
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=checkout, check=True, capture_output=True)
    return time.perf_counter() - start


def cases(device: str) -> Iterator[Case]:
    if device != "cpu":
        return
    contenders = {
        OURS: lambda: import_seconds("extension_cpp", after="torch"),
        "torch": lambda: import_seconds("torch"),
    }
    yield Case("package", "import, after torch", device, lambda: contenders, compare=False, timer=time_reported)
    checkout = Path(tempfile.mkdtemp()) / "checkout"
    ignored = shutil.ignore_patterns("*.so", "build", "*.egg-info", ".*", "dist", "__pycache__")
    shutil.copytree(ROOT, checkout, ignore=ignored)
    backends = "CPU and CUDA" if shutil.which("nvcc") and os.environ.get("USE_CUDA") != "0" else "CPU only"

    def build(*touched: str) -> dict:
        def once() -> float:
            for path in touched:
                (checkout / path).touch()
            return build_seconds(checkout)

        return {OURS: once}

    for title, touched, rounds in (
        ("clean build", (), 1),
        ("build, nothing changed", (), 3),
        ("build, one .cpp changed", ("csrc/muladd.cpp",), 3),
    ):
        named = f"{title}, {backends}"
        contenders_of = lambda touched=touched: build(*touched)  # noqa: E731
        yield Case("package", named, device, contenders_of, compare=False, timer=time_reported, rounds=rounds)
