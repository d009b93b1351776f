"""convrnn_forward, its backward and nn.ConvRNN: the contract, the definition, and what is particular to a recurrence."""

import copy
import io
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils.flop_counter import FlopCounterMode

import extension_cpp
from extension_cpp.ops._operator import reference_of
from extension_cpp.ops._recurrence import convolved
from extension_cpp.ops.convrnn import convrnn_backward
from extension_cpp.testing import CONVOLVED_SIZES, DEVICES, FLOATING, Case, Contract, gradients, same_bits
from extension_cpp.testing import convolved_arguments as inputs
from extension_cpp.testing import convolved_samples as samples

backward = torch.ops.extension_cpp.convrnn_backward
convrnn_forward_reference, convrnn_backward_reference = map(
    reference_of, (extension_cpp.convrnn_forward, convrnn_backward)
)


def backward_samples(device: str, dtype: torch.dtype):
    for i, (batch, steps, width, taps) in enumerate(CONVOLVED_SIZES):
        grad, kernel, _ = inputs((batch, steps + 1, width, taps), device, dtype)
        y = 0.8 * torch.tanh(inputs((batch, steps + 1, width, taps), device, dtype, seed=1)[0])
        yield grad, y, kernel, i % 4 != 1


def error_bound(x: Tensor, kernel: Tensor, hidden: Tensor) -> Tensor:
    """By how many epsilons a state can be off: those of its own rounding, and what the error before becomes."""
    y = convrnn_forward_reference(x, kernel, hidden)
    roundings = 1 + kernel.shape[2] / 16  # Of a sum of as many terms, each of which rounds, up or down.
    errors = [torch.zeros_like(y[:, 0])]
    for t in range(1, y.shape[1]):
        entering = convolved(errors[-1] + roundings * y[:, t - 1].abs(), kernel.abs()) + roundings * x[:, t - 1].abs()
        errors.append(2 * y[:, t].abs() + (1 - y[:, t] ** 2) * entering)
    return torch.stack(errors, 1)


def backward_bound(grad: Tensor, y: Tensor, kernel: Tensor, kernel_grad: bool) -> tuple[Tensor, ...]:
    """The same recurrence on magnitudes, which each step rounds a few times."""
    roundings = 2 * (y.shape[1] + kernel.shape[2] / 16)
    magnitudes = convrnn_backward_reference(grad.abs(), y.abs(), kernel.abs(), kernel_grad)
    return tuple(roundings * t for t in magnitudes)


def wrong_inputs(device: str):
    op = "convrnn_forward"
    x, kernel, hidden = inputs((2, 3, 4, 3), device)
    floating = "float16, bfloat16, float32 or float64"
    yield (x[0], kernel, hidden), f"{op}: x must have shape (B, T, H), got (3, 4)"
    yield (x.int(), kernel, hidden), f"{op}: x must have dtype {floating}, got int32"
    yield (x, kernel[0], hidden), f"{op}: kernel must have shape (1, 1, K), got (1, 3)"
    yield (x, kernel.view(1, 3, 1), hidden), f"{op}: kernel must have shape (1, 1, K), got (1, 3, 1)"
    yield (x, kernel.double(), hidden), f"{op}: kernel must have the dtype of x, float32, got float64"
    yield (
        (x, pad(kernel, (1, 1)), hidden),
        f"{op}: kernel must have shape (1, 1, K) with 1 <= K <= H and H = 4, got (1, 1, 5)",
    )
    yield (
        (x, kernel[:, :, :0], hidden),
        f"{op}: kernel must have shape (1, 1, K) with 1 <= K <= H and H = 4, got (1, 1, 0)",
    )
    yield (
        (x[:, :, :0], kernel, hidden[:, :0]),
        f"{op}: kernel must have shape (1, 1, K) with 1 <= K <= H and H = 0, got (1, 1, 3)",
    )
    wanted = f"{op}: hidden must have shape (B, H) or (B, 1, H) with B = 2 and H = 4"
    for shape in ((2, 3), (1, 4), (4,), (1, 2, 4), (2, 2, 4)):
        yield (x, kernel, torch.ones(shape, device=device)), f"{wanted}, got {shape}"
    yield (x, kernel, hidden.half()), f"{op}: hidden must have the dtype of x, float32, got float16"
    if device == "cuda":
        yield (x, kernel.cpu(), hidden), f"{op}: kernel must be on the device of x, cuda:0, got cpu"
        yield (x, kernel, hidden.cpu()), f"{op}: hidden must be on the device of x, cuda:0, got cpu"
        yield (x.cpu(), kernel, hidden), f"{op}: kernel must be on the device of x, cpu, got cuda:0"


