"""The results as pictures, one an operator: time or bandwidth over size, ours and the peers', and the machine's limit."""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Iterable

import matplotlib
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from benchmarks.harness import OURS
from benchmarks.records import BEHIND, Map, Results
from benchmarks.report.words import copying, readable, summary

matplotlib.use("svg")
WIDTH = 8.3  # Inches; a README is some 830 pixels wide.
# In a dark theme the picture's style sheet puts the second colour in place of the first.
THEMES = {
    "text": ("#1f2328", "#f0f6fc"),
    "faint": ("#59636e", "#9198a1"),
    "line": ("#d1d9e0", "#3d444d"),
    "ours": ("#0060b0", "#58b0ff"),
    "compiled": ("#a86f00", "#e3b341"),
    "graph": ("#00754f", "#3fc796"),
    "other 1": ("#a2358b", "#e38cd0"),
    "other 2": ("#6e7781", "#a5adb6"),
    "other 3": ("#b93a1e", "#ff8f73"),
}
COLOURS = {name: light for name, (light, _) in THEMES.items()}
OTHERS = [colour for name, colour in COLOURS.items() if name.startswith("other")]
DARK = "".join(
    f'[style*="{what}: {light}"]{{{what}: {dark} !important}}\n'
    for light, dark in THEMES.values()
    for what in ("fill", "stroke")
)
MARKERS = ("s", "^", "D", "v", "P", "X")
Records = list[dict]


