"""The example of a C++ program that runs the operators without Python, as it is."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from clones import ROOT

import extension_cpp

EXAMPLE = ROOT / "examples" / "aoti"
PATH = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
LIBRARIES = [str(path) for path in extension_cpp._loader.libraries.values()]


def run(*command: object, **variables: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PATH": PATH, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run([*map(str, command)], capture_output=True, text=True, env=env)


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("cmake", path=PATH), reason="cmake is not installed")
def test_every_operator_without_python(tmp_path):
    model, device = tmp_path / "model.pt2", "cuda" if torch.cuda.is_available() else "cpu"
    source = (EXAMPLE / "export.py").read_text()
    assert [name for name in extension_cpp.ops.__all__ if f"extension_cpp.{name}(" not in source] == []
    exported = run(sys.executable, EXAMPLE / "export.py", model, device)
    assert exported.returncode == 0, exported.stderr
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for command in (["-S", EXAMPLE, "-B", tmp_path / "build", prefix], ["--build", tmp_path / "build"]):
        done = run("cmake", *command)
        assert done.returncode == 0, done.stdout + done.stderr
    program = tmp_path / "build" / "run"
    for now in ("", "1"):
        done = run(program, model, device, *LIBRARIES, LD_BIND_NOW=now)
        assert done.returncode == 0 and done.stdout == exported.stdout, done.stdout + done.stderr
    # Whoever forgets the library reads whose it is, in Python too.
    assert "Could not find schema for extension_cpp::" in run(program, model, device, "libm.so.6").stderr
    load = f"import torch; torch._inductor.aoti_load_package({str(model)!r})"
    assert "Could not find schema for extension_cpp::" in run(sys.executable, "-c", load).stderr
