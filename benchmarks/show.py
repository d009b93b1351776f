"""Results as tables on a terminal, and numbers as one reads them."""

from __future__ import annotations

from rich.table import Table

from benchmarks.records import Results

PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0), ("m", 1e-3), ("µ", 1e-6), ("n", 1e-9))


def readable(value: float, unit: str = "s") -> str:
    """A value with a prefix that leaves one to three digits before the point."""
    prefixes = {"s": PREFIXES[4:], "B": PREFIXES[2:5]}.get(unit, PREFIXES[:5])
    scales = [(f"{prefix}{unit}", scale) for prefix, scale in prefixes]
    name, scale = next(((name, scale) for name, scale in scales if value >= scale), scales[-1])
    scaled = value / scale
    return f"{scaled:.{0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2}f} {name}"


def describe(results: Results) -> str:
    """The machine and its measured limits."""
    machine, ceilings = results.header["machine"], results.header["ceilings"]
    if not ceilings:
        return machine
    rates = ", ".join(f"{readable(rate, 'FLOP/s')} in {dtype}" for dtype, rate in ceilings["operations"].items())
    return f"{machine}: a copy moves {readable(ceilings['bytes'], 'B/s')}" + (f", a product {rates}" if rates else "")


def table(results: Results) -> Table:
    """A row a case: our time, its share of what the machine can do, and how many times longer each peer takes."""
    shown = Table(title=f"{results.family}, {describe(results)}", title_justify="left")
    for column in ("operator", "case"):
        shown.add_column(column)
    for column in ("ours", "of the limit"):
        shown.add_column(column, justify="right")
    shown.add_column("times ours")
    for (op, name), (ours, *peers) in results.cases().items():
        limit = results.limit(ours)
        share = f"{limit / ours['median']:.0%}" if limit else ""
        ratios = ", ".join(f"{peer['contender']} {peer['ratio']:.2f}" for peer in peers)
        shown.add_row(op, name, readable(ours["median"], ours["unit"]), share, ratios)
    return shown
