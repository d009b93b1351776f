"""Times an operator and its peers in one run.

Contenders take turns, so that a noisy machine moves all of them, and a round's ratio says more than its times. Each is
compared with the operator's reference before it is timed. A time is the median over the rounds, with its quartiles. A case
declares its bytes and operations, so that every time is also a fraction of what the machine can do (`limits`). On CUDA
triton's do_bench flushes the L2 cache before each call; on the CPU inputs and results rotate through more memory than its
caches hold. Every function that measures takes the clock as an argument.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

OURS = "extension_cpp"
PART, COPY = "a part of ours", "a copy of as many bytes"  # Timed with the contenders, and none of them.
ROUNDS = 7
SECONDS = 1.5  # A case that would take longer gets fewer rounds, but three.
TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 2e-5, torch.float64: 1e-10}

Function = Callable[..., Any]
Clock = Callable[[], float]


class Unavailable(Exception):
    """What a case needs is not on this machine."""


class Disagreement(Exception):
    """A contender computes something else than the reference."""


@dataclass
class Case:
    """One thing to time: what it is called, who computes it, and what it must move and compute."""

    op: str
    device: str
    contenders: Mapping[str, Function]
    """Who computes it, each a function of the inputs; the first is ours. Peers that are compiled have names that begin
    with "compiled", CUDA graphs names that end in "graph"."""
    inputs: Callable[[], tuple] = tuple
    """Makes the arguments of the contenders; called when the case's turn has come, more than once if inputs rotate."""
    reference: Function | None = None
    """The operator's plain PyTorch, on the same inputs; None where there is no result to compare."""
    workload: str = "forward"
    """What is timed of the operator: "forward and backward", "strided"."""
    dtype: torch.dtype | None = None
    size: str = ""
    """What else tells this case from others of its workload: its shape, its layout."""
    x: float | None = None
    """Its place on the picture's axis of sizes; None leaves it out of curves."""
    axis: str = "elements"
    """What x counts."""
    draw: str = "bandwidth"
    """What its curve shows: "bandwidth", "rate" (of operations) or "time"."""
    bytes: int = 0
    operations: int = 0
    part: Function | None = None
    """What can't be left out of the work, of the same inputs: a sort, the chain of a recurrence. Its time is a limit too, as
    that of the bytes and of the operations is."""
    tolerance: float | None = None
    """How far from the reference a contender may be, relative and absolute; that of the dtype where None."""
    reason: str = ""
    """Why it can't be as fast as the best peer, in a sentence, where it isn't."""
    timer: Callable[[Callable[[], object], Clock], float] | None = None
    """Seconds (or whatever the unit is) a call; the device's own timer where None."""
    unit: str = "s"
    rounds: int = ROUNDS
    short: bool = False
    """Whether it belongs to the short form that `.ci/run` runs."""
    threads: int | None = None
    """How many the CPU uses; as many as the whole run where None."""

    @property
    def name(self) -> str:
        return ", ".join(part for part in (self.workload, dtype_name(self.dtype), self.size) if part)


@dataclass
class Grid:
    """Very many sizes of an operator, each timed briefly next to one peer: it finds the worst of all sizes, not of those
    that somebody thought of."""

    op: str
    device: str
    dtype: torch.dtype
    axes: tuple[str, ...]
    """What the sizes are called."""
    values: tuple[int, ...]
    """Those of every axis."""
    ours: Function
    peer: tuple[str, Function]
    inputs: Callable[..., tuple]
    """Makes the arguments, of a size of each axis."""
    fits: Callable[..., bool] = lambda *sizes: True
    """Whether sizes are measured: not what takes too long or too much memory."""
    tolerance: Callable[..., float] = lambda *sizes: 0.0
    """How far the two results may be apart, relative to the largest."""
    reason: Callable[..., str] = lambda *sizes: ""
    """Why the peer is faster, where it is."""
    layout: str = ""
    """How the arguments lie in memory, where they aren't contiguous."""
    short: bool = False
    bytes: int = 0
    operations: int = 0

    @property
    def name(self) -> str:
        return f"a grid of {', '.join(filter(None, (*self.axes, dtype_name(self.dtype), self.layout)))}"


