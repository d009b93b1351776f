"""`make op`, `make op-rename` and `make op-remove`: writes the files of a new operator from templates/op, gives an operator
another name, and takes one out again."""

import argparse
import keyword
import re
import subprocess
import sys
import tempfile
from io import StringIO
from itertools import product
from pathlib import Path
from tokenize import generate_tokens
from typing import NoReturn

import copier
import yaml
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "templates" / "op"
QUESTIONS = yaml.safe_load((TEMPLATE / "copier.yml").read_text())
KINDS, SHAPES = (list(QUESTIONS[question]["choices"].values()) for question in ("kind", "shape"))
IN_TRITON = [shape for shape in SHAPES if (TEMPLATE / shape / "extension_cpp" / "triton").exists()]
USAGE = "make op NAME=... KIND=... SHAPE=..."
INIT = ROOT / "extension_cpp" / "ops" / "__init__.py"
SOURCES = [
    "csrc/{}.*",
    "csrc/{}/*",
    *(f"{path}{{}}.py" for path in ("extension_cpp/*/", "tests/test_", "benchmarks/bench_")),
]
MEASURED = ["benchmarks/results/{}-*.jsonl", "benchmarks/pictures/{}-*.svg"]
SCHEMA = r'Operator \w+\(\s*"(\w+)\('
SHORT_LISTS = ("--config", "format.skip-magic-trailing-comma=true")
# The names of a family's namespace and of its functions in C++.
CPP_WORDS = set(
    re.findall(
        r"\w+",
        """alignas alignof asm auto bool break case catch char compl concept const consteval constexpr constinit continue
        decltype default delete do double dynamic_cast else enum explicit export extern float for friend goto if inline
        int long main mutable namespace new noexcept nullptr operator private protected public register requires return
        short signed sizeof static std struct switch template this throw torch try typedef typeid typename union
        unsigned using virtual void volatile while xor
        alloca errno offsetof stderr stdin stdout""",  # The last are macros of what the headers include.
    )
)
MAX_LENGTH = 40  # With more the templates' lines get longer than the linter allows.


def refuse(name: str, must: str, instead: str = "") -> None:
    sys.exit(f"templates.op: NAME must {must}, got {name!r}{f': try NAME={instead}' if instead else ''}")


def unknown(name: str) -> NoReturn:
    there = ", ".join(path.stem for path in sorted(INIT.parent.glob("[!_]*.py")))
    files = f"{INIT.parent.relative_to(ROOT)}/NAME.py and csrc/NAME.cpp"
    sys.exit(f"templates.op: NAME must be that of an operator's files, {files}, got {name!r}: those are {there}")


def must_exist(name: str) -> None:
    """Before anything is changed: other files, as tests/test_NAME.py, can be those of what is no operator."""
    if not (name.isidentifier() and (INIT.parent / f"{name}.py").exists() and (ROOT / "csrc" / f"{name}.cpp").exists()):
        unknown(name)


def find(name: str, *patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern.format(name)))


def tidy(program: str, *arguments: str | Path) -> None:
    """Run a formatter, as where lines are broken depends on how long the name is."""
    subprocess.run([Path(sys.executable).with_name(program), *arguments], check=True)


def tidy_all(paths: list[Path]) -> None:
    """The sources of an operator."""
    python = [path for path in paths if path.suffix == ".py"]
    config = ("--quiet", "--config", ROOT / "pyproject.toml")
    ours = "lint.isort.known-first-party = ['extension_cpp', 'benchmarks']"
    tidy("ruff", "check", *config, "--config", ours, "--select", "I", "--fix", *python)
    tidy("ruff", "format", *config, *python)
    tidy("clang-format", "-i", f"--style=file:{ROOT / '.clang-format'}", *(set(paths) - set(python)))


def render(name: str, kind: str, shape: str) -> dict[Path, str]:
    """The files of a new operator."""
    with tempfile.TemporaryDirectory() as folder:
        copier.run_copy(str(TEMPLATE), folder, {"name": name, "kind": kind, "shape": shape}, quiet=True)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        tidy_all(paths)
        return {ROOT / path.relative_to(folder): path.read_text() for path in paths}