# Small print, thin lines, no frame; the same bytes for the same data.
SETTINGS = {
    "font.size": 7.6,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.titlecolor": COLOURS["text"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": COLOURS["line"],
    "axes.labelcolor": COLOURS["faint"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": COLOURS["line"],
    "grid.linewidth": 0.5,
    "text.color": COLOURS["text"],
    "xtick.color": COLOURS["line"],
    "ytick.color": COLOURS["line"],
    "xtick.labelcolor": COLOURS["faint"],
    "ytick.labelcolor": COLOURS["faint"],
    "xtick.bottom": False,
    "ytick.left": False,
    "svg.hashsalt": "extension_cpp",
    # Text stays text, for small files. Verdana, where DejaVu isn't, is as wide.
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans", "Bitstream Vera Sans", "Verdana", "Arial"],
}


def save(figure: Figure, title: str, data: object) -> bytes:
    """As SVG for both themes, without what matplotlib repeats at every piece of text, and with a hash of the data."""
    target = io.StringIO()
    digest = hashlib.sha256(repr(data).encode()).hexdigest()[:16]
    made = {"Date": None, "Creator": f"matplotlib {matplotlib.__version__}", "Title": title, "Identifier": digest}
    figure.savefig(target, format="svg", transparent=True, metadata=made)
    repeated = r' transform="rotate\(-0 [^"]*\)"| id="[a-z0-9.]+_\d+"|font-family: [^;]*; |^ +| +$'
    text = re.sub(repeated, "", target.getvalue(), flags=re.MULTILINE)
    text = re.sub(r"(\.\d\d)\d+", r"\1", text)  # No screen shows more of a coordinate.
    text = re.sub(r"M (\S+) (\S+) L (\S+) \2 L \3 (\S+) L \1 \4\b", r"M\1 \2H\3V\4H\1", text.replace("\nL ", " L "))
    text = text.replace("</style>", f"\n@media (prefers-color-scheme: dark) {{\n{DARK}}}</style>", 1)
    fonts = ", ".join(matplotlib.rcParams["font.sans-serif"])
    return text.replace("<svg ", f'<svg font-family="{fonts}, sans-serif" ', 1).encode()


def colours(contenders: Iterable[str]) -> dict[str, str]:
    """Ours, compiled code and CUDA graphs look alike in every picture; other peers take turns."""
    others = iter(OTHERS * 3)
    chosen = {}
    for name in contenders:
        colour = "ours" if name == OURS else "compiled" if name.startswith("compiled") else ""
        colour = "graph" if name.endswith("graph") else colour
        chosen[name] = COLOURS[colour] if colour else next(others)
    return chosen


def curves(results: Results, op: str) -> dict[tuple[str, str], Records]:
    """The records of an operator's curves, by workload and dtype."""
    found: dict[tuple[str, str], Records] = {}
    for record in results.records:
        if record["op"] == op and "x" in record:
            found.setdefault((record["workload"], record["dtype"]), []).append(record)
    return {key: records for key, records in found.items() if len({record["x"] for record in records}) > 1}


def height_of(record: dict, seconds: float) -> float:
    """What is drawn of a time."""
    if record["draw"] == "time":
        return seconds
    return record["bytes" if record["draw"] == "bandwidth" else "operations"] / seconds


UNITS = {"bandwidth": "B/s", "rate": "FLOP/s", "time": "s"}


def power_of_two(x: float, _=None) -> str:
    return "2" + str(round(x).bit_length() - 1).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def count(x: float, _=None) -> str:
    return f"{x / 1e6:.3g}M" if x >= 1e6 else f"{x / 1e3:.3g}k" if x >= 1e3 else f"{x:g}"


def apart(places: list[float]) -> list[float]:
    """The places on a logarithmic axis that can be labelled, the last one first."""
    room = 0.13 * math.log(places[-1] / places[0])
    kept = [places[-1]]
    for place in reversed(places):
        if math.log(kept[-1] / place) >= room:
            kept.append(place)
    return kept


def spread_out(heights: list[float], gap: float) -> list[float]:
    """Heights between 0 and 1, moved as little as need be to lie a gap apart, in their order."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = [heights[i] for i in order]
    for _ in range(100):
        for i in range(len(placed) - 1):
            overlap = max(0.0, gap - (placed[i + 1] - placed[i]))
            placed[i] -= overlap / 2
            placed[i + 1] += overlap / 2
        placed = [min(max(height, i * gap), 1 - (len(placed) - 1 - i) * gap) for i, height in enumerate(placed)]
    return [placed[order.index(i)] for i in range(len(heights))]


def draw_curve(axes: Axes, results: Results, records: Records, hues: dict[str, str]) -> None:
    first = records[0]
    ends: list[tuple[str, float, str, str]] = []
    drawn: list[tuple[float, float]] = []
    markers = dict(zip([name for name in hues if name != OURS], MARKERS))
    for name in (n for n in hues if any(record["contender"] == n for record in records)):
        points = sorted((r["x"], height_of(r, r["median"])) for r in records if r["contender"] == name)
        ours = name == OURS
        axes.plot(
            *zip(*points),
            color=hues[name],
            marker="o" if ours else markers[name],
            markersize=4.2 if ours else 3,
            linewidth=2 if ours else 1.1,
            zorder=3 if ours else 2,
        )
        drawn += points
        ends.append((name, points[-1][1], hues[name], "bold" if ours else "normal"))
    limits = sorted({(r["x"], height_of(r, limit)) for r in records if (limit := results.limit(r))})
    if limits:
        axes.plot(*zip(*limits), color=COLOURS["faint"], linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        ends.append(("machine's limit", limits[-1][1], COLOURS["faint"], "normal"))
    axes.set_title(f"{first['workload']}, {first['dtype']}", pad=7)
    scale(axes, records, max(height for _, height in limits + drawn))
    to_axes = axes.transScale + axes.transLimits
    heights = [to_axes.transform((1, height))[1] for _, height, _, _ in ends]
    for (name, _, colour, weight), height in zip(ends, spread_out(heights, 0.14)):
        axes.text(1.03, height, name, transform=axes.transAxes, color=colour, weight=weight, va="center")


def scale(axes: Axes, records: Records, highest: float) -> None:
    """Sizes as powers; times likewise, but bandwidth from zero, so that its share of the limit is what one sees."""
    places = sorted({record["x"] for record in records})
    binary = all(float(x).is_integer() and int(x).bit_count() == 1 for x in places)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.FixedLocator(apart(places)))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(power_of_two if binary else count))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    label = records[0]["axis"].replace(" of ", "\nof ")  # On one line it is wider than what is left.
    axes.text(1.09, -0.15, label, transform=axes.transAxes, va="center", color=axes.xaxis.label.get_color())
    draw = records[0]["draw"]
    if draw == "time":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(10, numticks=5))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    else:
        axes.set_ylim(0, 1.06 * highest)
        axes.yaxis.set_major_locator(ticker.MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: round_number(y, UNITS[draw])))


def round_number(value: float, unit: str) -> str:
    """A tick's value, without the zeros that `readable` shows."""
    if value == 0:
        return "0"
    number, name = readable(value, unit).split()
    return f"{float(number):g} {name}"


def operator(found: list[Results], op: str) -> bytes:
    """An operator's curves: a column a machine, a row a workload and dtype; with one machine alone, two columns of it."""
    groups = [(results, panels) for results in found if (panels := curves(results, op))]
    names = dict.fromkeys(r["contender"] for _, panels in groups for records in panels.values() for r in records)
    hues = colours(names)
    keys = list(dict.fromkeys(key for _, panels in groups for key in panels))
    workloads = list(dict.fromkeys(workload for workload, _ in keys))
    keys.sort(key=lambda key: workloads.index(key[0]))
    columns = max(2, len(groups))
    if len(groups) == 1:
        places = {(0, key): divmod(i, columns) for i, key in enumerate(keys)}
    else:
        places = {(i, key): (keys.index(key), i) for i, (_, panels) in enumerate(groups) for key in panels}
    rows = 1 + max(row for row, _ in places.values())
    width = 1 / columns - 0.116 - 0.0079 * max(len("machine's limit"), *map(len, names))
    with matplotlib.rc_context(SETTINGS):
        top, tall = 0.3, 1.48
        height = top + tall * rows
        figure = Figure(figsize=(WIDTH, height))
        for i, (results, _) in enumerate(groups):
            figure.text(0.012 + i / columns, 1 - 0.17 / height, copying(results), weight="bold", size=8.6)
        for (i, key), (row, column) in places.items():
            results, panels = groups[i]
            bottom = height - top - tall * (row + 1) + 0.29
            box = (0.1 + column / columns, bottom / height, width, (tall - 0.59) / height)
            draw_curve(figure.add_axes(box), results, panels[key], hues)
        data = [(results.header["machine"], results.header["ceilings"], panels) for results, panels in groups]
        return save(figure, f"{op}: {', '.join(names)}", data)


CLASSES = ((BEHIND, "ours", 0.25), (0.9, "other 1", 0.45), (0.8, "other 1", 0.8), (0.0, "other 3", 1.0))
"""Ratios from so many on, their colour and how opaque it is."""


def rectangles(places: list[tuple[int, int]]) -> Path:
    """Cells as one path: those next to each other in a row as one rectangle, and those of rows that are alike."""
    runs: list[list[int]] = []  # row, first and last column
    for row, column in sorted(places):
        if runs and runs[-1][0] == row and runs[-1][2] + 1 == column:
            runs[-1][2] = column
        else:
            runs.append([row, column, column])
    tall: dict[tuple[int, int, int], int] = {}  # by its columns and the row below: the first row
    for row, first, last in runs:
        tall[first, last, row + 1] = tall.pop((first, last, row), row)
    corners = [
        [(first, top), (last + 1, top), (last + 1, end), (first, end)] for (first, last, end), top in tall.items()
    ]
    # Filled, so that the last corner needs no line back to the first.
    return Path.make_compound_path(*map(Path, corners))


def draw_grid(axes: Axes, found: Map, labelled: bool) -> None:
    """Rows are the first axis; columns the third, within each size of the second, which is `labelled`."""
    # Of each axis the sizes that have a cell.
    rows, groups, columns = ([n for n in found.record["values"] if n in some] for some in zip(*found.ratios))
    step = len(columns) + 1
    places = {
        (rows.index(row), groups.index(group) * step + columns.index(column)): ratio
        for (row, group, column), ratio in found.ratios.items()
    }
    for i, (least, colour, alpha) in enumerate(
        CLASSES
    ):  # All cells in the first colour, and the slower ones over them.
        chosen = [place for place, ratio in places.items() if i == 0 or least <= ratio < CLASSES[i - 1][0]]
        if chosen:
            shape = rectangles(chosen)
            axes.add_patch(PathPatch(shape, facecolor=COLOURS[colour], alpha=alpha, linewidth=0))
    axes.set_xlim(0, step * len(groups) - 1)
    axes.set_ylim(len(rows), 0)
    axes.grid(False)
    axes.set_yticks([0.5, len(rows) - 0.5], [f"{rows[0]:,}", f"{rows[-1]:,}"])
    names = found.record["axes"]
    labels = [f"{names[1]} {n:,}" for n in groups] if labelled else []
    axes.set_xticks([i * step + len(columns) / 2 for i in range(len(labels))], labels)
    what = found.record["case"].removeprefix(f"a grid of {', '.join(names)}, ")
    axes.set_title(f"{what}: {summary(found)}", pad=3)
    axes.set_ylabel(names[0], rotation=0, labelpad=-10)


def grids(results: Results, op: str) -> bytes:
    """An operator's grids, a strip a dtype and layout: where the peer is faster."""
    found = [each for each in results.grids() if each.record["op"] == op]
    record = found[0].record
    with matplotlib.rc_context(SETTINGS):
        top, tall = 0.42, 1.12
        height = top + tall * len(found)
        figure = Figure(figsize=(WIDTH, height))
        machine, (rows, columns, within) = results.header["machine"], (record["axes"][i] for i in (0, 1, 2))
        title = (
            f"{machine}: the time of {record['contender']} / ours; {rows} down, {within} across, within each {columns}"
        )
        figure.text(0.012, 1 - 0.17 / height, title, weight="bold", size=8.6)
        names = f"{BEHIND} and more", f"from {CLASSES[1][0]}", f"from {CLASSES[2][0]}", "less"
        y = 1 - 0.33 / height
        for i, (x, name) in enumerate(zip((0.56, 0.69, 0.78, 0.87), names)):
            for _, colour, alpha in CLASSES[:1] if i == 0 else (CLASSES[0], CLASSES[i]):  # As they lie in the grid.
                figure.text(x, y, "■", color=COLOURS[colour], alpha=alpha)
            figure.text(x + 0.015, y, name, color=COLOURS["faint"], size=7)
        for i, each in enumerate(found):
            bottom = height - top - tall * (i + 1) + 0.24
            area = figure.add_axes((0.075, bottom / height, 0.915, (tall - 0.46) / height))
            draw_grid(area, each, [other.record["dtype"] for other in found[i : i + 2]] != [each.record["dtype"]] * 2)
        return save(figure, f"{op}: a grid of sizes", [machine, *(each.record for each in found)])