def dtype_name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.") if dtype else ""


def short_form(cases: Iterable[Case | Grid]) -> Iterator[Case]:
    """The cases of the short form. On the CPU they have one thread: two wait for each other whenever another process runs,
    for milliseconds, and a core stays free for that process.
    """
    for case in cases:
        if isinstance(case, Grid) or not case.short:
            continue
        # A compiled peer takes longer to compile than the others to measure.
        quick = {name: who for name, who in case.contenders.items() if not name.startswith("compiled")}
        case = replace(case, contenders=quick if len(quick) > 1 else case.contenders)
        if case.device == "cpu":
            case = replace(case, size=", ".join(filter(None, (case.size, "one thread"))), x=None, threads=1)
        yield case


# Timers: seconds a call, by torch.utils.benchmark and triton.testing.


def once(function: Callable[[], object], clock: Clock) -> float:
    start = clock()
    function()
    return clock() - start


def many(function: Callable[[], object], calls: int, clock: Clock) -> float:
    timer = Timer("function()", globals={"function": function}, timer=clock, num_threads=torch.get_num_threads())
    return timer.timeit(calls).median


def time_cpu(function: Callable[[], object], clock: Clock) -> float:
    """Over as many calls as fit into 10 ms. A call that takes longer is timed once, without the calls that Timer adds."""
    first = once(function, clock)
    return first if first > 0.01 else many(function, min(10_000, int(0.01 / max(first, 1e-9))), clock)


def time_cuda(function: Callable[[], object], clock: Clock) -> float:
    """On the device, between events, with the L2 cache flushed before each call. A call that takes longer than 10 ms is
    timed once, without the seven calls that do_bench adds at least; the cache doesn't matter to it.
    """
    from triton.testing import do_bench

    torch.cuda.synchronize()
    first = once(lambda: (function(), torch.cuda.synchronize()), clock)
    return first if first > 0.01 else do_bench(function, warmup=3, rep=10, return_mode="median") / 1e3


def time_calls(function: Callable[[], object], clock: Clock) -> float:
    """As Python sees it, device included, of many calls in a row."""
    return many(function, 2_000, clock)


def reported(function: Callable[[], object], clock: Clock) -> float:
    """What the function itself reports, of something that runs in another process."""
    value = function()
    assert isinstance(value, float)
    return value


# Measuring.


def results_of(returned: object) -> list[Tensor]:
    return [returned] if isinstance(returned, Tensor) else list(returned)  # type: ignore[call-overload]


def verify(case: Case, inputs: tuple) -> None:
    """Compare every contender with the reference; Disagreement names the one that computes something else."""
    if case.reference is None:
        return
    # On copies, so that what one writes into its arguments doesn't count for the next.
    expected = [t.detach() for t in results_of(case.reference(*deepcopy(inputs)))]
    for name, function in case.contenders.items():
        for got, want in zip(results_of(function(*deepcopy(inputs))), expected, strict=True):
            tolerance = TOLERANCES.get(want.dtype, 0.0)
            if case.tolerance is not None and want.is_floating_point():
                tolerance = case.tolerance
            try:
                for part, expected_part in parts(got.detach(), want):
                    bounds = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
                    alike = part.shape == expected_part.shape and part.dtype == expected_part.dtype
                    if not (alike and torch.allclose(part, expected_part, **bounds)):  # assert_close imports DTensor.
                        torch.testing.assert_close(part, expected_part, **bounds)
            except AssertionError as error:
                where = f"{case.op}: {case.name} on {case.device}: {name} is not what the reference computes"
                raise Disagreement(f"{where}\n{error}") from None


