"""What benchmarks of several families share: inputs, and what contenders are made of."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import OURS, Case, Clock, Function, time_calls

DTYPES = (torch.float32, torch.bfloat16)
# Why a peer is faster, where it is.
CALL = "the stable ABI boxes the arguments of a call, which takes about half a microsecond that PyTorch's own operators don't"
COLD = (
    "a call runs about twice as many instructions as PyTorch's own, in Python and to box arguments: a microsecond more, but "
    "up to twenty where the operands have displaced the code from the caches"
)
RECORD = "a call that records a gradient is checked in Python, for a microsecond or more, and PyTorch's own in C++"
VMAP = (
    "an operator's rule for vmap runs in Python, some microseconds longer than those of PyTorch's own operators in C++"
)
NODE = "the derivative is a node in Python, which takes longer on the thread of the backward than PyTorch's in C++"

# What none but PyTorch's own can be faster than.
BOXED, RECORDED = "PyTorch's, boxed", "PyTorch's, boxed, a node in Python"
# An overload of PyTorch's, and its derivative, a function of the gradient and the arguments.
Least = tuple[Any, Function]


def dtypes_of(operator: Any) -> tuple[torch.dtype, ...]:
    """Those of DTYPES that an operator takes, or the first that it takes."""
    taken = operator.signature.dtypes
    return tuple(dtype for dtype in DTYPES if dtype in taken) or taken[:1]


def sizes(device: str, dtype: torch.dtype) -> tuple[int, ...]:
    """Logarithms of the numbers of elements."""
    if device == "cuda":
        return (10, 16, 20, 24, 28)
    return (10, 16, 20) if dtype == torch.float32 else (16, 20)


def vectors(device: str, dtype: torch.dtype, n: int, count: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randn(n, device=device).to(dtype) for _ in range(count))


def compiled(function: Function) -> Function:
    """torch.compile for the exact shapes of a case, which gives the fastest code."""
    return torch.compile(function, dynamic=False)


@cache
def compiled_cpp(source: str, *flags: str) -> ctypes.CDLL:
    """C++ for this machine; OSError or CalledProcessError where it has no compiler."""
    folder = Path(tempfile.mkdtemp())
    (folder / "made.cpp").write_text(source)
    command = ["c++", "-O3", *flags, "-shared", "-fPIC", "-o", "made.so", "made.cpp"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return ctypes.CDLL(str(folder / "made.so"))


def backward(function: Function) -> Function:
    """A step of training: (grad, *inputs) to the gradients of those inputs that require one."""

    def step(grad: Tensor, *inputs) -> list[Tensor | None]:
        leaves = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
        for leaf in leaves:
            leaf.grad = None
        function(*inputs).backward(grad)
        return [leaf.grad for leaf in leaves]

    return step


def in_calling_thread(step: Function) -> Function:
    """A step of training whose backward stays in the thread that calls it: else autograd has a thread for each GPU."""

    def run(*inputs) -> object:
        with torch.autograd.set_multithreading_enabled(False):
            return step(*inputs)

    return run


def graphed(function: Function) -> Function:
    """The same work as one CUDA graph: the device's time without Python's. Captured again for other inputs."""
    captured: dict = {"inputs": None}

    def run(*inputs) -> object:
        if captured["inputs"] is None or any(x is not y for x, y in zip(captured["inputs"], inputs)):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    function(*inputs)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = function(*inputs)
            captured.update(inputs=inputs, graph=graph, results=results)
        captured["graph"].replay()
        return captured["results"]

    return run


def boxed(overload: Any) -> Function:
    """One of PyTorch's operators by the entry that ours have: how much of a call is the boxing."""
    return lambda *args: torch._C._dispatch_call_boxed(overload._handle, *args)


def in_python(forward: Function, derivative: Function) -> Function:
    """The least that a node in Python does: a function of the arguments, which it saves for the derivative. By PyTorch's own
    entry, as ours, without what Function.apply does for torch.func."""

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Tensor) -> Tensor:
            ctx.save_for_backward(*args)
            return forward(*args)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return derivative(grad, *ctx.saved_tensors)

    return super(torch.autograd.Function, Node).apply