def wrong_gradients(device: str):
    op = "convrnn_backward"
    grad, kernel, _ = inputs((2, 3, 4, 3), device)
    yield (grad[0], grad[0], kernel), f"{op}: grad must have shape (B, S, H), got (3, 4)"
    yield (grad[:, :0], grad[:, :0], kernel), f"{op}: grad must have shape (B, S, H) with 1 <= S, got (2, 0, 4)"
    yield (
        (grad, grad[:, 1:], kernel),
        f"{op}: y must have shape (B, S, H) with B = 2 and S = 3 and H = 4, got (2, 2, 4)",
    )
    yield (grad, grad.half(), kernel), f"{op}: y must have the dtype of grad, float32, got float16"
    yield (grad, grad, kernel.half()), f"{op}: kernel must have the dtype of grad, float32, got float16"
    yield (grad, grad, kernel.view(3)), f"{op}: kernel must have shape (1, 1, K), got (3,)"
    yield (
        (grad, grad, pad(kernel, (1, 1))),
        f"{op}: kernel must have shape (1, 1, K) with 1 <= K <= H and H = 4, got (1, 1, 5)",
    )


def longer(args: tuple, times: int) -> tuple:
    return tuple(torch.cat([a] * times) if isinstance(a, Tensor) and a.shape[0] > 1 else a for a in args)


class TestConvRNNForward(Contract):
    op = Case(
        function=extension_cpp.convrnn_forward,
        samples=samples,
        errors=wrong_inputs,
        magnitude=error_bound,
        grown=longer,
    )


class TestConvRNNBackward(Contract):
    """Not public, but an operator like any other."""

    op = Case(
        function=convrnn_backward,
        samples=backward_samples,
        errors=wrong_gradients,
        magnitude=backward_bound,
        grown=longer,
    )


def by_definition(x: np.ndarray, w: np.ndarray, h: np.ndarray) -> np.ndarray:
    """The formula as it stands, an element at a time."""
    (batch, steps, width), taps = x.shape, len(w)
    y = np.empty((batch, steps + 1, width))
    y[:, 0] = h
    for b in range(batch):
        for t in range(1, steps + 1):
            for n in range(width):
                c = sum(w[k] * y[b, t - 1, (n + k - taps // 2) % width] for k in range(taps))
                y[b, t, n] = math.tanh(c + x[b, t - 1, n])
    return y


@pytest.mark.parametrize("device", DEVICES)
class TestDefinition:
    @given(data=st.data())
    def test_element_by_element(self, device, data):
        width = data.draw(st.integers(1, 12))
        size = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 5)), width, data.draw(st.integers(1, width))
        args = inputs(size, device, torch.float64, seed=data.draw(st.integers(0, 100)))
        x, kernel, hidden = (t.cpu().numpy() for t in args)
        want = torch.from_numpy(by_definition(x, kernel[0, 0], hidden)).to(device)
        torch.testing.assert_close(extension_cpp.convrnn_forward(*args), want, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(convrnn_forward_reference(*args), want, rtol=1e-13, atol=1e-14)

    @given(data=st.data())
    def test_gradients_of_autograd(self, device, data):
        """What autograd makes of the reference, a step at a time."""
        width = data.draw(st.integers(1, 12))
        size = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 12)), width, data.draw(st.integers(1, width))
        args = inputs(size, device, torch.float64, seed=data.draw(st.integers(0, 100)))
        leaves = [t.requires_grad_() for t in args]
        for got, want in zip(
            gradients(extension_cpp.convrnn_forward, leaves), gradients(convrnn_forward_reference, leaves)
        ):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: str(dtype).removeprefix("torch."))
