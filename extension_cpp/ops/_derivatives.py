"""What an operator registers with autograd, torch.func and autocast, from its declaration.

Kernels of the dispatcher's keys, each for one overload. Its derivative is a torch.autograd.Function, which all of them lead
to: PyTorch knows how to take it through every transform. Forward mode takes the reference, whose operators are PyTorch's own.
"""

from __future__ import annotations

import linecache
import textwrap
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from types import new_class
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _any_requires_grad,
    _AutoDispatchBelowADInplaceOrView,
    _AutoDispatchBelowAutograd,
    _ExcludeDispatchKeyGuard,
    _len_torch_dispatch_stack,
)
from torch._C._functorch import (
    CVmapInterpreterPtr,
    TransformType,
    _add_batch_dim,
    _unwrap_batched,
    _unwrap_for_grad,
    _unwrap_functional_tensor,
    _wrap_for_grad,
    _wrap_functional_tensor,
    get_interpreter_stack,
    get_single_level_autograd_function_allowed,
    is_batchedtensor,
    is_gradtrackingtensor,
    pop_dynamic_layer_stack,
    push_dynamic_layer_stack,
    set_single_level_autograd_function_allowed,
    unwrap_if_dead,
)
from torch._functorch.autograd_function import VmapInfo
from torch._functorch.pyfunctorch import FunctionalizeInterpreter, GradInterpreter, JvpInterpreter
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling

from extension_cpp.ops import _backends
from extension_cpp.ops._backends import fail

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DEFAULT = "_default_"  # Which names in a closure begin with, that are defaults of parameters.


@cache
def maker(file: str, head: str, body: str, *names: str) -> Callable:
    """What makes a function of this text; its closure has the names, as torch.compile can guard those.

    All of them, whatever the body uses: the code of a function can only be replaced by one with the same closure.
    """
    name, used = head.partition("(")[0], ", ".join(n for n in names if not n.startswith(DEFAULT))
    body = textwrap.indent(f"{body}\n{used}  # Which is not reached.", " " * 8)
    source = f"def make({', '.join(names)}):\n    def {head}:\n{body}\n    return {name}"
    linecache.cache[file] = len(source), None, source.splitlines(True), file
    made: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, file, "exec"), made)
    return made["make"]


def make_autograd(operator: Any, overload: Any, backend: str | None) -> Callable:
    def below(*args: Any) -> Any:
        with _AutoDispatchBelowAutograd():
            return overload(*args)

    @cache
    def derivative() -> Any:
        return make_function(operator, backend, below)

    def autograd(keys: Any, *args: Any) -> Any:
        if forward_ad._current_level >= 0 and any(is_dual(arg) for arg in args):
            return _forward_mode(operator, overload, args, lambda *args: overload(*map(primal_of, args)))
        if torch.is_grad_enabled() and _any_requires_grad(*args):
            if overload is operator.default and not _len_torch_dispatch_stack():
                return operator.record(
                    1, *operator.all_arguments(args)
                )  # By the dispatcher, to the kernel of a user too.
            return derivative()(*map(alive, operator.all_arguments(args)))
        try:
            with _AutoDispatchBelowAutograd():
                return overload.redispatch(keys & torch._C._after_autograd_keyset, *args)
        except (RuntimeError, MemoryError) as error:
            raise operator.explain(error) from error.__cause__

    return autograd


_VMAP_AND_GRAD = {TransformType.Vmap, TransformType.Grad}


