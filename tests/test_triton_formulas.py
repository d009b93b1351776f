"""Formulas in Triton: what `make op` doesn't write, and what they refuse."""

import sys

import pytest
import torch

from extension_cpp.ops import _backends
from extension_cpp.ops._operator import operator
from extension_cpp.ops._signature import INTEGER
from extension_cpp.testing import FLOATING

pytest.importorskip("triton")
import triton
import triton.language as tl

from extension_cpp.triton.elementwise import elementwise
from extension_cpp.triton.recurrence import recurrence, recurrence_backward
from extension_cpp.triton.rowwise import rowwise
from extension_cpp.triton.selection import selection

DEVICE = "cpu" if _backends.interpreted else "cuda"
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU or TRITON_INTERPRET=1"
)
declared = 0


def declare(arguments: str, results: str, signature: str):
    """An operator that no library has."""
    global declared
    name = f"triton_formulas::formula{declared}"
    declared += 1
    torch.library.define(name, f"({arguments}) -> {results}")
    reference = eval(f"lambda {', '.join(part.split()[-1] for part in arguments.split(', '))}: None")
    return operator(name=name, signature=signature, differentiable=False, public=False)(reference).operator


@triton.jit
def _mixed(x, index, scale, eps, inside, N):
    total = tl.sum(x) / N + index + eps
    most = tl.max(tl.where(inside, x, float("-inf")))
    return total, x * index, x * scale * total, most


@pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("shape", [(1, 5), (13, 16), (3, 2, 100), (300,), (0, 7), (2, 0, 4)], ids=str)
def test_every_role(dtype, shape, monkeypatch):
    """Rows, columns, one value a row, an index; as results rows, sums and values, of a dtype of their own too."""
    op = declare(
        "Tensor x, Tensor index, Tensor scale, float eps=0.5",
        "(Tensor, Tensor, Tensor, Tensor)",
        "x: ... N; index: ... of int64; scale: N as x -> ... of float32, N, ... N, ...",
    )
    monkeypatch.setattr(sys.modules[rowwise.__module__], "MOST_SUMS", 4)  # So that a program has several rows.
    formula = rowwise(_mixed)
    formula.prepare(op)
    assert formula.fits()
    x = torch.randn(shape, device=DEVICE).to(dtype)
    index = torch.randint(-3, 4, shape[:-1], device=DEVICE)
    scale = torch.randn(2 * shape[-1], device=DEVICE).to(dtype)[::2]
    wide, eps = x.double(), torch.finfo(dtype).eps
    total = wide.mean(-1) + index + 0.25
    wanted = (
        total.float(),
        (wide * index[..., None]).reshape(-1, shape[-1]).sum(0).to(dtype),
        (wide * scale * total[..., None]).to(dtype),
        x.amax(-1) if shape[-1] else x.sum(-1),
    )
    apart = torch.empty(*shape[:-1], shape[-1] + 3, device=DEVICE, dtype=dtype)[..., : shape[-1]].copy_(x)
    strided = torch.empty(*shape[:-1], 2 * shape[-1], device=DEVICE, dtype=dtype)[..., ::2].copy_(x)
    for t in (x, apart, strided):
        results = formula(t, index, scale, 0.25)
        for got, want in zip(results, wanted):
            assert got.dtype == want.dtype and got.is_contiguous()
            torch.testing.assert_close(got, want, rtol=5 * eps, atol=200 * eps)


@triton.jit
def _two(x, gate, weight, other, h, c):
    c = c * gate + x * weight
    return h * other + c, c


@triton.jit
def _two_backward(grad, grad_c, x, gate, weight, other, h, c):
    of_c = grad + grad_c
    return of_c * weight, of_c * c, of_c * x, grad * h, grad * other, of_c * gate


TWO = "x: B T H; gate: B T H as x; weight: H as x; other: H as x; h: B H as x; c: B H as x"


def _reference(x, gate, weight, other, h, c):
    states = []
    for t in range(x.shape[1]):
        c = c * gate[:, t] + x[:, t] * weight
        h = h * other + c
        states.append((h, c))
    return tuple(torch.stack(each, 1) for each in zip(*states))


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 4, 129), (2, 9, 256)], ids=str)
def test_two_states_and_two_weights(shape):
    batch, _, width = shape
    names = ("x", "gate", "weight", "other", "h", "c")
    arguments = ", ".join(f"Tensor {name}" for name in names)
    forward = recurrence(_two)
    forward.prepare(declare(arguments, "(Tensor, Tensor)", f"{TWO} -> B T H, B T H"))
    backward = recurrence_backward(_two_backward)
    before = "grad: B T H; grad_c: B T H as grad; y: B T H as grad; y_c: B T H as grad; "
    backward.prepare(
        declare(
            f"Tensor grad, Tensor grad_c, Tensor y, Tensor y_c, {arguments}",
            f"({', '.join(['Tensor'] * 6)})",
            f"{before}{TWO.replace('x:', 'x:', 1).replace('B T H;', 'B T H as grad;', 1)} -> B T H, B T H, H, H, B H, B H",
        )
    )
    sizes = [shape, shape, (width,), (width,), (batch, width), (batch, width)]
    given = [torch.randn(size, device=DEVICE, dtype=torch.float64, requires_grad=True) for size in sizes]
    wanted = _reference(*given)
    got = forward(*(t.detach() for t in given))
    torch.testing.assert_close(got, wanted)
    grads = tuple(torch.randn_like(t) for t in got)
    torch.testing.assert_close(
        backward(*grads, *got, *(t.detach() for t in given)), torch.autograd.grad(wanted, given, grads)
    )