class TestProperties:
    @pytest.mark.parametrize("size", [(3, 21, 40, 3), (2, 12, 4200, 13), (2, 90, 4200, 7), (1, 150, 5003, 3)], ids=str)
    def test_a_sequence_cut_in_two(self, device, dtype, size):
        """Goes on where it stopped: the same bits. Parts of long rows meet at other steps than they do in one piece."""
        x, kernel, hidden = inputs(size, device, dtype)
        whole = extension_cpp.convrnn_forward(x, kernel, hidden)
        first = extension_cpp.convrnn_forward(x[:, :9], kernel, hidden)
        second = extension_cpp.convrnn_forward(x[:, 9:], kernel, first[:, -1])
        assert same_bits(whole, torch.cat([first, second[:, 1:]], 1))

    def test_rows_are_independent(self, device, dtype):
        """A row is the same in any batch, however many threads there are."""
        x, kernel, hidden = inputs((40, 30, 50, 5), device, dtype)
        whole = extension_cpp.convrnn_forward(x, kernel, hidden)
        grads = backward(whole, whole, kernel)
        for b in (0, 17, 39):
            alone = extension_cpp.convrnn_forward(x[b : b + 1], kernel, hidden[b : b + 1])
            assert same_bits(alone, whole[b : b + 1])
            for i in (0, 2):
                assert same_bits(backward(alone, alone, kernel)[i], grads[i][b : b + 1])

    def test_rotation(self, device, dtype):
        """Circular: what is rotated goes the same way."""
        x, kernel, hidden = inputs((2, 6, 37, 4), device, dtype)
        got = extension_cpp.convrnn_forward(x.roll(5, 2), kernel, hidden.roll(5, 1))
        assert same_bits(got, extension_cpp.convrnn_forward(x, kernel, hidden).roll(5, 2))

    def test_tanh_alone(self, device, dtype):
        """With weights of zero: tanh of every kind of value, within 2.5 units in the last place; half of one for halves."""
        special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 1e-310, 9.0, 20.0, -1e30])
        values = torch.cat([special.double(), torch.linspace(-12, 12, 20_001).double(), torch.logspace(-9, 1, 20_001)])
        x = values.to(device, dtype).view(-1, 1, 1)
        got = extension_cpp.convrnn_forward(x, x.new_zeros(1, 1, 1), x.new_zeros(len(x), 1))[:, 1, 0]
        want = torch.tanh(x.double().flatten())
        info = torch.finfo(dtype)
        ulps = 2.5 if dtype in (torch.float32, torch.float64) else 0.51
        bound = ulps * info.eps * 2.0 ** want.abs().clamp(min=info.tiny).log2().floor()
        error = (got.double() - want).abs()
        assert bool(((error <= bound) | want.isnan()).all()), error.max()
        assert bool((got.isnan() == want.isnan()).all())

    def test_infinite_and_nan(self, device, dtype):
        """Reach what they enter, and nothing else."""
        x, kernel, hidden = inputs((1, 2, 30, 3), device, dtype)
        clean = extension_cpp.convrnn_forward(x, kernel, hidden)
        hidden[0, 10], x[0, 1, 20] = math.nan, math.inf
        got = extension_cpp.convrnn_forward(x, kernel, hidden)
        assert got[0, 1].isnan().nonzero().flatten().tolist() == [9, 10, 11]
        assert got[0, 2].isnan().nonzero().flatten().tolist() == [8, 9, 10, 11, 12]
        assert got[0, 2, 20] == 1
        same = torch.ones(30, dtype=torch.bool, device=device)
        same[8:13] = same[20] = False
        assert same_bits(got[0, 2][same], clean[0, 2][same])

    def test_gradient_of_an_expanded_tensor(self, device, dtype):
        """As sum() gives it, with strides of zero; x as (T, B, H)."""
        x, kernel, hidden = inputs((3, 5, 70, 3), device, dtype)
        y = extension_cpp.convrnn_forward(x.transpose(0, 1).contiguous().transpose(0, 1), kernel, hidden)
        one = torch.ones((), device=device, dtype=dtype)
        for got, want in zip(backward(one.expand(y.shape), y, kernel), backward(torch.ones_like(y), y, kernel)):
            assert same_bits(got, want)


