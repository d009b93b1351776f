"""The contract: what every operator must pass, on every device present, by every backend that it has there, in every dtype.

A test module names its operator, of this package or of a namespace of its own, and gives samples. It inherits the checks:

    class TestMyOp(Contract):
        op = Case(extension_cpp.my_op, samples)

What else the checks need comes from the operator's declaration (extension_cpp/ops/_operator.py). Each of them can be
shown to fail: tests/test_contract.py runs them on operators that are broken on purpose. It needs pytest.
PyTorch's compiler takes seconds to import: only checks that compile import it.
"""

from __future__ import annotations

import importlib
import io
import itertools
import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from inspect import formatannotation
from itertools import islice, product
from pathlib import Path
from typing import Any, get_type_hints
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.gradcheck import GradcheckError
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

import extension_cpp
from extension_cpp import use_backend
from extension_cpp._features import TORCH, no_derivative, one_call_along, proves, vmap
from extension_cpp.ops import _backends, _operator
from extension_cpp.ops._signature import Signature

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SENTINEL = 77.0
LARGE = 1 << 18  # elements of which several threads have some, and a call is long enough to meet others
GUARD = 64  # elements on either side of a guarded tensor
OF_KERNELS = {
    "test_layouts",
    "test_nothing_outside_is_touched",
    "test_same_bits_every_time",
    "test_nothing_is_kept",
    "test_threads",
    "test_special_values",
    "test_opcheck",
    "test_gradcheck",
    "test_compile_for_any_size",
    "test_export",
    "test_tensors_for_numbers",
}
"""Checks that the backend "reference" has no part in: it is PyTorch's operators, and its registration is that of all."""
OF_THE_COMPILER = {
    "test_opcheck",
    "test_compile",
    "test_compile_for_any_size",
    "test_compliant",
    "test_export",
    "test_fake_cuda",
    "test_inductor_fuses",
    "test_symbolic_numbers",
    "test_tensors_for_numbers",
}
"""Checks that trace and compile. They take several times as long as all others."""
IMPORTS_THE_COMPILER = {
    "test_deterministic",
    "test_dispatch_modes",
    "test_fake_kernel",
    "test_forward_mode",
    "test_profile",
    "test_transforms",
    "test_user_kernels",
    "test_user_vmap",
    "test_wrong_arguments",
}
"""Other checks for which PyTorch imports its compiler."""

Args = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """An operator as the contract sees it."""

    function: Callable
    """The function that it was declared with."""
    samples: Callable[[str, torch.dtype], Iterable[Args]]
    """Arguments that together reach every path of the operator."""
    errors: Callable[[str], Iterable[tuple[Args, str]]] = lambda device: ()
    """Wrong arguments beyond those that follow from the signature, and the whole message that they must give."""
    exact: bool = False
    """Whether the result is that of the reference on the same arguments, dtype included."""
    ulps: dict[torch.dtype, float] = field(default_factory=dict)
    """Allowed error in units of the dtype's epsilon, relative to the sum of the magnitudes that enter a result; 1 of a dtype
    that it doesn't name."""
    magnitude: Callable | None = None
    """That sum, from the arguments in float64; the magnitude of the result itself where None."""
    grown: Callable[[Args, int], Args] | None = None
    """Arguments a number of times as long, for a graph that takes any size; longer in the first dimension where None."""

    @property
    def operator(self) -> Any:
        return self.function.operator  # type: ignore[attr-defined]

    @property
    def name(self) -> str:
        return self.operator.name

    @property
    def reference(self) -> Callable:
        return self.operator.reference

    @property
    def writes(self) -> list[int]:
        return self.operator.written

    @property
    def differentiable(self) -> bool:
        return self.operator.differentiable

    @property
    def dynamic_size(self) -> bool:
        """Whether the size of the result depends on the values of the arguments."""
        return self.operator.signature.dynamic_size

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of the first tensor that may be floating; if none may, of the first."""
        return self.operator.signature.dtypes

    @property
    def usual(self) -> torch.dtype:
        """For a check of one dtype."""
        return torch.float32 if torch.float32 in self.dtypes else self.dtypes[0]

    @property
    def precise(self) -> torch.dtype:
        """For a check of one dtype that compares derivatives."""
        return torch.float64 if torch.float64 in self.dtypes else self.usual


def others(operator: Any, device: str) -> list[str]:
    """The backends that an operator has next to the one that is used, on a device that this torch can have."""
    if device == "cuda" and torch.version.cuda is None:
        return []
    used = _backends.used(operator, device)
    return [backend for backend in _backends.implementations(operator, device) if backend != used]


def with_config(module: str, **settings: Any) -> Callable[[Callable], Callable]:
    """Settings of PyTorch's compiler while a check runs: its module is imported by then, and not before."""

    def decorate(check: Callable) -> Callable:
        @wraps(check)
        def run_check(self: Contract, *args: Any, **kwargs: Any) -> None:
            with importlib.import_module(module).patch(**settings):
                check(self, *args, **kwargs)

        return run_check

    return decorate


def tensors(args: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Tensor], args: Any) -> Any:
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, args)


def longer(args: Args, times: int) -> Args:
    """Each tensor a number of times as long in its first dimension."""
    return map_tensors(lambda t: torch.cat([t] * times), args)


def widened(t: Tensor) -> Tensor:
    """A copy, as the reference may write into it, in higher precision; integers, which may be indices, keep their dtype."""
    return t.detach().to(torch.float64 if t.is_floating_point() else t.dtype, copy=True)


def once(t: Tensor) -> Tensor:
    """t without its broadcast dimensions' repetitions."""
    return t[tuple(slice(1) if stride == 0 and size else slice(None) for size, stride in zip(t.shape, t.stride()))]


def clone(t: Tensor) -> Tensor:
    """A copy with the same strides, gaps and broadcast dimensions included."""
    source = once(t)
    copy = torch.empty_strided(source.shape, source.stride(), dtype=t.dtype, device=t.device)
    return copy.copy_(source).expand(t.shape)


def memory(t: Tensor) -> int:
    """Where it begins, of t and of all its views."""
    return t.untyped_storage().data_ptr()


def run(op: Case, function: Callable, args: Args) -> list[Tensor]:
    """The results of a call: what it returns and what it wrote."""
    returned = function(*args)
    return [*tensors(returned), *(args[i] for i in op.writes)]


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Equal including the sign of zero; one NaN is like another."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return bool(((x == y) & (x.signbit() == y.signbit()) | x.isnan() & y.isnan()).all())


def significant_strides(t: Tensor, shape: torch.Size | None = None) -> tuple[int, ...]:
    """Strides of the dimensions whose strides mean something; `shape` is that of t, where t doesn't know it."""
    shape = t.shape if shape is None else shape
    if shape.numel() == 0:
        return ()
    return tuple(stride for size, stride in zip(shape, t.stride()) if size > 1)


def guarded(t: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """A copy of t amid sentinels, off any alignment, and a test that the sentinels around its elements are untouched."""
    source = once(t)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride())) if t.numel() else 0
    buffer = torch.full((extent + 2 * GUARD + 1,), SENTINEL, dtype=t.dtype, device=t.device)
    inside = torch.zeros_like(buffer, dtype=torch.bool)
    view, mask = (x.as_strided(source.shape, source.stride(), GUARD + 1) for x in (buffer, inside))
    view.copy_(source)
    mask.fill_(True)
    return view.expand(t.shape), lambda: bool((buffer[~inside] == SENTINEL).all())


def layouts(t: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The values of t in every memory layout, each in memory of its own."""
    yield "contiguous", t.clone(memory_format=torch.contiguous_format)
    yield "offset", torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape)
    if t.dim() >= 1:
        yield "every second element", torch.stack([t, t], dim=-1)[..., 0]
        flip = range(t.dim() - 1, -1, -1)
        yield "reversed dimensions", t.permute(*flip).clone(memory_format=torch.contiguous_format).permute(*flip)
        yield "rows of a wider matrix", torch.cat([t, t], dim=-1)[..., : t.shape[-1]]
    if t.dim() == 4:
        yield "channels last", t.clone(memory_format=torch.channels_last)


def random(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Of which integers differ: those of an unsigned dtype are what becomes of negative ones."""
    values = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float64)
    return values.to(dtype) if dtype.is_floating_point else (values * 10).to(torch.int64).to(dtype)


def elementwise_samples(device: str, dtype: torch.dtype) -> Iterator[Tensor]:
    """A tensor of each kind that an elementwise operator meets: scalar, empty, more than a vector, strided, broadcast."""
    generator = torch.Generator(device).manual_seed(0)

    def make(*shape: int) -> Tensor:
        return random(shape, generator, dtype)

    for shape in ((7,), (3, 5), (), (0,), (2, 0, 3), (33, 65), (1030,), (2, 3, 4, 5)):
        yield make(*shape)
    yield make(65, 33).t()
    yield make(6).expand(4, 6)
    yield make(2, 6, 4, 4).contiguous(memory_format=torch.channels_last)
    yield make(3, 4, 2, 5, 3)[::2, 1:, :, ::3].permute(4, 1, 3, 0, 2)


def row_samples(device: str, dtype: torch.dtype) -> Iterator[Tensor]:
    """A tensor (..., N) of each kind that a row-wise operator meets: short and long rows, of an odd length, none, strided, of
    zeros, of negative numbers, far from zero, and with an element whose exponential overflows."""
    generator = torch.Generator(device).manual_seed(0)

    def make(*shape: int) -> Tensor:
        return random(shape, generator, dtype)

    for shape in ((3, 5), (8,), (2, 3, 4), (0, 4), (2, 0), (5, 1), (33, 77), (300, 16), (2, 1032), (3, 5000)):
        yield make(*shape)
    rows = make(9, 8)
    rows[3], rows[5:7], rows[7] = 0, rows[5:7] + 30, -rows[7].abs()
    yield rows
    rows = make(2, 64)
    rows[:, 3] = 100
    yield rows
    yield make(2, 9000)  # On CUDA, more than a block takes at once.
    if device == "cuda":
        yield make(9, 12_288)  # Two rows of halves have 48 KiB, what a block gets of shared memory without asking.
    yield make(40, 6).t()
    yield make(2, 3, 2, 8).transpose(1, 2)
    yield make(8).expand(4, 8)


