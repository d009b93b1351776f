"""mymuladd, mymul and myadd_out: the contract, and what is particular to them."""

import itertools
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.compiler.config
from hypothesis import given
from hypothesis import strategies as st
from strategies import available_memory, strided_tensor
from torch import Tensor

import extension_cpp
from extension_cpp.ops import _backends, muladd
from extension_cpp.ops._operator import reference_of
from extension_cpp.testing import (
    DEVICES,
    FLOATING,
    Case,
    Contract,
    Onlooker,
    default_device,
    same_bits,
    significant_strides,
)

SHAPES = [
    ((7,), (7,)),
    ((3, 5), (3, 5)),
    ((2, 3, 4), (4,)),
    ((4, 1), (1, 5)),
    ((), (3,)),
    ((), ()),
    ((0,), (1,)),
    ((2, 0, 3), (3,)),
    ((2, 3, 4, 5), (2, 3, 4, 5)),
    ((33, 65), (33, 65)),
    ((1030,), (1030,)),
]


def pairs(device: str, dtype: torch.dtype):
    generator = torch.Generator(device).manual_seed(0)

    def make(shape):
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float64).to(dtype)

    for shape_a, shape_b in SHAPES:
        yield make(shape_a), make(shape_b)
    yield make((65, 33)).t(), make((33, 65))  # one transposed
    yield make((6,)).expand(4, 6), make((4, 6))
    yield make((2, 6, 4, 4)).contiguous(memory_format=torch.channels_last), make((2, 6, 4, 4))


def wrong_pairs(op: str, device: str):
    t = torch.ones(2, 3, device=device)
    floating = "float16, bfloat16, float32 or float64"
    yield (t, torch.ones(4, device=device)), f"{op}: a and b must have shapes that broadcast, got (2, 3) and (4,)"
    yield (t, t.double()), f"{op}: b must have the dtype of a, float32, got float64"
    yield (t.int(), t.int()), f"{op}: a must have dtype {floating}, got int32"
    yield (t.bool(), t), f"{op}: a must have dtype {floating}, got bool"
    yield (t.to(torch.complex64), t), f"{op}: a must have dtype {floating}, got complex64"
    yield (t, t.to(torch.complex64)), f"{op}: b must have the dtype of a, float32, got complex64"
    yield (t.to(torch.float8_e4m3fn), t), f"{op}: a must have dtype {floating}, got float8_e4m3fn"
    if device == "cuda":
        yield (t, t.cpu()), f"{op}: b must be on the device of a, cuda:0, got cpu"
        yield (t.cpu(), t), f"{op}: b must be on the device of a, cpu, got cuda:0"


class TestMyMulAdd(Contract):
    op = Case(
        function=extension_cpp.mymuladd,
        samples=lambda device, dtype: ((a, b, c) for (a, b), c in zip(pairs(device, dtype), [1.5, 0, -2.25] * 5)),
        errors=lambda device: (((*args, 1.0), message) for args, message in wrong_pairs("mymuladd", device)),
        magnitude=lambda a, b, c: (a * b).abs() + abs(c),
    )

    def test_fused(self, device):
        """Rounded once: exact where a rounded product would lose everything."""
        if self.backend == "reference" or (self.backend == "triton" and _backends.interpreted):
            pytest.skip("neither plain PyTorch nor Triton's interpreter has a fused multiply-add")
        a = torch.full((1000,), 1 + 2.0**-12, device=device)
        exact = (a.double() * a.double() - 1).float()
        assert torch.equal(extension_cpp.mymuladd(a, a, -1.0), exact)

    @pytest.mark.parametrize("c", [float("inf"), float("-inf"), float("nan"), 1e300, -1e300, 1e-320, 7, True])
    def test_any_number(self, device, dtype, c):
        a = torch.tensor([0.0, 1.0, -2.0, float("inf")], device=device, dtype=dtype)
        expected = reference_of(extension_cpp.mymuladd)(a, a.neg(), c)
        torch.testing.assert_close(extension_cpp.mymuladd(a, a.neg(), c), expected, equal_nan=True)


