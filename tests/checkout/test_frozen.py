"""A program that PyInstaller made, which has this package by the hook that the package brings."""

import os
import shutil
import subprocess
import sys
from importlib import import_module

import pytest
from clones import ROOT, environment

from package import prepare

PROGRAM = """
import sys

import torch
import extension_cpp

assert sys.frozen
print(sorted(extension_cpp._loader.libraries), extension_cpp.load_errors)
print(next(iter(extension_cpp.backends().values())), extension_cpp.mymuladd(torch.ones(2), torch.ones(2), 0.5).tolist())
"""
LEFT_OUT = (
    "matplotlib",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "torchvision",
    "triton",
)  # It takes minutes less without them.


def test_entry_point():
    """Where PyInstaller looks for the hook of an installed package."""
    given = prepare.tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pyinstaller40"]
    module, function = given["hook-dirs"].split(":")
    (folder,) = getattr(import_module(module), function)()
    assert os.listdir(folder).count("hook-extension_cpp.py") == 1


@pytest.mark.long
def test_frozen_program(tmp_path):
    """Both libraries are in it, and the text of Triton's kernels; it runs where nothing else is installed."""
    pytest.importorskip("PyInstaller", reason="PyInstaller is not installed")
    package = tmp_path / "site" / "extension_cpp"
    shutil.copytree(ROOT / "extension_cpp", package, ignore=shutil.ignore_patterns("__pycache__", "_C_cuda.so"))
    shutil.copyfile(package / "_C.abi3.so", package / "_C_cuda.so")  # Found as a file; a torch for CPU doesn't load it.
    (tmp_path / "program.py").write_text(PROGRAM)
    options = [option for name in LEFT_OUT for option in ("--exclude-module", name)]
    hooks = ["--additional-hooks-dir", package / "_pyinstaller"]  # As the entry point is of another folder here.
    command = [sys.executable, "-m", "PyInstaller", "--log-level", "ERROR", *hooks, *options, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path / "site"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    shutil.rmtree(tmp_path / "site")
    folder = tmp_path / "dist" / "program"
    bundled = {path.name for path in (folder / "_internal" / "extension_cpp").rglob("*")}
    assert {"_C.abi3.so", "_C_cuda.so", "elementwise.py", "tuned.json"} <= bundled
    done = subprocess.run([folder / "program"], cwd=folder, env={}, capture_output=True, text=True)
    assert done.stdout.splitlines()[0].startswith("['_C'") and "[1.5, 1.5]" in done.stdout, done.stdout + done.stderr