def declared(header: Path) -> set[str]:
    """What a header of csrc/common/ declares where the operators' namespaces are: C++ has no namespace of the same name."""
    text = re.sub(
        r"^namespace \w*::\w+ \{.*?^\}  // namespace \w*::", "", header.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    text = re.sub(r"^(namespace detail \{).*?^\}  // namespace detail", r"\1", text, flags=re.MULTILINE | re.DOTALL)
    # At the start of a line, as the body of a namespace is not indented: a function up to its parenthesis.
    names = re.findall(r"^(?:struct|namespace) ([a-z]\w*)|^[^\s#/}][^(=;\n]*\b([a-z]\w*)\(", text, re.MULTILINE)
    spaces = re.findall(r"^namespace \w+::(\w+)", header.read_text(), re.MULTILINE)
    return {*spaces, *(name for pair in names for name in pair)}


def describe() -> str:
    """What `make op` can write: the choices of each question, a line each; the first is what it writes unless told."""
    lines = [USAGE]
    for question in ("kind", "shape"):
        lines += ["", QUESTIONS[question]["help"]]
        lines += [f"  {question.upper()}={value:<16}{text}" for text, value in QUESTIONS[question]["choices"].items()]
    return "\n".join(lines)


def check_name(name: str, kind: str, shape: str) -> None:
    snake = re.sub(r"\W+|(?<=[a-z0-9])(?=[A-Z])", "_", name, flags=re.ASCII).lower().lstrip("0123456789_").rstrip("_")
    if not name or name != snake or len(name) > MAX_LENGTH:
        refuse(name, f"be in snake_case, of at most {MAX_LENGTH} characters", snake[:MAX_LENGTH] or "my_op")
    if keyword.iskeyword(name) or name in CPP_WORDS:
        refuse(name, f"not be a word of {'Python' if keyword.iskeyword(name) else 'C++'}", f"my_{name}")
    if there := find(name, *SOURCES, *MEASURED, "tests/**/test_{}.py", "extension_cpp/{}"):
        refuse(name, f"not be taken, as by {there[0].relative_to(ROOT)}", f"my_{name}")
    if header := next((path for path in find(name, "csrc/common/*.*h") if name in declared(path)), None):
        refuse(name, f"not be taken, as by the C++ of {header.relative_to(ROOT)}", f"my_{name}")
    python = [text for path, text in render("the_name", kind, shape).items() if path.suffix == ".py"]
    python += [path.read_text() for path in (INIT, ROOT / "extension_cpp" / "__init__.py")]
    names = {token.string for text in python for token in generate_tokens(StringIO(text).readline)}
    if name in names | {op for path in ROOT.glob("csrc/*.cpp") for op in re.findall(SCHEMA, path.read_text())}:
        refuse(name, "not be taken, as by another name in the code", f"my_{name}")


def add(name: str, kind: str, shape: str) -> list[Path]:
    """Write an operator's files, and import it. Returns what was written."""
    if kind == "triton" and shape not in IN_TRITON:
        sys.exit(f"templates.op: SHAPE={shape} must have KIND=cpp, as it has no form in Triton, got KIND={kind}")
    check_name(name, kind, shape)
    files = render(name, kind, shape)
    for path, text in files.items():
        with path.open("x") as file:
            file.write(text)
    imported = f'\nfrom extension_cpp.ops.{name} import {name}\n\n__all__ = ["{name}", '
    INIT.write_text(INIT.read_text().replace("\n\n__all__ = [", imported))
    tidy("ruff", "check", "--quiet", "--fix", "--select", "I,RUF022", INIT)
    tidy("ruff", "format", "--quiet", *SHORT_LISTS, INIT)
    return [*files, INIT]


def rename(name: str, to: str) -> list[Path]:
    """Give an operator another name, in its files and theirs: it may have been edited and measured. Returns what it wrote."""
    must_exist(name)
    sources, measured = find(name, *SOURCES), find(name, *MEASURED)
    try:
        check_name(to, KINDS[0], SHAPES[0])
    except SystemExit as refused:
        sys.exit(str(refused).replace("NAME", "TO"))
    old, new = (f"Test{''.join(map(str.capitalize, each.split('_')))}" for each in (name, to))

    def renamed(text: str) -> str:
        names = rf"\b(?:({old})|{name})((?:_b|B)ackward)?\b"
        return re.sub(names, lambda match: (new if match[1] else to) + (match[2] or ""), text)

    def moved(path: Path) -> Path:
        if path.parent.name == name:
            return path.parent.with_name(to) / path.name
        return path.with_name(re.sub(rf"(^|_){name}(?=[.-])", rf"\g<1>{to}", path.name))

    for path in (*sources, *measured):
        moved(path).parent.mkdir(exist_ok=True)
        moved(path).write_text(renamed(path.read_text()))
        path.unlink()
    if (ROOT / "csrc" / name).is_dir():
        (ROOT / "csrc" / name).rmdir()
    tidy_all([moved(path) for path in sources])
    named = rf'^from extension_cpp\.ops\.{name} import (\([^)]*\)|.*)$|(?<=[\[ ])"{name}"'
    INIT.write_text(re.sub(named, lambda match: renamed(match[0]), INIT.read_text(), flags=re.MULTILINE))
    tidy("ruff", "check", "--quiet", "--fix", "--select", "I,RUF022", INIT)
    tidy("ruff", "format", "--quiet", *SHORT_LISTS, INIT)
    if measured:
        subprocess.run([sys.executable, "-m", "benchmarks.report"], cwd=ROOT, check=True)
    return [*map(moved, (*sources, *measured)), INIT]


def remove(name: str, force: bool) -> list[Path]:
    """Take out what `add`, the tests and the benchmarks have written. Returns which files that was in."""
    must_exist(name)
    files = {path: path.read_text() for path in find(name, *SOURCES)}
    if not force and all(render(name, kind, shape) != files for kind, shape in product(KINDS, SHAPES)):
        refuse(name, "be of files as `make op` writes them, as changes would be lost (FORCE=1 removes them too)")
    measured = find(name, *MEASURED)
    for path in (*files, *measured):
        path.unlink()
    ops = re.findall(SCHEMA, "".join(files.values()))
    if (ROOT / "csrc" / name).is_dir():
        (ROOT / "csrc" / name).rmdir()
    listed = rf'^from extension_cpp\.ops\.{name} import (\([^)]*\)|.*)\n|(?<=[\[ ])"({"|".join(ops)})"(,\s*|(?=\]))'
    INIT.write_text(re.sub(listed, "", INIT.read_text(), flags=re.MULTILINE))
    tidy("ruff", "format", "--quiet", *SHORT_LISTS, INIT)
    if measured:
        subprocess.run([sys.executable, "-m", "benchmarks.report"], cwd=ROOT, check=True)
    return [*files, *measured, INIT]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m templates.op", description=__doc__)
    parser.add_argument("action", choices=("list", "add", "rename", "remove"))
    parser.add_argument("name", nargs="?", default="", help="of the operator, its function and its files")
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0], help="what its CUDA kernel is written in")
    parser.add_argument("--shape", choices=SHAPES, default=SHAPES[0], help="what it returns")
    parser.add_argument("--to", default="", help="the new name, of rename")
    parser.add_argument("--force", action="store_true", help="remove what was changed, too")
    given = parser.parse_args()
    if given.action == "list":
        print(describe())
        sys.exit()
    paths = {
        "add": lambda: add(given.name, given.kind, given.shape),
        "rename": lambda: rename(given.name, given.to),
        "remove": lambda: remove(given.name, given.force),
    }[given.action]()
    said = ["removed" if given.action == "remove" else "wrote", *(f"  {path.relative_to(ROOT)}" for path in paths)]
    Console(highlight=False, soft_wrap=True).print("\n".join(said))