@pytest.mark.parametrize("trained", [False, True])
def test_operations(trained):
    """A convolution a step, and as many in the gradients of the states, and in that of the kernel where it is needed."""
    b, t, h, k = 2, 3, 8, 3
    x, kernel = torch.ones(b, t, h, requires_grad=True), torch.ones(1, 1, k, requires_grad=trained)
    with FlopCounterMode(display=False) as counter:
        extension_cpp.convrnn_forward(x, kernel, torch.ones(b, h)).sum().backward()
    assert counter.get_total_flops() == (2 + trained) * 2 * b * t * h * k


@pytest.mark.parametrize("device", DEVICES)
class TestGradients:
    def test_exactly_those_that_are_needed(self, device):
        args = inputs((2, 3, 10, 3), device)
        everything = gradients(extension_cpp.convrnn_forward, tuple(t.clone().requires_grad_() for t in args))
        for needed in range(1, 8):
            leaves = tuple(t.clone().requires_grad_(bool(needed >> i & 1)) for i, t in enumerate(args))
            extension_cpp.convrnn_forward(*leaves).square().sum().backward()
            assert [leaf.grad is not None for leaf in leaves] == [bool(needed >> i & 1) for i in range(3)]
            wanted = [grad for i, grad in enumerate(everything) if needed >> i & 1]
            for got, want in zip(gradients(extension_cpp.convrnn_forward, leaves), wanted):
                assert same_bits(got, want)

    @pytest.mark.parametrize(
        "size", [(64, 128, 256, 3), (16, 40, 2000, 8), (8, 30, 500, 41), (2, 90, 5000, 3)], ids=str
    )
    def test_long_sums(self, device, size):
        """The kernel's gradient adds up millions of products: close to float64, and the same bits each time."""
        x, kernel, hidden = inputs(size, device)
        y = extension_cpp.convrnn_forward(x, kernel, hidden)
        grad = inputs((size[0], size[1] + 1, *size[2:]), device, seed=1)[0]
        results = backward(grad, y, kernel)
        for got, want in zip(results, convrnn_backward_reference(grad.double(), y.double(), kernel.double())):
            scale = want.abs().max() if got is not results[1] else math.sqrt(y.numel())
            assert (got - want).abs().max() <= 4e-6 * scale
        for _ in range(3):
            assert all(same_bits(a, b) for a, b in zip(backward(grad, y, kernel), results))

    def test_forward_mode(self, device):
        args = inputs((2, 4, 7, 3), device, torch.float64)
        tangents = inputs((2, 4, 7, 3), device, torch.float64, seed=1)
        with torch.autograd.forward_ad.dual_level():
            duals = [torch.autograd.forward_ad.make_dual(t, dot) for t, dot in zip(args, tangents)]
            got = torch.autograd.forward_ad.unpack_dual(extension_cpp.convrnn_forward(*duals)).tangent
        want = torch.func.jvp(convrnn_forward_reference, args, tangents)[1]
        torch.testing.assert_close(got, want)

    def test_third_derivative(self, device):
        args = tuple(t.requires_grad_() for t in inputs((1, 2, 3, 2), device, torch.float64))

        def gradient(*args):
            return torch.autograd.grad(extension_cpp.convrnn_forward(*args).square().sum(), args, create_graph=True)

        assert torch.autograd.gradgradcheck(gradient, args)

    def test_vmap(self, device):
        sizes = [inputs((2, 3, 5, 3), device, seed=seed) for seed in range(4)]
        x, kernels, hidden = map(torch.stack, zip(*sizes))
        want = torch.stack([extension_cpp.convrnn_forward(*args) for args in sizes])
        got = torch.vmap(extension_cpp.convrnn_forward)(x, kernels, hidden)
        torch.testing.assert_close(got, want)
        want = torch.stack([extension_cpp.convrnn_forward(a, kernels[0], hidden[1]) for a in x])
        got = torch.vmap(lambda a: extension_cpp.convrnn_forward(a, kernels[0], hidden[1]))(x)
        torch.testing.assert_close(got, want)
        moved = torch.vmap(extension_cpp.convrnn_forward, in_dims=(1, None, 0))(x.movedim(0, 1), kernels[0], hidden)
        want = torch.stack([extension_cpp.convrnn_forward(a, kernels[0], h) for a, h in zip(x, hidden)])
        torch.testing.assert_close(moved, want)

    def test_batch_of_gradients(self, device):
        args = tuple(t.requires_grad_() for t in inputs((2, 3, 5, 3), device))
        y = extension_cpp.convrnn_forward(*args)
        seeds = torch.randn(4, *y.shape, device=device)
        got = torch.autograd.grad(y, args, seeds, is_grads_batched=True, retain_graph=True)
        want = zip(*(torch.autograd.grad(y, args, seed, retain_graph=True) for seed in seeds))
        torch.testing.assert_close(got, tuple(map(torch.stack, want)))