class Passing(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def calls(
    op: str, device: str, function: Function, eager: Function, inputs: Callable[[], tuple], least: Least | None = None
) -> Iterator[Case]:
    """A call by the ways to an operator other than the shortest, of tensors so small that nothing but the call takes time."""
    ways: dict[str, Callable[[], AbstractContextManager]] = {
        "": nullcontext,
        "of parameters under no_grad": torch.no_grad,
        "under set_default_device": lambda: torch.device(device),
        "in a dispatch mode": Passing,
    }
    shapes = " and ".join(" by ".join(map(str, t.shape)) for t in inputs())
    for (way, context), records in product(ways.items(), (False, True)):
        if context is torch.no_grad if records else not way:
            continue
        needs_grad = records or context is torch.no_grad

        def timer(function: Callable[[], object], clock: Clock, context: Callable = context) -> float:
            with context():
                return time_calls(function, clock)

        contenders = {OURS: function, "PyTorch's": eager}
        if least is not None:
            overload, derivative = least
            entry = boxed(overload)
            contenders |= {RECORDED: in_python(entry, derivative)} if records else {BOXED: entry}
        yield Case(
            op,
            device,
            contenders,
            lambda needs_grad=needs_grad: tuple(Parameter(t) if needs_grad else t for t in inputs()),
            eager,
            workload="a call that records a gradient" if records else "a call",
            size=", ".join(part for part in (shapes, way) if part),
            timer=timer,
            reason=RECORD if records else CALL,
        )


def training_steps(
    op: str, device: str, function: Function, eager: Function, inputs: Callable[[], tuple], least: Least
) -> Iterator[Case]:
    """A training step of tensors so small that nothing but the calls and the nodes takes time: PyTorch's own, what the
    boxing adds to it, and what a node in Python adds to that, with the backward pass in its own thread and in this one."""
    overload, derivative = least
    entry = boxed(overload)
    contenders = {OURS: function, "PyTorch's": eager, BOXED: entry, RECORDED: in_python(entry, derivative)}
    shapes = " and ".join(" by ".join(map(str, t.shape)) for t in inputs())

    def given() -> tuple[Tensor, ...]:
        leaves = tuple(Parameter(t) for t in inputs())
        return torch.ones_like(eager(*inputs())), *leaves

    in_threads: dict[str, Callable[[Function], Function]] = {"": backward}
    if device == "cuda":  # Whose backward pass has a thread of its own.
        in_threads["in the calling thread"] = lambda call: in_calling_thread(backward(call))
    for thread, step in in_threads.items():
        yield Case(
            op,
            device,
            {name: step(call) for name, call in contenders.items()},
            given,
            step(eager),
            workload="a training step",
            size=", ".join(part for part in (shapes, thread) if part),
            timer=time_calls,
            reason=RECORD,
        )


def batched_call(op: str, device: str, function: Function, eager: Function, inputs: Callable[[], tuple]) -> Case:
    """A call under vmap of tensors so small that nothing but the call takes time."""
    both = {OURS: torch.vmap(function), "vmap of PyTorch's": torch.vmap(eager)}
    size = " and ".join(" by ".join(map(str, t.shape)) for t in inputs())
    described = {"workload": "a call under vmap", "size": size, "timer": time_calls, "reason": VMAP}
    return Case(op, device, both, inputs, torch.vmap(eager), **described)


def elementwise_cases(
    function: Any, arguments: Callable[..., tuple] = lambda *tensors: tensors, tensors: int = 1
) -> Callable[[str], Iterator[Case]]:
    """The cases of an elementwise operator of this package, next to its reference, eager and compiled.

    Args:
        function: the public function.
        arguments: makes its arguments of vectors.
        tensors: how many of them.
    """
    operator = function.operator

    def returning(call: Function) -> Function:
        """What a call has computed: its result, or what it wrote."""

        def run(*vectors: Tensor) -> object:
            given = arguments(*vectors)
            result = call(*given)
            return given[operator.written[0]] if operator.written else result

        return run

    ours, eager = returning(function), returning(operator.reference)

    @cache
    def make() -> Function:
        return compiled(eager)

    def when_called(*vectors: Tensor) -> object:
        """Not before: PyTorch's compiler takes seconds to import, and the short form has no use for it."""
        return make()(*vectors)

    # torch.compile takes no result of a size that it can't know.
    peers = {"eager": eager} | ({} if operator.signature.dynamic_size else {"compiled": when_called})
    moved = tensors + (len(operator.written) or len(operator.signature.results))

    def cases(device: str) -> Iterator[Case]:
        for dtype in dtypes_of(operator):
            for log2 in sizes(device, dtype):
                n = 2**log2
                yield Case(
                    operator.name,
                    device,
                    {OURS: ours, **peers},
                    vectors(device, dtype, n, tensors),
                    eager,
                    dtype=dtype,
                    size=f"2^{log2}",
                    x=n,
                    bytes=moved * dtype.itemsize * n,
                    operations=n if dtype.is_floating_point else 0,  # No limit of integers is measured.
                    short=log2 == 20,
                )

    return cases


ROWS = {"cpu": ((64, 1024), (4096, 1024), (1024, 16384)), "cuda": ((4096, 1024), (4096, 16384), (65536, 4096))}


def row_cases(
    function: Any,
    arguments: Callable[[Tensor], tuple] = lambda x: (x,),
    peers: dict[str, Function] | None = None,
    passes: tuple[int, int] = (2, 5),
    compiles: bool = True,
) -> Callable[[str], Iterator[Case]]:
    """The cases of a row-wise operator of this package, next to its reference, eager and compiled, forward and backward.

    Args:
        function: the public function.
        arguments: makes its arguments of rows.
        peers: other functions of these.
        passes: how often rows are read or written, forward and in both.
        compiles: whether the compiled reference is one of its peers.
    """
    operator = function.operator
    eager = operator.reference

    @cache
    def make() -> Function:
        return compiled(eager)

    when_called = {"compiled": lambda *args: make()(*args)} if compiles else {}
    contenders = {OURS: function, "eager": eager, **when_called, **(peers or {})}

    def cases(device: str) -> Iterator[Case]:
        for dtype, (rows, size) in product(dtypes_of(operator), ROWS[device]):

            def inputs(dtype: torch.dtype = dtype, rows: int = rows, size: int = size) -> tuple:
                return arguments(torch.randn(rows, size, device=device).to(dtype))

            def training(inputs: Callable[[], tuple] = inputs) -> tuple:
                leaves = tuple(t.detach().clone().requires_grad_() if isinstance(t, Tensor) else t for t in inputs())
                return torch.randn_like(eager(*inputs())), *leaves

            described = {"dtype": dtype, "size": f"{rows} x {size}", "short": (rows, size) == ROWS["cpu"][0]}
            moved = dtype.itemsize * rows * size
            yield Case(operator.name, device, contenders, inputs, eager, bytes=passes[0] * moved, **described)
            both = {name: backward(who) for name, who in contenders.items()}
            yield Case(
                operator.name,
                device,
                both,
                training,
                backward(eager),
                workload="forward and backward",
                bytes=passes[1] * moved,
                tolerance=torch.finfo(dtype).eps * 32 * (1 + rows**0.5),  # Of a sum over rows.
                **described,
            )

    return cases
