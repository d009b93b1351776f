"""What benchmarks of several families share: inputs, and what contenders are made of."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import Function

DTYPES = (torch.float32, torch.bfloat16)


def sizes(device: str, dtype: torch.dtype) -> tuple[int, ...]:
    """Logarithms of the numbers of elements."""
    if device == "cuda":
        return (10, 16, 20, 24, 28)
    return (10, 16, 20) if dtype == torch.float32 else (16, 20)


def vectors(device: str, dtype: torch.dtype, n: int, count: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randn(n, device=device).to(dtype) for _ in range(count))


def compiled(function: Function) -> Function:
    """torch.compile for the exact shapes of a case, which gives the fastest code."""
    return torch.compile(function, dynamic=False)


@cache
def compiled_cpp(source: str, *flags: str) -> ctypes.CDLL:
    """C++ for this machine; OSError or CalledProcessError where it has no compiler."""
    folder = Path(tempfile.mkdtemp())
    (folder / "made.cpp").write_text(source)
    command = ["c++", "-O3", *flags, "-shared", "-fPIC", "-o", "made.so", "made.cpp"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return ctypes.CDLL(str(folder / "made.so"))


def backward(function: Function) -> Function:
    """A step of training: (grad, *inputs) to the gradients of those inputs that require one."""

    def step(grad: Tensor, *inputs) -> list[Tensor | None]:
        leaves = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
        for leaf in leaves:
            leaf.grad = None
        function(*inputs).backward(grad)
        return [leaf.grad for leaf in leaves]

    return step


def graphed(function: Function) -> Function:
    """The same work as one CUDA graph: the device's time without Python's. Captured again for other inputs."""
    captured: dict = {"inputs": None}

    def run(*inputs) -> object:
        if captured["inputs"] is None or any(x is not y for x, y in zip(captured["inputs"], inputs)):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    function(*inputs)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = function(*inputs)
            captured.update(inputs=inputs, graph=graph, results=results)
        captured["graph"].replay()
        return captured["results"]

    return run