def sequence_samples(
    device: str, dtype: torch.dtype, *, inputs: int, weights: int, states: int
) -> Iterator[tuple[Tensor, ...]]:
    """Inputs (B, T, H), weights (H,) and initial states (B, H) of each kind that a recurrence over time meets: no steps, one,
    many, no channels, more than a block has, strided, broadcast. With the weights small, steps don't make errors grow."""
    generator = torch.Generator(device).manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float64).to(dtype)

    shapes = ((2, 3, 5), (3, 1, 8), (2, 0, 4), (0, 3, 4), (2, 3, 0), (1, 1, 1), (2, 40, 33), (3, 5, 700))
    for batch, steps, width in shapes:
        some = [make(batch, steps, width) for _ in range(inputs)]
        yield *some, *(make(width) / 4 for _ in range(weights)), *(make(batch, width) for _ in range(states))
    # Time first, gates of one matrix, and the same state for the whole batch.
    some = [make(4, 3, 6).transpose(0, 1), *make(3, 4, 6 * inputs).chunk(inputs, -1)[1:]]
    yield *some, *(make(6) / 4 for _ in range(weights)), *(make(6).expand(3, 6) for _ in range(states))


CONVOLVED_SIZES = [  # B, T, H, K
    (2, 3, 5, 3),
    (2, 4, 3, 2),
    (3, 2, 4, 4),  # K = H
    (1, 3, 1, 1),
    (2, 0, 3, 3),
    (0, 3, 4, 2),
    (2, 20, 65, 3),  # More than a round of what CUDA loads ahead.
    (2, 9, 33, 8),
    (2, 7, 100, 33),
    (2, 9, 28, 27),  # On CUDA, a thread's elements are next to both ends of the others.
    (1, 5, 64, 20),
    (1, 5, 301, 12),  # No vectors.
    (1, 5, 384, 5),  # Few taps of a wide row.
    (1, 5, 600, 9),  # In float64, two elements a thread back in time.
    (1, 5, 1100, 9),  # Four.
    (1, 3, 4200, 12),  # More than a block has threads for.
    (1, 2, 300, 257),
    (1, 45, 2501, 3),  # A row in parts, which meet.
    (1, 45, 2504, 5),  # The same with vectors.
]


