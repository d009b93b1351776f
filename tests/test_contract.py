"""The contract has teeth: operators that are broken on purpose fail the very check that is there for them."""

import re
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import product
from pathlib import Path

import pytest
import torch
from processes import python
from torch import Tensor

import extension_cpp
from extension_cpp.ops import _backends, _operator
from extension_cpp.ops._operator import operator
from extension_cpp.testing import DEVICES, TORCH, Case, Contract, contracts

LIBRARY = torch.library.Library("extension_cpp", "FRAGMENT")


def register(schema: str, kernel, overload: str = "") -> None:
    """Define an operator, with a kernel for each device: later tests, as of the libraries, see it among the package's."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema.replace(name, name + overload, 1))
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name + overload, kernel, key)


def define(
    name: str,
    kernel,
    *,
    reference=None,
    fake=None,
    backward=None,
    vmap=None,
    autocast="promote",
    into=False,
    number=False,
    fused=False,
    by_reference=False,
    signature="x: ... -> ...",
    instead=None,
    public=None,
    differentiable=None,
    sizes=None,
    **description,
) -> Contract:
    """An operator that doubles x, or is meant to, and what the contract is told of it.

    `into`: it writes into an argument. `number`: it multiplies x with a number instead. `instead`: by dispatch key, what
    is put in the place of something derived; `public`: in that of the public function. `sizes`: fields of the
    declaration that name sizes.
    """
    arguments = "Tensor x, Tensor(a!) out" if into else "Tensor x, float times" if number else "Tensor x"
    register(f"{name}({arguments}) -> {'()' if into else 'Tensor'}", kernel)
    declared = operator(
        name=name,
        signature="x: ...; out: ... as x ->" if into else signature,
        fake=fake,
        backward=backward,
        vmap=vmap,
        autocast=autocast,
        fused=fused,
        exact=by_reference,
        differentiable=backward is not None if differentiable is None else differentiable,
        **(sizes or {}),
    )(reference or (double_into if into else multiply if number else double))
    for key, function in (instead or {}).items():
        declared.operator.implement(name, function(declared.operator), key)
    if public is not None:
        public.operator = declared.operator
        declared = public

    class Described(Contract):
        op = Case(declared, into_samples if into else number_samples if number else samples, **description)

    return Described()


def samples(device: str, dtype: torch.dtype):
    yield (torch.arange(1.0, 13, device=device).to(dtype),)
    yield (torch.arange(1.0, 13, device=device).to(dtype).view(3, 4),)


def into_samples(device: str, dtype: torch.dtype):
    for (x,) in samples(device, dtype):
        yield x, torch.zeros_like(x)


def number_samples(device: str, dtype: torch.dtype):
    for (x,) in samples(device, dtype):
        yield x, 1.5


def optional_samples(device: str, dtype: torch.dtype):
    for (x,) in samples(device, dtype):
        yield from ((x,), (x, None), (x, x.clone()))


def double_or_add(x: Tensor, bias: Tensor | None = None) -> None:
    x.mul_(2) if bias is None else x.add_(bias)


def multiply(x: Tensor, times: float) -> Tensor:
    return x * times


def double(x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(x).mul_(2)


def ignores_strides(x: Tensor) -> Tensor:
    return x.as_strided(x.shape, torch.empty(x.shape).stride()) * 2


def of_products(x: Tensor) -> Tensor:
    return (x.reshape(-1, 1) @ x.new_full((1, 1), 2)).reshape(x.shape)


def double_into(x: Tensor, out: Tensor) -> None:
    out.copy_(x).mul_(2)


def writes_wrong_doubles(x: Tensor, out: Tensor) -> None:
    out.copy_(x).mul_(2.001 if x.dtype == torch.float64 else 2)


def writes_past_the_end(x: Tensor, out: Tensor) -> None:
    double_into(x, out)
    out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(0)


def reads_past_the_end(x: Tensor) -> Tensor:
    after = x.storage_offset() + x.numel()
    stray = x.as_strided((1,), (1,), after) if after < x.untyped_storage().nbytes() // x.element_size() else 0
    return x * 2 + torch.as_tensor(stray == 77.0, device=x.device).to(x.dtype)


def changes_its_argument(x: Tensor) -> Tensor:
    result = double(x)
    x.zero_()
    return result


def on_the_default_stream(x: Tensor) -> Tensor:
    if x.device.type == "cpu":
        return double(x)
    with torch.cuda.stream(torch.cuda.default_stream()):
        return double(x)


calls = 0


def different_every_time(x: Tensor) -> Tensor:
    global calls
    calls += 1
    return double(x).add_(calls * 1e-3)


def different_by_several_threads(x: Tensor) -> Tensor:
    """As where they add up in one place: of a real race it depends on the machine whether it is seen."""
    return double(x).add_((torch.get_num_threads() - 1) * 1e-3)


def different_in_another_thread(x: Tensor) -> Tensor:
    """As where a call finds what another one writes."""
    return double(x).add_(0 if threading.current_thread() is threading.main_thread() else 1e-3)


def keeps_results_by_address(x: Tensor) -> Tensor:
    if kept_results.get("address") != x.data_ptr():
        kept_results.update(address=x.data_ptr(), result=double(x))
    return kept_results["result"].clone()


def keeps_one_result(x: Tensor) -> Tensor:
    return kept_results.setdefault(x.shape, torch.empty_like(x)).copy_(double(x))


kept_results: dict = {}


def refuses_in_the_kernel_only(x: Tensor) -> Tensor:
    if x.dim() == 3:
        raise RuntimeError("refuses: x must not have 3 dimensions")
    return double(x)


def changes_before_refusing(x: Tensor, out: Tensor) -> None:
    out.zero_()
    raise RuntimeError("refuses: x must not have 3 dimensions")


def twice(grad):
    return grad * 2


def transposed_strides(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[::-1]).permute(*range(x.dim() - 1, -1, -1))


def constant_size(x: Tensor) -> Tensor:
    return x.new_empty((int(x.shape[0]), *x.shape[1:]))


def where_large(x: Tensor) -> Tensor:
    return (x.reshape(-1) > 3).nonzero().squeeze(1)


def large(x: Tensor) -> Tensor:
    return x[x > 3.5]


def large_backward(grad: Tensor, x: Tensor) -> Tensor:
    return torch.zeros_like(x).masked_scatter(x > 3.5, grad)


def define_where(name: str, kernel, fake=None) -> Contract:
    return define(name, kernel, fake=fake, reference=where_large, signature="x: ... -> ? of int64", exact=True)


def three_dimensions(device: str):
    yield (torch.ones(2, 2, 2, device=device),), "refuses: x must not have 3 dimensions"


def errors_into(device: str):
    x = torch.ones(2, 2, 2, device=device)
    yield (x, x.clone()), "refuses: x must not have 3 dimensions"


def ignores_tangents(operator):
    def autograd(x: Tensor) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.default(x)

    return autograd


def detaches(operator):
    return lambda x: operator.reference(x.detach()) + 0 * x.sum()


def writes_nothing(operator):
    return lambda x, out: None


def writes_silently(x: Tensor, out: Tensor) -> None:
    with torch._C._AutoDispatchBelowADInplaceOrView():
        double_into(x, out)


def casts_nothing(operator):
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    keys |= torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

    def autocast(x: Tensor) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operator.default(x)

    return autocast


def casts_before_autograd(operator):
    """Casts arguments in a way that cuts the graph."""
    return lambda x: casts_nothing(operator)(x.detach().to(torch.bfloat16).requires_grad_(x.requires_grad))


def batch_first_always(info, in_dims, x: Tensor):
    return double(x), 0


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * 2


def keeps_its_argument(x: Tensor) -> Tensor:
    return Keeping.apply(x)


class RefusesSparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return double(x)

    @staticmethod
    def backward(ctx, grad):
        assert not grad.is_sparse
        return grad * 2


def with_a_factory(x: Tensor) -> Tensor:
    return x * torch.full(x.shape, 2, dtype=x.dtype)


def asks_for_a_value(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x + x


def modes_matter(grad: Tensor) -> Tensor:
    return grad * (3 if torch._C._len_torch_dispatch_stack() else 2)


def puts(x: Tensor) -> Tensor:
    """Which PyTorch refuses where only deterministic operators are allowed."""
    return double(x).put_(torch.zeros(1, dtype=torch.int64, device=x.device), x.reshape(-1)[:1] * 2)


def calls_twice(x: Tensor) -> Tensor:
    return (torch.ops.extension_cpp.fault_calls(x) + torch.ops.extension_cpp.fault_calls(x)) / 2


def define_optional() -> Contract:
    """In place, with an argument that the dispatcher leaves out."""
    register("fault_none_optional(Tensor(a!) x, Tensor? bias=None) -> ()", double_or_add)
    declared = operator(name="fault_none_optional", signature="x: ...; bias: ... as x ->")(double_or_add)

    class Optional(Contract):
        op = Case(declared, optional_samples)

    return Optional()


def untagged(name: str) -> Contract:
    contract = define(name, double)
    contract.op.operator.default._tags = []
    return contract


healthy = define("fault_none", double, backward=twice, fused=lambda x: x * 2)
healthy_into = define("fault_none_into", double_into, into=True)
healthy_once = define("fault_none_once", double, backward=lambda grad: grad.detach() * 2, differentiable="once")
healthy_where = define_where("fault_none_where", where_large)
healthy_large = define("fault_none_large", large, reference=large, backward=large_backward, signature="x: ... -> ?")
healthy_exact = define("fault_none_exact", double, backward=twice, by_reference=True)
healthy_optional = define_optional()
healthy_number = define("fault_none_number", multiply, number=True, backward=lambda grad, times: grad * times)
FAULTS = {
    "ignores strides": (define("fault_strides", ignores_strides), "test_layouts"),
    "wrong values": (define("fault_values", lambda x: x * 2.001), "test_parity"),
    "writes past the end": (define("fault_write", writes_past_the_end, into=True), "test_nothing_outside_is_touched"),
    "reads past the end": (define("fault_read", reads_past_the_end), "test_nothing_outside_is_touched"),
    "returns its argument": (define("fault_alias", lambda x: x, reference=lambda x: x.clone()), "test_parity"),
    "returns a view of its argument": (
        define("fault_view", lambda x: x.view_as(x), reference=lambda x: x.clone()),
        "test_parity",
    ),
    "changes its argument": (define("fault_mutates", changes_its_argument), "test_layouts"),
    "fake with wrong strides": (define("fault_fake", double, fake=transposed_strides), "test_fake_kernel"),
    "fake with wrong dtype": (define("fault_dtype", double, fake=lambda x: x.double().int()), "test_fake_kernel"),
    "wrong gradient": (define("fault_gradient", double, backward=lambda grad: grad * 3), "test_gradcheck"),
    "wrong second derivative": (
        define("fault_second", double, backward=lambda grad: grad.detach() * 2),
        "test_gradcheck",
    ),
    "a second derivative of what has one": (
        define("fault_once", double, backward=twice, differentiable="once", public=lambda x: x * 2),
        "test_gradcheck",
    ),
    "wrong gradient in half precision": (
        define("fault_half", double, backward=lambda grad: grad * (2 if grad.dtype == torch.float64 else 3)),
        "test_gradients_of_reference",
    ),
    "exact with another rounding": (
        define("fault_bits", lambda x: double(x) * (1 - torch.finfo(x.dtype).eps), by_reference=True, backward=twice),
        "test_exact",
    ),
    "exact with a gradient of another rounding": (
        define("fault_grad_bits", double, by_reference=True, backward=lambda g: g * 2 * (1 - torch.finfo(g.dtype).eps)),
        "test_exact",
    ),
    "keeps what no formula needs": (
        define("fault_kept", double, backward=twice, public=keeps_its_argument),
        "test_keeps_what_the_formula_names",
    ),
    "undeclared mutation": (define("fault_schema", lambda x: x.mul_(2).clone()), "test_opcheck"),
    "not deterministic": (define("fault_random", different_every_time), "test_same_bits_every_time"),
    "a race of PyTorch's threads": (define("fault_race", different_by_several_threads), "test_threads"),
    "a race of Python's threads": (define("fault_static", different_in_another_thread), "test_threads"),
    "a result that is kept": (define("fault_cached", keeps_results_by_address), "test_nothing_is_kept"),
    "one memory for all results": (define("fault_buffer", keeps_one_result), "test_nothing_is_kept"),
    "NaN becomes zero": (define("fault_nan", lambda x: double(x).nan_to_num(nan=0.0)), "test_special_values"),
    "specialises on a size": (define("fault_dynamic", double, fake=constant_size), "test_compile_for_any_size"),
    "compiled with wrong strides": (define("fault_compiled", double, fake=transposed_strides), "test_compile"),
    "fake misses an error": (define("fault_error", refuses_in_the_kernel_only, errors=three_dimensions), "test_errors"),
    "wrong index": (define_where("fault_index", lambda x: where_large(x) + 1), "test_parity"),
    "a reference of another dtype": (
        define("fault_reference", double, reference=lambda x: double(x).double()),
        "test_parity",
    ),
    "wrong dtype of an exact result": (define_where("fault_exact", lambda x: where_large(x).int()), "test_parity"),
    "fake with a size that depends on values": (
        define_where("fault_size", where_large, fake=lambda x: x.new_empty(x.numel(), dtype=torch.int64)),
        "test_fake_kernel",
    ),
    "ignores tangents": (
        define("fault_tangent", double, backward=twice, instead={"Autograd": ignores_tangents}),
        "test_forward_mode",
    ),
    "ignores tangents under torch.func": (
        define("fault_jvp", double, backward=twice, instead={"FuncTorchDynamicLayerFrontMode": detaches}),
        "test_forward_mode",
    ),
    "tangents lost in what is written": (
        define("fault_dual_out", double_into, into=True, instead={"ADInplaceOrView": lambda op: double_into}),
        "test_forward_mode",
    ),
    "no gradient under torch.func": (
        define("fault_func", double, backward=twice, instead={"FuncTorchDynamicLayerFrontMode": detaches}),
        "test_transforms",
    ),
    "wrong dimension of vmap": (
        define("fault_vmap", double, backward=twice, vmap=batch_first_always),
        "test_transforms",
    ),
    "two calls under vmap": (
        define("fault_calls", double, backward=twice, public=calls_twice),
        "test_transforms",
    ),
    "vmap without a derivative": (define("fault_batch", double, vmap=batch_first_always), "test_transforms"),
    "functionalize loses what is written": (
        define("fault_functional", double_into, into=True, instead={"FuncTorchDynamicLayerFrontMode": writes_nothing}),
        "test_transforms",
    ),
    "ignores autocast": (
        define(
            "fault_autocast",
            double,
            backward=twice,
            autocast="lower",
            instead={"AutocastCPU": casts_nothing, "AutocastCUDA": casts_nothing},
        ),
        "test_autocast",
    ),
    "gradients lost in autocast": (
        define(
            "fault_cast",
            double,
            backward=twice,
            autocast="lower",
            instead={"AutocastCPU": casts_before_autograd, "AutocastCUDA": casts_before_autograd},
        ),
        "test_autocast",
    ),
    "a reference that can't be traced": (define("fault_trace", double, reference=asks_for_a_value), "test_export"),
    "rounded otherwise where it is fused": (
        define("fault_fused", double, fused=lambda x: x * 2 + x * 1e-7),
        "test_inductor_fuses",
    ),
    "a graph for each number": (
        define(
            "fault_number",
            multiply,
            number=True,
            public=lambda x, times: torch.ops.extension_cpp.fault_number(x, times),
        ),
        "test_symbolic_numbers",
    ),
    "operations that are not counted": (define("fault_flops", double, public=lambda x: x * 2), "test_flops"),
    "fewer operations than products in the reference": (
        define("fault_products", double, reference=of_products, sizes={"flops": "..."}),
        "test_flops",
    ),
    "no event in a profile": (define("fault_profile", double, public=lambda x: x * 2), "test_profile"),
    "not deterministic, by PyTorch's switch": (define("fault_put", puts), "test_deterministic"),
    "no tag for torch.compile": (untagged("fault_untagged"), "test_compliant"),
    "no tag for nested tensors": (untagged("fault_unnested"), "test_nested"),
    "goes past a user's kernel": (define("fault_past", double, public=lambda x: double(x)), "test_user_kernels"),
    "goes past a user's kernel in forward mode": (
        define(
            "fault_past_jvp", double, instead={"FuncTorchDynamicLayerFrontMode": lambda op: op.checked}, backward=twice
        ),
        "test_user_kernels",
    ),
    "goes past a user's kernel in C++": (
        define("fault_past_cpp", double, public=lambda x: double(x)),
        "test_user_kernels_in_cpp",
    ),
    "goes past a user's vmap": (define("fault_past_vmap", double, public=lambda x: double(x)), "test_user_vmap"),
    "a gradient lost in a number": (
        define("fault_lost", multiply, number=True, public=lambda x, times: multiply(x, float(times))),
        "test_tensors_for_numbers",
    ),
    "no new version of what is written": (
        define("fault_version", double_into, into=True, instead={"ADInplaceOrView": lambda op: writes_silently}),
        "test_what_is_written",
    ),
    "refuses a sparse gradient": (
        define("fault_sparse", double, backward=twice, public=lambda x: RefusesSparse.apply(x)),
        "test_sparse_gradients",
    ),
    "a trace without the operator": (
        define("fault_traced", double, backward=twice, public=keeps_its_argument),
        "test_traced",
    ),
    "goes past a user's autocast": (define("fault_policy", double, public=lambda x: double(x)), "test_user_autocast"),
    "made where it is the default": (define("fault_factory", double, public=with_a_factory), "test_dispatch_modes"),
    "depends on a dispatch mode": (define("fault_mode", double, backward=modes_matter), "test_dispatch_modes"),
    "changes out, then refuses": (
        define("fault_late", changes_before_refusing, fake=changes_before_refusing, errors=errors_into, into=True),
        "test_errors",
    ),
}


def arguments(check: str, device: str) -> dict:
    per_dtype = ("parity", "layouts", "touched", "every_time", "fake_kernel", "of_reference", "special_values", "exact")
    result = {} if check in ("test_side_stream", "test_cuda_graph") else {"device": device}
    if check.endswith(per_dtype):
        result["dtype"] = torch.float32
    return result


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault, device):
    contract, check = FAULTS[fault]
    if check == "test_symbolic_numbers" and TORCH < (2, 13):
        pytest.skip(f"{check} is for a newer torch")
    with pytest.raises(BaseException) as caught:
        getattr(contract, check)(**arguments(check, device))
    assert not isinstance(caught.value, (pytest.skip.Exception, KeyboardInterrupt)), "the check was skipped"


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_written_is_compared_in_float64(device):
    """The dtype in which the reference could write into the same memory as the operator."""
    contract = define(f"fault_doubles_{device}", writes_wrong_doubles, into=True)
    contract.test_parity(device, torch.float32)
    with pytest.raises(AssertionError, match="ulps of float64"):
        contract.test_parity(device, torch.float64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("check", sorted({check for _, check in FAULTS.values()}))
def test_healthy_operator_passes(check, device):
    """The same operators without a fault pass the same checks: it is the fault that is caught, not the operator."""
    every = (
        healthy,
        healthy_into,
        healthy_where,
        healthy_large,
        healthy_once,
        healthy_exact,
        healthy_number,
        healthy_optional,
    )
    for contract in every:
        with suppress(pytest.skip.Exception):
            getattr(contract, check)(**arguments(check, device))


@pytest.mark.parametrize(
    ("fault", "answer"),
    [
        ("wrong values", "give the Case ulps= or magnitude="),
        ("wrong index", "exact=True of the Case wants its bits"),
        ("wrong dtype of an exact result", "a result in torch.int32, where the signature says torch.int64"),
        ("a race of PyTorch's threads", "they write the same memory"),
        ("a race of Python's threads", "something is kept between calls"),
        ("specialises on a size", "give the Case grown="),
        ("wrong gradient", "with differentiable=False; else correct backward="),
        ("wrong second derivative", 'with differentiable="once"'),
    ],
)
def test_a_failure_names_what_answers_it(fault, answer):
    contract, check = FAULTS[fault]
    with pytest.raises(AssertionError, match=re.escape(answer)):
        getattr(contract, check)(**arguments(check, "cpu"))


def count(x: Tensor, calls: Tensor | None = None) -> None:
    if calls is not None:
        calls.add_(1)


def test_what_is_written_may_be_left_out():
    for overload in ("", ".kernel"):  # With the second there is a quick way.
        register("fault_none_count(Tensor x, Tensor(a!)? calls=None) -> ()", count, overload)
    function = operator(name="fault_none_count", signature="x: ...; calls: ... as x ->")(count)
    x, calls = torch.ones(3), torch.zeros(3)
    negative = torch.complex(x, x).conj().imag
    for given in ((x,), (x, None), (negative,), (negative, None)) * 2:  # The first call is never the quick one.
        for call in (function, torch.ops.extension_cpp.fault_none_count):
            assert call(*given) is None
            with torch.autocast("cpu"):
                assert call(*given) is None
    with extension_cpp.use_backend("reference"):
        assert function(x) is function(x, None) is None
    assert function(x.to("meta")) is torch.compile(function, backend="aot_eager", fullgraph=True)(x, None) is None
    for n, call in enumerate((function, function, torch.ops.extension_cpp.fault_none_count), 1):
        call(x, calls)
        assert calls.tolist() == [n] * 3 and calls._version == n
    function(x, negative)
    assert negative.tolist() == [0] * 3


def multiply_tensors(x: Tensor, y: Tensor) -> Tensor:
    return x * y


@pytest.mark.parametrize("tensors", [1, 2])
def test_the_reference_takes_no_dtype_that_the_kernels_refuse(tensors):
    name = f"fault_none_dtypes_{tensors}"
    y = ", Tensor y" if tensors == 2 else ""
    reference = multiply_tensors if tensors == 2 else double
    for overload in ("", ".kernel"):
        register(f"{name}(Tensor x{y}) -> Tensor", lambda *args: _backends.operators[name].checked(*args), overload)
    signature = f"x: ... of float32|bfloat16{'; y: ... as x' if y else ''} -> ..."
    function = operator(name=name, signature=signature, exact=True)(reference)
    calls = {
        "eager": function,
        "torch.ops": getattr(torch.ops.extension_cpp, name),
        "vmap": torch.vmap(function),
        "grad": torch.func.grad(lambda *args: function(*args).sum()),
    }
    for size, (way, call), _ in product((3, 20000), calls.items(), range(2)):
        given = [torch.ones(2, size, dtype=torch.float64, requires_grad=way != "grad") for _ in range(tensors)]
        with pytest.raises(RuntimeError, match=f"^{name}: x must have dtype float32 or bfloat16, got float64$"):
            call(*given)
        call(*(t.float() for t in given))


def test_names_that_python_has():
    def scaled(len: Tensor, type: float, int: int, bool: bool = True) -> Tensor:
        return len * type * int * bool

    for overload in ("", ".kernel"):  # With the second there is a quick way.
        register("float(Tensor len, float type, int int, bool bool=True) -> Tensor", scaled, overload)
    function = operator(name="float", signature="len: ... -> ...", exact=True)(scaled)
    try:
        for _ in range(3):
            assert function(torch.ones(2), 2.0, 3).tolist() == [6, 6]
            x = torch.ones(2, requires_grad=True)
            assert torch.autograd.grad(function(x, type=2.0, int=3).sum(), x)[0].tolist() == [6, 6]
        assert torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2), 2.0, 3).tolist() == [6, 6]
    finally:
        del _backends.operators["float"]


def test_vmap_of_no_samples():
    def sums(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.sum(-1), y.sum(-1)

    register("fault_none_sums(Tensor x, Tensor y) -> (Tensor, Tensor)", sums)
    signature = "x: ... N; y: ... M as x -> ..., ..."
    function = operator(name="fault_none_sums", signature=signature, differentiable=False)(sums)
    x, y = torch.ones(0, 4, 2, 3), torch.ones(5, 2, 6)
    for got, dims in (
        (torch.vmap(function, (0, None)), (0, 4)),
        (torch.vmap(torch.vmap(function, (0, None)), (1, None)), (4, 0)),
    ):
        given = y[0].expand(4, 2, 6) if dims[0] == 0 else y[0]
        assert [t.shape for t in got(x, given)] == [(*dims, 2)] * 2
    with pytest.raises(RuntimeError, match=r"^fault_none_sums: y must have the dtype of x, float32, got float64$"):
        torch.vmap(function, (0, None))(x, y.double())


def test_an_argument_that_is_called_result():
    def slope(grad: Tensor, result: Tensor) -> Tensor:
        return grad * (1 - result * result)

    register("fault_none_slope(Tensor grad, Tensor result) -> Tensor", slope)
    declared = {"name": "fault_none_slope", "signature": "grad: ...; result: ... as grad -> ..."}
    with pytest.raises(
        RuntimeError, match=r"^fault_none_slope: backward must name one thing, got result, an argument too"
    ):
        operator(**declared, backward=lambda grad, result: (grad, result))(slope)
    given = [torch.full((2,), value, requires_grad=True) for value in (2.0, 0.5)]
    got, want = (torch.autograd.grad(f(*given).sum(), given) for f in (operator(**declared)(slope), slope))
    assert all(map(torch.equal, got, want))


def up_to(x: Tensor, longest: int = 9) -> Tensor:
    return x * 2


def test_a_number_of_the_signature_may_be_left_out():
    register("fault_none_up_to(Tensor x, int longest=9) -> Tensor", up_to)
    function = operator(name="fault_none_up_to", signature="x: N where N <= longest -> N")(up_to)
    x = torch.ones(3)
    with extension_cpp.use_backend("reference"):
        assert function(x).tolist() == torch.ops.extension_cpp.fault_none_up_to(x).tolist() == [2] * 3
    assert torch.func.jvp(function, (x,), (x,))[1].tolist() == [2] * 3
    with pytest.raises(
        RuntimeError, match=r"^fault_none_up_to: x must have shape .* with N <= longest and longest = 9"
    ):
        torch.func.jvp(function, (torch.ones(10),), (torch.ones(10),))


def scale_by_first(x: Tensor, by: list[float]) -> Tensor:
    return x * by[0]


@pytest.mark.parametrize("backward", [None, lambda grad, by: grad * by[0]])
def test_a_list_that_is_changed_before_the_backward(backward):
    name = f"fault_none_list_{backward is None}"
    for overload in ("", ".kernel"):  # With the second a call goes past the dispatcher, which makes a list of its own.
        register(f"{name}(Tensor x, float[1] by) -> Tensor", scale_by_first, overload)
    function = operator(name=name, signature="x: ... -> ...", backward=backward)(scale_by_first)
    x = torch.ones(2, requires_grad=True)
    for call in (function, getattr(torch.ops.extension_cpp, name)):
        by = [2.0]
        y = call(x, by)
        by[0] = 100.0
        assert torch.autograd.grad(y.sum(), x)[0].tolist() == [2, 2]


def checked(name: str, kernel) -> dict:
    """A kernel that refuses what the signature does, as those in C++ do."""

    def check_and_run(*args):
        _backends.operators[name].signature.check(args)
        return kernel(*args)

    return {"name": name, "kernel": check_and_run}


OF_ONE_DTYPE = {
    "int64": define(**checked("fault_none_int64", double), differentiable=True, signature="x: ... of int64 -> ..."),
    "float32": define(
        **checked("fault_none_float32", multiply),
        number=True,
        backward=lambda grad, times: grad * times,
        signature="x: ... of float32 -> ...",
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("check", sorted(name for name in vars(Contract) if name.startswith("test_")))
@pytest.mark.parametrize("of", ["int64", pytest.param("float32", marks=pytest.mark.long)])
def test_an_operator_of_one_dtype_passes(of, check, device):
    """Checks take the dtypes of its signature; what takes no floating tensor has no derivative."""
    contract = OF_ONE_DTYPE[of]
    assert contract.op.differentiable == contract.op.dtypes[0].is_floating_point
    method = getattr(contract, check)
    given = {"device": device, "dtype": contract.op.dtypes[0]}
    method(**{name: given[name] for name in signature(method).parameters if name in given})


def test_finite_differences_need_float64():
    with pytest.raises(pytest.skip.Exception, match="fault_none_float32 takes no float64, which finite differences"):
        OF_ONE_DTYPE["float32"].test_gradcheck("cpu")
    with pytest.raises(pytest.skip.Exception, match="it takes no floating tensor"):
        OF_ONE_DTYPE["int64"].test_gradcheck("cpu")


@pytest.mark.parametrize("dtypes", ["int64|float32", "int64 | float32", "real"])
def test_what_may_be_floating_has_a_derivative(dtypes):
    name = f"fault_none_either_{re.sub(r'[ |]+', '_', dtypes)}_{len(dtypes)}"
    register(f"{name}(Tensor x) -> Tensor", double)
    function = operator(name=name, signature=f"x: ... of {dtypes} -> ...")(double)
    assert function(torch.ones(2, requires_grad=True)).requires_grad


def annotated(x: "Tensor", times: "int") -> "Tensor":
    return multiply(x, times)


def returns_two(x: Tensor) -> tuple[Tensor, Tensor]:
    return double(x), double(x)


@pytest.mark.parametrize(
    ("number", "reference", "message"),
    [
        (True, annotated, "times must be float, as its schema says, got int"),
        (False, returns_two, "return must be torch.Tensor, as its schema says, got tuple[torch.Tensor, torch.Tensor]"),
    ],
)
def test_annotations_of_other_types(number, reference, message):
    contract = define(f"fault_{reference.__name__}", reference, reference=reference, number=number)
    said = f"fault_{reference.__name__}: in test_contract.py, the annotation of {message}"
    with pytest.raises(AssertionError, match=re.escape(said)):
        contract.test_annotations()


def test_a_dtype_that_the_signature_leaves_free():
    """A kernel that reads y as if it were of the dtype of x."""
    register(
        "fault_free(Tensor x, Tensor? y=None) -> Tensor",
        lambda x, y=None: x + (0 if y is None else y.view(x.dtype)[: x.numel()]),
    )
    add = operator(name="fault_free", signature="x: N; y: N -> N", differentiable=False)(
        lambda x, y=None: x + (0 if y is None else y.to(x.dtype))
    )

    class Free(Contract):
        # Of an argument that may be left out, as in the first samples.
        op = Case(
            add,
            lambda device, dtype: [
                *[(torch.ones(8, device=device).to(dtype),)] * 5,
                tuple(torch.randn(2, 8, device=device).to(dtype).unbind()),
            ],
        )

    Free().test_parity("cpu", torch.float32)
    with pytest.raises(
        AssertionError, match="if y must have the dtype of another argument, its signature must say `as`"
    ):
        Free().test_mixed_dtypes("cpu")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"independent": "N"}, "independent must name sizes that results have, got N"),
        ({"summed": "M"}, "summed must name sizes that a result lacks, got M"),
        ({"flops": "2 * M N"}, r'flops must be products of sizes, "2 M N \+ N", got \* in 2 \* M N'),
    ],
)
def test_sizes_that_say_nothing(given, message):
    name = f"fault_useless_{next(iter(given))}"
    register(f"{name}(Tensor x) -> Tensor", lambda x: x.sum(1))
    function = operator(name=name, signature="x: M N -> M", **given)(lambda x: x.sum(1))
    try:
        with pytest.raises(RuntimeError, match=f"^{name}: {message}"):
            _ = function.operator.signature
    finally:
        del _backends.operators[name]


@pytest.mark.slow
@pytest.mark.long
def test_a_changed_derivative_is_compiled_anew(tmp_path):
    """torch.compile keeps graphs on disk, in which an operator is only a name."""
    source = """