def make_transformed(operator: Any, overload: Any, backend: str | None) -> Callable:
    @cache
    def derivative() -> Any:
        return make_function(operator, backend, partial(_graded, overload), _SingleLevelFunction)

    is_default = overload is operator.default and not _backends.chosen
    is_exact = operator.declared.exact is True and is_default

    def transformed(*args: Any) -> Any:
        """Under transforms of torch.func. PyTorch's own operators, those of the reference, know forward mode."""
        try:
            # A mode is to find the call.
            is_plain = is_default and not _len_torch_dispatch_stack() and operator.uses_only_ours()
            if is_plain and is_exact:  # It has the bits, and PyTorch's rules for its operators take less time.
                every = operator.all_arguments(args)
                return operator.reference(*every) if operator.is_alike(*every) else operator.checked(*every)
            stack: Any = get_interpreter_stack()
            top = stack[-1].key()
            is_batch = is_plain and top == TransformType.Vmap
            if is_batch and (found := _batched_alike(operator, stack[-1], args)) is not None:
                return found
            if top == TransformType.Vmap and (not operator.written or _has_users_vmap(operator, overload)):
                return _batched(operator, overload, backend, CVmapInterpreterPtr(stack[-1]), args)
            if top == TransformType.Jvp and not operator.written:
                return _jvp(operator, overload, JvpInterpreter(stack[-1]), args)
            if top == TransformType.Functionalize and not operator.written:
                return _functional(overload, FunctionalizeInterpreter(stack[-1]), operator.all_arguments(args))
            by_reference = operator.written or (operator.differentiable and operator.backward is None)
            # A level of forward_ad within torch.func.grad, as that of torch.func.linearize.
            by_reference = by_reference or (forward_ad._current_level >= 0 and any(map(is_dual, args)))
            if by_reference or not {layer.key() for layer in stack} <= _VMAP_AND_GRAD:
                return _reference(operator, overload, stack[-1], args)
            allowed = get_single_level_autograd_function_allowed()
            set_single_level_autograd_function_allowed(True)
            try:
                return derivative()(*operator.all_arguments(args))
            finally:
                set_single_level_autograd_function_allowed(allowed)
        except RuntimeError as error:
            if type(error) not in (RuntimeError, NotImplementedError) or str(error).startswith(f"{operator.name}: "):
                raise
            # Of an operator of PyTorch's in the reference, of which the caller knows nothing.
            batched = any(layer.key() == TransformType.Vmap for layer in get_interpreter_stack())
            which = "vmap can't batch" if batched else "torch.func can't transform"
            raise RuntimeError(f"{operator.name}: {which} its reference: {error}") from error

    return transformed


def _functional(overload: Any, layer: Any, args: Sequence[Any]) -> Any:
    """A call under torch.func.functionalize of what writes nothing."""

    def below(arg: Any) -> Any:
        functional = isinstance(arg, Tensor) and torch._is_functional_tensor(arg)
        return _unwrap_functional_tensor(arg, True) if functional else arg

    with layer.lower():
        results = overload(*map(below, args))
    return _map_results(lambda t: _wrap_functional_tensor(t, layer.level()), results)


def _below(overload: Any, layer: Any, *args: Any) -> Any:
    """A call of the layer below one of torch.func.jvp or grad, without their derivative."""
    level = layer.level()
    given = [_unwrap_for_grad(arg, level) if isinstance(arg, Tensor) else arg for arg in args]
    with layer.lower():
        results = overload(*given)
    return _map_results(lambda t: _wrap_for_grad(t, level), results)


def _graded(overload: Any, *args: Any) -> Any:
    """A call under torch.func.grad, in the forward of what records it at that level: the levels below record their own."""
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return _below(overload, GradInterpreter(get_interpreter_stack()[-1]), *args)


def _jvp(operator: Any, overload: Any, layer: Any, args: Sequence[Any]) -> Any:
    """A call under torch.func.jvp, of the layer below for its values."""
    return _forward_mode(operator, overload, args, partial(_below, overload, layer))


def _reference(operator: Any, overload: Any, top: Any, args: Sequence[Any]) -> Any:
    """The reference, whose operators have each derivative; its values too, unless a user has registered a kernel."""
    results = operator.checked(*args)
    if top.key() != TransformType.Grad or overload is not operator.default or operator.uses_only_ours():
        return results
    values = _below(overload, GradInterpreter(top), *args)
    values = iter([values] if isinstance(values, Tensor) else values)

    def with_value(result: Tensor) -> Tensor:
        value = next(values)
        return OfValue.apply(result, value) if result.is_floating_point() else value

    return _map_results(with_value, results)


def _forward_mode(operator: Any, overload: Any, args: Sequence[Any], values: Callable) -> Any:
    """Tangents by the reference. The values too, unless a user has registered a kernel: then they are that kernel's."""
    results = operator.checked(*args)
    if overload is not operator.default or operator.uses_only_ours():
        return results
    duals = iter([results] if isinstance(results, Tensor) else results)

    def with_tangent(value: Tensor) -> Tensor:
        # The level by its number, which is all that a graph knows of it. There is no other.
        tangent = forward_ad.unpack_dual(next(duals), level=0).tangent
        return value if tangent is None else forward_ad.make_dual(value, tangent, level=0)

    return _map_results(with_tangent, values(*args))


