"""What the documents show is what happens."""

import doctest
import importlib
import json
import re
from functools import cache
from pathlib import Path

import features
import matrix
import pytest
import torch

import extension_cpp
from extension_cpp._features import PAGE
from templates import op

ROOT = Path(__file__).parents[2]
MODULES = [
    f"{folder}.{path.stem}" for folder in ("ops", "nn") for path in (ROOT / f"extension_cpp/{folder}").glob("[!_]*.py")
]
# The operators that documents show, with their shapes; `make op` writes them.
SHOWN = {
    "scale": "one-output",
    "in_two_parts": "two-outputs",
    "scale_in_place": "in-place",
    "scale_and_shift": "optional",
    "positive": "data-dependent",
    "rms_norm": "row-wise",
    "log_sum_exp": "reduce",
    "gated_sum": "recurrence",
    "neighbour_sum": "convolved",
}
GUIDE = ROOT / "docs" / "add-an-operator.md"
FILE_OF_BLOCK = r"(?:^`([\w/.]+)`:\n\n)?^```(\w+)\n(.*?)^```$"


def blocks(document: Path) -> list[tuple[str, str, str]]:
    """The file that a block of code is from, if it names one, its language, and the code."""
    return re.findall(FILE_OF_BLOCK, document.read_text(), re.DOTALL | re.MULTILINE)


@cache
def written(stem: str, kind: str) -> dict[Path, str]:
    return op.render(stem, kind, SHOWN[stem])


def source(path: str) -> str:
    """A file of this repository, or one that `make op` writes."""
    if (ROOT / path).exists():
        return (ROOT / path).read_text()
    stem = Path(path).stem.removeprefix("test_").removeprefix("bench_")
    return written(stem, "triton" if "/triton/" in path else "cpp")[ROOT / path]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(f"extension_cpp.{name}")
    result = doctest.testmod(module, extraglobs={"torch": torch, "extension_cpp": extension_cpp})
    assert result.attempted, f"no docstring of {name} has an example"
    assert not result.failed


PAGES = ("README.md", "docs/build.md", "docs/torchvision.md")


class TestDocuments:
    @pytest.mark.parametrize("name", [path for path in PAGES if (ROOT / path).exists()])
    def test_python(self, name):
        """Each block that is from no file runs."""
        alone = [code for path, language, code in blocks(ROOT / name) if language == "python" and not path]
        assert alone
        if name == "docs/torchvision.md":
            pytest.importorskip("torchvision")
        for block in alone:
            exec(compile(block, name, "exec"), {})

    @pytest.mark.parametrize("document", [path for path in (ROOT / "README.md", GUIDE) if path.exists()])
    def test_blocks_are_from_the_files_that_they_name(self, document):
        """Paragraph by paragraph, in order; what is between them in the file may be left out."""
        for path, _, code in blocks(document):
            text, at = source(path) if path else "", 0
            for paragraph in re.split(r"\n\n+", code.rstrip("\n")) if path else ():
                at = text.find(paragraph + "\n", at)
                assert at >= 0, f"{document.name}: {path} has not, or not there:\n{paragraph}"

    @pytest.mark.skipif(not GUIDE.exists(), reason="a distribution has no guide of its own")
    def test_the_guide_shows_every_shape(self):
        """Each block names its file, and each shape has the schema that the table says."""
        assert all(path for path, _, _ in blocks(GUIDE))
        row = r"^\| `make op NAME=scale(?: SHAPE=)?([\w-]*)` \| `(.*?)`"
        schemas = dict(re.findall(row, GUIDE.read_text(), re.MULTILINE))
        assert [shape or op.SHAPES[0] for shape in schemas] == op.SHAPES == list(SHOWN.values())
        for stem, shape in SHOWN.items():
            wanted = f'"{stem}{schemas.get(shape, schemas[""])}"'
            assert any(wanted in text for text in written(stem, "cpp").values()), wanted

    def test_make_targets_exist(self):
        makefile = (ROOT / "Makefile").read_text()
        for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob(".github/workflows/*.yml")):
            for target in set(re.findall(r"(?:^|`|run: )make ([\w-]+)", document.read_text(), re.MULTILINE)):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{document}: make {target}"

    def test_links_lead_somewhere(self):
        for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")):
            prose = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
            for link in re.findall(r"\]\((?!https?:)([^)#]+)", prose):
                assert (document.parent / link).exists(), f"{document}: {link}"

    def test_proven_on_is_what_make_matrix_saw(self):
        if not matrix.PROVEN.exists():  # A distribution that is new.
            assert "".join(matrix.MARKS) in (ROOT / "README.md").read_text()
            return
        proven = json.loads(matrix.PROVEN.read_text())
        assert matrix.MARKS[0] + matrix.markdown(proven) + matrix.MARKS[1] in (ROOT / "README.md").read_text()
        assert all("failed" not in row[variant] for row in proven["rows"] for variant in proven["variants"])

    def test_features_are_those_of_the_declarations(self):
        if not PAGE.exists():
            pytest.skip("a distribution has no such page before `make features`")
        assert PAGE.read_text() == features.document(), "docs/features.md is out of date: make features"

    def test_table_of_operators(self):
        """What the README says of an operator is what it is declared with. An operator needs no row."""
        rows = re.findall(r"^\| `(\w+)\((.*?)\)` \|.*\| (.*?) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
        for name, arguments, differentiable in rows:
            function = getattr(extension_cpp, name)
            taken = [name for name in function.operator.names if name not in function.operator.declared.filled]
            assert re.findall(r"(\w+)(?:=[^,]*)?", arguments.replace("=None", "")) == taken, name
            same = "the same" in differentiable
            assert same or differentiable.startswith("no") != function.operator.differentiable, name


def test_promises_name_tests():
    """Each row of the table has tests, and there is a test function of each name in the file."""
    page = ROOT / "docs" / "promises.md"
    if not page.exists():
        pytest.skip("a distribution has no such page")
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, name in named:
            assert re.search(rf"^ *def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file} has no {name}"