import torch
from extension_cpp import operator
library = torch.library.Library("changing_ops", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * 2, "CPU")
@operator(name="changing_ops::twice", signature="x: ... -> ...", backward=lambda grad: grad * {factor})
def twice(x):
    return x * 2
"""
    run = """
from changing import twice
x = torch.ones(5, requires_grad=True)
torch.compile(twice)(x).sum().backward()
print(x.grad[0].item(), torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
"""
    said = []
    for factor in (2, 2, 3):
        (tmp_path / "changing.py").write_text(source.replace("{factor}", str(factor)))
        code = f"import sys, torch\nsys.path.insert(0, {str(tmp_path)!r})\nsys.dont_write_bytecode = True\n{run}"
        done = python(code, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split())
    assert said == [["2.0", "0"], ["2.0", "1"], ["3.0", "0"]]


def test_a_namespace_of_its_own():
    """An operator in one is told apart from this package's of the same name, and its errors say which is missing."""
    with torch.library._scoped_library("fault_ops", "FRAGMENT") as library:
        for name in ("fault_none", "unsigned"):
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, double, "CPU")
        before = _backends.operators["fault_none"]
        function = operator(name="fault_ops::fault_none", signature="x: ... -> ...")(double)
        try:
            assert function(torch.ones(2)).tolist() == [2, 2] and _backends.operators["fault_none"] is before
            assert extension_cpp.backends()["fault_ops::fault_none"]["cpu"] == "native"
            with pytest.raises(RuntimeError, match=r"^fault_none: fault_ops::fault_none is declared already$"):
                operator(name="fault_ops::fault_none")(double)
            unsigned = operator(name="fault_ops::unsigned")(double).operator
            with pytest.raises(RuntimeError, match=r"^unsigned: no signature of fault_ops::unsigned in .*_C.*so"):
                _ = unsigned.signature
        finally:
            for name in ("fault_none", "unsigned"):
                _backends.operators.pop(f"fault_ops::{name}", None)
            _operator._libraries.cache_clear()
    with pytest.raises(RuntimeError, match=r"^absent: no library that is loaded has a schema of fault_ops::absent: "):
        operator(name="fault_ops::absent")(double)
    why = r"csrc/test_contract.cpp must register it, under this name, and make build compile it$"
    with pytest.raises(RuntimeError, match=rf"^absent: no library that is loaded has a schema of \w+::absent: {why}"):
        operator(name="absent")(double)