def _map_results(function: Callable, results: Any) -> Any:
    return function(results) if isinstance(results, Tensor) else tuple(map(function, results))


def make_write(operator: Any, overload: Any) -> Callable:
    def write(keys: Any, *args: Any) -> None:
        """What PyTorch's own functions with `out` refuse, and a new version of what is written.

        Kernels on the stable ABI can't do this. Without a new version, a gradient that needs the overwritten values is
        silently wrong.
        """
        recorded = torch.is_grad_enabled()
        every = operator.all_arguments(args)
        for i in operator.tensors:
            if not isinstance(every[i], Tensor):
                continue
            if recorded and every[i].requires_grad:
                why = "as writing has none; got one that does"
                fail(operator.name, f"{operator.names[i]} must not require a gradient, {why}")
            if forward_ad._current_level >= 0 and is_dual(every[i]):
                fail(
                    operator.name,
                    f"{operator.names[i]} must not have a tangent, as writing has no derivative; got one that does",
                )
        for i in operator.written:
            if every[i] is None:
                if i in operator.optional:
                    continue
                fail(operator.name, f"{operator.names[i]} must be a tensor, got None")
            if every[i].is_inference() and not torch.is_inference_mode_enabled():
                fail(
                    operator.name,
                    f"{operator.names[i]} must not be an inference tensor outside of inference mode, got one",
                )
        with _AutoDispatchBelowADInplaceOrView():
            overload.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args)
        for i in operator.written:
            if every[i] is not None:
                increment_version(every[i])

    return write


def make_negative(operator: Any, overload: Any) -> Callable:
    def negative(*args: Any) -> None:
        """PyTorch's own fallback for views with a negative bit takes no operator that returns nothing."""
        plain = {id(t): t.resolve_neg() for t in args if isinstance(t, Tensor)}
        overload(*(plain.get(id(arg), arg) for arg in args))
        for i in operator.written:  # One that was left out, or is None, is not among these.
            if i < len(args) and id(args[i]) in plain and args[i].is_neg():
                args[i].copy_(plain[id(args[i])])

    return negative


def make_autocast(operator: Any, overload: Any, device: str) -> Callable:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device}"))
    device_type = device.lower()

    def autocast(*args: Any) -> Any:
        floating = [a for a in args if isinstance(a, Tensor) and a.is_floating_point() and a.device.type == device_type]
        dtype = torch.float32 if operator.declared.autocast == "float32" else torch.get_autocast_dtype(device_type)
        if operator.declared.autocast == "promote":
            for t in floating:
                dtype = torch.promote_types(dtype, t.dtype) if t is not floating[0] else t.dtype
        if not operator.written and not any(t.dtype == torch.float64 for t in floating):
            args = tuple(a.to(dtype) if any(a is t for t in floating) else a for a in args)
        with _ExcludeDispatchKeyGuard(keys):
            return overload(*args)

    return autocast


