"""mymuladd and myadd_out beside what one would use instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import extension_cpp
from benchmarks.harness import OURS, Case, time_calls

SIZES = {"cpu": (10, 16, 20, 26), "cuda": (20, 24, 28)}
DTYPES = (torch.float32, torch.bfloat16)
C = 1.5


def peers(a: Tensor, b: Tensor) -> dict[str, Callable[[], Tensor]]:
    c = torch.tensor(C, dtype=a.dtype, device=a.device)
    compiled = torch.compile(lambda a, b: a * b + C)
    return {
        OURS: lambda: extension_cpp.mymuladd(a, b, C),
        "a*b+c": lambda: a * b + C,
        "addcmul": lambda: torch.addcmul(c, a, b),
        "compiled a*b+c": lambda: compiled(a, b),
    }


def forward(device: str, dtype: torch.dtype, log2: int) -> Case:
    n = 2**log2

    def contenders():
        return peers(*(torch.randn(n, device=device).to(dtype) for _ in range(2)))

    title = f"{name(dtype)} 2^{log2}"
    return Case("mymuladd", title, device, contenders, bytes=3 * dtype.itemsize * n, operations=2 * n)


def multiply(device: str, dtype: torch.dtype, log2: int) -> Case:
    """The same bytes as mymuladd, so torch.mul is its peer too."""
    n = 2**log2

    def contenders():
        a, b = (torch.randn(n, device=device).to(dtype) for _ in range(2))
        return {
            f"{OURS} mymuladd": lambda: extension_cpp.mymuladd(a, b, C),
            f"{OURS} mymul": lambda: extension_cpp.mymul(a, b),
            "torch.mul": lambda: torch.mul(a, b),
        }

    title = f"against torch.mul, {name(dtype)} 2^{log2}"
    return Case("mymuladd", title, device, contenders, bytes=3 * dtype.itemsize * n, operations=2 * n, compare=False)


def training(device: str, dtype: torch.dtype, log2: int) -> Case:
    n = 2**log2

    def contenders():
        a, b = (torch.randn(n, device=device).to(dtype).requires_grad_() for _ in range(2))
        grad = torch.randn(n, device=device).to(dtype)
        compiled = torch.compile(lambda a, b: a * b + C)

        def step(function):
            def run():
                a.grad = b.grad = None
                function(a, b).backward(grad)
                return a.grad, b.grad

            return run

        return {
            OURS: step(lambda a, b: extension_cpp.mymuladd(a, b, C)),
            "a*b+c": step(lambda a, b: a * b + C),
            "compiled a*b+c": step(compiled),
        }

    title = f"forward and backward, {name(dtype)} 2^{log2}"
    return Case("mymuladd", title, device, contenders, bytes=8 * dtype.itemsize * n, operations=4 * n)


def training_graph(dtype: torch.dtype, log2: int) -> Case:
    """Forward and backward as one CUDA graph each: the device's time, without Python's."""
    case = training("cuda", dtype, log2)

    def contenders():
        def captured(function):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(3):
                    function()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = function()

            def run():
                graph.replay()
                return results

            return run

        return {key: captured(function) for key, function in case.contenders().items()}

    title = case.name.replace("forward and backward", "forward and backward as a CUDA graph")
    return Case(case.op, title, "cuda", contenders, case.bytes, case.operations)


def layouts(device: str, dtype: torch.dtype) -> Iterator[Case]:
    side = 8192 if device == "cuda" else 1024

    def square(*size: int) -> Tensor:
        return torch.randn(size or (side, side), device=device).to(dtype)

    images = (side // 128, 256, 56, 56) if device == "cuda" else (4, 64, 56, 56)
    last = torch.channels_last
    makers: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "both transposed": lambda: (square().t(), square().t()),
        "one transposed": lambda: (square(), square().t()),
        "a row broadcast": lambda: (square(), square(side)),
        "a column broadcast": lambda: (square(), square(side, 1)),
        "outer product": lambda: (square(side, 1), square(side)),
        "columns of a wider matrix": lambda: (square(), square(side, side + 8)[:, :side]),
        "columns off alignment": lambda: (square(), square(side, side + 8)[:, 1 : side + 1]),
        "one element off alignment": lambda: (square(side**2 + 1)[1:], square(side**2 + 1)[1:]),
        "every second element": lambda: (square(side**2)[::2], square(side**2)[::2]),
        "channels last": lambda: tuple(square(*images).contiguous(memory_format=last) for _ in range(2)),
        "channels last and first": lambda: (square(*images), square(*images).contiguous(memory_format=last)),
        "a channel's bias": lambda: (square(*images), square(256 if device == "cuda" else 64, 1, 1)),
        "permuted": lambda: (square(side // 32, 512, 256).permute(2, 0, 1), square(256, side // 32, 512)),
    }
    for title, make in makers.items():
        a, b = make()
        moved = sum(t.untyped_storage().nbytes() if 0 in t.stride() else t.numel() * t.element_size() for t in (a, b))
        result = torch.broadcast_shapes(a.shape, b.shape).numel()
        contenders = lambda make=make: {k: f for k, f in peers(*make()).items() if k in (OURS, "a*b+c", "addcmul")}  # noqa: E731
        bytes = moved + result * dtype.itemsize
        yield Case("mymuladd", f"{title}, {name(dtype)}", device, contenders, bytes=bytes, operations=2 * result)


def add_out(device: str, dtype: torch.dtype, log2: int) -> Case:
    n = 2**log2

    def contenders():
        a, b, ours, theirs = (torch.randn(n, device=device).to(dtype) for _ in range(4))
        return {
            OURS: lambda: (extension_cpp.myadd_out(a, b, ours), ours)[1],
            "torch.add(out=)": lambda: torch.add(a, b, out=theirs),
        }

    title = f"{name(dtype)} 2^{log2}"
    return Case("myadd_out", title, device, contenders, bytes=3 * dtype.itemsize * n, operations=n)


def call(device: str) -> Case:
    def contenders():
        return peers(torch.randn(16, device=device), torch.randn(16, device=device))

    return Case("mymuladd", "a call on 16 elements", device, contenders, timer=time_calls)


def cases(device: str) -> Iterator[Case]:
    """All cases of a device."""
    yield call(device)
    for dtype in DTYPES:
        for log2 in SIZES[device]:
            yield forward(device, dtype, log2)
            yield multiply(device, dtype, log2)
        for log2 in SIZES[device][-2:] if device == "cpu" else SIZES[device]:
            yield training(device, dtype, log2)
            if device == "cuda":
                yield training_graph(dtype, log2)
        yield add_out(device, dtype, SIZES[device][-1])
        yield from layouts(device, dtype)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