def other_name(y: Tensor) -> Tensor:
    return double(y)


def with_a_default(x: Tensor, times: float = 2.0) -> Tensor:
    return multiply(x, times)


@pytest.mark.parametrize(
    ("declared", "reference", "message"),
    [
        ({"differentiable": "twice"}, double, "differentiable must be True, False or \"once\", got 'twice'"),
        ({"autocast": "lowest"}, double, 'autocast must be "promote", "lower", "float32" or "", got \'lowest\''),
        ({"backward": lambda grad, y: grad}, double, "backward must name arguments, x, result, result0 to .*; got y"),
        (
            {"backward": lambda *args: args[0]},
            double,
            r"backward must name what it takes, by position, got \*args: of a dec",
        ),
        (
            {"backward": lambda grad, *, x: grad},
            double,
            "backward must name what it takes, by position, got x: leave out",
        ),
        ({"backward": lambda: None}, double, "backward must take the gradients of the results first, 1, got none"),
        ({"backward": 2}, double, "backward must be a function whose parameters Python can tell, got 2"),
        ({"saved_for": {"y": "x"}}, double, "saved_for must name arguments, x; got y"),
        ({}, other_name, "the parameters of its reference must be the arguments of its schema, x, got y"),
        (
            {"name": "fault_none_number"},
            with_a_default,
            "the default of times in its reference must be that of its schema, no default, got 2.0",
        ),
    ],
)
def test_a_wrong_declaration_is_refused(declared, reference, message):
    declared = {"name": "fault_none", **declared}
    with pytest.raises(RuntimeError, match=f"^{declared['name']}: {message}"):
        operator(**declared)(reference)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            "(Tensor[] x, int y) -> Tensor",
            r"x must be a Tensor or a Tensor\? in its schema, got List\[Tensor\]: stack them",
        ),
        ("(Tensor x, Tensor?[] y) -> Tensor", r"y must be a Tensor or a Tensor\? in its schema, got List\[Optional\["),
        ("(Tensor x, int y) -> Tensor[]", r"result 0 must be a Tensor in its schema, got List\[Tensor\]: return"),
        ("(Tensor x, int y) -> (Tensor, int)", r"result 1 must be a Tensor in its schema, got int: return"),
        (
            "(Tensor x, Tensor(a!) y) -> Tensor",
            r"must return nothing, -> \(\), as it writes y, got Tensor: declare one",
        ),
        (
            "(Tensor(a!) x, float y) -> Tensor(a!)",
            r"must return nothing, -> \(\), as it writes x, got Tensor: declare one",
        ),
    ],
)
def test_a_schema_that_is_refused(schema, message):
    with torch.library._scoped_library("fault_ops", "FRAGMENT") as library:
        library.define(f"refused{schema}")
        with pytest.raises(RuntimeError, match=f"^refused: .*{message}"):
            operator(name="fault_ops::refused")(lambda x, y: x)
        assert "fault_ops::refused" not in _backends.operators