def parts(got: Tensor, want: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """On the CPU, parts that are compared in its cache: whole tensors would take longer than all measuring."""
    if got.shape != want.shape or got.device.type != "cpu":
        return [(got, want)]
    return zip(got.flatten().split(2**20), want.flatten().split(2**20))


def cache_bytes() -> int:
    """The CPU's last-level cache."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) * {"K": 2**10, "M": 2**20}[size[-1]] for size in sizes), default=2**25)


def input_sets(case: Case, inputs: tuple, clock: Clock) -> list[tuple]:
    """The inputs and, on the CPU, so many copies that they don't stay in its caches."""
    if case.device != "cpu" or not case.bytes:
        return [inputs]
    ours = next(iter(case.contenders.values()))
    seconds = max(once(lambda: ours(*inputs), clock), 1e-9)
    # Four times the cache: with twice as much, a third of it was still found there. Not more than a thousand sets, or the
    # tensors' own descriptions would no longer be in the cache, where those of a program's few tensors are; nor more than
    # 50 ms take, as what is slow doesn't wait for memory.
    copies = min(4 * cache_bytes() // case.bytes, int(0.05 / seconds), 1_000)
    return [inputs, *(deepcopy(inputs) for _ in range(copies))]


def rotated(function: Function, sets: list[tuple]) -> Callable[[], object]:
    """A call on the next inputs. A result lives until its inputs' next turn, so that its memory rotates too."""
    if len(sets) == 1:
        return lambda: function(*sets[0])
    slots = itertools.cycle([(inputs, [None]) for inputs in sets])

    def call() -> None:
        inputs, kept = next(slots)
        kept[0] = function(*inputs)

    return call


def alternate(calls: dict[str, Callable[[], object]], timer: Callable, rounds: int) -> dict[str, list[float]]:
    """Times by contender, a value a round; every other round in reverse, so that none always follows the same one."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name in reversed(calls) if i % 2 else calls:
            times[name].append(timer(calls[name]))
    return times


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return low, middle, high


@contextmanager
def using(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def flushed(function: Callable[[], object], flush: Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Events around a call, with the L2 cache flushed before it."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # Twice, so that the device is busy until the host has prepared the call.
    flush.zero_()
    flush.zero_()
    start.record()
    function()
    end.record()
    return start, end


def time_in_turn(calls: dict[str, Callable[[], object]], device: str, clock: Clock) -> list[float]:
    """Seconds a call of each, the least of few rounds: what disturbs a call only adds."""
    rounds = 4
    if device == "cpu":
        return [min(values) for values in alternate(calls, lambda call: time_cpu(call, clock), rounds).values()]
    flush = torch.empty(2**28, dtype=torch.uint8, device=device)
    events = [[flushed(call, flush) for call in calls.values()] for _ in range(rounds)]
    torch.cuda.synchronize()
    times = [[start.elapsed_time(end) / 1e3 for start, end in of_round] for of_round in events]
    return [min(of_call) for of_call in zip(*times)]


def measure_grid(grid: Grid, clock: Clock) -> dict:
    """A record of all cells: their times in the order of the axes, the last of which is the fastest; None where a size
    isn't measured. And of those where the peer is faster, by the reason that the grid declares."""
    named, peer = grid.peer
    cells = list(itertools.product(grid.values, repeat=len(grid.axes)))
    times: dict[tuple[int, ...], list[float]] = {}
    # Twice, as a machine that is busy for some milliseconds disturbs all rounds of a cell.
    for sizes in [*cells, *cells]:
        if not grid.fits(*sizes):
            continue
        torch.manual_seed(0)
        inputs = grid.inputs(*sizes)
        got, want = grid.ours(*inputs), peer(*inputs)
        if sizes not in times:
            most = want.abs().max().double()
            apart = (got - want).abs_().max().double()
            if not (got.dtype == want.dtype and apart <= grid.tolerance(*sizes) * most):  # NaN neither
                where = ", ".join(f"{axis} = {size}" for axis, size in zip(grid.axes, sizes))
                raise Disagreement(f"{grid.op}: {grid.name} on {grid.device}, {where}: not what {named} computes")
        del got, want
        calls = {OURS: partial(grid.ours, *inputs), named: partial(peer, *inputs)}
        pair = time_in_turn(calls, grid.device, clock)
        times[sizes] = [short(min(both)) for both in zip(pair, times.get(sizes, pair))]
    described = {"op": grid.op, "case": grid.name, "workload": "grid", "dtype": dtype_name(grid.dtype), "bytes": 0}
    described |= {"operations": 0, "unit": "s", "contender": named}
    ours, theirs = ([times[sizes][which] if sizes in times else None for sizes in cells] for which in (0, 1))
    reasons: dict[str, list[tuple[int, ...]]] = {}
    for sizes, (our_time, peer_time) in times.items():
        if peer_time < our_time and (reason := grid.reason(*sizes)):
            reasons.setdefault(reason, []).append(sizes)
    measured = {"ours": ours, "theirs": theirs, "reasons": reasons}
    return described | {"axes": grid.axes, "values": grid.values, **measured}


def measure(case: Case | Grid, clock: Clock = time.perf_counter) -> list[dict]:
    """Verify a case and time it; a record a contender, ours first. A grid has one record."""
    if isinstance(case, Grid):
        return [measure_grid(case, clock)]
    with using(case.threads or torch.get_num_threads()):
        return summarise(case, times_of(case, clock))


def times_of(case: Case, clock: Clock) -> dict[str, list[float]]:
    if "torch._dynamo" in sys.modules:  # Else nothing is compiled, and this would import it.
        torch.compiler.reset()  # Compiled peers are compiled for this case's shapes, not for any.
    torch.manual_seed(0)
    inputs = case.inputs()
    verify(case, inputs)
    sets = input_sets(case, inputs, clock)
    functions = {**case.contenders, **({PART: case.part} if case.part else {})}
    calls = {name: rotated(function, sets) for name, function in functions.items()}
    if case.device == "cpu" and case.bytes:  # Others use the memory too: at times it is faster by half.
        copied = [(torch.ones(case.bytes // 8), torch.empty(case.bytes // 8)) for _ in sets]
        calls[COPY] = rotated(lambda source, target: target.copy_(source), copied)
    for call in calls.values() if len(sets) > 1 else ():
        start = clock()
        # The first results take fresh memory, which may cost more than the work, until the allocator knows how much to keep.
        for _ in range(5 * len(sets)):
            call()
            if clock() - start > 0.5:
                break
    chosen = case.timer or (time_cuda if case.device == "cuda" else time_cpu)
    rounds = case.rounds

    def timer(call: Callable[[], object]) -> float:
        return chosen(call, clock)

    if rounds > 1 and chosen is not reported:  # Another process is warm or isn't, whatever ran before.
        start = clock()
        first = alternate(calls, timer, 1)  # warm-up
        rounds = max(3, min(rounds, int(SECONDS / max(clock() - start, 1e-9))))
        if rounds == 3 and case.device == "cpu":  # What takes so long was warm once its result was compared.
            rest = alternate(calls, timer, 2)
            return {name: first[name] + rest[name] for name in calls}
    return alternate(calls, timer, rounds)


def summarise(case: Case, times: dict[str, list[float]]) -> list[dict]:
    """Medians and quartiles, of the times and of a round's ratio to our time."""
    records = []
    limits = {key: short(min(times[name])) for key, name in (("part", PART), ("copy", COPY)) if name in times}
    times = {name: values for name, values in times.items() if name not in (PART, COPY)}
    ours = times[next(iter(times))]
    described = {
        "op": case.op,
        "case": case.name,
        "workload": case.workload,
        "dtype": dtype_name(case.dtype),
        "size": case.size,
        **({"x": case.x, "axis": case.axis, "draw": case.draw} if case.x is not None else {}),
        **({"threads": case.threads} if case.threads else {}),
        "bytes": case.bytes,
        "operations": case.operations,
        **limits,
        "unit": case.unit,
        **({"reason": case.reason} if case.reason else {}),
    }
    for name, values in times.items():
        low, middle, high = map(short, quartiles(values))
        measured = {"rounds": len(values), "best": short(min(values)), "median": middle, "quartiles": [low, high]}
        record = {**described, "contender": name, **measured}
        if values is not ours:
            low, middle, high = map(short, quartiles([theirs / mine for theirs, mine in zip(values, ours)]))
            record |= {"ratio": middle, "ratio_quartiles": [low, high]}
        records.append(record)
    return records


def short(value: float) -> float:
    return float(f"{value:.5g}")
