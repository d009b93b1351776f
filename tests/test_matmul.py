"""matmul: the contract, and what is particular to it."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import extension_cpp
from extension_cpp.testing import DEVICES, FLOATING, Case, Contract, guarded, same_bits

SHAPES = [
    (5, 4, 3),
    (7, 7, 7),
    (1, 1, 1),
    (1, 9, 6),
    (6, 9, 1),
    (3, 1, 5),
    (3, 0, 2),
    (0, 3, 4),
    (4, 3, 0),
    (65, 129, 33),
    (1, 300, 67),
    (131, 17, 2),
    (9, 300, 2070),  # On the CPU, few rows, in two parts along n and k.
    (60, 300, 150),  # On the CPU, more rows, and several strips of b at once.
]


def factors(device: str, dtype: torch.dtype, m: int, k: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    make = lambda *shape: torch.randn(shape, generator=generator, device=device, dtype=torch.float64)  # noqa: E731
    return make(m, k).to(dtype), make(k, n).to(dtype)


def samples(device: str, dtype: torch.dtype):
    for m, k, n in SHAPES:
        yield factors(device, dtype, m, k, n)
    a, b = factors(device, dtype, 6, 5, 4)
    yield a.t().contiguous().t(), b.t().contiguous().t()
    yield a[:1].expand(6, 5), b[:, :1].expand(5, 4)
    yield a[::2, 1:4], b[1:4, ::3]


def errors(device: str):
    t = torch.ones(2, 3, device=device)
    floating = "float16, bfloat16, float32 or float64"
    yield (t, t), "matmul: b must have shape (K, N) with K = 3, got (2, 3)"
    yield (t, torch.ones(0, 3, device=device)), "matmul: b must have shape (K, N) with K = 3, got (0, 3)"
    yield (t[0], t.t()), "matmul: a must have shape (M, K), got (3,)"
    yield (t, t[0]), "matmul: b must have shape (K, N) with K = 3, got (3,)"
    yield (t[None], t.t()), "matmul: a must have shape (M, K), got (1, 2, 3)"
    yield (t, t.t().double()), "matmul: b must have the dtype of a, float32, got float64"
    yield (t.int(), t.t().int()), f"matmul: a must have dtype {floating}, got int32"
    yield (t.to(torch.complex64), t.t()), f"matmul: a must have dtype {floating}, got complex64"
    yield (t.to(torch.float8_e4m3fn), t.t()), f"matmul: a must have dtype {floating}, got float8_e4m3fn"
    if device == "cuda":
        yield (t, t.t().cpu()), "matmul: b must be on the device of a, cuda:0, got cpu"
        yield (t.cpu(), t.t()), "matmul: b must be on the device of a, cpu, got cuda:0"


def magnitude(a: Tensor, b: Tensor) -> Tensor:
    return a.abs() @ b.abs()


def compare(a: Tensor, b: Tensor, epsilon: float | None = None) -> None:
    """Within the bound that the docstring states, of the product in float64 (of integers where that is not enough)."""
    got = extension_cpp.matmul(a, b)
    dtype, k = a.dtype, a.shape[1]
    exact = a.double() @ b.double()
    if dtype == torch.float64:  # What rounding the reference itself may add.
        epsilon = 2 * torch.finfo(dtype).eps
    epsilon = epsilon or torch.finfo(torch.float32).eps
    roundoff = torch.finfo(dtype).eps / 2 if dtype.itemsize == 2 else 0.0
    gamma = k * epsilon / (1 - k * epsilon)
    bound = roundoff * exact.abs() + (1 + roundoff) * gamma * magnitude(a.double(), b.double())
    bound += torch.finfo(dtype).smallest_normal
    finite = exact.abs() < torch.finfo(dtype).max
    error = (got.double() - exact).abs()
    assert got.dtype == dtype and got.shape == exact.shape and got.is_contiguous()
    where = f"{dtype}, {tuple(a.shape)} {a.stride()} by {tuple(b.shape)} {b.stride()} on {a.device}"
    assert (error[finite] <= bound[finite]).all(), f"{(error / bound)[finite].max():.3g} times the bound for {where}"


@contextmanager
def using(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class TestMatmul(Contract):
    op = Case(
        function=extension_cpp.matmul,
        samples=samples,
        errors=errors,
        magnitude=magnitude,
        grown=lambda args, times: tuple(t.repeat(times, times) for t in args),
        ulps={torch.float16: 1.0, torch.bfloat16: 1.0, torch.float32: 8.0, torch.float64: 8.0},
    )

    def test_vmap(self, device):
        a, b = factors(device, torch.float64, 6, 5, 4)
        batch_a, batch_b = torch.stack([a, a + 1, a - 1], 1), torch.stack([b, 2 * b, -b], 2)
        product = extension_cpp.matmul
        for dims, args in (((1, None), (batch_a, b)), ((None, 2), (a, batch_b)), ((1, 2), (batch_a, batch_b))):
            got, want = (torch.vmap(f, dims)(*args) for f in (product, torch.mm))
            torch.testing.assert_close(got, want)
        empty = torch.vmap(product, (1, 2))(batch_a[:, :0], batch_b[:, :, :0])
        assert empty.shape == (0, 6, 4)
        # What was accepted isn't looked at again: that must not be what differs.
        for wrong in (batch_b[:4], batch_b.float()):
            with pytest.raises(RuntimeError, match="matmul: b must have"):
                torch.vmap(product, (1, 2))(batch_a, wrong)

    def test_subnormal_factors(self, device):
        """Numbers below the normal ones count, also where the processor has an instruction that takes them for zero."""
        if self.backend == "reference":
            pytest.skip("PyTorch's own product on the CPU takes them for zero")
        tiny, large = (
            torch.full((70, 45), value, dtype=torch.bfloat16, device=device) for value in (2.0**-130, 2.0**20)
        )
        normal = torch.ones_like(large)
        normal[3, 4] = tiny[0, 0]
        for a in (tiny, tiny.t().contiguous().t(), tiny[::2]):
            compare(a, large.t())
            compare(large, a.t())
            for few, other in ((a, large), (large, a)):
                compare(few[:10], other.t().contiguous())
                compare(few[:, :1], other[:, :1].t().contiguous())
        compare(normal, large.t())

    def test_training(self, device):
        """The gradients that torch.mm has, of a step that a user writes."""
        x, w = factors(device, torch.float32, 70, 50, 30)
        found = []
        for function in (extension_cpp.matmul, torch.mm):
            leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
            function(*leaves).tanh().square().mean().backward()
            found.append([leaf.grad for leaf in leaves])
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("device", DEVICES)
def test_forward_mode(device):
    a, b = factors(device, torch.float64, 6, 5, 4)
    tangent_a, tangent_b = factors(device, torch.float64, 6, 5, 4, seed=1)
    with torch.autograd.forward_ad.dual_level():
        dual_a, dual_b = (torch.autograd.forward_ad.make_dual(*pair) for pair in ((a, tangent_a), (b, tangent_b)))
        for x, y, want in (
            (dual_a, b, tangent_a @ b),
            (a, dual_b, a @ tangent_b),
            (dual_a, dual_b, tangent_a @ b + a @ tangent_b),
        ):
            got = torch.autograd.forward_ad.unpack_dual(extension_cpp.matmul(x, y)).tangent
            torch.testing.assert_close(got, want)


def test_operations_are_those_of_mm():
    counts = []
    for function in (extension_cpp.matmul, torch.mm):
        a, b = torch.ones(3, 5, requires_grad=True), torch.ones(5, 7, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            function(a, b).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts == [3 * 2 * 3 * 5 * 7] * 2


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("device", DEVICES)
class TestValues:
    """Of the kernels alone, on the CPU in one thread: two wait for each other whenever another process runs."""

    @pytest.fixture(autouse=True)
    def one_thread(self):
        with using(1):
            yield

    @pytest.mark.parametrize("m", [1, 2, 13, 64, 127, 257])
    def test_sizes(self, device, dtype, m):
        """Around every size of a tile."""
        for n in (1, 3, 16, 63, 130, 256):
            for k in (1, 8, 31, 65, 257):
                compare(*factors(device, dtype, m, k, n))

    @pytest.mark.parametrize("k", [1, 255, 256, 257, 5000])
    def test_long_sums(self, device, dtype, k):
        compare(*factors(device, dtype, 5, k, 40))
        compare(*factors(device, dtype, 200, k, 3))

    def test_long_sums_of_many_rows_and_columns(self, device, dtype):
        """More than one block each way, of which sums wait for the others."""
        for sizes in ((2100, 2200, 40), (40, 2200, 2100), (40, 2200, 20)):
            compare(*factors(device, dtype, *sizes))

    def test_large_layouts(self, device, dtype):
        """The same bits from every layout, in sizes that are worth the fastest kernels."""
        sizes = [(256, 512, 384), (16, 1024, 512), (300, 200, 24), (257, 131, 129), (1, 4096, 1000), (1, 100, 20_000)]
        sizes += [(1000, 2060, 1), (3, 777, 1), (1, 2060, 3), (3, 9000, 1), (700, 16, 500)]
        sizes += [(37, 1, 70), (70, 3, 5), (9, 4, 3000), (5, 2, 1), (10, 9000, 20), (1, 2100, 12)]
        sizes += [(1, 3001, 1100), (1, 9007, 7), (1, 21, 37), (1, 1030, 20)]
        sizes += [(20, 1031, 333), (130, 600, 40), (16, 300, 2048), (40, 2048, 20), (70, 2, 45), (33, 7, 600)]
        if device == "cuda":  # Where factors are copied first, and where tiles are widest.
            sizes += [(1027, 512, 1030), (4096, 64, 4096)]
        for m, k, n in sizes:
            a, b = factors(device, dtype, m, k, n)
            compare(a, b)
            want = extension_cpp.matmul(a, b)
            for x in views(a):
                for y in views(b):
                    got = extension_cpp.matmul(x, y)
                    assert same_bits(got, want), f"{tuple(x.shape)} {x.stride()} by {tuple(y.shape)} {y.stride()}"

    def test_sign_of_zero(self, device, dtype):
        """Products that underflow are -0 here, or their sum is rounded to it: its sign is that of every layout."""
        tiny = {torch.float64: 1e-200, torch.float16: 2.0**-24}.get(dtype, 1e-30)
        sizes = [(1, 256, 100), (1, 2000, 500), (1, 100_003, 3), (5, 1000, 40), (300, 264, 200), (40, 20_000, 33)]
        sizes += [(30, 1, 50), (30, 4, 5)]
        for m, k, n in sizes:
            a = torch.full((m, k), -tiny, device=device, dtype=dtype)
            b = torch.full((k, n), tiny, device=device, dtype=dtype)
            want = extension_cpp.matmul(a, b)
            for x, y in itertools.product([a, *views(a)], [b, *views(b)]):
                assert same_bits(extension_cpp.matmul(x, y), want), f"{(m, k, n)}: {x.stride()} and {y.stride()}"

    def test_cancellation(self, device, dtype):
        """Sums whose terms cancel, where an error relative to the result says nothing."""
        a, b = factors(device, dtype, 33, 400, 35)
        compare(torch.cat([a, a], 1), torch.cat([b, -b], 0))

    def test_rounded_once(self, device, dtype):
        """Halves are summed in float32: 1 and then many that one half can't hold next to it."""
        k = 4097
        a = torch.ones(3, k, device=device, dtype=dtype)
        b = torch.full((k, 2), 2.0**-12, device=device, dtype=dtype)
        b[0] = 1
        assert torch.equal(extension_cpp.matmul(a, b), torch.full((3, 2), 2.0, device=device, dtype=dtype))

    def test_special_values(self, device, dtype):
        """NaN and infinities reach exactly the rows and columns that have them."""
        for m, k, n in ((70, 40, 66), (70, 1, 66), (70, 3, 20), (20, 600, 50)):
            a, b = factors(device, dtype, m, k, n)
            a[3, k // 2], a[10, k - 1], b[k // 2, n - 6] = float("nan"), float("inf"), float("-inf")
            got, want = extension_cpp.matmul(a, b), a.double() @ b.double()
            assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
            assert torch.equal(got[want.isinf()].double(), want[want.isinf()])

    def test_nothing_else_is_read(self, device, dtype):
        """Tiles end beyond the matrices: NaN all around must not get into a sum."""
        for m, k, n in (
            (130, 72, 136),
            (17, 33, 9),
            (300, 264, 200),
            (1, 600, 5),
            (1, 5000, 3),
            (1, 1043, 30),
            (1, 29, 1100),
            (25, 3, 5),
            (4, 2, 90),
            (10, 601, 37),
        ):
            a, b = factors(device, dtype, m, k, n)
            framed = []
            for t in (a, b, b.t()):
                frame = torch.full((t.shape[0] + 8, t.shape[1] + 16), float("nan"), device=device, dtype=dtype)
                frame[4:-4, 8:-8] = t
                framed.append(frame[4:-4, 8:-8])
            want = extension_cpp.matmul(a, b)
            assert same_bits(extension_cpp.matmul(*framed[:2]), want)
            assert same_bits(extension_cpp.matmul(framed[0], framed[2].t()), want)
            assert same_bits(extension_cpp.matmul(framed[0].t().contiguous().t(), framed[1]), want)

    def test_rows_that_overlap(self, device, dtype):
        """Views whose elements share memory, in both dimensions or in one."""
        values, _ = factors(device, dtype, 1, 700, 1)
        b = factors(device, dtype, 1, 130, 140)[1]
        for strides in ((1, 1), (2, 1), (1, 2), (0, 1), (1, 0), (0, 0)):
            a = values[0].as_strided((140, 130), strides)
            want = extension_cpp.matmul(a.clone(memory_format=torch.contiguous_format), b)
            assert same_bits(extension_cpp.matmul(a, b), want), f"strides {strides}"
            want = extension_cpp.matmul(b.t(), a.t().clone(memory_format=torch.contiguous_format))
            assert same_bits(extension_cpp.matmul(b.t(), a.t()), want), f"strides {strides}, transposed"

    def test_guarded_large(self, device, dtype):
        for args in (factors(device, dtype, 200, 264, 144), factors(device, dtype, 8, 2048, 520)):
            (a, a_is_whole), (b, b_is_whole) = map(guarded, args)
            assert same_bits(extension_cpp.matmul(a, b), extension_cpp.matmul(*args))
            assert a_is_whole() and b_is_whole()

    def test_same_bits_large(self, device, dtype):
        """Split sums are added in one order, however the blocks run."""
        for m, k, n in ((1, 4096, 1000), (64, 4096, 64), (300, 500, 260)):
            a, b = factors(device, dtype, m, k, n)
            first = extension_cpp.matmul(a, b)
            assert all(same_bits(extension_cpp.matmul(a, b), first) for _ in range(5))


def product(a: Tensor, b: Tensor) -> Tensor:
    return extension_cpp.matmul(a, b)


def views(t: Tensor) -> list[Tensor]:
    """t in layouts that kernels read in different ways: by rows and by columns, aligned or not, and every second one."""
    wide = torch.cat([t, t], 1)
    return [
        t.t().contiguous().t(),
        wide[:, : t.shape[1]],
        torch.cat([t[:, :1], t], 1)[:, 1:],
        torch.cat([t.t()[:1], t.t()])[1:].t(),
        torch.stack([t, t], 2)[..., 0],
    ]


@pytest.mark.parametrize("device", DEVICES)
@given(
    sizes=st.tuples(*[st.integers(0, 70)] * 3),
    dtype=st.sampled_from(FLOATING),
    layout=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    seed=st.integers(0, 99),
)
def test_any_product(device, sizes, dtype, layout, seed):
    factors_ = factors(device, dtype, *sizes, seed)
    a, b = (([t, *views(t)] if t.numel() else [t] * 6)[i] for t, i in zip(factors_, layout))
    compare(a, b)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_any_number_of_rows(dtype):
    """The bits of a row don't depend on how many others there are, but for a single row, whose sums have their own order."""
    for k, n in ((2000, 1), (700, 30)):
        a, b = factors("cpu", dtype, 600, k, n)
        want = extension_cpp.matmul(a, b)
        for m in (2, 16, 100, 262, 263):
            assert same_bits(extension_cpp.matmul(a[:m], b), want[:m]), f"{m} of 600 rows, K {k}, N {n}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_number_of_threads(dtype):
    """The bits don't depend on it."""
    sizes_ = [(150, 300, 270), (5, 400, 900), (900, 400, 5), (1, 400, 9000), (9000, 400, 1)]
    for sizes in [*sizes_, (1, 9000, 20), (20, 9000, 1), (16, 5000, 16)]:  # The last ones share the blocks of k.
        a, b = factors("cpu", dtype, *sizes)
        with using(1):
            compare(a, b)
            want = extension_cpp.matmul(a, b)
        for threads in (2, 3, 5):
            with using(threads):
                assert same_bits(extension_cpp.matmul(a, b), want), f"{sizes} on {threads} threads"


# On the CPU it takes a quarter of a minute.
@pytest.mark.parametrize("device", [pytest.param(at, marks=pytest.mark.long) if at == "cpu" else at for at in DEVICES])
@pytest.mark.large
def test_more_than_2_to_the_31_elements(device):
    """Offsets beyond 32 bits, in a factor and in the result."""
    if device == "cpu":
        rows, columns = 2**16 + 3, 2**15 + 1
        a = torch.ones(rows, 2, dtype=torch.bfloat16)
        b = torch.ones(2, columns, dtype=torch.bfloat16)
    else:
        rows, columns = 2**16 + 3, 2**15 + 9
        a = torch.ones(rows, 2, dtype=torch.bfloat16, device=device)
        b = torch.ones(2, columns, dtype=torch.bfloat16, device=device)
    a[-1], b[:, -1] = 3, 5
    c = extension_cpp.matmul(a, b)
    assert c[-1, -1] == 30 and c[0, 0] == 2 and c[-1, 0] == 6 and c[0, -1] == 10
    ones = torch.ones(columns, 3, dtype=torch.bfloat16, device=device)
    sums = extension_cpp.matmul(c, ones)
    assert sums[0, 0] == 2.0 * (columns - 1) + 10 or torch.isclose(
        sums[0, 0].float(), torch.tensor(2.0 * (columns - 1) + 10), rtol=2**-8
    )
    assert same_bits(sums[:-1], sums[:1].expand(rows - 1, 3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestCuda:
    @pytest.fixture(autouse=True)
    def restored_switch(self):
        yield
        torch.set_float32_matmul_precision("highest")

    def test_tf32_only_where_allowed(self):
        """float32 is exact to float32 unless PyTorch's switch is on; then to tf32, also in a gradient and compiled."""
        a, b = factors("cuda", torch.float32, 256, 512, 384)
        compare(a, b)
        exact = a.double() @ b.double()
        error = (extension_cpp.matmul(a, b) - exact).abs().max()
        torch.set_float32_matmul_precision("high")
        compare(a, b, epsilon=2**-10)
        assert (extension_cpp.matmul(a, b) - exact).abs().max() > 20 * error
        leaf = a.clone().requires_grad_()
        extension_cpp.matmul(leaf, b).sum().backward()
        compare(torch.ones(256, 384, device="cuda"), b.t(), epsilon=2**-10)
        compiled = torch.compile(product, fullgraph=True)
        assert same_bits(compiled(a, b), extension_cpp.matmul(a, b))
        torch.set_float32_matmul_precision("highest")
        assert same_bits(compiled(a, b), extension_cpp.matmul(a, b))
        compare(a, b)

    @pytest.mark.parametrize(("m", "n"), ((1024, 1030), (100, 4096), (4096, 64)))
    def test_float32_in_parts(self, m, n):
        """NaN, infinities and the largest numbers, of which parts in bfloat16 are infinite or NaN, in every position."""
        a, b = factors("cuda", torch.float32, m, 1000, n)
        a[3, 5], a[10, 39], b[7, 60] = float("nan"), float("inf"), float("-inf")
        a[12], b[0], b[0, 5], b[1, 9] = 0, 0.5, 0, 0
        a[12, 0] = torch.finfo(torch.float32).max
        got, want = extension_cpp.matmul(a, b), a.double() @ b.double()
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
        assert torch.equal(got[want.isinf()].double(), want[want.isinf()])
        assert torch.equal(got[12, :60].double(), want[12, :60])
        for x in views(a):
            assert torch.equal(extension_cpp.matmul(x, b).nan_to_num(), got.nan_to_num())

    @pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
    def test_parts_of_any_layout(self, dtype):
        """With few rows, few columns, many of both, and sizes of no tile; with and without parts of k, in clusters too."""
        cases = [(128, 1000, 4096), (4096, 520, 100), (60, 4096, 1000), (300, 20_000, 200), (1030, 257, 515)]
        cases += [(3000, 64, 8), (5, 300, 12_000), (16, 4096, 1000), (70, 20_000, 9)]
        cases += [(64, 100_000, 16), (9, 90_001, 20)]
        if dtype == torch.float64:  # What takes long has tiles of its own.
            cases += [(96, 500, 80), (2950, 3000, 3010), (3300, 3200, 3240)]
        for sizes in cases:
            a, b = factors("cuda", dtype, *sizes)
            compare(a, b)
            want = extension_cpp.matmul(a, b)
            for x, y in itertools.product([a, *views(a)], [b, *views(b)]):
                assert same_bits(extension_cpp.matmul(x, y), want), f"{sizes}: {x.stride()} and {y.stride()}"

    @pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
    def test_halves_of_any_tile(self, dtype):
        """All tiles of Hopper, also of transposed factors, where k is whole, in parts in a cluster or in memory, and where
        rows or columns are cut in two, in every layout. The sizes are such that each tile is that of two of them, by the
        costs that plans are made with.
        """
        whole = [(332, 168, 1648), (3108, 360, 128), (3896, 56, 4592), (8932, 168, 8), (8780, 232, 8)]
        whole += [(576, 168, 5896), (2700, 152, 2248), (3660, 184, 2104), (8, 696, 5448), (6332, 24, 344)]
        whole += [(8108, 464, 128), (5880, 248, 640), (4548, 120, 2584), (2, 144, 8), (20, 136, 24)]
        whole += [(18, 264, 24), (36, 152, 24), (42, 160, 24), (5500, 232, 40), (1204, 24, 1936)]
        whole += [(8328, 24, 496), (7164, 664, 72), (1884, 288, 2176)]
        in_cluster = [(4220, 1704, 8), (4700, 1064, 32), (388, 7808, 88), (276, 7568, 152), (4, 816, 2376)]
        in_cluster += [(1320, 1072, 8), (8, 704, 2216), (20, 392, 1736), (18, 1840, 2648), (3380, 4392, 24)]
        in_cluster += [(4956, 4104, 88), (4340, 4488, 96), (4764, 3536, 216), (1260, 744, 40), (436, 1424, 80)]
        in_cluster += [(2, 12_896, 4040), (1092, 4024, 56), (1596, 4184, 40), (1176, 6024, 344), (80, 12_760, 3808)]
        in_memory = [(76, 11_368, 8), (76, 18_472, 8), (220, 16_544, 40), (428, 13_392, 40), (652, 15_560, 88)]
        in_memory += [(692, 18_032, 112), (8, 16_752, 88), (4, 24_032, 168), (20, 13_824, 72), (2, 28_584, 872)]
        in_memory += [(6620, 5440, 8), (1448, 25_088, 8), (184, 29_624, 144), (2988, 7592, 56), (112, 12_616, 1136)]
        in_memory += [(28, 12_864, 64), (72, 19_840, 88), (2, 17_560, 5816), (264, 14_728, 136), (796, 29_560, 72)]
        in_memory += [(6532, 6616, 40), (148, 5760, 3080), (272, 12_392, 832), (4532, 11_920, 56), (8840, 2488, 152)]
        in_memory += [(148, 10_784, 2192)]
        in_two = [(2832, 1432, 688), (1136, 1776, 1800), (2384, 2296, 776), (584, 1960, 3352)]
        for sizes in whole + in_cluster + in_memory + in_two:
            a, b = factors("cuda", dtype, *sizes)
            compare(a, b)
            want = extension_cpp.matmul(a, b)
            for x, y in itertools.product((a, a.t().contiguous().t()), (b, b.t().contiguous().t())):
                assert same_bits(extension_cpp.matmul(x, y), want), f"{sizes}: {x.stride()} and {y.stride()}"

    @pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
    def test_halves_of_any_alignment(self, dtype):
        """Rows that begin anywhere, read or stored in pieces of 4 or 8 bytes, or copied first, with or without parts of k."""
        whole = [(7, 3, 5), (16, 2, 64), (64, 2, 1000), (1, 5, 2000), (66, 66, 66)]
        whole += [(300, 100, 498), (9000, 16, 500), (20_000, 500, 24), (20_000, 498, 64), (8000, 252, 62)]
        whole += [(500, 20, 500), (520, 64, 3004)]
        in_parts = [(100, 500, 16), (16, 20_004, 100), (60, 12_002, 20), (260, 9001, 101), (64, 20_004, 64)]
        # Blocks that have many more steps than stages, of which there are few, some or many.
        whole += [(8500, 516, 8), (10_000, 1004, 16), (300, 1004, 60)]
        in_parts += [(2560, 8004, 8), (3000, 20_004, 20), (64, 8004, 500), (384, 12_004, 8)]
        # Each tile of pieces, and of the transposed factors.
        whole += [(2, 172, 4648), (4964, 140, 8), (5152, 188, 40), (7844, 876, 68), (2, 268, 5308)]
        whole += [(3396, 176, 12), (3472, 188, 44), (7556, 240, 76), (8316, 284, 88)]
        in_parts += [(2, 428, 762), (514, 444, 10), (500, 1016, 40), (36, 1268, 2740), (3398, 1220, 34)]
        in_parts += [(26, 10_684, 20), (46, 12_596, 44), (34, 2300, 2514), (196, 26_160, 42), (104, 5664, 2396)]
        in_parts += [(2, 520, 692), (748, 404, 8), (728, 700, 36), (16, 12_156, 28), (88, 27_484, 68)]
        in_parts += [(44, 14_668, 40)]
        for sizes in whole + in_parts:
            a, b = factors("cuda", dtype, *sizes)
            compare(a, b)
            want = extension_cpp.matmul(a, b)
            for x, y in itertools.product((a, *views(a)), (b, *views(b))):
                assert same_bits(extension_cpp.matmul(x, y), want), f"{sizes}: {x.stride()} and {y.stride()}"

    @pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float64), ids=str)
    def test_straight_into_registers(self, dtype):
        """Over few k, with one tile of rows or several a warp, and small: in vectors of every width, and of none."""
        few = [(1, 2, 1), (17, 16, 16), (100, 12, 8), (1000, 16, 6), (40_000, 16, 512), (40_011, 8, 500), (300, 15, 72)]
        few += [(33, 4, 70_000), (5, 16, 70_002), (1, 16, 4096), (4096, 16, 1), (20_000, 16, 16), (129, 3, 1000)]
        few += [(4000, 16, 1001), (302, 13, 2050), (3001, 5, 4093), (1002, 15, 520)]
        small = [
            (1, 17, 1),
            (16, 256, 32),
            (17, 20, 12),
            (500, 64, 500),
            (1000, 100, 30),
            (8000, 128, 16),
            (31, 254, 100),
        ]
        small += [(1, 128, 1000), (1000, 128, 1), (63, 129, 65), (2, 24, 16_000), (130, 250, 136)]
        for sizes in few + small:
            a, b = factors("cuda", dtype, *sizes)
            compare(a, b)
            want = extension_cpp.matmul(a, b)
            for x, y in itertools.product((a, *views(a)), (b, *views(b))):
                assert same_bits(extension_cpp.matmul(x, y), want), f"{sizes}: {x.stride()} and {y.stride()}"

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    def test_products_one_after_another(self, dtype):
        """Of more sizes, in each dimension, than a thread remembers plans of: each is computed by its own."""
        for vary in range(3):
            for size in range(24, 9000, 68):
                compare(*factors("cuda", dtype, *(size if i == vary else 136 for i in range(3))))

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    def test_outer(self, dtype):
        """One product an element has the bits of the CPU."""
        for m, n in ((1, 1), (1, 7), (9, 1), (500, 500), (3, 1001), (70_000, 3), (3, 70_000), (129, 514), (1030, 8200)):
            a, b = factors("cuda", dtype, m, 1, n)
            want = extension_cpp.matmul(a.cpu(), b.cpu())
            for x, y in itertools.product((a, *views(a)), (b, *views(b))):
                assert same_bits(extension_cpp.matmul(x, y).cpu(), want), f"{(m, n)}: {x.stride()} and {y.stride()}"
        a, b = (torch.tensor([0.0, -0.0, 1.5, -2.0, float("inf"), float("-inf"), float("nan")], dtype=dtype),) * 2
        a, b = a[:, None], b[None]
        got, want = extension_cpp.matmul(a.cuda(), b.cuda()).cpu(), extension_cpp.matmul(a, b)
        known = ~(a.double() @ b.double()).isnan()
        assert same_bits(got[known], want[known]) and got[~known].isnan().all()

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    def test_vectors_of_any_alignment(self, dtype):
        """Rows of whole vectors, of halves of one, and of elements; the last vector may be short. Few sums may be long."""
        shapes = [(2000, 500), (500, 1004), (100, 4), (100, 12), (4000, 20), (300, 10_004), (999, 1001), (64, 6)]
        for k, n in [*shapes, (33_000, 1), (100_003, 3), (9001, 16), (5000, 67), (1_000_001, 2)]:
            x, matrix = factors("cuda", dtype, 1, k, n)
            compare(x, matrix)
            want = extension_cpp.matmul(x, matrix)
            assert same_bits(extension_cpp.matmul(torch.stack((x, x), -1)[..., 0], matrix), want), f"{(k, n)}: strided"
            for y in (matrix, *views(matrix)):
                assert same_bits(extension_cpp.matmul(x, y), want), f"{(k, n)}: {y.stride()}"
                assert same_bits(extension_cpp.matmul(y.t(), x.t()), want.t()), f"{(n, k)}: {y.t().stride()}"

    @pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
    def test_rows_off_vectors(self, dtype):
        """What is read in pieces, and what is copied first, has the bits of what lies in whole vectors."""
        for m, k, n in ((16, 40_000, 500), (64, 33_000, 500), (128, 33_000, 500), (20_000, 500, 128), (500, 1002, 66)):
            a, b = factors("cuda", dtype, m, k, n)
            compare(a, b)
            want = extension_cpp.matmul(a, b)
            wide_a, wide_b = (torch.nn.functional.pad(x, (0, 8 - x.shape[1] % 8))[:, : x.shape[1]] for x in (a, b))
            for x, y in ((wide_a, b), (a, wide_b), (wide_a, wide_b), (a, b.t().contiguous().t())):
                assert same_bits(extension_cpp.matmul(x, y), want), f"{(m, k, n)}: {x.stride()} and {y.stride()}"

    def test_float32_is_as_exact(self):
        """Of positive numbers, whose rounding errors add up where sums are cut off, and of wide ranges."""
        for k in (64, 1000, 8192):
            for power in (0, 8):
                shapes = (1024, k), (k, 1024)
                a, b = (torch.rand(s, device="cuda") * torch.rand(s, device="cuda") ** power for s in shapes)
                exact = a.double() @ b.double()
                errors = [((f(a, b) - exact) / exact).square().mean() for f in (extension_cpp.matmul, torch.matmul)]
                assert errors[0] <= 4 * errors[1]

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    def test_against_cublas(self, dtype):
        for m, k, n in (
            (1024, 1024, 1024),
            (1, 8192, 512),
            (1, 100_000, 3),
            (4096, 64, 4096),
            (2048, 2056, 1000),
            (20_000, 64, 64),
            (128, 20_000, 256),
        ):
            a, b = factors("cuda", dtype, m, k, n)
            compare(a, b)
            compare(a, b.t().contiguous().t())