def test_a_default_that_the_reference_lacks():
    with torch.library._scoped_library("fault_ops", "FRAGMENT") as library:
        library.define("times(Tensor x, float times=2) -> Tensor")
        message = r"^times: the default of times in its reference must be that of its schema, 2.0, got no default$"
        with pytest.raises(RuntimeError, match=message):
            operator(name="fault_ops::times")(multiply)


def test_a_module_without_the_kernel():
    made = define("fault_triton", double).op.operator
    made.declared.triton = "json"
    with pytest.raises(RuntimeError, match=r"^fault_triton: triton= .* names json, which has no kernel of this name$"):
        made.triton_kernel()


class Times:
    def __call__(self, grad: Tensor, times: float) -> Tensor:
        return grad * times

    def method(self, grad: Tensor, times: float) -> Tensor:
        return grad * times


def times_by_default(grad: Tensor, times: float, more: float) -> Tensor:
    return grad * times * more


FORMULAS = {
    "decorated": torch.no_grad()(Times().method),
    "method": Times().method,
    "object": Times(),
    "partial": partial(times_by_default, more=1.0),
}


@pytest.mark.parametrize("kind", FORMULAS)
def test_a_formula_that_is_no_plain_function(kind):
    contract = define(f"fault_none_{kind}", multiply, number=True, backward=FORMULAS[kind])
    x = torch.ones(2, requires_grad=True)
    assert torch.autograd.grad(contract.op.function(x, 3.0).sum(), x)[0].tolist() == [3, 3]
    assert contract.op.operator._sources  # A hash of them, for the cache of torch.compile.
    file = _operator._code_of(FORMULAS[kind]).co_filename
    assert Path(file).name == "test_contract.py", f"{file} would be hashed"