def convolved_arguments(
    size: tuple[int, int, int, int], device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """x, kernel and hidden of a recurrence whose state is convolved, for B, T, H and K. Magnitudes of the kernel add up to
    0.9, so that an error doesn't grow over time."""
    batch, steps, width, taps = size
    generator = torch.Generator().manual_seed(seed)
    x, hidden = (torch.randn(s, generator=generator) for s in ((batch, steps, width), (batch, width)))
    kernel = torch.rand(taps, generator=generator) - 0.5
    kernel = (0.9 * kernel / kernel.abs().sum()).view(1, 1, taps)
    return x.to(device, dtype), kernel.to(device, dtype), hidden.to(device, dtype)


def convolved_samples(device: str, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """These of each size that such a recurrence has a way of its own for."""
    for i, size in enumerate(CONVOLVED_SIZES):
        x, kernel, hidden = convolved_arguments(size, device, dtype)
        yield x, kernel, hidden if i % 2 else hidden[:, None]


class Contract:
    """The checks. `op` is the operator under test; subclasses may add tests of their own."""

    op: Case
    backend: str | None = None
    """What is chosen for the test that runs; None for what is used."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Each check on each device, by what is used there and then by the operator's other backends."""
        devices = DEVICES if "device" in metafunc.fixturenames else ["cuda"]
        cases = [(device, backend) for device in devices for backend in (None, *others(self.op.operator, device))]
        if metafunc.function.__name__ in OF_KERNELS:
            cases = [(device, backend) for device, backend in cases if backend != "reference"]
        if "dtype" in metafunc.fixturenames:
            every = self.op.dtypes
            of_reference = every if torch.float32 not in every else (torch.float32,)
            params = [(*case, dtype) for case in cases for dtype in (of_reference if case[1] == "reference" else every)]
            ids = ["-".join([*filter(None, case), str(dtype).removeprefix("torch.")]) for *case, dtype in params]
            metafunc.parametrize("device, chosen, dtype", params, ids=ids)
        elif "device" in metafunc.fixturenames:
            metafunc.parametrize("device, chosen", cases, ids=["-".join(filter(None, case)) for case in cases])
        else:
            names = list(dict.fromkeys(backend for _, backend in cases))
            metafunc.parametrize("chosen", names, ids=[name or "best" for name in names])

    @pytest.fixture(autouse=True)
    def choose(self, chosen: str | None) -> Iterator[None]:
        self.backend = chosen
        # Each call takes the operator's own derivative; test_exact has the other.
        never_small = mock.patch.dict(_operator.SMALL, dict.fromkeys(_operator.SMALL, -1))
        nor_large = mock.patch.object(self.op.operator, "is_one_of_pytorchs", False)
        with never_small, nor_large, use_backend(chosen) if chosen else nullcontext():
            yield

    @property
    def overload(self) -> torch._ops.OpOverload:
        """What torch.ops has of the operator, or of the backend that is chosen."""
        return getattr(self.op.operator.packet, self.backend or "default")

    def compare_with_reference(self, args: Args) -> None:
        """Within the rounding error that the operator declares, of the reference in float64."""
        op = self.op
        # Triton's interpreter rounds bfloat16 in its own way.
        if op.exact or (op.operator.declared.exact is True and not self.is_interpreted(args)):
            expected = run(op, op.reference, map_tensors(clone, args))
            for got, want in zip(self.results_of(args), expected):
                where = "Case" if op.exact else "declaration"
                why = f"exact=True of the {where} wants its bits; ulps= instead allows rounding"
                assert same_bits(got, want), f"{got}, expected {want}, on {describe(args)}; {why}"
            return
        exact = map_tensors(widened, args)
        expected = run(op, op.reference, exact)
        actual = self.results_of(args)
        scales = (
            [e.abs() if e.is_floating_point() else e for e in expected]
            if op.magnitude is None
            else tensors(op.magnitude(*exact))
        )
        for got, want, scale in zip(actual, expected, scales):
            assert got.shape == want.shape, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
            if not got.dtype.is_floating_point:
                # In the dtype of the reference on wider arguments: two whole numbers can be one number of float64.
                assert torch.equal(got.to(want.dtype), want), f"{got}, expected {want}, on {describe(args)}"
                continue
            # Of a statistic in float64, that of what it was computed from.
            computed = [t.dtype for t in tensors(args) if t.is_floating_point()]
            dtype = max([got.dtype, *computed[:1]], key=lambda dtype: torch.finfo(dtype).eps)
            finite = want.abs() <= torch.finfo(dtype).max
            bound = op.ulps.get(dtype, 1.0) * torch.finfo(dtype).eps * scale + torch.finfo(dtype).smallest_normal
            error = (got.to(torch.float64) - want).abs()
            wrong = finite & ~(error <= bound)
            assert not wrong.any(), self.say_error(op, got, want, torch.where(wrong, error / bound, 0), args)
            got, want = got[~finite], want[~finite].to(got.dtype)
            if not same_bits(got, want):
                g, w = next(pair for pair in zip(got, want) if not same_bits(*pair))
                raise AssertionError(f"wrong infinity or NaN: got {g.item()}, want {w.item()}, on {describe(args)}")

    def is_interpreted(self, args: Args) -> bool:
        """Whether Triton's interpreter has the call, which it does on a CPU."""
        return self.backend == "triton" and not any(t.is_cuda for t in tensors(args))

    def takes_seconds(self, args: Args, rows: int = 0) -> bool:
        """Whether Triton's interpreter, which runs one program after another, takes seconds for what a check does with the
        arguments: more than 2,500 elements, in more than `rows` rows."""
        most = max(tensors(args), key=Tensor.numel)
        return self.is_interpreted(args) and most.numel() > max(2500, rows * most.shape[-1:].numel())

    def check_dtypes(self, returned: Any, args: Args, said: str) -> None:
        signature = self.op.operator.signature
        given = {argument.name: t for argument, t in signature.tensors(args) if t is not None}
        for t, result in zip(tensors(returned), signature.results):
            want = signature.dtype_of(result, given)
            assert t.dtype == want, f"{said}{t.dtype}, where the signature says {want}, on {describe(args)}"

    def results_of(self, args: Args) -> list[Tensor]:
        """Of a call: of the dtypes that the signature says, and none of the arguments, on which autograd relies."""
        returned = self.op.function(*args)
        self.check_dtypes(returned, args, "a result in ")
        for (i, arg), t in product(enumerate(args), tensors(returned)):
            if isinstance(arg, Tensor) and (t is arg or (t.numel() and memory(t) == memory(arg))):
                where = f"in the memory of argument {i}, on {describe(args)}"
                raise AssertionError(f"the result is {where}; return a new tensor")
        return [*tensors(returned), *(args[i] for i in self.op.writes)]

    @staticmethod
    def say_error(op: Case, got: Tensor, want: Tensor, excess: Tensor, args: Args) -> str:
        """Where a result is off most, by how much, and what allows more."""
        at = tuple(int(i) for i in torch.unravel_index(excess.nan_to_num(torch.inf).argmax(), excess.shape))
        name, allowed = str(got.dtype).removeprefix("torch."), op.ulps.get(got.dtype, 1.0)
        off = f"{excess[at].item() * allowed:.3g} ulps of {name} where {allowed:g} is allowed, at index {at}"
        why = "if rounding explains it, as in a long sum, give the Case ulps= or magnitude="
        return f"{off}: got {got[at].item()!r}, want {want[at].item()!r}, on {describe(args)}; {why}"

    def same(self, x: Tensor, y: Tensor) -> bool:
        """The same bits; of the reference, those of PyTorch's operators, whose rounding may depend on where memory lies."""
        if self.backend == "reference" and x.dtype == y.dtype and x.is_floating_point():
            tolerance = 8 * torch.finfo(x.dtype).eps
            return x.shape == y.shape and torch.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)
        return same_bits(x, y)

    @proves("Triton kernel", refused=True)
    def test_parity(self, device, dtype):
        """The values of the reference, computed in higher precision."""
        samples = list(self.op.samples(device, dtype))
        assert samples, f"the Case of {self.op.name} has no samples for {dtype} on {device}: nothing is tested"
        self.check_dtypes(self.op.reference(*map_tensors(clone, samples[0])), samples[0], "the reference returns ")
        for args in samples:
            if dtype == self.op.usual or not self.takes_seconds(args, rows=32):
                self.compare_with_reference(args)

    def test_layouts(self, device, dtype):
        """The same bits from every layout of each argument as from contiguous ones, and the arguments stay as they are."""
        op = self.op
        for args in self.op.samples(device, dtype):
            if self.takes_seconds(args):
                continue
            expected = [t.clone() for t in run(op, op.function, map_tensors(torch.clone, args))]
            for said, changed in self.laid_out(args):
                results = run(op, op.function, changed)
                for got, want in zip(results, expected):
                    assert self.same(got, want), f"{said}: wrong on {describe(changed)}"
                for k, (before, after) in enumerate(zip(args, changed)):
                    if isinstance(before, Tensor) and k not in op.writes:
                        assert same_bits(before, after), f"argument {k} was changed by {describe(changed)}"

    def laid_out(self, args: Args) -> Iterator[tuple[str, Args]]:
        """The arguments with each tensor in each layout: one tensor at a time, or all, of which Triton's interpreter needs
        fewer calls."""
        every = {i: [*layouts(arg)] for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.numel()}
        chosen = [{i: layout} for i, found in every.items() for layout in found]
        if self.is_interpreted(args):
            most = max(map(len, every.values()), default=0)
            chosen = [{i: found[(k + i) % len(found)] for i, found in every.items()} for k in range(most)]
        for each in chosen:
            said = ", ".join(f"argument {i} with layout {name!r}" for i, (name, _) in each.items())
            others = map_tensors(torch.clone, args)
            yield said, tuple(each[i][1] if i in each else other for i, other in enumerate(others))

    def test_nothing_outside_is_touched(self, device, dtype):
        """Each tensor lies amid sentinels: nothing outside is written, and nothing outside changes the result."""
        op = self.op
        for args in self.op.samples(device, dtype):
            expected = run(op, op.function, map_tensors(clone, args))
            guards = [guarded(t) for t in tensors(args)]
            views = iter(guards)
            results = run(op, op.function, map_tensors(lambda _, views=views: next(views)[0], args))
            for got, want in zip(results, expected):
                assert self.same(got, want), f"the surroundings change the result of {describe(args)}"
            assert all(untouched() for _, untouched in guards), f"wrote outside its tensors on {describe(args)}"

    def test_same_bits_every_time(self, device, dtype):
        op = self.op
        for args in self.op.samples(device, dtype):
            first = [t.clone() for t in run(op, op.function, map_tensors(clone, args))]
            for got, want in zip(run(op, op.function, map_tensors(clone, args)), first):
                assert same_bits(got, want), f"another result the second time on {describe(args)}"

    def test_nothing_is_kept(self, device):
        """Other values in the same memory have their own results, and those of the call before stay as they are."""
        op = self.op
        for args in self.op.samples(device, self.op.usual):
            given = map_tensors(clone, args)
            returned = tensors(op.function(*given))
            before = [t.clone() for t in returned]
            for to, value in zip(tensors(given), tensors(args)):
                once(to).copy_(variants(once(value))[1])
            fresh = map_tensors(clone, given)
            results = [t.clone() for t in run(op, op.function, given)]
            for got, want in zip(results, run(op, op.function, fresh), strict=True):
                assert same_bits(got, want), f"the call before changes the result of {describe(args)}"
            for got, want in zip(returned, before):
                assert same_bits(got, want), f"a later call changes the result of {describe(args)}"

    def test_threads(self, device):
        """The same bits by one of PyTorch's threads and by several, and in calls from several threads of Python at once."""
        op, call = self.op, self.overload  # A thread of Python's own doesn't know which backend is chosen.

        def results(args: Args, threads: int = 1) -> list[Tensor]:
            copies = map_tensors(torch.clone, args)
            torch.set_num_threads(threads)  # In the call alone: all that they share waits where a machine is busy.
            found = run(op, call, copies)
            torch.set_num_threads(1)
            return [t.clone() for t in found]

        samples = list(op.samples(device, self.op.usual))
        if self.is_interpreted(samples[0]):
            pytest.skip("Triton's interpreter runs in one thread")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            args = self.for_threads(samples)
            given = [map_tensors(lambda t, n=n: variants(t)[n], args) for n in range(3)]
            want = [results(args) for args in given]
            why = "they write the same memory, some is not written, or the order of a sum depends on them"
            # Whether they meet depends on the machine: two do more often than four where it has two cores.
            found = [
                (results(args, threads=n), f"{n} threads of PyTorch than by one: {why}")
                for n in (2, 4, 2, 4)
                for args in given
            ]
            with ThreadPoolExecutor(4) as pool:
                why = "calls from 4 threads of Python at once: something is kept between calls, as in a static"
                found += [(each, why) for each in pool.map(results, given * 4)]
            for i, (each, by) in enumerate(found):
                same = len(each) == len(want[i % 3]) and all(map(same_bits, each, want[i % 3]))
                assert same, f"another result by {by}, on {describe(given[i % 3])}"
        finally:
            torch.set_num_threads(threads)

    def for_threads(self, samples: list[Args]) -> Args:
        """A sample that is grown until several threads share the work."""
        grown = self.op.grown or longer
        full = [args for args in samples if all(t.numel() for t in tensors(args))]
        # Of tensors of one length in the first dimension, unless the Case knows better.
        same = [a for a in full if self.op.grown or len({t.shape[:1] or None for t in tensors(a)} | {None}) == 2]
        args = max(same or full, key=lambda args: tensors(args)[0].numel())  # Of which more values differ.
        for _ in range(20):
            if not same or max(t.numel() for t in tensors(args)) >= LARGE:
                break
            args = grown(args, 2)
        return args

    def test_mixed_dtypes(self, device):
        """Arguments whose dtype the signature doesn't tie to another's, in other dtypes."""
        operator = self.op.operator
        free = [argument for argument in operator.signature.arguments[1:] if not argument.like]
        if not free:
            pytest.skip("the dtypes of all arguments are tied to the first one's")
        for argument in free:
            at = operator.signature.positions[argument.name]
            given = (a for a in self.op.samples(device, self.op.usual) if at < len(a) and a[at] is not None)
            for args, dtype in product(islice(given, 3), argument.dtypes):
                if dtype.is_floating_point != args[at].is_floating_point():
                    continue
                with hint(f"if {argument.name} must have the dtype of another argument, its signature must say `as`"):
                    self.compare_with_reference((*args[:at], args[at].to(dtype), *args[at + 1 :]))

    def test_special_values(self, device, dtype):
        """NaN, infinities, zeros and what exp of overflows, as the reference has them."""
        if not self.op.operator.signature.elementwise or not dtype.is_floating_point:
            pytest.skip("not elementwise, or not of a floating dtype")
        special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 100.0, -100.0], device=device).to(dtype)
        largest = max(self.op.samples(device, dtype), key=lambda args: tensors(args)[0].numel())
        at = iter(range(len(largest)))  # So that the tensors together have all combinations.

        def filled(t: Tensor) -> Tensor:
            index = torch.arange(t.numel(), device=device) // len(special) ** next(at) % len(special)
            return special[index].view(t.shape) if t.is_floating_point() else t

        self.compare_with_reference(map_tensors(filled, largest))

    def test_opcheck(self, device):
        """PyTorch's own checks of schema, autograd registration, fake kernel and AOT dispatch."""
        for args in islice(self.op.samples(device, self.op.usual), 2):  # It looks at registrations more than at shapes.
            opcheck(self.overload, args)
            if self.op.differentiable:
                opcheck(self.overload, self.with_gradients(args))

    @proves("fake tensors")
    def test_fake_kernel(self, device, dtype):
        """Shape, dtype, strides and device of the real result, from the fake kernel."""
        op = self.op
        mode = of_any_size()
        for args in self.op.samples(device, dtype):
            given = [("of the sample", args)]
            if dtype == self.op.usual:  # Layouts mean the same in every dtype.
                given += [
                    (f"{name!r} of argument {i}", (*args[:i], laid_out, *args[i + 1 :]))
                    for i, arg in enumerate(args)
                    for name, laid_out in (layouts(arg) if isinstance(arg, Tensor) and arg.numel() else ())
                ]
            for name, changed in given:
                real = tensors(op.function(*map_tensors(clone, changed)))
                with mode:
                    fake = tensors(op.function(*map_tensors(mode.from_tensor, changed)))
                self.compare_fake(real, fake, device, f"for layout {name} in {describe(changed)}")

    def compare_fake(self, real: list[Tensor], fake: list[Tensor], device: str, what: str) -> None:
        assert len(real) == len(fake)
        for r, f in zip(real, fake):
            shape = tuple(f.shape)
            if self.op.dynamic_size and len(shape) == r.dim():
                shape = tuple(n if isinstance(size, torch.SymInt) else size for size, n in zip(shape, r.shape))
            assert shape == tuple(r.shape), f"shape {shape}, not {tuple(r.shape)} {what}"
            assert f.dtype == r.dtype, f"dtype {f.dtype}, not {r.dtype} {what}"
            assert f.device.type == device, f"device {f.device}, not {device} {what}"
            strides = significant_strides(f, r.shape), significant_strides(r)
            assert strides[0] == strides[1], f"strides {strides[0]}, not {strides[1]} {what}"

    @with_config("torch._dynamo.config", capture_dynamic_output_shape_ops=True)
    def test_fake_cuda(self):
        """Traced and compiled for CUDA where there is no GPU, as a CUDA package is tested where it is built."""
        if torch.version.cuda is None:
            pytest.skip("this torch was built without CUDA")
        op = self.op
        # Up to then AOTAutograd takes no inputs that are fake already.
        backend = "aot_eager" if TORCH >= (2, 14) else "eager"
        for args in islice(op.samples("cpu", self.op.usual), 3):
            torch._dynamo.reset()
            real = run(op, op.reference, map_tensors(clone, args))
            with of_any_size():
                fake = map_tensors(
                    lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda"), args
                )
                compiled = torch.compile(op.function, backend=backend, fullgraph=True)
                self.compare_fake(real, run(op, op.function, fake), "cuda", f"for {describe(args)}")
                self.compare_fake(real, run(op, compiled, fake), "cuda", f"compiled for {describe(args)}")

    def differentiable_samples(self, device: str, dtype: torch.dtype) -> Iterator[Args]:
        if reason := no_derivative(self.op.operator):
            pytest.skip(f"{self.op.name} has no derivative: {reason}")
        if not dtype.is_floating_point:
            pytest.skip(f"{dtype} has no derivative")
        for args in self.op.samples(device, dtype):
            yield self.with_gradients(args)

    def with_gradients(self, args: Args) -> Args:
        """Leaves that require a gradient, of the tensors that may have one."""
        may = {id(args[i]) for i in self.op.operator.differentiable_arguments if i < len(args)}
        return map_tensors(lambda t: t.detach().clone().requires_grad_() if id(t) in may else t, args)

    @proves("gradients", "second derivatives")
    def test_gradcheck(self, device):
        """First and second derivatives against finite differences, of all arguments and of each alone."""
        if torch.float64 not in self.op.dtypes:
            pytest.skip(f"{self.op.name} takes no float64, which finite differences need")
        small = [
            args
            for args in self.differentiable_samples(device, torch.float64)
            if sum(t.numel() for t in tensors(args)) <= 100  # Finite differences take a call an element.
        ]
        for args in small:
            # In the first sample each element by itself; in the others all at once, in a random direction.
            given = {"fast_mode": args is not small[0]}
            why = "if it has no derivative, declare it with differentiable=False; else correct backward= or what that calls"
            with hint(why, of=GradcheckError):
                assert torch.autograd.gradcheck(self.op.function, args, **given)
            if self.op.operator.declared.differentiable == "once":
                self.check_refuses_a_second_derivative(args)
                continue
            with hint('if no second derivative is wanted, declare the operator with differentiable="once"'):
                assert torch.autograd.gradgradcheck(self.op.function, args, **given)
            for i, arg in enumerate(args):
                if isinstance(arg, Tensor) and arg.requires_grad:
                    alone = tuple(a.detach() if isinstance(a, Tensor) and k != i else a for k, a in enumerate(args))
                    assert torch.autograd.gradcheck(self.op.function, alone, **given)

    def check_refuses_a_second_derivative(self, args: Args) -> None:
        """An error that names the operator, where gradients are differentiated in what they depend on."""
        outputs = [t for t in tensors(self.op.function(*args)) if t.requires_grad]
        seeds = [ramp(t).requires_grad_() for t in outputs]
        leaves = [t for t in tensors(args) if t.requires_grad]
        found = torch.autograd.grad(outputs, leaves, seeds, create_graph=True)
        with pytest.raises(RuntimeError, match=rf"^{self.op.name}: it has no second derivative"):
            torch.autograd.grad([t.sum() for t in found], [*leaves, *seeds], allow_unused=True)

    def test_keeps_what_the_formula_names(self, device):
        """No argument lives on for its derivative but those that the declared formula takes."""
        operator = self.op.operator
        if not self.op.differentiable or operator.backward is None:
            return
        for args in self.differentiable_samples(device, self.op.precise):
            made = map_tensors(lambda t: t * 1, args)
            results = self.op.function(*made)
            left = {name: weakref.ref(t) for name, t in zip(operator.names, made) if isinstance(t, Tensor)}
            del made
            gone = {name for name, alive in left.items() if alive() is None}
            assert gone == {*left} - {*operator.taken}, f"{results} keeps {set(left) - gone}"
            break

    @proves("gradients")
    def test_gradients_of_reference(self, device, dtype):
        """The reference's gradients, in every dtype, for a gradient that is not contiguous."""
        op = self.op
        for args in self.differentiable_samples(device, dtype):
            if self.takes_seconds(args):
                continue
            exact = self.with_gradients(map_tensors(widened, args))
            leaves = [t for t in tensors(args) if t.requires_grad]
            most = max(t.numel() for t in tensors(args))
            for leaf, got, want in zip(leaves, gradients(op.function, args), gradients(op.reference, exact)):
                assert got.dtype == leaf.dtype, f"a gradient in {got.dtype}, not {leaf.dtype}, on {describe(args)}"
                assert want.isfinite().all(), f"the reference has a gradient of infinity or NaN, on {describe(args)}"
                largest = want.abs().max().item() if want.numel() else 0.0
                # Of a sum of n terms, as of a bias, which may cancel each other; in float64 the reference rounds as much.
                terms = max(most / max(leaf.numel(), 1), 1)
                tolerance = 8 * torch.finfo(dtype).eps * terms**0.5
                close = {"rtol": tolerance, "atol": tolerance * (1 + largest)}
                said = partial("a gradient is not that of the reference, on {}: {}".format, describe(args))
                torch.testing.assert_close(got.double(), want.double(), **close, msg=said)

    @proves("gradients")
    def test_sparse_gradients(self, device):
        """The gradient of a result may be sparse, as that of torch.gather: it is taken for a dense one."""
        for args in itertools.islice(self.differentiable_samples(device, self.op.usual), 3):
            every = zip(gradients(self.op.function, args, sparse=True), gradients(self.op.function, args))
            for got, want in every:
                got = got.to_dense() if got.is_sparse else got
                torch.testing.assert_close(got, want, msg=f"another gradient for a sparse one, on {describe(args)}")

    @proves("gradients")
    def test_exact(self, device, dtype):
        """Small tensors are recorded by `exact` of the declaration: with the same bits, also of gradients."""
        operator = self.op.operator
        if not operator.declared.exact or self.backend:
            pytest.skip(f"{operator.name}: exact= is not declared, or not for this backend")
        for args in self.differentiable_samples(device, dtype):
            if len({t.shape for t in tensors(args)}) > 1:
                continue
            args = (*operator.all_arguments(args),)
            said = f"by exact= than by the operator, on {describe(args)}; leave exact= out of the declaration"
            made = operator.exact(*args).detach()
            assert same_bits(made, self.op.function(*map_tensors(Tensor.detach, args))), f"another result {said}"
            every = zip(gradients(operator.exact, args), gradients(self.overload, args))
            assert all(same_bits(*pair) for pair in every), f"another gradient {said}"

    @proves("`torch.compile`, one graph")
    @with_config("torch._dynamo.config", capture_dynamic_output_shape_ops=True)
    def test_compile(self, device):
        """One graph, compiled to the end: the eager result, with the strides that the compiled code relies on."""
        self.check_compiled(device, torch.compile(self.op.function, fullgraph=True, dynamic=False), 2)

    @proves("`torch.compile`, one graph for all sizes")
    @with_config("torch._dynamo.config", capture_dynamic_output_shape_ops=True)
    def test_compile_for_any_size(self, device):
        """The graph of symbolic sizes: the eager result, and no new graph for a new size."""
        op = self.op
        # What comes after the graph knows the operator by its name alone, and is what takes long.
        compiled = torch.compile(op.function, backend="aot_eager", fullgraph=True, dynamic=True)
        samples = self.check_compiled(device, compiled, 3)
        torch._dynamo.reset()
        same = (a for a in samples if op.grown or all(t.shape[:1] == tensors(a)[0].shape[:1] for t in tensors(a)))
        args, grown = next(same, None), op.grown or longer
        how = "if its arguments grow otherwise than each in its first dimension, give the Case grown="
        assert args, f"{op.name}: no sample has tensors of one length in the first dimension; {how}"
        with torch._dynamo.config.patch(error_on_recompile=True), hint(how):
            for times in (1, 2, 3):
                run(op, compiled, grown(args, times))

    def check_compiled(self, device: str, compiled: Callable, count: int) -> list[Args]:
        """The results and gradients of the first samples; returns all that have elements."""
        op = self.op
        torch._dynamo.reset()
        samples = [args for args in op.samples(device, self.op.usual) if any(t.numel() > 1 for t in tensors(args))]
        for args in samples[:count]:
            expected = run(op, op.function, map_tensors(clone, args))
            actual = run(op, compiled, map_tensors(clone, args))
            for got, want in zip(actual, expected):
                same = same_bits(got, want) and significant_strides(got) == significant_strides(want)
                why = "; fused= wants the bits of the kernel" if op.operator.declared.fused else ""
                assert same, f"compiled another result: {got}, expected {want}, on {describe(args)}{why}"
            if op.differentiable and op.operator.public:  # torch.compile has no second derivatives.
                leaves = self.with_gradients(args)
                for got, want in zip(gradients(compiled, leaves), gradients(op.function, leaves)):
                    torch.testing.assert_close(got, want)
        return samples

    @proves("`torch.export`, `run_decompositions`")
    def test_export(self, device):
        """torch.export, then the decompositions: PyTorch's own operators alone, or one that has a translation to ONNX."""
        op = self.op
        dtypes = [dtype for dtype in (torch.float32, torch.bfloat16) if dtype in op.dtypes] or op.dtypes[:1]
        # Not a tensor without dimensions, whose elements PyTorch can't select by a mask here.
        samples = [self.smallest(self.small_samples(device, dtype), 2) for dtype in dtypes]

        class Model(torch.nn.Module):
            def forward(self, samples: list[Args]) -> list[list[Tensor]]:
                return [run(op, op.function, map_tensors(torch.clone, args)) for args in samples]

        program = torch.export.export(Model(), (samples,), strict=False)
        program = program.run_decompositions(extension_cpp.decompositions())
        used = {node.target for node in program.graph.nodes if node.op == "call_function"}
        allowed = ("aten", op.operator.namespace) if op.operator.declared.onnx else ("aten",)
        others = {target for target in used if getattr(target, "namespace", "aten") not in allowed}
        assert not others, f"left after the decompositions: {others}"
        got = program.module()(samples)
        want = [run(op, op.reference, map_tensors(clone, args)) for args in samples]
        compare(got, want, "the exported program")

    @proves("fused by Inductor")
    @with_config("torch._inductor.config", fx_graph_cache=False)
    @with_config("torch._functorch.config", enable_autograd_cache=False)
    def test_inductor_fuses(self, device):
        """What Inductor takes for the operator has its bits, tails of vectors too; halves are left to the kernel."""
        op = self.op
        if self.backend:
            return
        from torch._inductor.utils import run_and_get_code

        dtypes = [dtype for dtype in (torch.float32, torch.float64, torch.bfloat16) if dtype in op.dtypes]
        every = [[a for a in op.samples(device, t) if all(x.numel() < 2000 for x in tensors(a))] for t in dtypes]
        groups = [max(args, key=lambda a: tensors(a)[0].numel()) for args in every]
        torch._dynamo.reset()

        def call(*groups: Args) -> list[list[Tensor]]:
            return [tensors(op.function(*args)) for args in groups]

        results, code = run_and_get_code(torch.compile(call, fullgraph=True), *groups)
        for got, want, dtype in zip(results, call(*groups), dtypes):
            assert all(map(same_bits, got, want)), f"other bits in {dtype} where Inductor fuses"
        calls = _backends.shown(op.operator, device) not in ("triton", _backends.COMPILED)  # Which Inductor sees into.
        assert len(re.findall(rf"torch\.ops\.{op.operator.namespace}\.{op.name}\.default\(", code[0])) == calls, code[0]

    @proves("numbers as symbols: one graph for all values")
    @with_config("torch._dynamo.config", capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
    def test_symbolic_numbers(self, device):
        """Numbers that change, that a tensor has, or that follow from a size: no graph for each, as with PyTorch's own."""
        op, arguments = self.op, self.overload._schema.arguments
        floats = [i for i, argument in enumerate(arguments) if str(argument.type) == "float"]
        if self.backend:
            return
        from torch._dynamo.testing import CompileCounterWithBackend

        def using(make: Callable) -> Callable:
            return lambda n, *args: op.function(*(make(n, *args) if i in floats else a for i, a in enumerate(args)))

        args = next(a for a in op.samples(device, self.op.usual) if all(t.numel() > 1 for t in tensors(a)))
        ways = {
            "the same": (using(lambda n, *_: n), lambda k: 0.3 + k / 7),
            "an item": (using(lambda n, *_: n.item()), lambda k: torch.tensor(0.3 + k / 7)),
            "a size": (using(lambda n, *_: n.shape[0] ** -0.5), lambda k: torch.ones(3 + k)),
        }
        for name, (function, value) in ways.items():
            for given in (args, self.with_gradients(args)) if op.differentiable else (args,):
                torch._dynamo.reset()
                graphs = CompileCounterWithBackend("aot_eager")
                compiled = torch.compile(function, fullgraph=True, backend=graphs)
                for k in range(4):
                    got, want = (tensors(f(value(k), *given)) for f in (compiled, function))
                    assert all(map(self.same, got, want)), f"another result with {name} as a number, {describe(given)}"
                    if given is not args:
                        found = (gradients(partial(f, value(k)), given) for f in (compiled, function))
                        compare(*found, f"gradients with {name} as a number, {describe(given)}")
                assert graphs.frame_count <= 2, f"{graphs.frame_count} graphs with {name} as a number"

    def test_errors(self, device):
        """The documented error from the real and from the fake kernel, with all arguments left as they were.

        Which elements share memory only the compiled kernels know exactly.
        """
        op = self.op
        for args, message in op.errors(device):
            if "overlap" in message and self.backend == "reference":
                continue
            assert self.refuses(op.function, args) == message
            if "overlap" not in message:
                with FakeTensorMode() as mode, pytest.raises((RuntimeError, TypeError), match=re.escape(message)):
                    op.function(*fake_args(mode, args))

    def refuses(self, function: Callable, args: Args) -> str:
        """What the error says that a call raises, which leaves every argument as it was."""
        before = map_tensors(lambda t: t.detach().clone(), args)
        with pytest.raises((RuntimeError, TypeError)) as error:
            function(*args)
        for was, now in zip(tensors(before), tensors(args)):
            assert torch.equal(was, now.detach()), f"an argument was changed before the error {error.value}"
        return str(error.value)

    def test_wrong_arguments(self, device):
        """Of each sample's arguments one is made wrong: the kernel, the fake kernel and torch.ops say the same of it."""
        op = self.op
        for args in islice(op.samples(device, self.op.usual), 6):
            for name, wrong in wrong_arguments(op.operator.signature, args):
                message = self.refuses(op.function, wrong)
                assert re.match(rf"{op.name}: (.* and )?{name}\b.* must (have|be) .*, got ", message), message
                assert self.refuses(self.overload, wrong) == message
                with FakeTensorMode() as mode, pytest.raises(RuntimeError) as error:
                    op.function(*fake_args(mode, wrong))
                assert str(error.value) == message

    def test_annotations(self):
        """Of the public function: what type checkers and editors say of it is what the schema says."""
        operator = self.op.operator
        known = {"Tensor": Tensor, "Optional[Tensor]": Tensor | None, "float": float, "int": int, "bool": bool}
        results = [known.get(str(result.type)) for result in operator.schema.returns]
        returned = tuple[tuple(results)] if len(results) > 1 else results[0] if results else type(None)
        wanted = {**dict(zip(operator.names, map(known.get, operator.types))), "return": returned}
        # Those of the reference, as they may be strings, which mean something in its module alone.
        for name, got in get_type_hints(operator.reference).items():
            if (want := wanted[name]) not in (None, got):
                said = f"must be {formatannotation(want)}, as its schema says, got {formatannotation(got)}"
                raise AssertionError(f"{operator.name}: in {operator.stem}.py, the annotation of {name} {said}")

    def test_non_tensors(self, device):
        """A number, a string or None in place of a tensor: an error that names the operator and the argument."""
        op = self.op
        args = next(iter(op.samples(device, self.op.usual)))
        for i, arg in enumerate(args):
            if isinstance(arg, Tensor):
                for wrong in (1, "text", None, [1.0]):
                    with pytest.raises((RuntimeError, TypeError)) as error:
                        op.function(*args[:i], wrong, *args[i + 1 :])
                    name = self.overload._schema.arguments[i].name
                    assert op.name in str(error.value) and re.search(rf"\b{name}\b", str(error.value)), str(error.value)

    # Transforms and modes, on small samples of one dtype: they depend on what is registered, not on the kernels' paths.

    def small_samples(self, device: str, dtype: torch.dtype | None = None) -> list[Args]:
        """Without broadcast dimensions, for which PyTorch can't make a dual tensor."""
        every = self.op.samples(device, dtype or self.op.precise)
        small = (args for args in every if sum(t.numel() for t in tensors(args)) <= 100)
        return [
            map_tensors(lambda t: t if once(t).shape == t.shape else t.contiguous(), args) for args in islice(small, 8)
        ]

    def smallest(self, samples: list[Args], least: int = 1) -> Args:
        """Of those that have elements, for what takes a call an element; if there is one, with at least so many in each."""
        fitting = [args for args in samples if all(t.numel() for t in tensors(args))]
        larger = [args for args in fitting if all(t.numel() >= least for t in tensors(args))]
        return min(larger or fitting, key=lambda args: sum(t.numel() for t in tensors(args)))

    def entries(self) -> list[Callable]:
        return [self.op.function, self.overload]

    def positions(self, args: Args) -> list[int]:
        """Of the tensors that may have a derivative."""
        may = self.op.operator.differentiable_arguments
        return [i for i in may if i < len(args) and isinstance(args[i], Tensor)]

    @proves("forward mode: `jvp`, `jacfwd`", refused=True)
    def test_forward_mode(self, device):
        """The reference's derivatives in the direction of a tangent, of all arguments and of each; none is lost."""
        op, samples = self.op, self.small_samples(device)
        for args in samples:
            at = self.positions(args)
            if not op.differentiable:
                for function in self.entries():
                    self.check_no_derivative(function, args, at)
                continue
            for chosen in [at, *([i] for i in at if len(at) > 1)]:
                primals = tuple(args[i] for i in chosen)
                tangents = tuple(map(ramp, primals))
                want = torch.func.jvp(of_tensors(op.reference, args, chosen), primals, tangents)
                for function in self.entries():
                    inner = of_tensors(function, args, chosen)
                    compare(torch.func.jvp(inner, primals, tangents), want, f"jvp in {chosen} on {describe(args)}")
                    compare(by_dual_tensors(inner, primals, tangents), want, f"dual {chosen} on {describe(args)}")
        if op.differentiable and not op.dynamic_size:  # What follows is batched.
            args = self.smallest(samples)
            at = self.positions(args)
            primals = tuple(args[i] for i in at)
            many = tuple(torch.stack([ramp(t), -t, t.cos()]) for t in primals)
            every = tuple(range(len(at)))
            reference = of_tensors(op.reference, args, at)
            jacobians = torch.func.jacfwd(reference, every)(*primals)
            batched = torch.vmap(lambda *ts: torch.func.jvp(reference, primals, ts))(*many)
            for function in self.entries():
                inner = of_tensors(function, args, at)
                compare(torch.func.jacfwd(inner, every)(*primals), jacobians, f"jacfwd on {describe(args)}")
                got = torch.vmap(lambda *ts, inner=inner: torch.func.jvp(inner, primals, ts))(*many)
                compare(got, batched, f"vmap(jvp) on {describe(args)}")

    def check_no_derivative(self, function: Callable, args: Args, at: list[int]) -> None:
        """The same values for dual tensors; an error where a tangent would be lost in what is written."""
        op = self.op
        if not at:
            return
        expected = [t.clone() for t in run(op, function, map_tensors(clone, args))]
        for i in at:
            given = list(map_tensors(clone, args))
            with forward_ad.dual_level():
                given[i] = forward_ad.make_dual(given[i], ramp(given[i]))
                if op.writes:
                    with pytest.raises(RuntimeError, match=rf"{op.name}: {self.overload._schema.arguments[i].name}\b"):
                        function(*given)
                    continue
                for got, want in zip(run(op, function, tuple(given)), expected):
                    primal, tangent = forward_ad.unpack_dual(got)
                    assert tangent is None, f"a tangent of what has no derivative, on {describe(args)}"
                    assert self.same(primal, want), f"another result for a dual tensor, on {describe(args)}"

    @proves("`torch.func`: `grad`, `vjp`, `jacrev`", "`vmap`", refused=True)
    def test_transforms(self, device):
        """grad, vjp, jacrev, gradients per sample and vmap as of the reference; functionalize of what writes."""
        op, samples = self.op, self.small_samples(device)
        for args in samples:
            for function in self.entries():
                self.check_vmap(function, args)
                if op.writes:
                    self.check_functionalize(function, args)
        self.check_calls_of_vmap(self.smallest(samples, 2))
        if not op.differentiable:
            return
        for args in samples:
            at = self.positions(args)
            primals, every = tuple(args[i] for i in at), tuple(range(len(at)))
            reference = of_tensors(op.reference, args, at)
            seeds = tree_map(ramp, reference(*primals))
            want = torch.func.vjp(reference, *primals)[1](seeds)
            gradient = torch.func.grad(summed(reference), every)(*primals)
            for function in self.entries():
                inner = of_tensors(function, args, at)
                compare(torch.func.vjp(inner, *primals)[1](seeds), want, f"vjp on {describe(args)}")
                got = torch.func.grad(summed(inner), every)(*primals)
                compare(got, gradient, f"grad on {describe(args)}")
        if op.dynamic_size:  # What follows is batched.
            return
        args = self.smallest(samples)
        at = self.positions(args)
        primals, every = tuple(args[i] for i in at), tuple(range(len(at)))
        reference = of_tensors(op.reference, args, at)
        jacobians = torch.func.jacrev(reference, every)(*primals)
        gradient = torch.func.grad(summed(reference), every)(*primals)
        batches = tuple(torch.stack(variants(t)) for t in primals)
        which = [tuple(0 for _ in at), *(tuple(0 if k == i else None for k in every) for i in every if len(at) > 1)]
        for function in self.entries():
            inner = of_tensors(function, args, at)
            compare(torch.func.jacrev(inner, every)(*primals), jacobians, f"jacrev on {describe(args)}")
            around = torch.func.grad(summed(in_forward_mode(inner)), every)(*primals)
            compare(
                around, gradient, f"grad around forward_ad.dual_level, as of torch.func.linearize, on {describe(args)}"
            )
            for in_dims in which:
                given = [primals[k] if dim is None else batches[k] for k, dim in enumerate(in_dims)]
                each = [
                    torch.func.grad(summed(reference), every)(
                        *(t if dim is None else t[n] for t, dim in zip(given, in_dims))
                    )
                    for n in range(3)
                ]
                got = torch.vmap(torch.func.grad(summed(inner), every), in_dims)(*given)
                compare(got, tuple(map(torch.stack, zip(*each))), f"vmap(grad) in {in_dims} on {describe(args)}")

    def check_vmap(self, function: Callable, args: Args) -> None:
        """Over each tensor alone and over all, the batch first and last: as a loop over it, or an error of the operator."""
        op = self.op
        at = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        choices = [at, *([i, *op.writes] for i in at if i not in op.writes and len(at) > 1)]
        for chosen, last in ((chosen, last) for chosen in choices for last in (False, True)):
            in_dims = tuple((args[i].dim() if last else 0) if i in chosen else None for i in range(len(args)))
            given = [arg if d is None else torch.stack(variants(arg), d) for arg, d in zip(args, in_dims)]

            def results(f: Callable, *given: Any) -> tuple[Tensor, ...]:
                return tuple(run(op, f, given))

            each = [
                results(op.reference, *(clone(t.select(d, n)) if d is not None else t for t, d in zip(given, in_dims)))
                for n in range(3)
            ]
            what = f"vmap in {in_dims} on {describe(args)}"
            try:
                slow = "the reference calls what PyTorch runs for each sample of a batch alone: write it with other operators"
                with warnings.catch_warnings(), hint(slow, of=UserWarning):
                    warnings.simplefilter("error")
                    got = torch.vmap(lambda *ts: results(function, *ts), in_dims)(*map_tensors(clone, given))
            except RuntimeError as error:
                if op.differentiable and not op.dynamic_size:
                    raise
                assert re.match(rf"{op.name}: .*\bvmap\b", str(error)), f"{what}: {error}"
            else:
                compare(got, tuple(map(torch.stack, zip(*each))), what)

    def check_calls_of_vmap(self, args: Args) -> None:
        """As many as the declaration says: one, none but the reference's operators, or one an element of the batch."""
        op, way = self.op, vmap(self.op.operator)
        if self.backend or op.writes or op.dynamic_size or way == "its own rule":
            return
        patterns = {argument.name: argument.patterns for argument, _ in op.operator.signature.tensors(args)}
        elsewhere = 1 if way == "one call" else 3 if way.endswith("a call each") else 0
        for i in (i for i, arg in enumerate(args) if isinstance(arg, Tensor)):
            along = {size for pattern in patterns[op.operator.names[i]] for size in pattern.sizes}
            calls = Calls(op.operator.packet)
            in_dims = tuple(0 if k == i else None for k in range(len(args)))
            with calls:
                torch.vmap(op.function, in_dims)(
                    *(torch.stack(variants(a)) if k == i else a for k, a in enumerate(args))
                )
            want = 1 if along.intersection(one_call_along(op.operator)) else elsewhere
            assert calls.count == want, f"{calls.count} calls under vmap in {in_dims}, not {want}"

    def check_functionalize(self, function: Callable, args: Args) -> None:
        op = self.op
        expected = [t.clone() for t in run(op, op.reference, map_tensors(clone, args))]

        def written(*given: Any) -> tuple[Tensor, ...]:
            copies = map_tensors(torch.clone, given)
            return tuple(run(op, function, copies))

        got = torch.func.functionalize(written, remove="mutations_and_views")(*map_tensors(clone, args))
        compare(got, tuple(expected), f"functionalize on {describe(args)}")

    @proves("operations, for `FlopCounterMode`")
    def test_flops(self, device):
        """PyTorch's counter finds as many operations by each entry and backend, at least one an element if elementwise, and
        those of the matrix products and convolutions that the reference is made of."""
        op = self.op
        declared, packet = op.operator.declared.flops, op.operator.packet
        for args in self.small_samples(device, self.op.usual):
            counters = [FlopCounterMode(display=False) for _ in range(3)]
            for counter, function in zip(counters, (op.operator.reference, *self.entries())):
                with counter:
                    results = run(op, function, map_tensors(clone, args))
            products, *counts = (counter.get_flop_counts().get("Global", {}) for counter in counters)
            counts, products = [count.get(packet, 0) for count in counts], sum(products.values())
            elementwise = op.operator.signature.elementwise
            least = tensors(results)[0].numel() if elementwise else 1 if declared else 0
            empty = not all(t.numel() for t in (*tensors(args), *tensors(results)))
            assert counts[0] == counts[1] and (empty or counts[0] >= least), f"{counts} for {describe(args)}"
            # A reference may multiply and add where others have a product: up to half of the operations.
            said = (
                f"flops={declared!r} gives {counts[0]}, and products of the reference {products}, for {describe(args)}"
            )
            assert not (declared and products) or products <= counts[0] <= 2 * products, said

    @proves("names in a profile")
    def test_profile(self, device):
        """A call is an event of the operator's name; what is not native has one more, with that of the backend."""
        op = self.op
        args = next(iter(op.samples(device, self.op.usual)))
        backend = self.backend or _backends.used(op.operator, device)
        name = op.operator.qualified
        suffixes = [f".{backend}"] * (backend != "native")
        for function in self.entries():
            run(op, function, map_tensors(clone, args))
            with torch.profiler.profile() as profile:
                run(op, function, map_tensors(clone, args))
            seen = {event.name for event in profile.events() if event.name == name or event.name.startswith(f"{name}.")}
            assert seen == {name, *(name + suffix for suffix in suffixes)}, seen

    @proves("deterministic algorithms")
    def test_deterministic(self, device):
        """Allowed where only deterministic operators are, gradients too, and memory is not read before it is written."""
        op = self.op
        for args in self.small_samples(device, self.op.usual):
            leaves = self.with_gradients(args) if op.differentiable else args
            for function in self.entries():
                torch.use_deterministic_algorithms(True)  # And new memory is filled with NaN.
                try:
                    results = [t.detach().clone() for t in run(op, function, map_tensors(clone, args))]
                    found = [*gradients(function, leaves)] if op.differentiable else []
                finally:
                    torch.use_deterministic_algorithms(False)
                want = run(op, function, map_tensors(clone, args))
                want += [*gradients(function, leaves)] if op.differentiable else []
                assert all(map(self.same, results + found, want)), f"another result on {describe(args)}"

    @proves("tags")
    def test_compliant(self, device):
        """Tagged as what torch.compile can trace, for who allows nothing else."""
        op = self.op
        args = next(iter(op.samples(device, self.op.usual)))
        torch._dynamo.reset()
        settings = {"only_allow_pt2_compliant_ops": True, "capture_dynamic_output_shape_ops": True}
        with torch._dynamo.config.patch(**settings):
            for function in self.entries():
                compiled = torch.compile(function, fullgraph=True, backend="eager")
                got, want = (run(op, f, map_tensors(clone, args)) for f in (compiled, function))
                assert all(map(self.same, got, want)), f"another result on {describe(args)}"

    @proves("jagged nested tensors")
    def test_nested(self, device):
        """An elementwise operator of one or two tensors takes jagged nested tensors, and gives their gradients."""
        op = self.op
        offsets = torch.tensor([0, 1, 3], device=device)
        samples = [a for a in op.samples(device, self.op.usual) if all(t.shape[:1] == (3,) for t in tensors(a))]

        def nested(function: Callable) -> Callable:
            def call(*args: Any) -> Any:
                jagged = map_tensors(lambda t: torch.nested.nested_tensor_from_jagged(t, offsets), args)
                return map_tensors(lambda t: t.values(), function(*jagged))

            return call

        for function, args in product(self.entries(), samples[:1]):
            got, want = (run(op, f, args) for f in (nested(function), function))
            assert all(map(self.same, got, want)), f"another result of nested tensors on {describe(args)}"
            if op.differentiable:
                leaves = self.with_gradients(args)
                compare(gradients(nested(function), leaves), gradients(function, leaves), "gradients of nested tensors")

    @proves("a user's kernel is used")
    def test_user_kernels(self, device):
        """What a user registers in Python is what the public function and torch.ops call, until its library is gone."""
        op, key = self.op, device.upper()
        args = next(iter(op.samples(device, self.op.usual)))
        for way in self.ways_to_a_kernel(args) if self.backend is None else ():
            seen = []

            def kernel(*passed: Any, seen: list[str] = seen) -> Any:
                seen.append(key)
                return op.reference(*passed)

            with warnings.catch_warnings(), torch.library._scoped_library(op.operator.namespace, "IMPL") as library:
                warnings.filterwarnings("ignore", message="Warning only once for all operators")
                library.impl(op.name, kernel, key, allow_override=True)
                got = [way(function) for function in self.entries()]
            assert seen == [key] * 2, (
                f"{seen}, not a call each of the kernel for {key}, {way.__doc__}, on {describe(args)}"
            )
            compare(got, [way(function) for function in self.entries()], f"a user's kernel, {way.__doc__}")
            assert len(seen) == 2, "a kernel is called whose library is gone"

    def ways_to_a_kernel(self, args: Args) -> list[Callable]:
        op = self.op
        every = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]

        def plain(function: Callable) -> Any:
            """in a plain call"""
            return run(op, function, map_tensors(clone, args) if op.writes else args)

        def functional(function: Callable) -> Any:
            """under functionalize"""
            return torch.func.functionalize(of_tensors(function, args, every))(*tensors(args))

        if op.writes:
            return [plain]
        if not op.differentiable:
            return [plain, functional]
        leaves, at = self.with_gradients(args), self.positions(args)
        primals = tuple(args[i] for i in at)
        tangents = tuple(map(ramp, primals))

        def recorded(function: Callable) -> Any:
            """with a gradient"""
            return run(op, function, leaves)

        def jvp(function: Callable) -> Any:
            """under jvp"""
            return torch.func.jvp(of_tensors(function, args, at), primals, tangents)

        def over_reverse(function: Callable) -> Any:
            """under jvp of vjp"""
            call = of_tensors(function, args, at)
            return torch.func.jvp(lambda *ts: torch.func.vjp(call, *ts)[0], primals, tangents)

        def dual(function: Callable) -> Any:
            """on dual tensors"""
            with forward_ad.dual_level():
                duals = [*map(forward_ad.make_dual, primals, tangents)]
                return [tuple(forward_ad.unpack_dual(t)) for t in tensors(of_tensors(function, args, at)(*duals))]

        return [plain, functional, recorded, jvp, over_reverse, dual]

    def test_user_kernels_in_cpp(self, device):
        """What a library of C++ registers is called too, by both. torch.library knows nothing of it."""
        op, key = self.op, device.upper()
        args, seen = next(iter(op.samples(device, self.op.usual))), []

        def kernel(*passed: Any) -> Any:
            seen.append(key)
            return op.reference(*passed)

        def call_both() -> None:
            for function in self.entries():
                run(op, function, map_tensors(clone, args))

        if self.backend is not None:
            return
        call_both()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            # As TORCH_LIBRARY_IMPL makes one.
            library = torch._C._dispatch_library("IMPL", op.operator.namespace, "")
            library.impl(op.name, key, kernel)
        torch.ops.loaded_libraries.add("a user's")
        try:
            call_both()
        finally:
            torch.ops.loaded_libraries.remove("a user's")
        assert seen == [key] * 2, f"{seen}, not a call each of the kernel for {key}"
        del library
        call_both()
        assert len(seen) == 2, "a kernel is called whose library is gone"

    def test_user_vmap(self, device):
        """torch.library.register_vmap replaces the rule that is derived, for a batch of gradients too."""
        op = self.op
        if self.backend or op.writes or op.dynamic_size:
            return
        args, seen = self.smallest(self.small_samples(device, next(iter(op.dtypes[-1:])))), []

        def rule(info: Any, in_dims: Any, *given: Any) -> Any:
            seen.append(info.batch_size)
            calls = [
                op.reference(*(t if d is None else t.select(d, n) for t, d in zip(given, in_dims)))
                for n in range(info.batch_size)
            ]
            if isinstance(calls[0], Tensor):
                return torch.stack(calls), 0
            return tuple(map(torch.stack, zip(*calls))), (0,) * len(calls[0])

        at = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        batch = [torch.stack([args[i]] * 2) for i in at]
        ways = [lambda f: torch.vmap(of_tensors(f, args, at))(*batch)]
        if op.operator.backward and self.positions(args) == at:  # Whose formula may call the operator too.
            gradient = tuple(range(len(at)))
            ways.append(lambda f: torch.vmap(torch.func.grad(summed(of_tensors(f, args, at)), gradient))(*batch))
        for way in ways:
            want = [way(function) for function in self.entries()]
            with torch.library._scoped_library(op.operator.namespace, "IMPL") as library:
                torch.library.register_vmap(op.operator.qualified, rule, lib=library)
                seen.clear()
                got = [way(function) for function in self.entries()]
                assert seen and seen[::2] == seen[1::2], f"{seen}, not the user's rule by each on {describe(args)}"
            compare(got, want, f"a user's rule on {describe(args)}")
            seen.clear()
            assert way(op.function) is not None and not seen, "a rule is called whose library is gone"

    def test_tensors_for_numbers(self, device):
        """A tensor whose derivative would be lost as a number is refused on every path, also by torch.ops."""
        op, arguments = self.op, self.overload._schema.arguments
        args = self.smallest(self.small_samples(device, op.dtypes[-1]))
        for i, argument in enumerate(arguments[: len(args)]):
            if str(argument.type) not in ("float", "int", "bool"):
                continue
            for function in self.every_entry():
                self.check_refuses_tensors(of_tensors(function, map_tensors(clone, args), [i]), argument.name, device)

    def check_refuses_tensors(self, call: Callable, name: str, device: str) -> None:
        one = torch.ones((), dtype=torch.float64, device=device)
        leaf = one.clone().requires_grad_()
        with forward_ad.dual_level():
            messages = [self.refuses(call, (t,)) for t in (leaf, forward_ad.make_dual(one, one))]
        for message in messages:
            assert re.match(rf"{self.op.name}: {name} must be a number, got a tensor", message), message
        torch._dynamo.reset()
        for way in (
            lambda: torch.compile(call, backend="eager")(leaf),
            lambda: torch.func.grad(summed(call))(one),
            lambda: torch.func.jvp(call, (one,), (one,)),
            lambda: torch.vmap(call)(one[None]),
        ):
            with pytest.raises(Exception, match=rf"\b{name}\b"):
                way()

    def every_entry(self) -> list[Callable]:
        """With the kernel alone, as programs in C++ call it where no Python is."""
        if self.backend is not None or self.op.operator.kernel is None:
            return self.entries()
        return [*self.entries(), self.op.operator.packet.kernel]

    def test_what_is_written(self, device):
        """A new version of it and of what it is a view of, and what PyTorch's own functions refuse to write into."""
        op = self.op
        if not op.writes:
            return
        args = next(args for args in op.samples(device, self.op.usual) if all(t.numel() for t in tensors(args)))
        compiled = torch.compile(op.function, backend="eager")
        want = run(op, op.function, map_tensors(clone, args))
        for i, function in product(op.writes, [*self.every_entry(), compiled]):
            torch._dynamo.reset()

            def call(out: Tensor, i: int = i, function: Callable = function) -> None:
                assert function(*(out if k == i else map_tensors(clone, arg) for k, arg in enumerate(args))) is None

            base = torch.stack([args[i], args[i]])
            call(base[0])
            assert base._version == 1, f"version {base._version}, not 1"
            assert same_bits(base[0], want[-1]), f"{base[0]} by {function}, and {want[-1]} by the public function"
            call(base[1].detach())
            assert base._version == 2, f"version {base._version}, not 2, after a write into what was detached"
            with torch.inference_mode():
                call(base[0])
                call(base[0].clone())
                inference = base.clone()
            assert base._version == 3, f"version {base._version}, not 3, after a write in inference mode"
            before = inference.clone()
            for out in (clone(args[i]).requires_grad_(), inference[0]):
                with pytest.raises(RuntimeError, match=r"\brequire|inference tensor"):
                    call(out)
            assert same_bits(inference, before), "an inference tensor is changed before the error"
            negative = torch.complex(args[i], args[i]).conj().imag
            negative.copy_(args[i])
            call(negative)
            assert negative.is_neg() and same_bits(negative.resolve_neg(), want[-1]), "wrong in a negative view"

    def test_traced(self, device):
        """torch.jit.trace, saved and loaded: the operator in it, with its gradients."""
        op = self.op
        if self.backend is not None:
            return
        args = self.smallest(self.small_samples(device))
        leaves = self.with_gradients(args) if op.differentiable else args
        at = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]

        def call(*given: Tensor) -> tuple[Tensor, ...]:
            copies = [t.clone() if i in op.writes else t for i, t in zip(at, given)]
            every = [copies[at.index(i)] if i in at else arg for i, arg in enumerate(args)]
            return tuple(run(op, op.function, tuple(every)))

        given = tuple(leaves[i] for i in at)
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`torch.jit", category=DeprecationWarning)
            torch.jit.save(torch.jit.trace(call, given, check_trace=False), file)
            file.seek(0)
            loaded = torch.jit.load(file)
        assert op.operator.qualified in str(loaded.graph), loaded.graph
        compare(loaded(*given), call(*given), f"a trace of {describe(args)}")
        if op.differentiable:
            compare(gradients(loaded, given), gradients(call, given), f"gradients of a trace of {describe(args)}")

    @proves("autocast by a user's rule")
    def test_user_autocast(self, device):
        """torch.library.register_autocast replaces the policy that is declared."""
        op, low = self.op, torch.bfloat16
        if self.backend:
            return
        args = next(iter(op.samples(device, self.op.usual)))
        if any(t.dtype == torch.float64 for t in tensors(args)):
            return  # It takes no other dtype there.
        want = run(op, op.function, in_dtype(args, low))
        with torch.library._scoped_library(op.operator.namespace, "IMPL") as library:
            before = dict(self.overload.py_kernels)
            torch.library.register_autocast(op.operator.qualified, device, low, lib=library)
            for function in self.entries():
                with torch.autocast(device, torch.float16):
                    got = run(op, function, args)
                assert all(map(same_bits, got, want)), f"another policy on {describe(args)}"
        self.overload.py_kernels = before  # torch.library doesn't put it back.
        self.overload._dispatch_cache.clear()

    @proves("autocast casts to")
    def test_autocast(self, device):
        """As the same call of arguments that are cast by the declared policy; gradients in the dtype of each leaf."""
        op = self.op
        policy, low = op.operator.declared.autocast, torch.bfloat16
        for args in self.small_samples(device, self.op.usual)[:4]:
            # Not what is float64 in every call.
            floating = [i for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.dtype == torch.float32]
            mixed = [{i: low for i in floating[:1]}, {i: low for i in floating[1:]}]
            for lowered in [{}, dict.fromkeys(floating, low), *mixed * bool(policy and not op.writes)]:
                given = tuple(arg.to(lowered[i]) if i in lowered else arg for i, arg in enumerate(args))
                dtypes = [given[i].dtype for i in floating]
                widest = torch.float32 if torch.float32 in dtypes else low
                want = {"promote": widest, "lower": low, "float32": torch.float32, "": None}[policy]

                cast = partial(in_dtype, dtype=None if op.writes else want)
                expected = [t.clone() for t in run(op, op.function, cast(map_tensors(clone, given)))]
                for function in self.entries():
                    what = f"under autocast on {describe(given)}"
                    with torch.autocast(device, torch.bfloat16):
                        results = run(op, function, map_tensors(clone, given))
                    for got, result in zip(results, expected, strict=True):
                        assert got.dtype == result.dtype, f"{got.dtype}, not {result.dtype}, {what}"
                        assert self.same(got, result), f"another result {what}"
                    if op.differentiable:
                        self.check_autocast_gradients(function, given, cast, device, what)

    def check_autocast_gradients(
        self, function: Callable, given: Args, cast: Callable[[Args], Args], device: str, what: str
    ) -> None:
        leaves = self.with_gradients(given)
        want = gradients(lambda *args: self.op.function(*cast(args)), leaves)
        with torch.autocast(device, torch.bfloat16):
            outputs = function(*leaves)
        for got, gradient, leaf in zip(
            gradients(lambda *_: outputs, leaves), want, (t for t in tensors(leaves) if t.requires_grad), strict=True
        ):
            assert got.dtype == leaf.dtype, f"gradient in {got.dtype} for a leaf in {leaf.dtype} {what}"
            tolerance = 8 * torch.finfo(got.dtype).eps
            torch.testing.assert_close(got, gradient, rtol=tolerance, atol=tolerance)

    @proves("dispatch modes")
    def test_dispatch_modes(self, device):
        """The same results and derivatives while a mode looks on, and with tensors made elsewhere by default."""
        op = self.op
        for args in self.small_samples(device):
            leaves = self.with_gradients(args) if op.differentiable else args
            at = self.positions(args)

            def everything(function: Callable, args: Args = args, leaves: Args = leaves, at: list[int] = at) -> Any:
                found: list[Any] = [[t.clone() for t in run(op, function, map_tensors(clone, args))]]
                if op.differentiable:
                    primals = tuple(leaves[i] for i in at)
                    found.append(plain_gradients(function, leaves, primals))
                    with torch.no_grad():
                        tangents = tuple(map(torch.cos, primals))
                        found.append(by_dual_tensors(of_tensors(function, leaves, at), primals, tangents))
                if op.differentiable and not op.dynamic_size:
                    # Of what vmap has wrapped, whose own `requires_grad` is False.
                    batch = [torch.stack([t.detach()] * 2).requires_grad_() for t in primals]
                    results = tensors(torch.vmap(of_tensors(function, args, at))(*batch))
                    total = torch.stack([t.double().sum() for t in results]).sum()
                    found.append(torch.autograd.grad(total, batch, allow_unused=True))
                return found

            for function in self.entries():
                want = everything(function)
                for mode in (FlopCounterMode(display=False), Onlooker(), default_device("meta")):
                    with mode:
                        got = everything(function)
                    what = f"under {type(mode).__name__} on {describe(args)}"
                    assert [t.device for t in tensors(got)] == [t.device for t in tensors(want)], what
                    compare(tuple(tensors(got)), tuple(tensors(want)), what)

    # CUDA alone

    def cuda_samples(self) -> Iterator[Args]:
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        yield from self.op.samples("cuda", self.op.usual)

    def test_side_stream(self):
        """Ordered with the work around it on the stream that is current, not on the default one."""
        op = self.op
        for args in self.cuda_samples():
            expected = [t.clone() for t in run(op, op.function, map_tensors(clone, args))]
            late = map_tensors(lambda t: clone(torch.zeros_like(t)), args)
            torch.cuda.synchronize()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(50_000_000)
                for to, value in zip(tensors(late), tensors(args)):
                    to.copy_(value)
                results = [t.clone() for t in run(op, op.function, late)]
            torch.cuda.synchronize()
            for got, want in zip(results, expected):
                assert same_bits(got, want), f"not ordered with its stream on {describe(args)}"

    def test_second_device(self):
        """Tensors on a device that is not the current one."""
        op = self.op
        for args in self.cuda_samples():
            if torch.cuda.device_count() < 2:
                pytest.skip("one CUDA device only")
            there = map_tensors(lambda t: t.to("cuda:1"), args)
            expected = run(op, op.function, map_tensors(clone, args))
            for got, want in zip(run(op, op.function, there), expected):
                assert got.device == torch.device("cuda:1") and same_bits(got.to(want.device), want)
            assert torch.cuda.current_device() == 0

    @proves("CUDA graphs")
    def test_cuda_graph(self):
        """Captured once, replayed on new values."""
        op = self.op
        for args in self.cuda_samples():
            static = map_tensors(lambda t: torch.zeros_like(t), args)
            run(op, op.function, static)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = run(op, op.function, static)
            for to, value in zip(tensors(static), tensors(args)):
                to.copy_(value)
            graph.replay()
            expected = run(op, op.function, map_tensors(torch.clone, args))
            for got, want in zip(results, expected):
                assert same_bits(got, want), f"the replayed graph is wrong on {describe(args)}"


@contextmanager
def hint(what: str, of: type[Exception] = Exception) -> Iterator[None]:
    """Adds to an error what its reader can do."""
    try:
        yield
    except of as error:
        raise AssertionError(f"{error}; {what}") from error


def contracts(folder: Path) -> Iterator[Contract]:
    """Of every operator that has one in the test modules of a folder, from which Python imports."""
    for path in sorted(folder.glob("test_*.py")):
        if path.name == "test_contract.py" or not re.search(r"^class \w+\(Contract\)", path.read_text(), re.MULTILINE):
            continue
        for member in vars(importlib.import_module(path.stem)).values():
            if isinstance(member, type) and issubclass(member, Contract) and member is not Contract:
                yield member()


def gradients(function: Callable, args: Args, sparse: bool = False) -> tuple[Tensor, ...]:
    outputs = [t for t in tensors(function(*args)) if t.requires_grad]
    # Every second element of a wider tensor: a gradient that is not contiguous, as a user's may be.
    seeds = [torch.linspace(-1, 1, 2 * t.numel(), dtype=torch.float64)[::2].reshape(t.shape).to(t) for t in outputs]
    seeds = [seed.to_sparse() for seed in seeds] if sparse else seeds
    # What a result doesn't depend on has a gradient of zero, whether a graph is made of it or not.
    return torch.autograd.grad(outputs, [t for t in tensors(args) if t.requires_grad], seeds, materialize_grads=True)


def in_dtype(args: Args, dtype: torch.dtype | None) -> Args:
    """With floating arguments in another dtype, if one is given."""
    return map_tensors(lambda t: t.to(dtype) if dtype and t.is_floating_point() else t, args)


class Calls(TorchDispatchMode):
    """Counts those of an operator."""

    def __init__(self, packet: Any) -> None:
        super().__init__()
        self.packet, self.count = packet, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket is self.packet
        return func(*args, **(kwargs or {}))


class Onlooker(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def ramp(t: Tensor) -> Tensor:
    """Of the shape of t, different and not zero everywhere: a tangent, or a gradient of a result."""
    values = torch.linspace(0.5, 2, t.numel(), dtype=torch.float64, device=t.device)
    return values.reshape(t.shape).to(t.dtype)


def variants(t: Tensor) -> list[Tensor]:
    """Three tensors of the shape of t for a batch."""
    if not t.is_floating_point():
        return [t, t.flip(0) if t.dim() else t, t]
    return [t, t.flip(0) if t.dim() else t / 3, (t / 2).to(t.dtype)]


def of_tensors(function: Callable, args: Args, positions: Sequence[int]) -> Callable:
    """The function of the tensors at these positions; the other arguments stay."""

    def call(*given: Tensor) -> Any:
        every = list(args)
        for i, t in zip(positions, given):
            every[i] = t
        return function(*every)

    return call


def in_forward_mode(function: Callable) -> Callable:
    """The same values, of tensors that have tangents."""

    def values(*primals: Tensor) -> Any:
        with forward_ad.dual_level():
            results = function(*(forward_ad.make_dual(t, torch.ones_like(t)) for t in primals))
            return tree_map(lambda t: forward_ad.unpack_dual(t).primal, results)

    return values


def summed(function: Callable) -> Callable:
    """Weighted, so that each element of each result has a gradient of its own."""
    return lambda *args: sum(((t * t.cos()).sum() for t in tensors(function(*args))), start=torch.zeros(()))


def by_dual_tensors(function: Callable, primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> Any:
    """What torch.func.jvp returns, without it."""
    with forward_ad.dual_level():
        results = function(*map(forward_ad.make_dual, primals, tangents))
        parts = [forward_ad.unpack_dual(t) for t in tensors(results)]
        # None is a tangent of zero: right where a result doesn't depend on the argument, as the comparison tells.
        found = [torch.zeros_like(part.primal) if part.tangent is None else part.tangent for part in parts]
    if isinstance(results, Tensor):
        return parts[0].primal, found[0]
    return tuple(part.primal for part in parts), tuple(found)


def plain_gradients(function: Callable, args: Args, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    outputs = [t for t in tensors(function(*args)) if t.requires_grad]
    return torch.autograd.grad(outputs, leaves, [t.detach().cos() for t in outputs], materialize_grads=True)


def compare(got: Any, want: Any, what: str) -> None:
    """Results or derivatives in float64, or whole numbers, against the reference's."""
    got, want = tensors(got), tensors(want)
    assert len(got) == len(want), f"{len(got)} tensors, not {len(want)}: {what}"
    for g, w in zip(got, want):
        tolerance = 8 * torch.finfo(w.dtype).eps if w.is_floating_point() else 0
        largest = w.abs().max().item() if w.numel() else 0.0
        torch.testing.assert_close(
            g, w, rtol=tolerance, atol=tolerance * (1 + largest), equal_nan=True, msg=lambda m: f"{what}: {m}"
        )


def wrong_arguments(signature: Signature, args: Args) -> Iterator[tuple[str, Args]]:
    """Arguments of which one is wrong, by the signature: in dtype, number of dimensions or size."""
    bound: set[str] = set()
    broadcast = [name for result in signature.results for name in result.pattern.broadcast]
    for argument, t in signature.tensors(args):
        at = signature.positions[argument.name]
        if t is None:
            continue
        others: list[Tensor] = [t.to(torch.complex64)]
        if argument.like:
            others.append(t.double() if t.dtype != torch.float64 else t.float())
        elif torch.bool not in argument.dtypes:
            others.append(t.bool())
        exact = [p for p in argument.patterns if not p.pack and not p.broadcast]
        if exact:
            others += [t[None, None, None, None], t.new_ones(())] if t.dim() else [t[None]]
        if t.dim() and t.numel():
            sizes = exact[0].sizes if exact else ()
            again = [d for d, size in enumerate(sizes) if len(exact) == 1 and (size in bound or size.isdigit())]
            others += [torch.cat([t, t.narrow(d, 0, 1)], d) for d in again]
            same = argument.patterns[0].pack and not signature.broadcasts and "..." in bound
            if (same and t.dim() > len(argument.patterns[0].sizes)) or argument.patterns[0].broadcast:
                others.append(torch.cat([t, t], 0))
            before = args[0].dim() - t.dim()
            if argument.name in broadcast[1:] and t.shape[0] > 1 and before >= 0 and args[0].shape[before] > 1:
                others.append(torch.cat([t, t], 0))
        bound |= {name for pattern in argument.patterns for name in (*pattern.names, *["..."] * pattern.pack)}
        for other in others:
            yield argument.name, (*args[:at], other, *args[at + 1 :])


def of_any_size() -> FakeTensorMode:
    """A mode that knows sizes which depend on values as symbols."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)


def fake_args(mode: FakeTensorMode, args: Args) -> Args:
    """Fake versions of the arguments that still share memory where the real ones do."""
    return map_tensors(lambda t: mode.fake_tensor_converter.from_real_tensor(mode, t), args)


def describe(args: Args) -> str:
    def text(a: Any) -> str:
        return f"{a.dtype}{tuple(a.shape)} strides {a.stride()}" if isinstance(a, Tensor) else repr(a)

    return f"({', '.join(map(text, args))})"
