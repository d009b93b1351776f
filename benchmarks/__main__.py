"""`make bench`: times every operator that has a benchmark, on the devices present, and leaves results and a report.

make bench BENCH="--op package --device cpu"  one family, one device
make bench BENCH="--no-save"                  look only
make bench COMPARE=v0.1.0                     and say what became faster or slower since those results
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
from benchmarks import compare, harness, records, show
from benchmarks.records import Results, ResultsError

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


def cases(family: str, device: str) -> Iterator[harness.Case]:
    return importlib.import_module(f"benchmarks.bench_{family}").cases(device)


def measure(family: str, device: str, commit: str, console: Console) -> Results:
    """All cases of a family on a device, one after another."""
    listed = list(cases(family, device))
    listed += [case for case in harness.short_form(listed) if case.threads]
    needed = {harness.dtype_name(case.dtype) or "float32" for case in listed if case.operations}
    found: list[dict] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{family} on {device}: ceilings", total=len(listed))
        ceilings = harness.ceilings(device, needed) if any(case.bytes or case.operations for case in listed) else {}
        # Taken off the list, so that what a case holds is freed when its turn is over.
        while listed:
            case = listed.pop(0)
            progress.update(task, description=f"{family} on {device}: {case.op}, {case.name}")
            try:
                found += harness.measure(case)
            except harness.Unavailable as reason:
                console.print(f"not measured: {case.op}: {case.name}: {reason}", highlight=False)
            progress.advance(task)
    return Results(records.header(family, device, commit, ceilings), found)


def check(pairs: list[tuple[str, str]], console: Console) -> int:
    """The short form: fails where a ratio to a peer fell by more than its noise."""
    slower = []
    for family, device in pairs:
        if not any(case.short for case in cases(family, device)):
            continue
        try:
            then = records.load_one(family, device)
        except ResultsError as reason:
            console.print(f"not compared: {reason}", highlight=False)
            continue
        machine = records.machine(device)
        same = machine == then.header["machine"]
        found = compare.check(cases(family, device), then, same)
        where = "" if same else f"; the committed results are of {then.header['machine']}"
        console.print(compare.table(f"{family}, {machine}{where}", found))
        slower += [change for change in found if change.verdict == "slower"]
    for change in slower:
        console.print(f"[red]slower:[/red] {change}", highlight=False)
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
        console.print(f"not compared: {line}", highlight=False)
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--op", type=family_of, action="append", help="a family or an operator of it; all without it")
    parser.add_argument("--device", type=device, action="append", help="a device; all present without it")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--no-save", action="store_true", help="print, but leave the committed results alone")
    parser.add_argument(
        "--compare", metavar="COMMIT", help="say what became faster or slower than that commit's results"
    )
    parser.add_argument("--check", action="store_true", help="a short form; fails where a ratio to a peer fell")
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    console = Console(width=None if Console().is_terminal else 150)
    pairs = [(family, device) for family in options.op or FAMILIES for device in options.device or devices()]
    pairs = [(family, device) for family, device in pairs if next(cases(family, device), None)]
    try:
        if options.check:
            return check(pairs, console)
        then = earlier(options.compare, pairs, console) if options.compare else {}
    except ResultsError as error:
        console.print(f"[red]error:[/red] {error}", highlight=False)
        return 1
    commit = options.commit or records.commit()
    for pair in pairs:
        start = time.monotonic()
        results = measure(*pair, commit, console)
        console.print(show.table(results))
        console.print(f"{pair[0]} on {pair[1]} took {time.monotonic() - start:.0f} s", highlight=False)
        if disturbed := compare.noisy(results):
            count = f"{len(disturbed)} of {len(results.cases())} cases"
            note = f"the machine was busy, {count} moved by more than {compare.NOISY:.0%} between rounds; the first:"
            console.print(f"[yellow]note:[/yellow] {note} {disturbed[0]}", highlight=False)
        if not options.no_save:
            results.save()
        if pair in then:
            found, left_out = compare.changes(then[pair], results)
            title = f"{pair[0]} since {then[pair].header['commit']}: times ours that the best peer takes"
            console.print(compare.table(title, found))
            for line in left_out:
                console.print(f"not compared: {line}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
