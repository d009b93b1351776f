"""PyTorch's checks of its own operators, on ours: an OpInfo follows from each operator's declaration and its `Case`.

torch.mul and torch.mm pass the same checks, by the OpInfos that PyTorch has of them: what they fail is not asked of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config
from test_contract import (
    Keeping,
    asks_for_a_value,
    batch_first_always,
    define,
    double,
    ignores_tangents,
    twice,
)
from torch import Tensor

from extension_cpp._features import TORCH
from extension_cpp.ops import _backends
from extension_cpp.testing import (
    DEVICES,
    Args,
    Case,
    Contract,
    contracts,
    map_tensors,
    of_tensors,
    ramp,
    tensors,
    variants,
)

pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest")
CONTRACTS = {contract.op.name: contract for contract in contracts(Path(__file__).parent)}
PEERS = ["mul", "mm"]
each_operator = pytest.mark.parametrize(("device", "name"), [*product(DEVICES, [*PEERS, *CONTRACTS])])
TRANSFORMS = ("vjp", "jvp", "vmap")


def op_info(case: Case) -> Any:
    """The OpInfo of an operator. One that writes into an argument is a function here: it writes into a copy."""
    from torch.testing._internal.common_dtype import _dispatch_dtypes
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

    contract = Contract()
    contract.op = case

    def function(*args: Any) -> Any:
        if not case.writes:
            return case.function(*args)
        copies = map_tensors(torch.clone, args)
        case.function(*copies)
        return tuple(copies[i] for i in case.writes)

    def samples(info: Any, device: str, dtype: torch.dtype, requires_grad: bool, **_: Any) -> Iterator[SampleInput]:
        for args in contract.small_samples(device, dtype):
            first, *others = contract.with_gradients(args) if requires_grad else args
            yield SampleInput(first, args=tuple(others))

    return OpInfo(
        case.name,
        op=function,
        dtypes=_dispatch_dtypes(case.dtypes),
        sample_inputs_func=samples,
        supports_out=False,
        supports_autograd=case.differentiable,
        supports_gradgrad=case.differentiable and case.operator.declared.differentiable != "once",
        supports_forward_ad=case.differentiable,
        supports_fwgrad_bwgrad=case.differentiable,
    )


@cache
def info_of(name: str) -> Any:
    if name in CONTRACTS:
        return op_info(CONTRACTS[name].op)
    from torch.testing._internal.common_methods_invocations import op_db

    return next(info for info in op_db if info.name == name)


def plain(name: str) -> Callable:
    """What an operator is compared with: its reference, or PyTorch's operator itself."""
    return CONTRACTS[name].op.reference if name in CONTRACTS else info_of(name).op


def sample_of(name: str, device: str, requires_grad: bool = False) -> tuple[Any, Args]:
    """An OpInfo, and of its samples a small one in which each tensor has two elements, if there is one."""
    info = info_of(name)
    if requires_grad and not info.supports_autograd:
        pytest.skip(f"{name} has no derivative")
    dtype = CONTRACTS[name].op.precise if name in CONTRACTS else torch.float64
    samples = info.sample_inputs(device, dtype, requires_grad=requires_grad)
    return info, Contract().smallest([(sample.input, *sample.args) for sample in samples], 2)


def is_batched(name: str) -> bool:
    return name not in CONTRACTS or not (CONTRACTS[name].op.dynamic_size or CONTRACTS[name].op.writes)


def leaves(args: Args) -> list[int]:
    return [i for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.requires_grad]


def compare(got: Any, want: Any, what: str) -> None:
    """Sums in another order, many of them in a derivative of a derivative."""
    for g, w in zip(tensors(got), tensors(want), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9, msg=lambda m: f"{what}: {m}")


def close(got: Any, want: Any, equal_nan: bool = True) -> None:
    compare(got, want, "another result")


def vjp(function: Callable, args: Args) -> tuple[Callable, Args]:
    def transformed(*given: Tensor) -> Any:
        return torch.func.vjp(lambda *ts: tuple(tensors(function(*ts))), *given[: len(args)])[1](given[len(args) :])

    return transformed, (*args, *map(ramp, tensors(function(*args))))


def jvp(function: Callable, args: Args) -> tuple[Callable, Args]:
    def transformed(*given: Tensor) -> Any:
        return torch.func.jvp(lambda *ts: tuple(tensors(function(*ts))), given[: len(args)], given[len(args) :])

    return transformed, (*args, *map(ramp, args))


def vmap(function: Callable, args: Args) -> tuple[Callable, Args]:
    return torch.vmap(lambda *ts: tuple(tensors(function(*ts)))), tuple(torch.stack(variants(t)) for t in args)


def loop(function: Callable, args: Args) -> tuple[Callable, Args]:
    """What vmap does, without it."""

    def transformed(*given: Tensor) -> Any:
        return tuple(map(torch.stack, zip(*(tensors(function(*each)) for each in zip(*given)))))

    return transformed, vmap(function, args)[1]