def make_function(operator: Any, backend: str | None, plain: Callable, base: Any = torch.autograd.Function) -> Any:
    """What applies the torch.autograd.Function whose values `plain` computes.

    That is PyTorch's own entry, without what Function.apply does for torch.func: it makes classes anew in each call. While a
    transform is active, PyTorch lets only a function of a single level pass there, which has another base. The methods are
    written out for the operator: on CUDA, backward runs on a thread whose core has little of Python in its caches, and each
    step of it takes longer there.
    """
    positions = {name: i for i, name in enumerate(operator.names)}
    results = [f"result{i}" for i in range(len(operator.schema.returns))]
    wanted = operator.taken if operator.backward else operator.names
    gradients = operator.differentiable_arguments if operator.differentiable else []
    arguments = [f"argument{i}" for i in range(len(operator.names))]
    grads = [f"grad{i}" for i in range(len(results))]
    # What the formula takes after the gradients: of it the context saves the tensors, and holds the numbers.
    saved: dict[str, str] = {}
    numbers: dict[str, str] = {}
    takes = []
    for name in wanted:
        if name in positions:  # Of the reference, whose arguments may have any name.
            takes.append(arguments[positions[name]])
            other = operator.declared.saved_for.get(name)
            if positions[name] not in operator.tensors:
                numbers[takes[-1]] = takes[-1]
                if "List" in operator.types[positions[name]]:  # Which the caller may change before the backward.
                    numbers[takes[-1]] = f"tuple({takes[-1]}) if isinstance({takes[-1]}, list) else {takes[-1]}"
            else:
                needed = f" if needs[{positions[other]}] else None" if other else ""
                saved[takes[-1]] = f"{takes[-1]}{needed}"
        elif name == "needs":
            takes.append("needs")
        else:
            takes.append(f"result{name.removeprefix('result') or 0}")
            saved[takes[-1]] = takes[-1]
    # Whose gradient may come in another of the shapes that the signature has. Autograd itself sums to that of an argument.
    patterns = {argument.name: argument.patterns for argument in operator.signature.arguments}
    shaped = [i for i in gradients if len(of := patterns[operator.names[i]]) > 1 or of[0].pack]
    shaped = [] if operator.signature.broadcasts else shaped

    unpack = f"{', '.join(results)} = results"
    keep = [unpack, "needs = ctx.needs_input_grad"]
    if not operator.differentiable:
        keep.append(f"ctx.mark_non_differentiable({', '.join(results)})")
    else:
        if saved:
            keep.append(f"ctx.save_for_backward({', '.join(saved.values())})")
        if shaped:
            shapes = (f"None if {arguments[i]} is None else {arguments[i]}.shape, " for i in shaped)
            keep.append(f"ctx.shapes = {''.join(shapes)}")
        if numbers:
            keep.append(f"ctx.numbers = {', '.join(numbers.values())},")
    # As of torch.gather, or of an embedding, of the result.
    back = [*(f"if {grad}.is_sparse: {grad} = {grad}.to_dense()" for grad in grads), "needs = ctx.needs_input_grad"]
    if saved:
        back.append(f"{', '.join(saved)}, = ctx.saved_tensors")
    if numbers:
        back.append(f"{', '.join(numbers)}, = ctx.numbers")
    back += [
        f"found = formula({', '.join(grads + takes)})",
        "if found is None or isinstance(found, Tensor): found = found,",
        f"if len(found) != {len(gradients)}: refuse(found)",
    ]
    if once := operator.declared.differentiable == "once":
        back.append(f"if is_grad_enabled(): found = once(found, {', '.join(grads + list(saved))})")
    back += [f"of{i} = found[{n}] if needs[{i}] else None" for n, i in enumerate(gradients)]
    for n, i in enumerate(shaped):
        back.append(
            f"if of{i} is not None and of{i}.shape != ctx.shapes[{n}]: of{i} = fit({i}, of{i}, ctx.shapes[{n}])"
        )
    back.append(f"return {', '.join(f'of{i}' if i in gradients else 'None' for i in range(len(arguments)))},")

    def refuse(found: Sequence) -> None:
        names = ", ".join(operator.names[i] for i in gradients)
        fail(operator.name, f"backward must return the gradients of {names}, got {len(found)} values")

    def fit(i: int, grad: Tensor, shape: Sequence[int]) -> Tensor:
        """A gradient of another shape than its argument. A reshape of any would hide one that is transposed."""
        name, got = operator.names[i], grad.shape
        # "B H | B 1 H"
        if len(patterns[name]) > 1 and [n for n in got if n != 1] == [n for n in shape if n != 1]:
            return grad.reshape(shape)
        if len(got) < len(shape) or any(n not in (1, m) for n, m in zip(shape[::-1], got[::-1])):
            want = f"a gradient of {name} of its shape, {tuple(shape)}"
            fail(operator.name, f"backward must return {want}, got {tuple(got)}")
        return grad  # Which autograd sums.

    def with_no_second(found: Sequence, *others: Any) -> list:
        given = [t for t in others if isinstance(t, Tensor)]
        return [None if grad is None else Once.apply(operator.name, grad, *given) for grad in found]

    formula = _within(backend, operator.backward or partial(_derivative_of_reference, operator))
    scope: dict[str, Any] = {
        "formula": torch.no_grad()(formula) if once else formula,
        "once": with_no_second,
        "refuse": refuse,
        "fit": fit,
    }
    scope |= {"Tensor": Tensor, "is_grad_enabled": torch.is_grad_enabled, "plain": plain}

    def written(head: str, *lines: str) -> Callable:
        return maker(f"<derivative of {operator.qualified}>", head, "\n".join(lines), *scope)(**scope)

    every = ", ".join(arguments)
    parts = {"forward": written(f"forward(ctx, {every})", f"results = plain({every})", *keep, "return results")}
    parts["backward"] = written(f"backward(ctx, {', '.join(grads)})", *back)
    body = {name: staticmethod(part) for name, part in parts.items()}
    Derivative: Any = new_class(f"{operator.name}_derivative", (base,), {}, lambda it: it.update(body))
    # The name in a profile, and of grad_fn.
    Derivative._backward_cls.__name__ = f"{operator.name}Backward"
    Derivative._backward_cls.apply = parts["backward"]  # Else PyTorch looks for it in each call.
    return super(base, Derivative).apply


