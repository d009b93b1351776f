"""The report is drawn from the committed results, and says nothing else."""

import re
from pathlib import Path

import pytest

import extension_cpp
from benchmarks import records
from benchmarks.records import ROOT
from benchmarks.report import documents as report
from benchmarks.report import pictures

README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def rendered():
    return report.render(records.load(), README)


def test_the_documents_and_pictures_are_those_of_the_results(rendered):
    for path, content in rendered.items():
        written = (ROOT / path).read_bytes()
        if path.suffix == ".svg" and mark(written, "creator") != mark(content, "creator"):
            written, content = mark(written, "identifier"), mark(content, "identifier")
        assert written == content, f"{path} is not what the results say: make report"
    there = {path.relative_to(ROOT) for path in (ROOT / report.PICTURES).glob("*")}
    assert there == {path for path in rendered if path.suffix == ".svg"}


def test_no_speed_is_typed_by_hand():
    """Outside of the generated section, and of what a command printed, the README has no times and no ratios."""
    by_hand = re.sub(rf"{re.escape(report.START)}.*?{re.escape(report.END)}|```.*?```", "", README, flags=re.DOTALL)
    speeds = r"\d ?([nµm]?s|seconds?|min|minutes?|[kMGT]?B/s|[GT]?FLOP/s)\b|(faster|slower|times|as fast) (as|than)\b"
    assert not re.search(speeds, by_hand), re.search(speeds, by_hand)


def mark(picture: bytes, name: str) -> bytes:
    """What a picture says of the matplotlib that drew it, which may draw otherwise, or of its data."""
    pattern = rb"<dc:identifier>(.*?)<" if name == "identifier" else rb"(matplotlib [\d.]+)"
    return re.search(pattern, picture)[1]


def test_the_same_results_give_the_same_bytes(rendered):
    assert report.render(records.load(), README) == rendered


def test_results_are_of_the_whole_family():
    """Results from before a family got another operator say nothing of that one."""
    for results in records.load():
        module = f"extension_cpp.ops.{results.family}"
        of_family = {op for op in extension_cpp.ops.__all__ if getattr(extension_cpp, op).__module__ == module}
        assert {r["op"] for r in results.records} >= of_family, f"{results.family} on {results.device}: make bench"


def test_pictures_are_small(rendered):
    sizes = [len(content) for path, content in rendered.items() if path.suffix == ".svg"]
    assert all(size < 100_000 for size in sizes) and sum(sizes) <= 40_000 * len(sizes)


def test_pictures_follow_the_theme(rendered):
    """Every colour of a picture has another one in a dark theme."""
    for path, content in rendered.items():
        if path.suffix == ".svg":
            sheet, drawn = content.decode().split("</style>")
            colours = set(re.findall(r"(?:fill|stroke): #\w+", drawn))
            dark = dict(
                re.findall(r'\[style\*="(.*?)"\]\{(.*?) !important\}', sheet.split("prefers-color-scheme: dark")[1])
            )
            assert colours and all(dark[colour] != colour for colour in colours), path


def test_the_worst_cell_of_each_operator():
    """Next to the median; a cell that is below its best peer is counted, and its reason is given."""

    def case(op: str, ratio: float, **more) -> list[dict]:
        described = {"op": op, "case": f"at {ratio}", "workload": "", **more}
        peer = {"contender": "peer", "ratio": ratio, **described}
        return [{"contender": "extension_cpp", **described}, peer, {**peer, "contender": "slow peer", "ratio": 9}]

    cells = [*case("a", 2), *case("a", 0.5, reason="Physics."), *case("a", 1.5), *case("b", 0.9)]
    found = [records.Results({"family": "a", "machine": "here"}, cells)]
    assert report.worst(found).splitlines()[2:] == [
        "| `a` | here | 3 | 1.50 | 0.50 | at 0.5: peer | 1 |",
        "| `b` | here | 1 | 0.90 | 0.90 | at 0.9: peer | 1 |",
    ]
    why = "\n- `a`, at 0.5, on here: Physics.\n- `b`, at 0.9, on here: no reason is declared\n"
    assert report.reasons(found) == why


def test_a_grid():
    """A row and a strip of a picture for each: how many cells are below the peer, the mean, and the worst."""
    ours = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, None]
    theirs = [2.0, 0.93, 0.85, 0.5, 1.0, 1.0, 1.0, None]
    case = "a grid of M, K, N, float32, b transposed"
    described = {"op": "a", "case": case, "workload": "grid", "dtype": "float32", "contender": "peer", "ours": ours}
    record = {**described, "theirs": theirs, "axes": ["M", "K", "N"], "values": [1, 1000]}
    found = records.Results({"family": "a", "machine": "here", "device": "cuda"}, [record])
    row = "| `a` | here | M, K, N, float32, b transposed | 7 | 0.97 | 0.50 | M 1, K 1,000, N 1,000 | 3 |\n"
    assert row in report.grids([found])
    picture = pictures.grids(found, "a").decode()
    assert "here: the time of peer / ours; M down, N across, within each K" in picture
    said = "3 of 7 cells below 0.95 of peer, geometric mean 0.97, worst 0.50 at M 1, K 1,000, N 1,000"
    assert f"float32, b transposed: {said}" in picture
    shapes = re.findall(r'clip-path="[^"]*" style="fill: #\w+', picture)
    assert len(shapes) == len(pictures.CLASSES), "a shape for each class of ratios"
    assert report.grids([records.Results({"machine": "here"}, [])]) == ""
    record["reasons"] = {"Physics.": [[1, 1, 1000], [1, 1000, 1000], [1, 1, 1]]}
    assert (
        f"\n- `a`, {case}, on here: 2 cells, the worst 0.50 at M 1, K 1,000, N 1,000: Physics.\n"
        f"- `a`, {case}, on here: 1 cell, the worst 0.85 at M 1, K 1,000, N 1: no reason is declared\n"
        in report.grids([found])
    )


def test_the_leading_machine_is_that_of_most_results():
    """Of those that measured the family at hand: pictures of all families are of the same machine then."""
    of = {family: records.Results({"family": family, "device": "cpu", "machine": "a"}, []) for family in ("x", "y")}
    other = records.Results({"family": "x", "device": "cpu", "machine": "b"}, [])
    assert records.leading([of["x"], other], [*of.values(), other]) == [of["x"]]
    assert records.leading([of["x"], other]) == [other]


def test_nothing_measured():
    """A distribution that is new has no results."""
    files = report.render([], README)
    assert set(files) == {Path("README.md"), Path("benchmarks/README.md")}
    assert b"Nothing was measured yet: `make bench`" in files[Path("README.md")]


def test_a_readme_without_marks():
    with pytest.raises(records.ResultsError, match=r"README\.md lacks the marks"):
        report.render(records.load(), "# no marks")


def test_labels_do_not_overlap():
    heights = [0.5, 0.51, 0.99, 1.4, -0.2]
    placed = pictures.spread_out(heights, 0.14)
    assert all(b - a > 0.139 for a, b in zip(sorted(placed), sorted(placed)[1:]))
    assert min(placed) >= -1e-9 and max(placed) <= 1 + 1e-9
    assert sorted(range(5), key=placed.__getitem__) == sorted(range(5), key=heights.__getitem__)
