"""Times an operator beside its peers in one run and writes what it saw.

Contenders take turns, so that a noisy machine moves all of them; each is checked against the first before it is timed;
a time is the median over the rounds, with the quartiles beside it. Bytes and operations are declared with a case, so that
every time is also a fraction of what a plain copy reaches in the same run.
"""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.utils.benchmark import Timer

import extension_cpp

RESULTS = Path(__file__).parent / "results"
SCHEMA = 1
ROUNDS = 7
OURS = "extension_cpp"


@dataclass
class Case:
    """One thing to time: what it is called, who computes it, and what it must move and compute."""

    op: str
    name: str
    device: str
    contenders: Callable[[], dict[str, Callable[[], object]]]
    """Makes the inputs and returns the contenders; the first is ours. Called when the case's turn has come."""
    bytes: int = 0
    operations: int = 0
    compare: bool = True
    """Whether the contenders return something to compare."""
    timer: Callable[[Callable[[], object]], float] | None = None
    """Seconds a call; the device's own timer where None."""
    rounds: int = ROUNDS


def time_cpu(function: Callable[[], object]) -> float:
    """Seconds a call."""
    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    once = timer.timeit(1).median
    return timer.timeit(max(1, min(20_000, int(0.03 / once)))).median


def time_cuda(function: Callable[[], object]) -> float:
    """Seconds a call on the device, with the L2 cache flushed before each."""
    from triton.testing import do_bench

    return do_bench(function, warmup=5, rep=20, return_mode="median") / 1e3


def time_reported(function: Callable[[], object]) -> float:
    """Seconds that the function itself reports, of something that runs in another process."""
    seconds = function()
    assert isinstance(seconds, float)
    return seconds


def time_calls(function: Callable[[], object]) -> float:
    """Seconds a call as Python sees it, device included, of many in a row."""
    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    return timer.timeit(5_000).median


def measure(case: Case) -> Iterator[dict]:
    """Time a case; yields one record a contender."""
    contenders = case.contenders()
    if case.compare:
        (_, ours), *peers = contenders.items()
        for _, peer in peers:
            torch.testing.assert_close(ours(), peer(), rtol=2e-2, atol=2e-2)
    timer = case.timer or (time_cuda if case.device == "cuda" else time_cpu)
    if case.rounds > 1:
        for function in contenders.values():
            timer(function)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(case.rounds):
        for name, function in contenders.items():
            times[name].append(timer(function))
    for name, seconds in times.items():
        low, median, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
        yield {
            "op": case.op,
            "case": case.name,
            "device": case.device,
            "contender": name,
            "median_us": round(median * 1e6, 3),
            "quartiles_us": [round(low * 1e6, 3), round(high * 1e6, 3)],
            "bytes": case.bytes,
            "operations": case.operations,
        }


def copy_case(device: str) -> Case:
    """The machine's limit: bytes read and written by a plain copy."""
    n = 2**28 if device == "cuda" else 2**26

    def contenders():
        source = torch.randn(n, device=device)
        target = torch.empty_like(source)
        return {"copy": lambda: target.copy_(source)}

    return Case("copy", f"float32 2^{n.bit_length() - 1}", device, contenders, bytes=8 * n, compare=False)


def machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    described = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":")[1].strip() for line in described if line.startswith("model name")]
    return f"{torch.get_num_threads()} cores of {models[0] if models else platform.processor()}"


def provenance(device: str) -> dict:
    """What a result depends on."""
    root = Path(__file__).parent.parent
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True)
    libraries = sorted(Path(extension_cpp.__file__).parent.glob("_C*.so"))
    return {
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "machine": machine(device),
        "commit": git.stdout.strip(),
        "libraries": {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in libraries},
        "extension_cpp": extension_cpp.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def run(name: str, device: str, cases: list[Case], save: bool, console: Console) -> list[dict]:
    """Time all cases on a device, print the table, and write benchmarks/results/<name>-<device>.jsonl."""
    records = []
    for case in track([copy_case(device), *cases], f"{name} on {device}", console=console, transient=True):
        records += measure(case)
    limit = next(r["bytes"] / r["median_us"] for r in records if r["contender"] == "copy")
    console.print(table(f"{name}, {machine(device)}, a copy moves {limit / 1e3:.1f} GB/s", records, limit))
    if save:
        RESULTS.mkdir(exist_ok=True)
        lines = [json.dumps(provenance(device)), *map(json.dumps, records)]
        (RESULTS / f"{name}-{device}.jsonl").write_text("\n".join(lines) + "\n")
    return records


def table(title: str, records: list[dict], limit: float) -> Table:
    """A row a case: our time, what share of the copy's bandwidth that is, and how many times longer each peer takes."""
    result = Table(title=title, title_justify="left")
    for column in ("operator", "case"):
        result.add_column(column)
    for column in ("ours", "of copy"):
        result.add_column(column, justify="right")
    result.add_column("times ours")
    cases = dict.fromkeys((r["op"], r["case"]) for r in records if r["op"] != "copy")
    for op, name in cases:
        of_case = [r for r in records if (r["op"], r["case"]) == (op, name)]
        ours, *peers = of_case
        share = f"{ours['bytes'] / ours['median_us'] / limit:.0%}" if ours["bytes"] else ""
        ratios = ", ".join(f"{p['contender']} {p['median_us'] / ours['median_us']:.2f}" for p in peers)
        result.add_row(op, name, readable(ours["median_us"]), share, ratios)
    return result


def readable(us: float) -> str:
    for unit, scale in (("s", 1e6), ("ms", 1e3)):
        if us >= scale:
            return f"{us / scale:.2f} {unit}"
    return f"{us:.2f} µs"
