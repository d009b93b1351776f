"""`make report`: draws the committed results, and writes the tables of speed that the documents have.

Nothing about speed is typed by hand: `render` says what every file must be, and a test compares.
"""

from __future__ import annotations

import re
import statistics
from pathlib import Path

from benchmarks import records
from benchmarks.records import BEHIND, ROOT, Results, best_peer
from benchmarks.report import overview, pictures, words
from benchmarks.report.words import UNDECLARED, describe, readable, times

PICTURES = Path("benchmarks/pictures")
START, END = "<!-- speed: written by make report -->", "<!-- end of speed -->"


def picture(name: str, alternative: str, folder: Path) -> str:
    """A picture, which follows the reader's theme."""
    return f'<img src="{file_of(name).relative_to(folder)}" width="830" alt="{alternative}">\n'


def file_of(name: str) -> Path:
    return PICTURES / f"{name}-speed.svg"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def head(*cells: str) -> str:
    return row(*cells) + row(*("---" for _ in cells))


def ours_cells(results: Results, ours: dict) -> tuple[str, str]:
    limit = results.limit(ours)
    share = limit / ours["median"] if limit else 0.0
    return readable(ours["median"], ours["unit"]), f"{share:.0%}" if share > 0.01 else "< 1%" if limit else ""


def chosen(results: Results) -> dict[tuple[str, str], list[dict]]:
    """The cases of the README's table, by operator and workload: the end of the first curve, or the only case."""
    workloads: dict[tuple[str, str], list[list[dict]]] = {}
    for case in results.cases(whole=True).values():
        workloads.setdefault((case[0]["op"], case[0]["workload"]), []).append(case)
    picked = {}
    for key, cases in workloads.items():
        curve = [case for case in cases if "x" in case[0] and case[0]["dtype"] == cases[0][0]["dtype"]]
        if curve or len(cases) == 1:
            picked[key] = max(curve or cases, key=lambda case: case[0].get("x", 0))
    return picked


def cells(results: Results, case: list[dict] | None) -> tuple[str, str]:
    """Our time, and the best peer's as a multiple of it."""
    if case is None:
        return "", ""
    ours, peer = case[0], best_peer(case)
    time, share = ours_cells(results, ours)
    said = time + (f" at {ours['size']}" if ours["size"] else "") + (f", {share} of the limit" if share else "")
    return said, f"{peer['contender']} {times(peer['ratio'])}" if peer else ""


def brief(found: list[Results]) -> str:
    """A row an operator and workload, two columns a machine."""
    machines = by_machine(found)
    rows: dict[tuple[str, str], dict[str, tuple[Results, list[dict]]]] = {}
    for results in found:
        for key, case in chosen(results).items():
            rows.setdefault(key, {})[results.header["machine"]] = results, case
    names = list(dict.fromkeys(op for op, _ in rows))
    headings = [heading for machine in machines for heading in (f"ours, {machine}", "best peer, times ours")]
    text = head("operator", "case", *headings)
    for op, workload in sorted(rows, key=lambda key: names.index(key[0])):
        here = rows[op, workload]
        dtype = next(iter(here.values()))[1][0]["dtype"]
        of_machines = [cell for machine in machines for cell in cells(*here.get(machine, (found[0], None)))]
        text += row(f"`{op}`", ", ".join(filter(None, (workload, dtype))), *of_machines)
    return text


def waits(found: list[Results]) -> str:
    """What users wait for apart from the operators."""
    text = ""
    for results in found:
        text += "\n" + head(f"on {results.header['machine']}", "extension_cpp", "compared with")
        for ours, *peers in results.cases().values():
            others = ", ".join(f"{peer['contender']} {readable(peer['median'], peer['unit'])}" for peer in peers)
            text += row(ours["case"], readable(ours["median"], ours["unit"]), others)
    return text


def by_machine(found: list[Results]) -> dict[str, list[Results]]:
    grouped: dict[str, list[Results]] = {}
    for results in found:
        grouped.setdefault(results.header["machine"], []).append(results)
    return grouped


