"""All operators at a glance: how many times longer than ours the best peer takes."""

from __future__ import annotations

import statistics

import matplotlib
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.records import Results
from benchmarks.report.pictures import COLOURS, OTHERS, SETTINGS, WIDTH, save
from benchmarks.report.words import times

TICKS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
FEW_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10)  # of an axis that is shorter


def ratios(results: Results) -> dict[tuple[str, str], list[float]]:
    """How many times longer than ours the best peer takes, by operator and workload."""
    found: dict[tuple[str, str], list[float]] = {}
    for cell in results.cells():
        found.setdefault((cell["op"], cell["workload"]), []).append(cell["ratio"])
    return found


def overview(found: list[Results]) -> bytes:
    """A row an operator and workload, a dot a case: how many times longer than ours the best peer takes."""
    machines: dict[str, dict[tuple[str, str], list[float]]] = {}
    for results in found:
        machines.setdefault(results.header["machine"], {}).update(ratios(results))
    keys = sorted({key for rows in machines.values() for key in rows}, key=order_of(machines))
    values = [v for rows in machines.values() for vs in rows.values() for v in vs]
    low, high = min(0.45, *values) * 0.9, max(2.2, *values) * 1.1
    ticks = [x for x in (TICKS if high / low > 30 else FEW_TICKS) if low <= x <= high]
    with matplotlib.rc_context(SETTINGS):
        height = 0.185 * len(keys) + 0.84
        figure = Figure(figsize=(WIDTH, height))
        left, gap = 0.285, 0.022
        width = (0.985 - left + gap) / len(machines) - gap
        for i, (machine, rows) in enumerate(machines.items()):
            bottom = 0.36 / height
            axes = figure.add_axes((left + i * (width + gap), bottom, width, 1 - bottom - 0.42 / height))
            draw_ratios(axes, keys, rows)
            axes.set_xlim(low, high * (high / low) ** 0.32)  # room for two numbers
            axes.xaxis.set_major_locator(ticker.FixedLocator(ticks))
            axes.set_title(machine, weight="bold", pad=15)  # above what the numbers are
            if i == 0:
                label_rows(axes, keys)
            axes.set_xlabel("the best peer's time / ours", labelpad=2)
        return save(figure, "How many times longer than extension_cpp the best peer takes, by operator", machines)


def order_of(machines: dict):
    """Operators in the order of their results."""
    seen = list(dict.fromkeys(key for rows in machines.values() for key in rows))
    names = list(dict.fromkeys(op for op, _ in seen))
    return lambda key: (names.index(key[0]), seen.index(key))


def draw_ratios(axes: Axes, keys: list, rows: dict) -> None:
    axes.set_xscale("log")
    axes.axvline(1, color=COLOURS["faint"], linewidth=1, zorder=1)
    dots = [(ratio, y) for y, key in enumerate(keys) for ratio in rows.get(key, ())]
    for faster, colour, marker, size in ((True, COLOURS["ours"], "o", 4), (False, OTHERS[2], "D", 3.2)):
        chosen = [dot for dot in dots if (dot[0] >= 1) == faster]
        if chosen:
            axes.plot(*zip(*chosen), marker, color=colour, markersize=size, alpha=0.75, markeredgewidth=0)
    for place, title, summary in ((0.855, "worst", min), (0.995, "median", statistics.median)):
        written = {"transform": axes.get_yaxis_transform(), "ha": "right", "size": 7}
        axes.text(place, -0.7, title, va="bottom", color=COLOURS["faint"], **written)
        for y, key in enumerate(keys):
            if rows.get(key):
                axes.text(place, y, times(summary(rows[key])), va="center", **written)
    axes.set_ylim(len(keys) - 0.4, -0.6)
    axes.set_yticks(range(len(keys)), [""] * len(keys))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())


def label_rows(axes: Axes, keys: list) -> None:
    """The operator once, its workloads below each other."""
    before = None
    for y, (op, workload) in enumerate(keys):
        place = axes.get_yaxis_transform()
        if op != before:
            axes.annotate(op, (0, y), (-2.28 * 72, 0), place, "offset points", weight="bold", va="center")
            before = op
        axes.annotate(
            workload, (0, y), (-6, 0), place, "offset points", ha="right", va="center", color=COLOURS["faint"]
        )
