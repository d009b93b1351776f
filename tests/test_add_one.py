"""add_one and my_op: the contract, and what is particular to them."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import available_memory, strided_tensor

import extension_cpp
from extension_cpp.ops import _backends, _operator
from extension_cpp.testing import DEVICES, FLOATING, Case, Contract, elementwise_samples, same_bits, significant_strides


def wrong_singles(op: str, device: str):
    t = torch.ones(2, 3, device=device)
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        name = str(dtype).removeprefix("torch.")
        yield t.to(dtype), f"{op}: input must have dtype float16, bfloat16, float32 or float64, got {name}"
    yield t.to_sparse(), f"{op}: input must be a strided tensor, got torch.sparse_coo"


class TestAddOne(Contract):
    op = Case(
        function=extension_cpp.add_one,
        samples=lambda device, dtype: ((t,) for t in elementwise_samples(device, dtype)),
        errors=lambda device: (((t,), message) for t, message in list(wrong_singles("add_one", device))[:-1]),
        magnitude=lambda t: t.abs() + 1,
    )


class TestMyOp(Contract):
    op = Case(
        function=extension_cpp.my_op,
        samples=lambda device, dtype: ((t, c) for t, c in zip(elementwise_samples(device, dtype), [1.5, 0, -2.25] * 4)),
        errors=lambda device: (((t, 2.0), message) for t, message in list(wrong_singles("my_op", device))[:-1]),
    )

    @pytest.mark.parametrize("scalar", [float("inf"), float("nan"), 1e300, 1e-320, 1 / 3, 7, True])
    def test_any_number(self, device, dtype, scalar):
        if self.backend == "triton" and _backends.interpreted and dtype == torch.bfloat16:
            pytest.skip("Triton's interpreter doesn't round to bfloat16, it cuts")
        t = torch.tensor([0.0, 1.0, -2.0, float("inf")], device=device, dtype=dtype)
        assert same_bits(extension_cpp.my_op(t, scalar), t * float(scalar))


@pytest.mark.parametrize("function", [extension_cpp.add_one, lambda t: extension_cpp.my_op(t, 2.0)])
def test_vmap_of_any_size(function):
    """Of which torch.compile knows symbols only, once a second size has come."""
    compiled = torch.compile(torch.func.vmap(function), backend="aot_eager", fullgraph=True)
    for size in (3, 4, 5):
        t = torch.randn(2, size)
        assert same_bits(compiled(t), function(t))


@pytest.mark.parametrize("function", [extension_cpp.add_one, lambda t: extension_cpp.my_op(t, 2.0)])
def test_sparse_is_refused(function):
    with pytest.raises(RuntimeError, match=r"input must be a strided tensor, got torch\.sparse_coo"):
        function(torch.eye(3).to_sparse())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_small_tensors_have_derivatives_of_pytorch(device, dtype):
    """For a call that records one: with the bits of the kernel, which large tensors and a backend asked for get. On CUDA
    large tensors have them too, of an operator that is one of PyTorch's.
    """
    calls = {
        "add_one": (extension_cpp.add_one, lambda a, b: (a,)),
        "my_op": (extension_cpp.my_op, lambda a, b: (a, 1 / 3)),
        "mymul": (extension_cpp.mymul, lambda a, b: (a, b)),
        "mymuladd": (extension_cpp.mymuladd, lambda a, b: (a, b, 1 / 3)),
    }
    for name, (function, arguments) in calls.items():
        by_pytorch = device == "cuda" and name in ("add_one", "my_op")
        for n, small in ((1000, True), (_operator.SMALL[device == "cuda"] + 1, by_pytorch)):
            a, b = torch.randn(2, n, device=device).to(dtype).unbind()
            args = arguments(a.requires_grad_(), b)
            assert function.operator.is_small(*args) == small
            function(*args)  # The first call after an import asks who has registered a kernel.
            recorded = function(*args)
            node = recorded.grad_fn.name()
            assert (node in ("AddBackward0", "MulBackward0")) == small, node
            with torch.no_grad():
                assert same_bits(recorded.detach(), function(*args))
            with extension_cpp.use_backend("native"):
                assert function(*args).grad_fn.name() not in ("AddBackward0", "MulBackward0")


@pytest.mark.parametrize(
    "name, reference, one",
    [
        ("my_op", lambda x, number: x * number, True),
        ("my_op", lambda x, number: (x * number).sin(), False),
        ("my_op", lambda x, number: {}[number], False),  # It takes no 1, which it is tried with.
        ("mymul", lambda a, b: a * b, False),  # Its derivative reads memory once that PyTorch's reads twice.
        ("mymuladd", lambda a, b, c: a * b, False),
    ],
)
def test_operators_that_are_one_of_pytorchs(name, reference, one):
    operator = getattr(extension_cpp, name).operator
    with mock.patch.object(operator, "reference", reference):
        assert type(operator).is_one_of_pytorchs.func(operator) == one


@pytest.mark.parametrize("device", DEVICES)
def test_small_tensors_are_checked(device):
    """What PyTorch's operators would take is refused, and a tensor without memory is no reason to stop."""
    a = torch.randn(2, 3, device=device, requires_grad=True)
    dead = []
    torch.func.grad(lambda t: dead.append(t) or t.sum())(a.detach())
    for _ in range(2):
        assert extension_cpp.mymul(a, dead[0]).requires_grad
    freed = torch.randn(2, 3, device=device)
    freed.untyped_storage().resize_(0)
    for args, message in (
        ((a, a.to(torch.int32)), "b must have the dtype of a, float32, got int32"),
        ((a, freed), "b must have "),
        ((a.view((1,) * 65 + (2, 3)), a), "a must have at most 64 dimensions, got 67"),
    ):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"^mymul: {message}"):
                extension_cpp.mymul(*args)
    with pytest.raises(RuntimeError, match=r"my_op.*Expected a value of type .float. for argument .scalar_arg."):
        extension_cpp.my_op(a, "3")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: str(dtype).removeprefix("torch."))