@pytest.mark.parametrize("device", DEVICES)
class TestModule:
    def test_as_the_operator(self, device):
        x, kernel, hidden = inputs((2, 6, 9, 4), device)
        y = extension_cpp.convrnn_forward(x, kernel, hidden)
        layer = extension_cpp.nn.ConvRNN(4, device=device)
        first = extension_cpp.nn.ConvRNN(4, batch_first=True, device=device)
        layer.load_state_dict({"weight": kernel})
        first.load_state_dict(layer.state_dict())
        for output, h_n in (first(x, hidden[None]), layer(x.transpose(0, 1), hidden[None])):
            assert same_bits(h_n, y[None, :, -1])
            assert same_bits(output if output.shape[0] == 2 else output.transpose(0, 1), y[:, 1:])
        output, h_n = layer(x[0], hidden[:1])
        assert same_bits(output, y[0, 1:]) and same_bits(h_n, y[:1, -1])
        zeros = extension_cpp.convrnn_forward(x, kernel, torch.zeros_like(hidden))
        assert same_bits(first(x)[0], zeros[:, 1:]) and same_bits(layer(x[1])[0], zeros[1, 1:])

    def test_shapes_are_those_of_rnn(self, device):
        for batch_first in (False, True):
            layer = extension_cpp.nn.ConvRNN(3, batch_first=batch_first, device=device)
            rnn = torch.nn.RNN(8, 8, batch_first=batch_first, device=device)
            for shape, state in (((5, 2, 8), (1, 5 if batch_first else 2, 8)), ((5, 8), (1, 8))):
                x, h = torch.randn(shape, device=device), torch.randn(state, device=device)
                for args in ((x,), (x, h)):
                    assert [t.shape for t in layer(*args)] == [t.shape for t in rnn(*args)]

    def test_state_and_text(self, device):
        layer = extension_cpp.nn.ConvRNN(5, batch_first=True, device=device, dtype=torch.float64)
        assert list(layer.state_dict()) == ["weight"] and layer.weight.shape == (1, 1, 5)
        assert layer.weight.dtype == torch.float64 and layer.weight.device.type == device
        assert str(layer) == "ConvRNN(5, batch_first=True)" and str(extension_cpp.nn.ConvRNN(2)) == "ConvRNN(2)"
        before = layer.weight.clone()
        layer.reset_parameters()
        assert not torch.equal(before, layer.weight) and layer.weight.abs().max() <= 5**-0.5
        assert layer.half()(torch.randn(1, 2, 6, device=device).half())[0].dtype == torch.float16

    def test_errors(self, device):
        with pytest.raises(ValueError, match="ConvRNN: kernel_size must be at least 1, got 0"):
            extension_cpp.nn.ConvRNN(0)
        layer = extension_cpp.nn.ConvRNN(3, device=device)
        for args, message in (
            (((5,),), r"ConvRNN: input must have shape \(T, B, H\) or \(T, H\), got \(5,\)"),
            (((5, 2, 4), (2, 4)), r"ConvRNN: hx must have shape \(1, 2, 4\), got \(2, 4\)"),
            (((5, 4), (1, 1, 4)), r"ConvRNN: hx must have shape \(1, 4\), got \(1, 1, 4\)"),
            (((5, 2, 2),), r"kernel must have shape \(1, 1, K\) with 1 <= K <= H and H = 2, got"),
        ):
            with pytest.raises(RuntimeError, match=message):
                layer(*(torch.zeros(shape, device=device) for shape in args))

    def test_packed_sequences(self, device):
        """Each sequence as if alone, and packed as RNN packs it."""
        layer, hx = extension_cpp.nn.ConvRNN(3, device=device), torch.randn(1, 4, 8, device=device)
        for lengths, is_sorted in (((4, 3, 3, 1), True), ((3, 1, 4, 3), False)):
            sequences = [torch.randn(length, 8, device=device) for length in lengths]
            packed = pack_sequence(sequences, enforce_sorted=is_sorted)
            for state in (None, hx):
                output, h_n = layer(packed, state)
                want, _ = torch.nn.RNN(8, 8, device=device)(packed, state)
                for field in ("batch_sizes", "sorted_indices", "unsorted_indices"):
                    got, expected = (getattr(each, field) for each in (output, want))
                    assert got is expected is None or torch.equal(got, expected)
                padded, _ = pad_packed_sequence(output)
                for i, sequence in enumerate(sequences):
                    alone, last = layer(sequence, None if state is None else hx[:, i])
                    assert same_bits(padded[: len(sequence), i], alone) and same_bits(h_n[:, i], last)
        for args, message in (
            ((packed, hx[:, :2]), r"ConvRNN: hx must have shape \(1, 4, 8\), got \(1, 2, 8\)"),
            ((pack_sequence([hx]),), r"ConvRNN: input must be packed of sequences \(T, H\), got data \(1, 4, 8\)"),
        ):
            with pytest.raises(RuntimeError, match=message):
                layer(*args)

    def test_results_may_be_overwritten_under_vmap(self, device):
        layer, x = extension_cpp.nn.ConvRNN(3, device=device), torch.randn(3, 5, 2, 8, device=device)
        torch.func.vmap(lambda t: layer(t)[0].mul(2).sum())(x).sum().backward()
        want, layer.weight.grad = layer.weight.grad, None
        torch.func.vmap(lambda t: layer(t)[0].mul_(2).sum())(x).sum().backward()
        assert same_bits(layer.weight.grad, want)

    def test_decompositions_of_a_dynamic_size(self, device, tmp_path):
        """A loop is unrolled: where its size is dynamic that is an error, which a program that was loaded would not have."""
        steps, batch = torch.export.Dim("steps", min=1, max=50), torch.export.Dim("batch", min=1, max=50)
        layer, x = extension_cpp.nn.ConvRNN(3, device=device), torch.randn(4, 2, 6, device=device)
        for dynamic in ({1: batch}, {0: steps, 1: batch}):
            program = torch.export.export(layer, (x,), dynamic_shapes={"input": dynamic})
            torch.export.save(program, tmp_path / "program.pt2")
            for each in (torch.export.load(tmp_path / "program.pt2"), program):
                if 0 in dynamic:
                    with pytest.raises(RuntimeError, match=r"^convrnn_forward: dimension 1 of x must not be dynamic"):
                        each.run_decompositions(extension_cpp.decompositions())
                else:
                    made = each.run_decompositions(extension_cpp.decompositions()).module()
                    other = torch.randn(4, 5, 6, device=device)
                    torch.testing.assert_close(made(other), layer(other))

    def test_results_may_be_overwritten(self, device):
        """As those of RNN on the CPU: neither the other one nor a gradient changes."""
        layer, x = extension_cpp.nn.ConvRNN(3, device=device), torch.randn(5, 2, 8, device=device)
        for input in (x, x[:, 0], pack_sequence([x[:, 0], x[:3, 1]])):

            def results(layer=layer, input=input) -> list[Tensor]:
                output, h_n = layer(input)
                return [output if isinstance(output, Tensor) else output.data, h_n]

            torch.stack([t.relu().sum() for t in results()]).sum().backward()
            want, layer.weight.grad = layer.weight.grad, None
            torch.stack([t.relu_().sum() for t in results()]).sum().backward()
            assert same_bits(layer.weight.grad, want)
            layer.weight.grad = None
            with torch.no_grad():
                output, h_n = results()
                before = h_n.clone()
                output.zero_()
                assert same_bits(h_n, before)

    def test_traced(self, device):
        """torch.fx.symbolic_trace of a model with it, which RNN is a leaf of too, and torch.jit.trace for other sizes."""
        layer, x = extension_cpp.nn.ConvRNN(3, device=device), torch.randn(5, 2, 8, device=device)
        want = layer(x)[0]
        assert same_bits(torch.fx.symbolic_trace(torch.nn.Sequential(layer))(x)[0], want)
        for args in ((x,), (x, torch.zeros(1, 2, 8, device=device))):
            file = io.BytesIO()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="`torch.jit", category=DeprecationWarning)
                warnings.filterwarnings("error", category=torch.jit.TracerWarning)
                torch.jit.save(torch.jit.trace(layer, args), file)
                file.seek(0)
                loaded = torch.jit.load(file)
            assert same_bits(loaded(*args)[0], want)
        loaded(*args)[0].relu_().sum().backward()
        assert loaded.weight.grad is not None
        file.seek(0)
        wider = torch.randn(7, 3, 9, device=device), torch.randn(1, 3, 9, device=device)
        assert same_bits(loaded(*wider)[0], layer(*wider)[0])

    def test_saved(self, device):
        layer, x = extension_cpp.nn.ConvRNN(3, device=device), torch.randn(5, 2, 8, device=device)
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        for other in (torch.load(file, weights_only=False), copy.deepcopy(layer)):
            assert same_bits(other(x)[0], layer(x)[0])

    @pytest.mark.slow
    def test_compiled(self, device):
        torch._dynamo.reset()
        layer = extension_cpp.nn.ConvRNN(3, device=device)
        x = torch.randn(6, 2, 9, device=device)
        compiled = torch.compile(layer, fullgraph=True)
        assert same_bits(compiled(x)[0], layer(x)[0])
        grads = []
        for f in (layer, compiled):
            layer.zero_grad()
            f(x)[0].square().sum().backward()
            grads.append(layer.weight.grad.clone())
        torch.testing.assert_close(*grads)

    def test_learns(self, device):
        """To carry a mark on a ring around with it: which way, and how far a step, is for the kernel to find out."""
        torch.manual_seed(0)
        layer = extension_cpp.nn.ConvRNN(5, batch_first=True, device=device)
        gain = torch.nn.Parameter(torch.ones((), device=device))
        optimizer = torch.optim.Adam([*layer.parameters(), gain], lr=0.05)
        width, steps = 16, 6
        losses = []
        for _ in range(300):
            hidden = torch.nn.functional.one_hot(torch.randint(width, (32,), device=device), width).float()
            x = torch.zeros(32, steps, width, device=device)
            output, _ = layer(x, hidden[None])
            target = torch.stack([hidden.roll(2 * t, 1) for t in range(1, steps + 1)], 1)
            loss = torch.nn.functional.mse_loss(gain * output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] > 0.05 and losses[-1] < 0.005, (losses[0], losses[-1])
        assert layer.weight.argmax() == 0


@pytest.mark.large
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_past_2_31_elements():
    """Offsets past 32 bits, in y and in x."""
    if torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("needs 30 GB of free memory")
    batch, steps, width = 2, 1_100_000, 1000
    x, kernel, hidden = inputs((1, 1, width, 3), "cuda", torch.float16)
    y = extension_cpp.convrnn_forward(x.expand(batch, steps, width), kernel, hidden.expand(batch, width))
    assert torch.equal(y[0, -50:], y[1, -50:]) and torch.equal(y[1, :2], y[0, :2])
    want = extension_cpp.convrnn_forward(x.expand(1, 50, width), kernel, y[1, -51][None])
    assert torch.equal(y[1, -51:], want[0])
    grad_x, _, grad_hidden = backward(x[:, :1].expand(y.shape), y, kernel, False)
    want = backward(x[:, :1].expand(1, 51, width), y[1:, -51:], kernel, False)
    assert torch.equal(grad_x[1, -50:], want[0][0]) and torch.equal(grad_hidden[0], grad_hidden[1])
