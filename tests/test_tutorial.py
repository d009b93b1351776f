"""What PyTorch's tutorial on custom operators shows with extension_cpp holds here, line for line in meaning."""

import pytest
import torch
from torch.library import opcheck

import extension_cpp
from extension_cpp.testing import DEVICES

pytestmark = pytest.mark.parametrize("device", DEVICES)


def muladd_samples(device, requires_grad):
    def tensor(*size, differentiable=True):
        return torch.randn(size, device=device, requires_grad=requires_grad and differentiable)

    return [
        (tensor(3), tensor(3), 1),
        (tensor(20), tensor(20), 3.14),
        (tensor(20), tensor(20, differentiable=False), -123),
        (tensor(2, 3, differentiable=False), tensor(2, 3), -0.3),
    ]


def add_out_samples(device, requires_grad):
    return [tuple(torch.randn(n, device=device, requires_grad=requires_grad) for _ in range(3)) for n in (3, 20)]


def test_values(device):
    for a, b, c in muladd_samples(device, requires_grad=False):
        torch.testing.assert_close(extension_cpp.ops.mymuladd(a, b, c), a * b + c)
        torch.testing.assert_close(torch.ops.extension_cpp.mymuladd(a, b, c), a * b + c)
        torch.testing.assert_close(torch.ops.extension_cpp.mymul.default(a, b), a * b)
    for a, b, out in add_out_samples(device, requires_grad=False):
        assert extension_cpp.ops.myadd_out(a, b, out) is None
        torch.testing.assert_close(out, torch.add(a, b))


def test_gradients(device):
    for args in muladd_samples(device, requires_grad=True):
        leaves = [t for t in args if isinstance(t, torch.Tensor) and t.requires_grad]
        for function in (extension_cpp.ops.mymuladd, torch.ops.extension_cpp.mymuladd.default):
            out = function(*args)
            seed = torch.randn_like(out)
            a, b, c = args
            expected = torch.autograd.grad(a * b + c, leaves, seed)
            torch.testing.assert_close(torch.autograd.grad(out, leaves, seed), expected)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_opcheck(device, requires_grad):
    for args in muladd_samples(device, requires_grad):
        opcheck(torch.ops.extension_cpp.mymuladd.default, args)
    for args in add_out_samples(device, requires_grad):
        if requires_grad:  # As with PyTorch's own functions with `out`.
            with pytest.raises(RuntimeError, match="myadd_out: a must not require a gradient"):
                torch.ops.extension_cpp.myadd_out(*args)
        else:
            opcheck(torch.ops.extension_cpp.myadd_out.default, args)


def test_reduce_overhead(device):
    """On CUDA this captures a graph: the kernels must run on the stream that is being captured."""
    for size in (1000, 5000):
        linear = torch.nn.Linear(size, size, device=device)
        x = torch.randn(1, size, device=device)
        for model in (
            lambda x, linear=linear: extension_cpp.ops.mymuladd(linear(x), linear(x), 0.0),
            lambda x: extension_cpp.ops.mymuladd(x, x, 1.0),
        ):
            torch._dynamo.reset()
            with torch.no_grad():
                compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
                for _ in range(3):
                    torch.testing.assert_close(compiled(x), model(x))


def test_training_step(device):
    """As in the tutorial's extension of a module: it trains, compiled and not."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(64, device=device))
    x, y = torch.randn(256, 64, device=device), torch.randn(64, device=device)
    optimizer = torch.optim.SGD([weight], lr=20.0)
    step = torch.compile(lambda w: (extension_cpp.mymuladd(x, w, 0.5) - (x * y + 0.5)).pow(2).mean(), fullgraph=True)
    for i in range(20):
        optimizer.zero_grad()
        loss = step(weight) if i % 2 else (extension_cpp.mymuladd(x, weight, 0.5) - (x * y + 0.5)).pow(2).mean()
        loss.backward()
        optimizer.step()
    assert loss < 1e-3, loss
