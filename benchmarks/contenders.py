"""What contenders are made of: compiled functions, steps of training, CUDA graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.harness import Function


def compiled(function: Function) -> Function:
    """torch.compile for the shapes that come, as one would who wants the fastest code."""
    return torch.compile(function, dynamic=False)


def backward(function: Function) -> Function:
    """A step of training: (grad, *inputs) to the gradients of those inputs that want one."""

    def step(grad: Tensor, *inputs) -> list[Tensor | None]:
        leaves = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
        for leaf in leaves:
            leaf.grad = None
        function(*inputs).backward(grad)
        return [leaf.grad for leaf in leaves]

    return step


def graphed(function: Function) -> Function:
    """The same work as one CUDA graph: the device's time without Python's. Captured anew for other inputs."""
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