class OfValue(torch.autograd.Function):
    """The derivatives of a result, with another value."""

    generate_vmap_rule = True

    @staticmethod
    def forward(result: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, of_result: Tensor, of_value: Tensor) -> Tensor:
        return of_result.clone()


class Once(torch.autograd.Function):
    """A gradient, and the tensors that it depends on: its own derivative is an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, grad: Tensor, *others: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        fail(ctx.name, "it has no second derivative, as it is declared with differentiable='once'")


def _derivative_of_reference(operator: Any, *args: Any) -> Any:
    """The gradients that autograd has of the reference, differentiable themselves."""
    from extension_cpp.ops import _sharding

    if not _sharding.is_sharded(args):
        return _differentiate_reference(operator, *args)
    try:
        return _differentiate_reference(operator, *args)
    except RuntimeError:  # DTensor has no rule for one of PyTorch's operators in it.
        return _sharding.on_each_device(partial(_differentiate_reference, operator), args)


def _differentiate_reference(operator: Any, *args: Any) -> Any:
    results = len(operator.schema.returns)
    grads, inputs = args[:results], list(args[results:])
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        for i in operator.differentiable_arguments:
            if inputs[i] is not None:  # A new name for it, which the gradient is taken of; the graph goes on behind it.
                inputs[i] = (
                    inputs[i].view_as(inputs[i]) if inputs[i].requires_grad else inputs[i].detach().requires_grad_()
                )
        outputs = operator.reference(*inputs)
        outputs = (outputs,) if results == 1 else outputs
        wanted = [inputs[i] for i in operator.differentiable_arguments if inputs[i] is not None]
        pairs = [(out, grad) for out, grad in zip(outputs, grads) if out.requires_grad and grad is not None]
        found = iter(
            torch.autograd.grad(
                [out for out, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                create_graph=again,
                allow_unused=True,
            )
            if pairs
            else [None] * len(wanted)
        )
        return tuple(None if inputs[i] is None else next(found) for i in operator.differentiable_arguments)


def _has_users_vmap(operator: Any, overload: Any) -> bool:
    """Whether somebody called torch.library.register_vmap for the operator, or registered its key in C++."""
    return overload is operator.default and operator.has_users_vmap()


def _batched(operator: Any, overload: Any, backend: str | None, layer: Any, args: Sequence[Any]) -> Any:
    """A call under torch.vmap, as torch.autograd.Function has it, which takes longer for this than most operators."""
    level = layer.level()
    # Those that a finished transform made hide a batch.
    args = [*map(alive, operator.all_arguments(args))]
    given, in_dims = zip(*[_unwrap_batched(arg, level) if isinstance(arg, Tensor) else (arg, None) for arg in args])
    is_batched = in_dims.count(None) < len(in_dims)
    if is_batched and _has_users_vmap(operator, overload):
        return overload.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched), *args)
    info = VmapInfo(layer.batchSize(), layer.randomness())
    state = pop_dynamic_layer_stack()  # What an interpreter's lower() does, in a fifth of the time.
    try:
        if not is_batched:
            return overload(*given)
        if operator.declared.vmap and info.batch_size:  # It reads shapes as the signature has them.
            _check_sample(operator, in_dims, given)
        found = _within(backend, _in_one_call)(operator, info, in_dims, *given)
    finally:
        push_dynamic_layer_stack(state)
    if found is None:  # PyTorch batches its operators.
        return _within(backend, operator.checked)(*args)
    results, out_dims = found
    if isinstance(results, Tensor):
        return results if out_dims is None else _add_batch_dim(results, out_dims, level)
    return tuple(t if dim is None else _add_batch_dim(t, dim, level) for t, dim in zip(results, out_dims))


def _batched_alike(operator: Any, layer: Any, args: Sequence[Any]) -> Any:
    """A call under torch.vmap of an elementwise operator whose tensors are of one shape and all batched along the first
    dimension: that of the batches. None for any other, which takes longer to look at than such a call.
    """
    if operator.written or operator.declared.vmap or not operator.signature.elementwise:
        return None
    level, shape, given = layer.level(), None, [*args]
    for i in operator.tensors:
        if i >= len(args) or args[i] is None:
            continue
        given[i], dim = _unwrap_batched(args[i], level)
        if dim != 0 or (shape is not None and given[i].shape != shape):
            return None
        shape = given[i].shape
    state = pop_dynamic_layer_stack()
    try:
        results = (operator.default if operator.declared.filled else operator.function)(*given)
    finally:
        push_dynamic_layer_stack(state)
    return _map_results(lambda t: _add_batch_dim(t, 0, level), results)


def _in_one_call(operator: Any, info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
    """The results and their batch dimensions: of one call where the declaration or the signature says how, of a call for
    each sample of what has no derivative, and else None."""
    if operator.declared.vmap and (found := operator.declared.vmap(info, in_dims, *args)) is not None:
        return found
    batched = {i: t for i, t in enumerate(args) if isinstance(t, Tensor)}
    outs = [0] * len(operator.schema.returns)
    if operator.signature.elementwise:
        moved = batch_first([in_dims[i] for i in batched], *batched.values())
        if not operator.signature.broadcasts:
            first, *others = (shape_of_one(t, in_dims[i]) for i, t in batched.items())  # Which may be symbols.
            if any(shape != first for shape in others):
                check_one(operator, in_dims, args)
            moved = list(torch.broadcast_tensors(*moved))
        return _call_with(operator, args, dict(zip(batched, moved))), outs[0] if len(outs) == 1 else tuple(outs)
    patterns = {}
    for argument, _ in operator.signature.tensors(args):
        i = operator.names.index(argument.name)
        if i in batched:
            dims = batched[i].dim() - (in_dims[i] is not None)
            patterns[i] = operator.signature.pattern_of(argument, dims)
            if dims < len(patterns[i].sizes):  # Then it has not the dimensions to merge.
                check_one(operator, in_dims, args)
    for name in operator.declared.independent.split():
        if not all(name in result.pattern.sizes for result in operator.signature.results):
            continue  # A sum over it would be one of the whole batch, not of its parts.
        with_it = [i for i, pattern in patterns.items() if name in pattern.sizes]
        if not all(i in with_it for i in batched if in_dims[i] is not None):
            continue
        size, merged = 0, {}
        for i in with_it:
            t, dim = args[i], in_dims[i]
            at = patterns[i].sizes.index(name) - len(patterns[i].sizes)  # from the last dimension
            t = t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0) if dim else t
            size = t.shape[at]
            merged[i] = t.movedim(0, at - 1).flatten(t.dim() + at - 1, t.dim() + at)
        found = _call_with(operator, args, merged)
        found = (found,) if isinstance(found, Tensor) else found
        split = []
        for t, result in zip(found, operator.signature.results):
            at = result.pattern.sizes.index(name) - len(result.pattern.sizes)
            split.append(t.unflatten(at, (info.batch_size, size)).movedim(at - 1, 0))
        return (split[0], 0) if len(outs) == 1 else (tuple(split), tuple(outs))
    if operator.signature.dynamic_size:
        fail(operator.name, "vmap needs results of one size, and its result has one that depends on values")
    if operator.differentiable:
        return None
    if not info.batch_size:  # The fake kernel knows the shapes of what no sample has computed.
        one = operator.fake(*_samples(in_dims, args))
        return _map_results(lambda t: t.new_empty((0, *t.shape)), one), outs[0] if len(outs) == 1 else tuple(outs)
    # The reference may need values, as PyTorch's batching has none; no derivative is lost.
    calls = [
        operator.default(*(arg if dim is None else arg.select(dim, n) for arg, dim in zip(args, in_dims)))
        for n in range(info.batch_size)
    ]
    return (torch.stack(calls), 0) if len(outs) == 1 else (tuple(map(torch.stack, zip(*calls))), tuple(outs))


def shape_of_one(t: Tensor, dim: int | None) -> tuple[int, ...]:
    """The shape of a sample."""
    return tuple(t.shape if dim is None else t.shape[:dim] + t.shape[dim + 1 :])


def check_one(operator: Any, in_dims: Sequence[int | None], args: Sequence[Any]) -> None:
    """Raise for shapes of the samples that the signature refuses, of a batch of any size."""
    operator.signature.check(_samples(in_dims, args))


def _samples(in_dims: Sequence[int | None], args: Sequence[Any]) -> list[Any]:
    """Arguments as a sample of a batch has them, of any size, without values."""
    return [t.new_empty(shape_of_one(t, dim)) if isinstance(t, Tensor) else t for t, dim in zip(args, in_dims)]


def _check_sample(operator: Any, in_dims: Sequence[int | None], args: Sequence[Any]) -> None:
    """Raise for samples that the signature refuses. It isn't asked again about what it has accepted."""
    described = []
    for arg, dim in zip(args, in_dims):
        if type(arg) is Tensor and arg.layout is torch.strided and not arg.is_nested:
            described.append((arg.shape, dim, arg.dtype, arg.device))
        elif arg is None or type(arg) in (bool, int, float):
            described.append(arg)
    known = tuple(described)
    if known in operator.accepted and len(known) == len(args):
        return
    operator.signature.check([arg if dim is None else arg.select(dim, 0) for arg, dim in zip(args, in_dims)])
    if len(known) == len(args) and len(operator.accepted) < 1000:
        operator.accepted.add(known)


