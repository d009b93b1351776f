"""Times every operator that has a benchmark, on the devices present; with --save the results are kept.

make bench                                    all, saved and drawn
make bench BENCH="--op package --device cpu"  one family on one device: look only
make bench BENCH="--op package --save"        and keep the results; `make report` draws them
make bench COMPARE=v0.1.0                     look only: what became faster or slower since those results
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

import extension_cpp
from benchmarks import compare, harness, limits, records
from benchmarks.harness import Clock
from benchmarks.load import Load
from benchmarks.records import BEHIND, Results, ResultsError
from benchmarks.report import words

FAMILIES = sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))


def family_of(name: str) -> str:
    """The family that a name stands for: its own, or that of one of its operators."""
    operator = getattr(extension_cpp, name, None) if name in extension_cpp.ops.__all__ else None
    stem = name if operator is None else operator.__module__.rpartition(".")[2]
    if stem not in FAMILIES:
        known = f"families {', '.join(FAMILIES)}, operators {', '.join(sorted(extension_cpp.ops.__all__))}"
        raise argparse.ArgumentTypeError(f"there is no benchmark of {name!r}; there are {known}")
    return stem


def device(name: str) -> str:
    present = devices()
    if name not in present:
        raise argparse.ArgumentTypeError(f"there is no device {name!r} here, only {', '.join(present)}")
    return name


def devices() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def cases(family: str, device: str) -> Iterator[harness.Case | harness.Grid]:
    return importlib.import_module(f"benchmarks.bench_{family}").cases(device)


def say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False)


def measure(family: str, device: str, commit: str, console: Console, clock: Clock) -> tuple[Results, list[str]]:
    """All cases of a family on a device, one after another; and what went wrong with the cases that have no results."""
    listed = list(cases(family, device))
    listed += [case for case in harness.short_form(listed) if case.threads]
    needed = {harness.dtype_name(case.dtype) or "float32" for case in listed if case.operations}
    found: list[dict] = []
    failed: list[str] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{family} on {device}: limits", total=len(listed))
        ceilings = limits.measure(device, needed) if any(case.bytes or case.operations for case in listed) else {}
        # Taken off the list, so that what a case holds is freed when its turn is over.
        while listed:
            case = listed.pop(0)
            progress.update(task, description=f"{family} on {device}: {case.op}, {case.name}")
            try:
                found += harness.measure(case, clock)
            except harness.Unavailable as reason:
                say(console, f"not measured: {case.op}: {case.name}: {reason}")
            except harness.Disagreement as error:
                hint = f"if that is rounding, benchmarks/bench_{family}.py allows it with Case(tolerance=...)"
                failed.append(f"{error}\n{hint}")
            except Exception as error:  # One case must not cost the results of all others.
                failed.append(f"{case.op}: {case.name} on {device}: {type(error).__name__}: {error}")
            progress.advance(task)
    return Results(records.header(family, device, commit, ceilings), found), failed


def check(pairs: list[tuple[str, str]], console: Console, clock: Clock, load: Load) -> int:
    """The short form: fails where a ratio to a peer fell by more than its noise.

    It decides nothing on another processor than that of the committed results, or while the machine is busy.
    """
    slower = []
    for family, device in pairs:
        if not any(case.short for case in cases(family, device)):
            continue
        try:
            then = records.load_one(family, device)
        except ResultsError as reason:
            say(console, f"not compared: {reason}")
            continue
        machine = records.machine(device)
        other = then.header["machine"] if machine != then.header["machine"] else ""
        if device == "cpu" and not other:
            other = limits.of_another(then.header["ceilings"], clock)
        found = compare.check(cases(family, device), then, not other, load, clock)
        where = f"; the committed results are of {other}" if other else ""
        console.print(compare.table(f"{family}, {machine}{where}", found))
        if not other:
            slower += [change for change in found if change.verdict == "slower"]
        elif any(change.verdict == "slower" for change in found):
            # PyTorch's own kernels differ from one processor to another by as much as ours from theirs.
            say(console, f"{family}: nothing is decided, as {machine} is another processor")
    for change in slower:
        console.print(f"[red]slower:[/red] {change}", highlight=False)
    if disturbed := load.disturbed():
        say(console, f"nothing is decided, as the machine is busy: {disturbed}")
        return 0
    return 1 if slower else 0


def earlier(commit: str, pairs: list[tuple[str, str]], console: Console) -> dict[tuple[str, str], Results]:
    """A commit's results; an error where it has none of what is measured now."""
    found: dict[tuple[str, str], Results] = {}
    reasons: list[str] = []
    for pair in pairs:
        try:
            found[pair] = records.load_at(commit, *pair)
        except ResultsError as reason:
            reasons.append(str(reason))
    if not found:
        raise ResultsError("; ".join(dict.fromkeys(reasons)))
    for line in reasons:
        say(console, f"not compared: {line}")
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--op", type=family_of, action="append", help="a family or an operator of it; all without it")
    parser.add_argument("--device", type=device, action="append", help="a device; all present without it")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--save", action="store_true", help="keep the results in benchmarks/results; else only print")
    parser.add_argument(
        "--compare", metavar="COMMIT", help="say what became faster or slower than that commit's results"
    )
    parser.add_argument("--check", action="store_true", help="a short form; fails where a ratio to a peer fell")
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None, clock: Clock = time.perf_counter, load: Load | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    console = Console(width=None if Console().is_terminal else 150)
    pairs = [(family, device) for family in options.op or FAMILIES for device in options.device or devices()]
    pairs = [(family, device) for family, device in pairs if next(cases(family, device), None)]
    try:
        if options.check:
            return check(pairs, console, clock, load or Load())
        then = earlier(options.compare, pairs, console) if options.compare else {}
    except ResultsError as error:
        console.print(f"[red]error:[/red] {error}", highlight=False)
        return 1
    commit = options.commit or records.commit()
    measured: list[Results] = []
    failed: list[str] = []
    for pair in pairs:
        start = clock()
        results, wrong = measure(*pair, commit, console, clock)
        measured, failed = [*measured, results], [*failed, *wrong]
        console.print(words.table(results))
        say(console, f"{pair[0]} on {pair[1]} took {clock() - start:.0f} s")
        if disturbed := compare.noisy(results):
            count = f"{len(disturbed)} of {len(results.cases())} cases"
            note = f"the machine was busy, {count} moved by more than {compare.NOISY:.0%} between rounds; the first:"
            console.print(f"[yellow]note:[/yellow] {note} {disturbed[0]}", highlight=False)
        if options.save:
            results.save()
        if pair in then:
            found, left_out = compare.changes(then[pair], results)
            title = f"{pair[0]} since {then[pair].header['commit']}: times ours that the best peer takes"
            console.print(compare.table(title, found))
            for line in left_out:
                say(console, f"not compared: {line}")
    conclude(measured, failed, console, options.save)
    return 1 if failed else 0


def conclude(measured: list[Results], failed: list[str], console: Console, saved: bool) -> None:
    """What the user should act on, after all tables."""
    behind = words.behind(measured)
    say(console, f"below {BEHIND} of the best peer: {len(behind)} of {sum(len(r.cells()) for r in measured)} cells")
    for line in behind:
        say(console, f"  {line}")
    for line in words.grids(measured):
        say(console, line)
    for text in failed:
        console.print("[red]error:[/red]", end=" ")
        say(console, text)
    kept = "the results are in benchmarks/results: make report" if saved else "nothing was saved: --save keeps results"
    if failed:
        kept += f"; {len(failed)} cases failed and are not in them"
    say(console, kept)


if __name__ == "__main__":
    sys.exit(main())
