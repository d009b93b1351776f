"""What copier.yml needs: the renaming of this repository's files, and what is done once they are there."""

import keyword
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import yaml
from jinja2 import Environment
from jinja2.ext import Extension

ROOT = Path(__file__).resolve().parents[1]
OTHERS = Path(__file__).resolve().with_suffix("")
HOMEPAGE = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text())["context"]["homepage"]
# In this order, as the address has the name in it.
NAMES = {
    HOMEPAGE: "~[ homepage ]~",
    "extension_cpp": "~[ name ]~",
    "EXTENSION_CPP": "~[ name | upper ]~",
}
MAX_LENGTH = 20  # With more, comments get longer than the linter allows.
TOOLS = {"ruff": "ruff", "clang_format": "clang-format", "rich": "rich"}
EXAMPLE = "scale"


class Rename(Extension):
    """Every file, and every file's path, under the distribution's name; some files are others altogether."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        environment.filters["refused"] = refused
        families = [*ROOT.glob("extension_cpp/ops/[!_]*.py"), *ROOT.glob("extension_cpp/compat/[!_]*.py")]
        environment.globals["stems"] = [path.stem for path in families]

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        if name and (OTHERS / name).is_file():
            return (OTHERS / name).read_text()
        if name == "Makefile":  # The target that made the distribution, and that of a table which it has not.
            for target in ("new-distribution", "selection"):
                source = re.sub(rf"(?m)(^# .*\n)+{target}:.*\n(\t.*\n)+\n", "", source).replace(f" {target}", "")
        if name == "LICENSE":  # It keeps the notice of what it is made of, next to its own.
            return re.sub(r"(?m)^(Copyright .* the )\w+( developers)$", r"\g<0>\n\1~[ name ]~\2", source)
        for ours, theirs in NAMES.items():
            source = source.replace(ours, theirs)
        return source


def refused(name: str) -> str:
    """Why a distribution can't have a name; nothing where it can."""
    snake = re.sub(r"\W+|(?<=[a-z0-9])(?=[A-Z])", "_", name, flags=re.ASCII).lower().lstrip("0123456789_").rstrip("_")
    if not name or name != snake or len(name) > MAX_LENGTH:
        suggested = snake[:MAX_LENGTH].rstrip("_") or "my_ops"
        return f"name must be in snake_case, of at most {MAX_LENGTH} characters, got {name!r}: try {suggested}"
    taken = {*sys.stdlib_module_names, *TOOLS, "torch", "triton", "numpy", "extension_cpp"}
    taken |= {path.name for path in ROOT.iterdir() if path.is_dir()}
    if keyword.iskeyword(name) or name in taken:
        return f"name must not be taken, as by a module of Python, torch or a folder here, got {name!r}: try {name}_ops"
    return ""


def finish(operation: str) -> None:
    """In the new distribution: break lines by the new lengths; write its example, which is its owner's from then on."""
    lacking = [package for module, package in TOOLS.items() if not find_spec(module)]
    if lacking:
        sys.exit(f"templates.distribution: copier also needs {' and '.join(lacking)}: pip install them next to it")
    scripts = Path(sys.executable).parent
    ruff = [sys.executable, "-m", "ruff"]
    subprocess.run([*ruff, "check", "--no-cache", "--quiet", "--fix", "--select", "I,RUF022", "."], check=True)
    subprocess.run([*ruff, "format", "--no-cache", "--quiet", "."], check=True)
    subprocess.run(
        [scripts / "clang-format", "-i", *(str(path) for path in Path("csrc").rglob("*") if path.is_file())], check=True
    )
    if operation == "copy":
        subprocess.run([sys.executable, "-m", "templates.op", "add", EXAMPLE], check=True)


def check(name: str, destination: str) -> None:
    """What copier says with a traceback, or not at all: without a destination it copies into this folder."""
    why = refused(name).replace("name", "NAME", 1) or ("" if destination else "DEST must be a new folder, got ''")
    if why:
        sys.exit(f"templates.distribution: {why} (make new-distribution NAME=my_ops DEST=../my_ops)")


if __name__ == "__main__":
    check(*sys.argv[2:]) if sys.argv[1] == "check" else finish(sys.argv[1])