class TestMyMul(Contract):
    op = Case(
        function=extension_cpp.mymul,
        samples=pairs,
        errors=lambda device: wrong_pairs("mymul", device),
    )


class TestMulBackward(Contract):
    """Not public, but an operator like any other."""

    op = Case(
        function=muladd.mymul_backward,
        samples=lambda device, dtype: (
            (torch.ones_like(a) / 3, a, b) for a, b in pairs(device, dtype) if a.shape == b.shape
        ),
        errors=lambda device: [
            (
                (torch.ones(3, device=device), torch.ones(3, device=device), torch.ones(1, device=device)),
                "mymul_backward: b must have the shape of grad, (3,), got (1,)",
            ),
            (
                (torch.ones(3, device=device), torch.ones(3, device=device).half(), torch.ones(3, device=device)),
                "mymul_backward: a must have the dtype of grad, float32, got float16",
            ),
        ],
    )


def out_errors(device: str):
    for args, message in wrong_pairs("myadd_out", device):
        yield (*args, torch.zeros(2, 3, device=device)), message
    a = torch.ones(2, 3, device=device)
    shape = "myadd_out: out must have the shape that a and b broadcast to, (2, 3), got"
    yield (a, a, torch.zeros(3, 2, device=device)), f"{shape} (3, 2)"
    yield (a, a, torch.zeros(1, 2, 3, device=device)), f"{shape} (1, 2, 3)"
    yield (a, a, torch.zeros(0, device=device)), f"{shape} (0,)"
    yield (a, a, a.double()), "myadd_out: out must have the dtype of a, float32, got float64"
    itself = "myadd_out: out must not overlap itself, got shape (2, 3) with strides"
    yield (a, a, torch.zeros(1, 3, device=device).expand(2, 3)), f"{itself} (0, 1)"
    yield (a, a, torch.zeros(6, device=device).as_strided((2, 3), (2, 1))), f"{itself} (2, 1)"
    partial = "itself or not overlap it, got a partial overlap"
    base = torch.arange(10.0, device=device)
    yield (base[:6], base[4:], base[2:8]), f"myadd_out: out must be a {partial}"
    yield (base[4:].clone(), base[2:8], base[1:7]), f"myadd_out: out must be b {partial}"
    yield (base[1:2].expand(4), base[4:8].clone(), base[:4]), f"myadd_out: out must be a {partial}"
    square = torch.ones(4, 4, device=device)
    yield (square.t(), square.clone(), square), f"myadd_out: out must be a {partial}"
    grad = "must not require a gradient, as writing has none; got one that does"
    leaf = torch.zeros(2, 3, device=device, requires_grad=True)
    yield (a, a, leaf), f"myadd_out: out {grad}"
    yield (leaf, a, a.clone()), f"myadd_out: a {grad}"
    yield (a, leaf, a.clone()), f"myadd_out: b {grad}"


def out_samples(device: str, dtype: torch.dtype):
    for i, (a, b) in enumerate(pairs(device, dtype)):
        out = torch.zeros(torch.broadcast_shapes(a.shape, b.shape), device=device, dtype=dtype)
        if i % 2 and out.dim() == 2:
            out = out.t().contiguous().t()
        yield a, b, out


