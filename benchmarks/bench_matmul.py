"""matmul compared with torch.matmul."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import extension_cpp
from benchmarks.contenders import BOXED, CALL, backward, batched_call, boxed, calls
from benchmarks.harness import OURS, TOLERANCES, Case, Grid, time_calls

SIZES = {"cpu": (64, 128, 256, 512, 1024, 2048), "cuda": (256, 512, 1024, 2048, 4096, 8192)}
DTYPES = (torch.float32, torch.bfloat16)
OTHERS: dict[str, dict[torch.dtype, tuple[int, ...]]] = {
    "cpu": {torch.float16: (512,), torch.float64: (512,)},
    "cuda": {torch.float16: (4096, 8192), torch.float64: (2048, 4096)},
}
# (M, K, N) that are hard to cut into tiles: there are few, or they are narrow, or sums are long, or rows begin anywhere.
SHAPES = (
    (500, 500, 500),
    (1000, 1000, 1000),
    (3000, 3000, 3000),
    (64, 2048, 2048),
    (128, 8192, 1024),
    (128, 4096, 4096),
    (1024, 5120, 5120),
    (100_000, 64, 64),
    (512, 32_768, 512),
    (64, 100_000, 64),
    (8, 4096, 14_336),
    (32, 4096, 4096),
    (100_000, 64, 8),
    (100_000, 500, 64),
    (4096, 1, 4096),
    (64, 100_000, 1000),
    (4096, 100_000, 128),
    (128, 32_768, 32_768),
    (100_000, 16, 16),
    (2000, 500, 16),
    (1, 32_768, 16),
)
GRID = (1, 16, 64, 128, 500, 1000, 2000, 4096, 8192, 32_768, 100_000)
FEWER = (1, 16, 128, 1000, 8192)  # For layouts on the CPU, where the whole grid takes minutes.
SMALL = 2**17  # multiply-adds, of which two cores do as many in a few microseconds
FEW = "so few multiply-adds an element that starting and reading take most of the time"
PEERS = {OURS: extension_cpp.matmul, "torch.matmul": torch.matmul}


def reference(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() @ b.double()).to(a.dtype)


def plain(rows: int, columns: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, device=device).to(dtype)


def transposed(rows: int, columns: int, device: str, dtype: torch.dtype) -> Tensor:
    return plain(columns, rows, device, dtype).t()


def unaligned(rows: int, columns: int, device: str, dtype: torch.dtype) -> Tensor:
    return plain(rows, columns + 1, device, dtype)[:, 1:]


def by(sizes: tuple[int, ...]) -> str:
    return " by ".join(f"{n:,}" for n in sizes)


def tolerance(dtype: torch.dtype, k: int) -> float:
    """An error in a sum is in proportion to the sums on the way, each of so many terms, not to one that cancels."""
    return TOLERANCES[dtype] * max(1.0, k / 128)


def reason(
    device: str,
    dtype: torch.dtype,
    make_a: Callable[..., Tensor],
    make_b: Callable[..., Tensor],
    m: int,
    k: int,
    n: int,
) -> str:
    """Why the peer is faster, where it is."""
    if device == "cpu":
        if m * k * n <= SMALL:
            return CALL
        if min(m, n) == 1:
            return (
                "a row's sum is eight partial sums in every layout, which few k's don't pay for, and columns are read eight "
                "at a time, which memory gives more slowly"
            )
        if dtype == torch.bfloat16:
            return "oneDNN generates code for each size, ours packs factors for tiles"
        if n <= 64 < k:
            return "rows of a are read or packed for each tile, and few columns multiply them"
        return FEW if k <= 16 else ""
    if k <= 16 or min(m, n) <= 16:
        return FEW
    rows = m if make_a is transposed else k, k if make_b is transposed else n  # elements of a row in memory
    if dtype.itemsize == 2 and any(row % 8 for row in rows):
        return "rows that don't begin at a multiple of 16 bytes are read in small pieces or copied first"
    if dtype.itemsize == 2 and any(row % 64 for row in rows):
        return "rows that don't begin at a line of the cache take two of them for each that a tile reads"
    if dtype == torch.float64:
        return "small tiles wait for their copies, and parts of k for their sums"
    if dtype == torch.float32:
        return "so small that splitting float32, or adding parts of k up, takes more time than multiplying"
    return "small tiles wait for the L2 cache, which gives a multiprocessor 64 bytes a cycle, and parts of k for their sums"


def case(
    device: str,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    make_a: Callable[..., Tensor] = plain,
    make_b: Callable[..., Tensor] = plain,
    **described,
) -> Case:
    m, k, n = sizes

    def inputs() -> tuple[Tensor, Tensor]:
        return make_a(m, k, device, dtype), make_b(k, n, device, dtype)

    common = {
        "contenders": PEERS,
        "inputs": inputs,
        "reference": reference,
        "dtype": dtype,
        "bytes": dtype.itemsize * (m * k + k * n + m * n),
        "operations": 2 * m * k * n,
        "tolerance": tolerance(dtype, k),
        "reason": reason(device, dtype, make_a, make_b, m, k, n),
    }
    return Case("matmul", device, **common | described)


def training(device: str, dtype: torch.dtype, side: int) -> Case:
    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        grad, a, b = (plain(side, side, device, dtype) for _ in range(3))
        return grad, a.requires_grad_(), b.requires_grad_()

    return case(
        device,
        dtype,
        (side, side, side),
        workload="forward and backward",
        size=f"{side:,}",
        contenders={name: backward(function) for name, function in PEERS.items()},
        inputs=inputs,
        reference=backward(torch.matmul),
        operations=6 * side**3,
        bytes=8 * dtype.itemsize * side**2,
    )


LAYOUTS = (("a transposed", transposed, plain), ("b transposed", plain, transposed))
LAYOUTS += (("both transposed", transposed, transposed),)


def grid(
    device: str,
    dtype: torch.dtype,
    layout: str = "",
    make_a: Callable[..., Tensor] = plain,
    make_b: Callable[..., Tensor] = plain,
) -> Grid:
    """Every M, K and N of GRID, up to a millisecond or two each on a GPU, and to ten on the CPU."""
    most_bytes, most_operations = 2**32, 2**40 if dtype.itemsize == 2 else 2**36
    if device == "cpu":
        most_bytes, most_operations = 2**26, 2**28

    def fits(m: int, k: int, n: int) -> bool:
        return dtype.itemsize * (m * k + k * n + m * n) <= most_bytes and 2 * m * k * n <= most_operations

    return Grid(
        "matmul",
        device,
        dtype,
        ("M", "K", "N"),
        FEWER if layout and device == "cpu" else GRID,
        extension_cpp.matmul,
        ("torch.mm", torch.mm),
        lambda m, k, n: (make_a(m, k, device, dtype), make_b(k, n, device, dtype)),
        fits,
        lambda m, k, n: tolerance(dtype, k),
        partial(reason, device, dtype, make_a, make_b),
        layout,
    )


def grids(device: str, dtype: torch.dtype) -> Iterator[Grid]:
    yield grid(device, dtype)
    for layout, make_a, make_b in LAYOUTS:
        yield grid(device, dtype, layout, make_a, make_b)


def cases(device: str) -> Iterator[Case | Grid]:
    """All cases of a device."""
    small = partial(case, device, torch.float32, (16, 16, 16))
    called = {"workload": "a call on 16 by 16", "timer": time_calls, "bytes": 0, "operations": 0, "reason": CALL}
    yield small(contenders={**PEERS, BOXED: boxed(torch.ops.aten.mm.default)}, short=True, **called)
    yield from calls(
        "matmul",
        device,
        extension_cpp.matmul,
        torch.mm,
        lambda: tuple(torch.randn(2, 16, 16, device=device).unbind()),
        (torch.ops.aten.mm.default, lambda grad, a, b: (grad @ b.t(), a.t() @ grad)),
    )
    yield batched_call(
        "matmul", device, extension_cpp.matmul, torch.mm, lambda: (torch.randn(2, 16, 16, device=device),) * 2
    )
    for dtype in DTYPES:
        for side in SIZES[device]:
            short = dtype == torch.float32 and side == 512
            curve = {"x": side, "axis": "side", "draw": "rate", "size": f"{side:,}", "short": short}
            yield case(device, dtype, (side, side, side), **curve)
    for dtype, sides in OTHERS[device].items():
        for side in sides:
            yield case(device, dtype, (side, side, side), size=f"{side:,}")
    for dtype in DTYPES if device == "cuda" else DTYPES[:1]:
        yield from particular(device, dtype)
    for dtype in TOLERANCES if device == "cuda" else ():
        for sizes in SHAPES:
            yield case(device, dtype, sizes, size=by(sizes))
        yield from grids(device, dtype)
    if device == "cpu":
        for dtype in TOLERANCES:
            yield from vectors(device, dtype)
        yield from grids(device, torch.float32)
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():  # Else PyTorch's takes up to twenty times as long as ours.
            yield from grids(device, torch.bfloat16)
        yield grid(device, torch.float16)


def vectors(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """A vector and a matrix in either layout, and two vectors."""
    for sizes, make_b, title in (
        ((1, 2048, 2048), plain, ""),
        ((1, 2048, 2048), transposed, " transposed"),
        ((1, 100_000, 16), transposed, " transposed"),
        ((1, 100_000, 1), plain, ""),
    ):
        yield case(device, dtype, sizes, make_b=make_b, workload="vector", size=by(sizes) + title)


def particular(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Shapes and layouts that are not those of the curve."""
    side, large, prime = (4096, 8192, (4093, 4099, 4091)) if device == "cuda" else (1024, 2048, (1021, 1031, 1019))
    for m in (1, 16, 128) if device == "cuda" else (16, 128):
        for title, make_b in (("", plain), (" transposed", transposed)):
            size = f"{m} by {large:,} by {large:,}{title}"
            yield case(device, dtype, (m, large, large), make_b=make_b, workload="skinny", size=size)
    for title, make_a, make_b in (*LAYOUTS, ("rows off alignment", unaligned, unaligned)):
        yield case(device, dtype, (side, side, side), make_a, make_b, workload="strided", size=title)
    yield case(device, dtype, prime, size=by(prime))
    yield training(device, dtype, side)
