"""The CPU kernels under ThreadSanitizer: no two threads of one call write the same memory, or read what another writes."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from clones import clone, environment, lean

CALLS = """
import torch
import extension_cpp

torch.manual_seed(0)
torch.set_num_threads(1)  # PyTorch's own.
for dtype in (torch.float32, torch.float16):
    a, b = (torch.randn(256, 301).to(dtype).requires_grad_() for _ in range(2))
    row = torch.randn(301).to(dtype).requires_grad_()
    extension_cpp.add_one(a)
    if not hasattr(extension_cpp, "nms"):  # In the copy in which a race was planted.
        break
    for other in (b, row, b[:, :1], torch.randn(301, 256).to(dtype).t()):
        extension_cpp.mymuladd(a, other, 0.5).sum().backward()
        extension_cpp.myadd_out(a.detach(), other.detach(), torch.empty(256, 301, dtype=dtype))
    extension_cpp.matmul(a, b.t()).sum().backward()
    corners = torch.rand(20_000, 2) * 1000
    boxes = torch.cat([corners, corners + 20], 1).to(dtype)
    scores, classes = torch.rand(20_000).to(dtype), torch.randint(0, 9, (20_000,))
    extension_cpp.nms(boxes, scores, 0.5)
    extension_cpp.batched_nms(boxes, scores, classes, 0.5)
    extension_cpp.nms_padded(boxes, scores, 0.5, classes)
    x = torch.randn(9, 40, 128).to(dtype).requires_grad_()
    kernel, hidden = (torch.randn(*shape).to(dtype).requires_grad_() for shape in ((1, 1, 5), (9, 128)))
    out = extension_cpp.convrnn_forward(x, kernel, hidden)
    (out if isinstance(out, torch.Tensor) else out[0]).sum().backward()
print("all were called")
"""


def run(checkout: Path, folder: Path) -> subprocess.CompletedProcess:
    flags = "-fsanitize=thread -g1"
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    variables = environment(checkout, USE_CUDA="0", CXX="g++", CXXFLAGS=flags, LDFLAGS="-fsanitize=thread")
    subprocess.run(build, cwd=checkout, env=variables, check=True, stdout=subprocess.DEVNULL)
    threads = folder / "libthreads.so"
    source = Path(__file__).with_name("threads.cpp")
    subprocess.run(["g++", *flags.split(), "-O1", "-std=c++20", "-shared", "-fPIC", source, "-o", threads], check=True)
    runtime = subprocess.check_output(["g++", "-print-file-name=libtsan.so"], text=True).strip()
    variables = environment(
        checkout,
        LD_PRELOAD=f"{os.path.realpath(runtime)} {threads}",
        # What isn't compiled with it, as PyTorch and Python, has locks that it doesn't see.
        TSAN_OPTIONS="ignore_noninstrumented_modules=1 exitcode=66",
        OMP_NUM_THREADS="1",
    )
    # Its memory has fixed addresses, which the system's random ones are in the way of.
    command = ["setarch", platform.machine(), "-R", sys.executable, "-c", CALLS]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)


@pytest.mark.long
def test_no_race(tmp_path):
    done = run(clone(tmp_path / "checkout"), tmp_path)
    assert done.returncode == 0 and "all were called" in done.stdout, (done.stdout + done.stderr)[-8000:]


@pytest.mark.long
def test_a_race_is_found(tmp_path):
    """Where the parts of a loop count in one place."""
    checkout = lean(tmp_path / "checkout", "add_one")
    header = checkout / "csrc" / "common" / "memory.h"
    line = "      body(from, to);"
    text = header.read_text().replace(line, f"      static int64_t planted = 0;\n      ++planted;\n{line}")
    assert "planted" in text
    header.write_text(text)
    done = run(checkout, tmp_path)
    assert done.returncode == 66 and "WARNING: ThreadSanitizer: data race" in done.stderr, done.stderr[-8000:]