def worst(found: list[Results]) -> str:
    """A row an operator and machine: the worst of its cells next to their median."""
    text = head("operator", "on", "cells", "median", "worst", "the worst cell", f"below {BEHIND}")
    for results in found:
        operators: dict[str, list[dict]] = {}
        for cell in results.cells():
            operators.setdefault(cell["op"], []).append(cell)
        for op, of_op in operators.items():
            least = min(of_op, key=lambda cell: cell["ratio"])
            below = sum(cell["ratio"] < BEHIND for cell in of_op)
            numbers = times(statistics.median(cell["ratio"] for cell in of_op)), times(least["ratio"])
            where = f"{least['case']}: {least['contender']}"
            text += row(f"`{op}`", results.header["machine"], str(len(of_op)), *numbers, where, str(below or ""))
    return text


def grids(found: list[Results]) -> str:
    """A row a grid and machine, and a picture of each operator's grids."""
    mapped = [(results, each) for results in found for each in results.grids()]
    if not mapped:
        return ""
    text = "\n## Grids\n\nVery many sizes, each timed briefly next to one peer. A cell says how many times longer than ours"
    text += " the peer takes, by\nthe fastest of eight calls of each. Small cells vary by a tenth from run to run.\n\n"
    text += head("operator", "on", "grid", "cells", "geometric mean", "worst", "the worst cell", f"below {BEHIND}")
    for results, each in mapped:
        place, ratio = each.worst
        numbers = f"{len(each.ratios):,}", times(each.mean), times(ratio), place, str(each.below)
        where = results.header["machine"], each.record["case"].removeprefix("a grid of ")
        text += row(f"`{each.record['op']}`", *where, *numbers)
    said = [
        f"- `{each.record['op']}`, {each.record['case']}, on {results.header['machine']}: {line}\n"
        for results, each in mapped
        if "reasons" in each.record  # Earlier results have none.
        for line in words.reasons(each)
    ]
    text += "".join(["\n", *said] if said else [])
    for op in mapped_operators(found):
        text += "\n" + picture(f"{op}-grid", f"{op}: where a peer is faster", PICTURES.parent)
    return text


def mapped_operators(found: list[Results]) -> list[str]:
    return list(dict.fromkeys(each.record["op"] for results in found for each in results.grids()))


def reasons(found: list[Results]) -> str:
    """Why cells are below."""
    said = [
        f"- `{cell['op']}`, {cell['case']}, on {results.header['machine']}: {cell.get('reason') or UNDECLARED}\n"
        for results in found
        for cell in results.behind()
    ]
    return "\n" + "".join(said) if said else ""


def speed(found: list[Results]) -> str:
    """The README's section: the overview, a table a machine, and what one waits for."""
    operators = records.leading([results for results in found if results.of_package])
    if not operators:
        return "\nNothing was measured yet: `make bench`.\n"
    text = "\n" + picture("overview", "How many times longer the best peer takes, by operator", Path("."))
    text += "\nA dot is a case, a size or a layout in a dtype; the numbers are the worst and the median.\n\n"
    for of_machine in by_machine(operators).values():
        text += f"{describe(of_machine[0])}.\n"
    text += "\n" + brief(operators)
    return text + waits([results for results in found if not results.of_operators])


def page(found: list[Results]) -> str:
    """benchmarks/README.md: every picture and every case."""
    text = "# Results\n\nWritten by `make report` from `results`, which `make bench` measures: the median of rounds"
    text += (
        " in which ours and its peers\ntake turns. The limit is the least time that a case can take: that of moving its"
    )
    text += (
        " bytes, of doing its operations, or of a step\nthat it can't do without, such as a sort, whichever is longest."
    )
    text += (
        " All are measured in the same run. On the CPU, the bytes\nare moved by a copy of as many, which takes turns"
    )
    text += " with the contenders.\n"
    operators = [results for results in found if results.of_operators]
    if operators:
        text += (
            "\n## The worst cells\n\nHow many times longer than ours the best peer takes, over all sizes, dtypes and"
        )
        text += " layouts.\n\n" + worst(operators) + reasons(operators) + grids(operators)
    for op in drawn(operators):
        text += f"\n## {op}\n\n" + picture(op, f"{op} over size", PICTURES.parent)
    for results in found:
        header = results.header
        versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
        text += f"\n## {results.family} on {header['machine']}\n\n"
        text += f"Commit {header['commit']}, {header['date']}, {versions}. {describe(results)}.\n\n"
        text += "<details><summary>All cases</summary>\n\n" + head(
            "operator", "case", "ours", "of the limit", "peers, times ours"
        )
        for case in results.cases().values():
            peers = ", ".join(f"{peer['contender']} {times(peer['ratio'])}" for peer in case[1:])
            text += row(f"`{case[0]['op']}`", case[0]["case"], *ours_cells(results, case[0]), peers)
        text += "\n</details>\n"
    return text


