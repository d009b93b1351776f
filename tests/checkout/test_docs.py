"""What the documents show is what happens."""

import doctest
import importlib
import json
import re
from pathlib import Path

import matrix
import pytest
import torch

import extension_cpp

ROOT = Path(__file__).parents[2]
MODULES = [
    f"{folder}.{path.stem}" for folder in ("ops", "nn") for path in (ROOT / f"extension_cpp/{folder}").glob("[!_]*.py")
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(f"extension_cpp.{name}")
    result = doctest.testmod(module, extraglobs={"torch": torch, "extension_cpp": extension_cpp})
    assert result.attempted and not result.failed


class TestDocuments:
    # The guide's blocks are of files that it has made; test_templates.py has those.
    @pytest.mark.parametrize("name", [path for path in ("README.md", "docs/build.md") if (ROOT / path).exists()])
    def test_python(self, name):
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
        assert blocks
        for block in blocks:
            exec(compile(block, name, "exec"), {})

    def test_make_targets_exist(self):
        makefile = (ROOT / "Makefile").read_text()
        for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob(".github/workflows/*.yml")):
            for target in set(re.findall(r"(?:^|`|run: )make ([\w-]+)", document.read_text(), re.MULTILINE)):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{document}: make {target}"

    def test_links_lead_somewhere(self):
        for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
            for link in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
                assert (document.parent / link).exists(), f"{document}: {link}"

    def test_proven_on_is_what_make_matrix_saw(self):
        if not matrix.PROVEN.exists():  # A distribution that is new.
            assert "".join(matrix.MARKS) in (ROOT / "README.md").read_text()
            return
        proven = json.loads(matrix.PROVEN.read_text())
        assert matrix.MARKS[0] + matrix.markdown(proven) + matrix.MARKS[1] in (ROOT / "README.md").read_text()
        assert all("failed" not in row[variant] for row in proven["rows"] for variant in proven["variants"])

    def test_every_operator_is_in_the_table(self):
        table = (ROOT / "README.md").read_text()
        for name in extension_cpp.ops.__all__:
            assert f"| `{name}(" in table