class TestMyAddOut(Contract):
    op = Case(
        function=extension_cpp.myadd_out,
        samples=out_samples,
        errors=out_errors,
        magnitude=lambda a, b, out: a.abs() + b.abs(),
    )

    def test_in_place(self, device, dtype):
        """out may be an input; views of one storage may interleave without sharing an element."""
        a, b = torch.ones(5, 4, device=device, dtype=dtype), torch.arange(20, device=device).reshape(5, 4).to(dtype)
        for out in (a.clone(), a.t().contiguous().t()):
            extension_cpp.myadd_out(out, b, out)
            assert torch.equal(out, a + b)
        base = torch.arange(40, device=device).reshape(5, 8).to(dtype)
        left, right, even, odd = base[:, :4], base[:, 4:], base[:, ::2], base[:, 1::2]
        expected = (right + right).clone()
        extension_cpp.myadd_out(right, right, left)
        assert torch.equal(left, expected)
        expected = base[4:, 7:].expand(1, 4) + b[:1]
        extension_cpp.myadd_out(base[4:, 7:].expand(1, 4), b[:1], base[4:, :4])  # Broadcast, next to what is written.
        assert torch.equal(base[4:, :4], expected)
        expected = (even + b).clone()
        extension_cpp.myadd_out(even, b, odd)
        assert torch.equal(odd, expected)

    def test_autograd_notices(self, device):
        """A gradient that needs the overwritten values is an error, not a wrong number."""
        x = torch.ones(3, device=device, requires_grad=True)
        y = x.exp()
        z = y * y
        with torch.no_grad():
            extension_cpp.myadd_out(y, y, y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()

    def test_no_grad_allows_parameters(self, device):
        weight = torch.ones(3, device=device, requires_grad=True)
        with torch.no_grad():
            extension_cpp.myadd_out(weight, weight, weight)
        assert torch.equal(weight, torch.full((3,), 2.0, device=device))


@st.composite
def strided_pair(draw, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=5)))
    narrowed = tuple(1 if draw(st.booleans()) else size for size in shape)
    b_shape = narrowed[draw(st.integers(0, len(shape))) :]
    pair = draw(strided_tensor(shape, dtype)), draw(strided_tensor(b_shape, dtype))
    return pair if draw(st.booleans()) else pair[::-1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: str(dtype).removeprefix("torch."))
class TestProperties:
    @given(data=st.data())
    def test_mymul_is_torch_mul(self, device, dtype, data):
        """Bit for bit and stride for stride, also for infinities, NaN and subnormals."""
        a, b = (t.to(device) if device == "cuda" else t for t in data.draw(strided_pair(dtype)))
        got, want = extension_cpp.mymul(a, b), a * b
        assert same_bits(got, want)
        assert significant_strides(got) == significant_strides(want)

    @given(data=st.data(), c=st.floats(-10, 10, width=16))
    def test_mymuladd_is_exact_but_for_one_rounding(self, device, dtype, data, c):
        """float32 and halves: the float64 result, rounded. In float64, the product of two float32 is exact."""
        a, b = (t.to(device) if device == "cuda" else t for t in data.draw(strided_pair(dtype)))
        got = extension_cpp.mymuladd(a, b, c)
        if dtype == torch.float64:
            torch.testing.assert_close(got, a * b + c, rtol=4e-16, atol=4e-15, equal_nan=True)
        else:
            want = (a.double() * b.double() + c).float().to(dtype)
            info = torch.finfo(dtype)
            torch.testing.assert_close(got, want, rtol=info.eps, atol=2 * info.tiny * info.eps, equal_nan=True)

    @given(data=st.data())
    def test_myadd_out_is_torch_add(self, device, dtype, data):
        a, b = (t.to(device) if device == "cuda" else t for t in data.draw(strided_pair(dtype)))
        shape = torch.broadcast_shapes(a.shape, b.shape)
        order = data.draw(st.permutations(range(len(shape))))
        out = torch.empty([shape[d] for d in order], dtype=dtype, device=device)
        out = out.permute([list(order).index(d) for d in range(len(shape))])
        extension_cpp.myadd_out(a, b, out)
        assert same_bits(out, a + b)