def transformed(word: tuple[str, ...], function: Callable, args: Args, **steps: Callable) -> tuple[Callable, Args]:
    """A function under transforms, the last of the word first, and its arguments."""
    for name in reversed(word):
        function, args = ({"vjp": vjp, "jvp": jvp, "vmap": vmap} | steps)[name](function, args)
    return function, args


def with_gradients(function: Callable, args: Args) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Results, and their gradients by autograd, which knows nothing of the transforms in the function."""
    given = tuple(t.detach().clone().requires_grad_() for t in args)
    results = tensors(function(*given))
    outputs = [t for t in results if t.requires_grad]
    seeds = [t.detach().cos() for t in outputs]
    return results, torch.autograd.grad(outputs, given, seeds, materialize_grads=True)


@each_operator
@pytest.mark.parametrize("length", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_transforms(device, name, length):
    """Under vjp, jvp and vmap one in another: the results of the reference in loops, and the gradients of that."""
    info, args = sample_of(name, device, requires_grad=True)
    at = leaves(args)
    for word in product(TRANSFORMS, repeat=length):
        if ("vjp" in word and not info.supports_gradgrad) or ("vmap" in word and not is_batched(name)):
            continue
        primals = tuple(args[i].detach() for i in at)
        got = with_gradients(*transformed(word, of_tensors(info.op, args, at), primals))
        want = with_gradients(*transformed(word, of_tensors(plain(name), args, at), primals, vmap=loop))
        compare(got, want, f"{name} under {' of '.join(word)}")


@each_operator
def test_vmap(device, name):
    """Over each choice of arguments, the batch first or last, and where the inner one of two vmaps has nothing to batch."""
    info, args = sample_of(name, device)
    if not is_batched(name):
        pytest.skip("vmap may refuse it: the contract has that")
    one = tensors(info.op(*args))
    at = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
    for dims in [(0,) * len(at), *product((-1, None), repeat=len(at))][:-1]:
        in_dims = tuple(dict(zip(at, dims)).get(i) for i in range(len(args)))
        given = [arg if d is None else torch.stack([arg, arg], d) for arg, d in zip(args, in_dims)]
        compare(torch.vmap(info.op, in_dims)(*given), [torch.stack([t, t]) for t in one], f"{name} in {in_dims}")
        inner = torch.vmap(lambda _, *ts: info.op(*ts), (0, *[None] * len(args)))
        got = torch.vmap(inner, (None, *in_dims))(torch.ones(1), *given)
        compare(got, [torch.stack([t, t])[:, None] for t in one], f"{name} in {in_dims}, twice")


@each_operator
def test_gradients(device, name):
    """PyTorch's gradcheck with all that it has: batched, forward mode, undefined gradients, forward over reverse."""
    from torch.testing._internal.common_utils import gradcheck, gradgradcheck

    info, args = sample_of(name, device, requires_grad=True)
    assert gradcheck(info.op, args, check_forward_ad=True, check_batched_forward_grad=True)
    if info.supports_gradgrad:
        assert gradgradcheck(info.op, args, gen_non_contig_grad_outputs=True)
        forward = {"check_fwd_over_rev": True, "check_rev_over_rev": False}
        assert gradgradcheck(info.op, args, **forward, check_batched_grad=False, check_undefined_grad=False)


@each_operator
def test_subclasses(device, name):
    """Any choice of arguments and gradients may be of a subclass without memory: no values are asked for."""
    from torch.testing._internal import composite_compliance as compliance

    info, args = sample_of(name, device)
    compliance.check_with_mode(info.op, args, {}, close)
    compliance.check_all_permutations(info.op, args, {}, close)
    if info.supports_autograd:
        _, args = sample_of(name, device, requires_grad=True)
        compliance.check_backward_formula(info.op, args, {}, assert_equal_fn=close)


@each_operator
@pytest.mark.long
def test_subclasses_in_forward_mode(device, name):
    from torch.testing._internal import composite_compliance as compliance

    info, args = sample_of(name, device, requires_grad=True)
    compliance.check_forward_ad_formula(info.op, args, {}, assert_equal_fn=close)


@each_operator
def test_fake_kernels(device, name):
    """Shapes, strides and dtypes of fake tensors in a call and in its gradients, of every operator that takes part."""
    from torch._subclasses.fake_utils import CrossRefFakeMode

    info, args = sample_of(name, device, requires_grad=info_of(name).supports_autograd)
    with CrossRefFakeMode(check_strides=True):
        results = [t for t in tensors(info.op(*args)) if t.requires_grad]
        if results:
            torch.autograd.grad([t.sum() for t in results], [args[i] for i in leaves(args)], allow_unused=True)