def drawn(found: list[Results]) -> list[str]:
    """The operators that have curves."""
    return list(dict.fromkeys(record["op"] for results in found for record in results.records if "x" in record))


def detectors(found: list[Results]) -> str:
    """Each model, and how much of its time is suppression, with our kernels and without."""
    shown = f"../{file_of('yolo')}"
    text = f'\n<img src="{shown}" width="830" alt="Post-processing of a YOLO head over its candidates">\n'
    for results in found:
        kinds: dict[str, dict[str, list[dict]]] = {}
        for case in results.cases().values():
            kinds.setdefault(case[0]["op"], {})[case[0]["workload"]] = case
        which = "batched_nms in it"
        names = which, "an image with ours", which, "torchvision alone / with ours, median of rounds"
        text += f"\n{describe(results)}.\n\n" + head("model", "an image, torchvision alone", *names)
        for op, cases in kinds.items():
            if "an image" not in cases:
                continue
            (ours, theirs), (our_part, their_part) = cases["an image"], cases["its batched_nms alone"]
            shares = [
                f"{readable(part['median'])}, {part['median'] / whole['median']:.1%}"
                for part, whole in ((their_part, theirs), (our_part, ours))
            ]
            text += row(
                op, readable(theirs["median"]), shares[0], readable(ours["median"]), shares[1], times(theirs["ratio"])
            )
    return text


def fill(document: str, content: str, name: str = "README.md") -> str:
    """A document with everything between the two marks replaced."""
    if START not in document or END not in document:
        raise records.ResultsError(f"{name} lacks the marks that the table goes between, {START} and {END}")
    pattern = f"{re.escape(START)}.*?{re.escape(END)}"
    return re.sub(pattern, lambda _: f"{START}\n{content}{END}", document, flags=re.DOTALL)


def render(found: list[Results], readme: str) -> dict[Path, bytes]:
    """What each file of the report must hold, by its path in the checkout."""
    operators = [results for results in found if results.of_operators]
    files = {Path("README.md"): fill(readme, speed(found)).encode(), Path("benchmarks/README.md"): page(found).encode()}
    if of_ours := [results for results in operators if results.of_package]:
        files[file_of("overview")] = overview.overview(records.leading(of_ours))
    for op in drawn(operators):  # With a column for each GPU a page is too narrow: their tables have all.
        of_op = [each for each in operators if op in drawn([each])]
        files[file_of(op)] = pictures.operator(records.leading(of_op, operators), op)
    for op in mapped_operators(operators):
        of_op = [each for each in operators if op in mapped_operators([each])]
        files[file_of(f"{op}-grid")] = pictures.grids(records.leading(of_op)[-1], op)
    if of_models := [results for results in found if results.of_models]:
        document = Path(f"docs/{of_models[0].family}.md")
        files[document] = fill((ROOT / document).read_text(), detectors(of_models), str(document)).encode()
    return files


def main() -> None:
    files = render(records.load(), (ROOT / "README.md").read_text())
    (ROOT / PICTURES).mkdir(exist_ok=True)
    for stale in set((ROOT / PICTURES).glob("*.svg")) - {ROOT / path for path in files}:
        stale.unlink()
    for path, content in files.items():
        (ROOT / path).write_bytes(content)
    documents = [str(path) for path in files if path.suffix != ".svg"]
    print(f"{len(files)} files: {', '.join(documents)}, {PICTURES}")