@triton.jit
def _between(x, y, least):
    return (x >= least) & (x < y), x, 2 * y


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0), (7, 300), (5, 2048), (123_457,)], ids=str)
def test_two_selections(shape):
    """Two tensors and two results, from no program to some with several blocks each; not NaN, which is below nothing."""
    formula = selection(_between)
    every = "x: ...; y: ... as x -> ?, ?"
    formula.prepare(declare("Tensor x, Tensor y, float least", "(Tensor, Tensor)", every))
    assert formula.fits()
    for dtype in FLOATING:
        x, y = torch.randn(2, *shape, 2, device=DEVICE).to(dtype)[..., 0]
        if x.numel() > 3:
            x[(0,) * x.dim()] = float("nan")
        kept = (x >= -0.5) & (x < y)
        for least in (-0.5, 100.0):
            first, second = formula(x, y, least)
            want = kept if least < 1 else torch.zeros_like(kept)
            assert torch.equal(first, x[want]) and torch.equal(second, 2 * y[want])


@triton.jit
def _one(x, y):
    return x + y


@triton.jit
def _two_of_integers(x, y, least, n):
    return x + 1 + n, (x - y) * least


@triton.jit
def _equal(x, y, n):
    return x == y + n, y


@pytest.mark.parametrize("dtype", INTEGER, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_integers_are_computed_in_their_type(dtype):
    """As in C++: float32 has not all of more than 24 bits, and float64 not all of more than 53."""
    most = torch.iinfo(dtype).max
    n = 2**60 + 1 if dtype == torch.int64 else 3
    x = torch.tensor([0, 5, most // 2, most - 4 - n, 2**24 if most > 2**24 else 7], device=DEVICE, dtype=dtype)
    y = x - 1
    formula = elementwise(_two_of_integers)
    formula.prepare(
        declare(
            "Tensor x, Tensor y, float least, int n", "(Tensor, Tensor)", "x: ... of integer; y: ... as x -> ..., ..."
        )
    )
    for got, want in zip(formula(x, y, 2.0, n), (x + 1 + n, (x - y) * 2), strict=True):
        assert torch.equal(got, want), f"{got}, not {want}"
    chosen = selection(_equal)
    chosen.prepare(declare("Tensor x, Tensor y, int n", "Tensor", "x: ... of integer; y: ... as x -> ?"))
    other = y.clone()
    other[3] += 1
    assert torch.equal(chosen(x, other, 1), torch.cat([y[:3], y[4:]]))


def test_what_is_refused():
    """A signature of other shapes, results that are missing, arguments of other names."""
    x, y, xy = "Tensor x", "Tensor x, Tensor y", "x: ... N; y: ... N as x -> ... N"
    for how, arguments, results, signature, message in (
        (rowwise, y, "Tensor", "x: M N; y: N as x -> M N", r"rowwise takes tensors of shape .* got \(M, N\), \(N,\)"),
        (rowwise, y, "Tensor", "x: ...; y: N as x -> ...", "rowwise takes tensors of shape"),
        (rowwise, y, "Tensor", "x: ... N; y: K as x -> ... N", "rowwise takes tensors of shape"),
        (rowwise, "Tensor x, Tensor? y", "Tensor", xy, "is for operators that return all and need all tensors"),
        (rowwise, x, "Tensor", "x: ... N -> ... N", "its Triton formula must take x, N, inside; got y"),
        (recurrence, y, "Tensor", xy.replace("... N", "..."), r"recurrence takes tensors of shape \(B, T, H\)"),
        (recurrence, y, "Tensor", "x: B T H; y: H as x -> B T H", "has an input, a state, and a result for each"),
        (recurrence, "Tensor y, Tensor x", "Tensor", "y: B H; x: B T H as y -> B T H", "in the order x, y, got y, x"),
        (selection, y, "Tensor", "x: ...; y: N as x -> ?", "selection takes tensors of shape"),
        (selection, y, "Tensor", "x: ...; y: ... as x -> ...", "selection takes tensors of shape"),
        (selection, y, "Tensor", "x: ...; y: ... as x -> ? of int64", "selection takes tensors of shape"),
        (elementwise, y, "Tensor", "x: ...; y: ... as x -> ... of bool", "the dtype of its inputs, got bool$"),
        (recurrence_backward, y, "Tensor", "x: B T H; y: B H as x -> B T H", "has an input, a state, and a result"),
    ):
        with pytest.raises(RuntimeError, match=message):
            how(_one).prepare(declare(arguments, results, signature))
    elementwise(_one).prepare(declare(y, "Tensor", "x: ... of float32; y: ... as x -> ... of float32"))
    formula = rowwise(_one)
    formula.prepare(declare(y, "Tensor", xy))
    with pytest.raises(RuntimeError, match="Triton's blocks have at most 1048576 elements, got rows of 1048577"):
        formula(*torch.empty(2, 1, 2**20 + 1, device=DEVICE))