@each_operator
def test_traced(device, name):
    """Derivatives under torch.func are traced with symbolic sizes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    info, args = sample_of(name, device, requires_grad=True)
    at = leaves(args)
    function, given = vjp(of_tensors(info.op, args, at), tuple(args[i].detach() for i in at))
    compare(make_fx(function, tracing_mode="symbolic")(*given)(*given), function(*given), f"{name}, traced")


@each_operator
@pytest.mark.long
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compiled_transforms(device, name):
    info, args = sample_of(name, device, requires_grad=True)
    at = leaves(args)
    # With a size that depends on values PyTorch's own operators have no jvp there.
    for transform in TRANSFORMS if is_batched(name) else ("vjp",):
        torch._dynamo.reset()
        function, given = transformed((transform,), of_tensors(info.op, args, at), tuple(args[i].detach() for i in at))
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        compare(compiled(*given), function(*given), f"{name} under {transform}, compiled")


@each_operator
def test_negative_views(device, name):
    """Of a view that only says that its numbers are negative."""
    info, args = sample_of(name, device)
    negative = map_tensors(lambda t: torch._neg_view(-t) if t.is_floating_point() else t, args)
    compare(info.op(*negative), info.op(*args), name)


@each_operator
def test_copies_on_write(device, name):
    """Tensors that are copied when they are written to: what an operator and its gradient only read is not copied."""
    if name in CONTRACTS and _backends.used(CONTRACTS[name].op.operator, device) == "triton":
        pytest.skip("Triton asks for the memory of an argument as if it were written")
    info, args = sample_of(name, device, requires_grad=info_of(name).supports_autograd)
    read = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
    lazy = [torch._lazy_clone(arg).detach() if i in read else arg for i, arg in enumerate(args)]
    for i in leaves(args):
        lazy[i].requires_grad_()
    outputs = [t for t in tensors(info.op(*lazy)) if t.requires_grad]
    seeds = [torch._lazy_clone(ramp(t)) for t in outputs]
    if outputs:
        torch.autograd.grad(outputs, [lazy[i] for i in leaves(args)], seeds, allow_unused=True)
    copied = [t.shape for t in (*tensors(lazy), *seeds) if t.numel() and not torch._C._is_cow_tensor(t)]
    assert not copied, f"{name} copies tensors of shapes {copied}"


@each_operator
@pytest.mark.parametrize("made_by", ["vjp", "jvp"])
def test_after_a_transform(device, name, made_by):
    """A tensor that was made in a transform which is over has the gradient of what it was made of."""
    info, args = sample_of(name, device, requires_grad=True)

    def gradients(function: Callable) -> tuple[Tensor, ...]:
        kept: list[Tensor] = []
        at = leaves(args)
        # Only what is kept leads to the arguments.
        transform = {"vjp": torch.func.vjp, "jvp": lambda f, *ts: torch.func.jvp(f, ts, tuple(map(ramp, ts)))}[made_by]
        transform(lambda *ts: kept.extend(t * 1 for t in ts) or ts[0] * 1, *(args[i] for i in at))
        outputs = [t for t in tensors(of_tensors(function, args, at)(*kept)) if t.requires_grad]
        seeds = [t.detach().cos() for t in outputs]
        return torch.autograd.grad(outputs, [args[i] for i in at], seeds, materialize_grads=True)

    compare(gradients(info.op), gradients(plain(name)), f"{name} of what {made_by} made")


def copies_always(x: Tensor) -> Tensor:
    return x.mul_(1) * 2


def forgets_the_sign(operator: Any) -> Callable:
    return lambda x: operator.default(x.resolve_neg().neg())


def past_what_torch_func_does(x: Tensor) -> Tensor:
    return super(torch.autograd.Function, Keeping).apply(x)


FAULTS = {
    "test_transforms": define("fault_opinfo_detached", double, backward=lambda grad: grad.detach() * 2),
    "test_vmap": define("fault_opinfo_vmap", double, backward=twice, vmap=batch_first_always),
    "test_gradients": define("fault_opinfo_tangent", double, backward=twice, instead={"Autograd": ignores_tangents}),
    "test_subclasses": define("fault_opinfo_value", double, backward=asks_for_a_value),
    "test_fake_kernels": define("fault_opinfo_fake", double, fake=lambda x: x.float(), backward=twice),
    "test_traced": define("fault_opinfo_traced", double, backward=asks_for_a_value),
    "test_negative_views": define("fault_opinfo_negative", double, instead={"Negative": forgets_the_sign}),
    "test_copies_on_write": define("fault_opinfo_copies", copies_always, backward=twice),
    "test_after_a_transform": define("fault_opinfo_after", double, backward=twice, public=past_what_torch_func_does),
}
HEALTHY = define("fault_opinfo_none", double, backward=twice)
MORE = {"test_transforms": {"length": 1}, "test_after_a_transform": {"made_by": "jvp"}}


@pytest.mark.parametrize("check", FAULTS)
def test_fault_is_caught(check, monkeypatch):
    if check == "test_after_a_transform" and TORCH >= (2, 14):
        pytest.skip("from torch 2.14 on, it is PyTorch itself that finds what such a tensor was made of")
    for contract in (HEALTHY, FAULTS[check]):
        monkeypatch.setitem(CONTRACTS, contract.op.name, contract)
    call = globals()[check]
    call(device="cpu", name="fault_opinfo_none", **MORE.get(check, {}))
    with pytest.raises(BaseException) as caught:
        call(device="cpu", name=FAULTS[check].op.name, **MORE.get(check, {}))
    assert not isinstance(caught.value, (pytest.skip.Exception, KeyboardInterrupt)), "the check was skipped"