def test_too_many_gradients():
    contract = define("fault_count", double, backward=lambda grad: (grad, None))
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"^fault_count: backward must return the gradients of x, got 2 values$"):
        contract.op.function(x).sum().backward()


def test_a_gradient_of_another_shape():
    transposed = define("fault_transposed", double, backward=lambda grad: grad.t() * 2).op.function
    repeated = define("fault_none_repeated", double, backward=lambda grad: grad.expand(2, *grad.shape)).op.function
    alternatives = {"signature": "x: N M | N 1 M -> N M", "reference": lambda x: x.reshape(x.shape[0], -1) * 2}
    fits = define(
        "fault_none_fits", alternatives["reference"], backward=lambda grad: grad * 2, **alternatives
    ).op.function
    x = torch.ones(2, 3, requires_grad=True)
    wanted = r"backward must return a gradient of x of its shape, \(2, 3\), got \(3, 2\)$"
    with pytest.raises(RuntimeError, match=f"^fault_transposed: {wanted}"):
        transposed(x).sum().backward()
    for function, given in (
        (repeated, x),
        (fits, x),
        (fits, x[:, None]),
    ):  # As autograd.Function sums what is broadcast.
        assert torch.equal(torch.autograd.grad(function(given).sum(), given)[0], torch.full_like(given, 2))