def _call_with(operator: Any, args: Sequence[Any], changed: dict[int, Tensor]) -> Any:
    return operator.default(*(changed.get(i, arg) for i, arg in enumerate(args)))


def refuse_for_number(op: str, name: str, given: Tensor) -> None:
    """Raise for a tensor in place of a number, if its derivative would be lost, or it has a value for each sample."""
    if given.requires_grad:
        fail(op, f"{name} must be a number, got a tensor that requires a gradient, of which it would get none")
    if is_dynamo_compiling():
        return
    if is_dual(given):
        fail(op, f"{name} must be a number, got a tensor that has a tangent, which would be lost")
    if is_batchedtensor(given) or is_gradtrackingtensor(given):
        fail(op, f"{name} must be a number, got a tensor whose value a transform of torch.func keeps")


def is_dual(value: Any) -> bool:
    return isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None


def alive(value: Any) -> Any:
    """In place of a tensor of a transform that is over, whose own graph leads nowhere, the one that it wraps."""
    return unwrap_if_dead(value) if isinstance(value, Tensor) else value


def primal_of(value: Any) -> Any:
    return forward_ad.unpack_dual(value).primal if isinstance(value, Tensor) else value


def _within(backend: str | None, function: Callable) -> Callable:
    if backend is None:
        return function

    @wraps(function)
    def run(*args: Any) -> Any:
        with _backends.use_backend(backend):
            return function(*args)

    return run


def batch_first(in_dims: Sequence[int | None], *tensors: Tensor) -> list[Tensor]:
    """For vmap: tensors whose batch is their first dimension and which broadcast as their elements do."""
    first = [t if not dim else t.movedim(dim, 0) for t, dim in zip(tensors, in_dims)]
    dims = max(t.dim() - (dim is not None) for t, dim in zip(first, in_dims))
    return [
        t if dim is None or t.dim() > dims else t.reshape(t.shape[0], *(1,) * (dims + 1 - t.dim()), *t.shape[1:])
        for t, dim in zip(first, in_dims)
    ]
