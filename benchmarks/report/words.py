"""Results in words, and as tables on a terminal."""

from __future__ import annotations

from rich.table import Table

from benchmarks.records import BEHIND, Map, Results

UNDECLARED = "no reason is declared"
PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0), ("m", 1e-3), ("µ", 1e-6), ("n", 1e-9))


def times(ratio: float) -> str:
    """Three digits."""
    return f"{ratio:.{0 if ratio >= 99.95 else 1 if ratio >= 9.995 else 2}f}"


def readable(value: float, unit: str = "s") -> str:
    """A value with a prefix that leaves one to three digits before the point."""
    prefixes = {"s": PREFIXES[4:], "B": PREFIXES[2:5]}.get(unit, PREFIXES[:5])
    scales = [(f"{prefix}{unit}", scale) for prefix, scale in prefixes]
    name, scale = next(((name, scale) for name, scale in scales if value >= scale), scales[-1])
    scaled = value / scale
    return f"{times(scaled)} {name}"


def copying(results: Results) -> str:
    """The machine and the limit of its memory."""
    machine, ceilings = results.header["machine"], results.header["ceilings"]
    return f"{machine}: a copy moves {readable(ceilings['bytes'], 'B/s')}" if ceilings else machine


def describe(results: Results) -> str:
    """The machine and its measured limits, and what reached them; before `by` was recorded that was a product."""
    ceilings = results.header["ceilings"]
    rates: dict[str, list[str]] = {}
    for dtype, rate in ceilings.get("operations", {}).items():
        by = ceilings.get("by", {}).get(dtype, "a product")
        rates.setdefault(by, []).append(f"{readable(rate, 'FLOP/s')} in {dtype}")
    return ", ".join([copying(results), *(f"{by} {', '.join(reached)}" for by, reached in rates.items())])


def behind(found: list[Results]) -> list[str]:
    """A line for each cell that is below its best peer, with the reason that its case declares."""
    return [
        f"{cell['op']}: {cell['case']} on {results.header['machine']}: {cell['contender']} takes "
        f"{times(cell['ratio'])} times as long as ours: {cell.get('reason') or UNDECLARED}"
        for results in found
        for cell in results.behind()
    ]


def summary(grid: Map) -> str:
    """How many cells of a grid are below the peer, their mean and the worst of them."""
    place, worst = grid.worst
    below = f"{grid.below} of {len(grid.ratios):,} cells below {BEHIND} of {grid.record['contender']}"
    return f"{below}, geometric mean {times(grid.mean)}, worst {times(worst)} at {place}"


def reasons(grid: Map) -> list[str]:
    """A line for each reason why cells are below, with how many they are and the worst of them."""
    lines = []
    for reason, cells in grid.reasons:
        place, worst = cells[0]
        count = f"{len(cells)} {'cell' if len(cells) == 1 else 'cells'}, the worst {times(worst)} at {place}"
        lines.append(f"{count}: {reason or UNDECLARED}")
    return lines


def grids(found: list[Results]) -> list[str]:
    """A line for each grid, and below it one for each reason."""
    lines = []
    for results in found:
        for each in results.grids():
            where = f"{each.record['op']}: {each.record['case']} on {results.header['machine']}"
            lines += [f"{where}: {summary(each)}", *(f"  {line}" for line in reasons(each))]
    return lines


def table(results: Results) -> Table:
    """A row a case: our time, its share of what the machine can do if that was measured, and how many times longer each
    peer takes."""
    shown = Table(title=f"{results.family}, {describe(results)}", title_justify="left")
    with_limits = any(map(results.limit, results.records))
    for column in ("operator", "case"):
        shown.add_column(column)
    for column in ("ours", *["of the limit"] * with_limits):
        shown.add_column(column, justify="right")
    shown.add_column("times ours")
    for (op, name), (ours, *peers) in results.cases().items():
        limit = results.limit(ours)
        share = [f"{limit / ours['median']:.0%}" if limit else ""] * with_limits
        ratios = ", ".join(f"{peer['contender']} {times(peer['ratio'])}" for peer in peers)
        shown.add_row(op, name, readable(ours["median"], ours["unit"]), *share, ratios)
    return shown