@given(data=st.data())
def test_same_as_pytorch(device, dtype, data):
    """Bit for bit and stride for stride, also for infinities, NaN and subnormals."""
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=5)))
    t = data.draw(strided_tensor(shape, dtype)).to(device)
    scalar = data.draw(st.floats(width=32))
    for got, want in ((extension_cpp.add_one(t), t + 1), (extension_cpp.my_op(t, scalar), t * scalar)):
        assert same_bits(got, want)
        assert significant_strides(got) == significant_strides(want)


@pytest.mark.parametrize("device", DEVICES)
def test_transforms(device):
    """vmap, forward-mode derivatives, inference mode."""
    x, tangent = torch.randn(2, 4, 3, device=device)
    torch.testing.assert_close(torch.vmap(extension_cpp.add_one, in_dims=1, out_dims=1)(x), x + 1)
    torch.testing.assert_close(torch.vmap(lambda t: extension_cpp.my_op(t, 3.0))(x), x * 3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        for function, want in ((extension_cpp.add_one, tangent), (lambda t: extension_cpp.my_op(t, 3.0), tangent * 3)):
            torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(function(dual)).tangent, want)
    with torch.inference_mode():
        torch.testing.assert_close(extension_cpp.my_op(x, -1.0), -x)


@pytest.mark.large
@pytest.mark.parametrize("device", DEVICES)
def test_past_2_31_elements(device):
    """Indices, sizes and offsets past 32 bits."""
    n = 2**31 + 17
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else available_memory()
    if free < 16e9:
        pytest.skip(f"needs 16 GB of free memory, {free / 1e9:.0f} GB are free")
    row = (
        torch.arange(n, device=device, dtype=torch.int32).to(torch.float16)
        if device == "cuda"
        else torch.ones(1).half()
    )
    ends = torch.tensor([0, 1, 2**31 - 1, 2**31, n - 1], device=device)
    for got, want in ((extension_cpp.my_op(row.expand(n), 2.0), 2 * row.expand(n)[ends]),):
        assert torch.equal(got[ends], want)
    if device == "cuda":
        every_second = row[::2].t() if row.dim() == 2 else row[::2]
        got = extension_cpp.add_one(every_second)
        assert torch.equal(got[-3:], every_second[-3:] + 1)