@pytest.mark.parametrize("device", DEVICES)
class TestEverywhere:
    def test_all_half_values(self, device):
        """Each of the 65,536 values of float16 and of bfloat16 is read, computed with and rounded as PyTorch does it."""
        bits = torch.arange(-(2**15), 2**15, device=device).to(torch.int16)
        for dtype in (torch.float16, torch.bfloat16):
            values = bits.view(dtype)
            assert same_bits(extension_cpp.mymul(values, torch.ones_like(values)), values)
            other = values[torch.randperm(values.numel(), generator=torch.Generator().manual_seed(1))]
            for x, y in ((values, other), (values[1:], other[:-1]), (values[::2], other[::2])):
                assert same_bits(extension_cpp.mymul(x, y), x * y)
                out = torch.empty_like(x)
                extension_cpp.myadd_out(x, y, out)
                assert same_bits(out, x + y)

    @pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: str(dtype).removeprefix("torch."))
    def test_rows_of_any_length_at_any_strides(self, device, dtype):
        """Shorter than a vector, one element longer than some, next to each other or not, broadcast, and in place."""

        def layouts(rows, n):
            whole = torch.randn(rows, 2 * n + 1, generator=torch.Generator().manual_seed(n)).to(device, dtype)
            yield from (whole[:, :n].contiguous(), whole[:, 1 : n + 1], whole[:, ::2][:, :n])
            yield from (whole[:, :n].t().contiguous().t(), whole[:, :1].expand(rows, n), whole[:1, :n].expand(rows, n))

        for rows, n in itertools.product((1, 3, 40, 600), (1, 2, 7, 8, 9, 15, 16, 17, 33, 100)):
            for x, y in itertools.product(layouts(rows, n), repeat=2):
                assert same_bits(extension_cpp.mymul(x, y), x * y), (rows, n, x.stride(), y.stride())
            for out, y in itertools.product(list(layouts(rows, n))[:4], layouts(rows, n)):
                expected = out + y
                extension_cpp.myadd_out(out, y, out)
                assert same_bits(out, expected), (rows, n, out.stride(), y.stride())

    def test_many_dimensions(self, device):
        a = torch.randn((2,) * 12, device=device)
        b = a.permute(torch.randperm(12).tolist())
        assert same_bits(extension_cpp.mymul(a, b), a * b)
        wide = torch.ones((1,) * 62 + (2, 3), device=device)
        assert extension_cpp.mymul(wide, wide).shape == wide.shape

    @pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: str(dtype).removeprefix("torch."))
    def test_short_rows(self, device, dtype):
        """So many that threads share them, and begin within one."""
        n = 20_011
        for width in (2, 3, 5, 17):
            rows = torch.randn(n, width, device=device, dtype=dtype)
            wide = torch.randn(3, n, width + 4, device=device, dtype=dtype)
            others = (rows[7], rows[:, :1], rows.reshape(width, n).t(), wide[0, :, :width], wide[..., 1 : width + 1])
            for other in others:
                assert same_bits(extension_cpp.mymul(rows, other), rows * other)
                assert same_bits(extension_cpp.mymul(other, rows), other * rows)

    @pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: str(dtype).removeprefix("torch."))
    def test_transposed(self, device, dtype):
        """Inputs that lie across the rows of the result, one or both, of sizes around those of tiles; many threads too."""
        for shape in ((2, 3), (15, 129), (33, 257), (16, 128), (3, 40, 130), (130, 3, 33), (500, 301), (7, 2, 5, 31)):
            a = torch.randn(shape, device=device, dtype=dtype)
            for order in itertools.permutations(range(len(shape))):
                b = torch.empty([shape[d] for d in order], device=device, dtype=dtype).normal_()
                b = b.permute([order.index(d) for d in range(len(shape))])
                for x, y in ((a, b), (b, a), (a[:1], b), (a, b[..., :1]), (a[:, 1:], b[:, 1:])):
                    got, want = extension_cpp.mymul(x, y), x * y
                    assert same_bits(got, want) and got.stride() == want.stride(), (
                        f"{shape}: {x.stride()} and {y.stride()}"
                    )
                out = torch.empty(shape[::-1], device=device, dtype=dtype).permute(*range(len(shape) - 1, -1, -1))
                extension_cpp.myadd_out(a, b, out)
                assert same_bits(out, a + b)

    def test_vmap(self, device):
        a, b = torch.randn(4, 3, 2, device=device), torch.randn(3, 4, device=device)
        got = torch.vmap(lambda x, y: extension_cpp.mymuladd(x, y, 1.0), in_dims=(0, 1))(a, b.unsqueeze(-1))
        want = torch.vmap(lambda x, y: x * y + 1.0, in_dims=(0, 1))(a, b.unsqueeze(-1))
        torch.testing.assert_close(got, want)
        alone = torch.vmap(lambda x: extension_cpp.mymul(x, b[:, :2]))(a)
        torch.testing.assert_close(alone, a * b[:, :2])

    def test_forward_mode(self, device):
        a, b, tangent = torch.randn(3, 3, device=device).unbind()
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(a, tangent)
            for function in (lambda x, y: extension_cpp.mymuladd(x, y, 1.0), extension_cpp.mymul):
                for args, want in (((dual, b), tangent * b), ((b, dual), b * tangent), ((dual, dual), 2 * a * tangent)):
                    got = torch.autograd.forward_ad.unpack_dual(function(*args)).tangent
                    torch.testing.assert_close(got, want)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_infinite_factors(self, device, dtype):
        """The gradient is the other factor, also where it comes from the reference."""
        a = torch.ones(3, dtype=dtype, device=device)
        b = torch.tensor([2, torch.inf, 1], dtype=dtype, device=device)
        gradient = torch.func.grad(lambda a: extension_cpp.mymuladd(a, b, 1.0).sum())
        (tangent,) = torch.func.jvp(lambda a: extension_cpp.mymuladd(a, b, 1.0), (a,), (a,))[1:]
        assert same_bits(tangent, b)
        assert same_bits(torch.func.functionalize(gradient)(a), b)
        assert same_bits(torch.func.jvp(gradient, (a,), (a,))[0], b)

    def test_inference_mode_and_subclasses(self, device):
        a, outside = torch.randn(5, device=device), torch.empty(5, device=device)
        with torch.inference_mode():
            torch.testing.assert_close(extension_cpp.mymuladd(a, a, 1.0), a * a + 1.0)
            for out in (torch.empty_like(a), outside):  # Of these only the other one has a version.
                extension_cpp.myadd_out(a, a, out)
                assert torch.equal(out, a + a)
        assert outside._version == 1
        parameter = torch.nn.Parameter(a)
        assert extension_cpp.mymul(parameter, a).requires_grad
        with torch.no_grad():
            assert not extension_cpp.mymul(parameter, a).requires_grad
        negated = torch.randn(5, device=device, dtype=torch.complex64).conj().imag
        assert negated.is_neg()
        torch.testing.assert_close(extension_cpp.mymul(negated, a), negated * a)

    def test_what_enters_no_formula(self, device):
        """Registered formulas take longer than the operator: a call without a gradient needs none."""
        a, parameter = torch.ones(3, device=device), torch.nn.Parameter(torch.ones(3, device=device))
        b, entered = a.clone().requires_grad_(), set()

        def look(frame, event, argument):
            entered.add(frame.f_code.co_name)

        def called(*args, of=extension_cpp.mymul) -> set[str]:
            of(*args)  # The first call makes what it needs.
            entered.clear()
            sys.setprofile(look)
            try:
                of(*args)
            finally:
                sys.setprofile(None)
            return entered - {"called", "is_dynamo_compiling"}

        with torch.no_grad():
            assert called(parameter, a) == called(a, b) == {"mymul"}
            assert called(a, parameter, a.clone(), of=extension_cpp.myadd_out) == {"myadd_out"}
        with default_device("meta"):
            assert not {"autograd", "__torch_function__"} & called(a, a)
            assert "autograd" not in called(a, b)
        with Onlooker():
            assert "autograd" not in called(a, a) | called(a, b)

    def test_modes_see_the_operator(self, device):
        from torch.utils._python_dispatch import TorchDispatchMode

        class Recorder(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                seen.append(function)
                return function(*args, **(kwargs or {}))

        seen: list = []
        a = torch.randn(3, device=device)
        with Recorder():
            extension_cpp.mymuladd(a, a, 1.0)
        assert seen == [torch.ops.extension_cpp.mymuladd.default]

    @pytest.mark.large
    def test_past_2_31_elements(self, device):
        """Indices, sizes and offsets past 32 bits, contiguous, broadcast and transposed."""
        n = 2**31 + 17
        free = torch.cuda.mem_get_info()[0] if device == "cuda" else available_memory()
        if free < 16e9:
            pytest.skip(f"needs 16 GB of free memory, {free / 1e9:.0f} GB are free")
        row = torch.randn(n, device=device, dtype=torch.float16) if device == "cuda" else torch.ones(1).half().expand(n)
        got = extension_cpp.mymuladd(row, row[:1], 1.0)
        ends = torch.tensor([0, 1, 2**31 - 1, 2**31, n - 1], device=device)
        torch.testing.assert_close(got[ends], reference_of(extension_cpp.mymuladd)(row[ends], row[:1], 1.0))
        if device == "cuda":
            got = extension_cpp.mymuladd(row, row, 1.0)
            torch.testing.assert_close(got[ends], reference_of(extension_cpp.mymuladd)(row[ends], row[ends], 1.0))
            tall = row[: 2**31].view(2**16, 2**15)
            got = extension_cpp.mymul(tall, tall[:1, :].t().expand(2**15, 2**16).t())
            assert torch.equal(got[-1, -5:], tall[-1, -5:] * tall[0, -5:])


@pytest.mark.parametrize("function", [extension_cpp.mymuladd, torch.ops.extension_cpp.mymuladd])
def test_derivatives_of_a_users_kernel(function):
    """Its values, and the derivatives of the operator at these values, also of second order."""
    a, b = torch.randn(2, 3, dtype=torch.float64)

    def squares(a: Tensor) -> Tensor:
        return function(a, b, 2.0).square().sum()

    with warnings.catch_warnings(), torch.library._scoped_library("extension_cpp", "IMPL") as library:
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl("mymuladd", lambda a, b, c: a * 0 + 7, "CPU", allow_override=True)
        gradient, tangent = torch.func.jvp(torch.func.grad(squares), (a,), (torch.ones_like(a),))
        torch.testing.assert_close(gradient, 14 * b)
        torch.testing.assert_close(tangent, 2 * b * b)
        torch.testing.assert_close(torch.func.hessian(squares)(a), torch.diag(2 * b * b))
        batched = torch.vmap(lambda a: torch.func.jvp(torch.func.grad(squares), (a,), (b,)))(a.repeat(2, 1))
        torch.testing.assert_close(batched, ((14 * b).repeat(2, 1), (2 * b**3).repeat(2, 1)))


@pytest.mark.slow
def test_what_inductor_keeps_on_disk_is_not_used_for_another_kernel():
    def call(a: Tensor) -> Tensor:
        return extension_cpp.mymuladd(a, a, -1.0).relu()

    a = torch.full((64,), 1 + 2.0**-12)
    with torch.compiler.config.patch(cache_key_tag=""):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(call)(a), (a.double() * a.double() - 1).float())
        torch._dynamo.reset()
        with warnings.catch_warnings(), torch.library._scoped_library("extension_cpp", "IMPL") as library:
            warnings.simplefilter("ignore")
            library.impl("mymuladd", lambda a, b, c: a * 0 + 7, "CPU", allow_override=True)
            assert torch.equal(torch.compile(call)(a), torch.full((64,), 7.0))
        torch._dynamo.reset()


def test_huge_pages_under_a_large_result():
    """Where Linux gives them to who asks; without, the first touches of a large result take longer than all else."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system has no transparent huge pages")
    result = extension_cpp.mymul(torch.ones(2**24), torch.ones(1))
    inside = result.data_ptr() + 2**22
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    for mapping in mappings[1:]:
        begin, end = (int(address, 16) for address in mapping.split(maxsplit=1)[0].split("-"))
        if begin <= inside < end:
            assert "hg" in re.search(r"VmFlags:(.*)", mapping)[1].split()
            return
    pytest.fail("no mapping holds the result")