@pytest.mark.parametrize("name", ["independent", "summed", "flops"])
def test_sizes_that_the_signature_lacks(name):
    declared = define(f"fault_{name}_size", double, signature="x: T -> T", sizes={name: "2 T Q"}).op.operator
    try:
        with pytest.raises(RuntimeError, match=f"^fault_{name}_size: {name} must name sizes of its signature, got Q"):
            _ = declared.signature
        assert [*declared.default.tags] == [torch.Tag.pt2_compliant_tag]  # For who asks all operators of a process.
    finally:
        del _backends.operators[f"fault_{name}_size"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams are CUDA's")
def test_default_stream_is_caught():
    faulty = define("fault_stream", on_the_default_stream)
    healthy.test_side_stream()
    with pytest.raises(AssertionError, match="not ordered with its stream"):
        faulty.test_side_stream()


@pytest.mark.parametrize("device", DEVICES)
def test_wrong_reference_is_caught(device):
    """Kernels that are right, and a reference that isn't."""
    contract = define(f"fault_reference_{device}", double, reference=lambda x: x * 2.001)
    with pytest.raises(AssertionError):
        contract.test_parity(device, torch.float32)


def test_a_case_without_samples():
    """Every other check would pass."""
    contract = define("fault_samples", double)
    contract.op = replace(contract.op, samples=lambda device, dtype: ())
    with pytest.raises(AssertionError, match=r"the Case of fault_samples has no samples for torch.float32 on cpu"):
        contract.test_parity("cpu", torch.float32)


def test_every_operator_has_a_contract():
    """A registered operator that no test module names would be tested by nothing."""
    ours = {
        name
        for name, operator in _backends.operators.items()
        if operator.reference.__module__.startswith("extension_cpp.ops.")
    }
    assert sorted(ours) == sorted({contract.op.name for contract in contracts(Path(__file__).parent)} & ours)
