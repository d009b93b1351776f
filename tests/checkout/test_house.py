"""The modules stand on floors: a module imports none of a higher floor, and no module imports itself in a circle. What they
export has names and types that tools can read."""

import ast
import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import extension_cpp

PACKAGE = Path(__file__).parents[2] / "extension_cpp"
FLOORS = [
    ["_C", "_elf", "_machine", "_build", "_version", "_pyinstaller", "_pyinstaller.*"],
    ["_loader"],
    ["jit", "_jit", "ops", "ops.*", "triton", "triton.*"],
    ["nn", "nn.*", "doctor", "doctor.*", "compat", "compat.*", "_features"],
    ["__init__", "__main__", "doctor._probe", "testing"],  # The doctor starts its probe; tests use the whole package.
]


def sources() -> dict[str, str]:
    """The source of each module, by its name in the package; that of a package is its __init__.py."""
    names = {
        path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path for path in PACKAGE.rglob("*.py")
    }
    return {name.removesuffix(".__init__"): path.read_text() for name, path in names.items()}


def imports(modules: Mapping[str, str], package: str = "extension_cpp") -> dict[str, set[str]]:
    """What each module imports of the package, also in its functions. `from a import b` imports a.b if that is a module."""

    def named(name: str) -> str:
        return name.removeprefix(package).lstrip(".") or "__init__"

    def imported(module: str) -> Iterator[str]:
        for node in ast.walk(ast.parse(modules[module])):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
                yield from (named(name) for name in names if name.split(".")[0] == package)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}: a relative import"
                if str(node.module).split(".")[0] == package:
                    for alias in node.names:
                        inner = named(f"{node.module}.{alias.name}")
                        yield inner if inner in modules else named(str(node.module))

    return {module: set(imported(module)) for module in modules}


def floor(module: str) -> int:
    floors = [i for i, names in enumerate(FLOORS) if any(fnmatchcase(module, name) for name in names)]
    assert floors, f"{module} has no floor: write it into FLOORS"
    return floors[-1]


def upward(graph: Mapping[str, set[str]]) -> set[tuple[str, str]]:
    return {(module, other) for module, others in graph.items() for other in others if floor(other) > floor(module)}


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """The modules of one circle, or none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_a_higher_floor():
    assert upward(imports(sources())) == set()


def test_no_circle():
    assert circle(imports(sources())) == []


@pytest.mark.parametrize(
    ("source", "other"),
    [
        ("from extension_cpp import jit", "jit"),
        ("def load():\n    from extension_cpp.jit import load_package", "jit"),
        ("if True:\n    import extension_cpp.ops.one as one", "ops.one"),
        ("from extension_cpp.ops import one", "ops.one"),
        ("from extension_cpp.ops import two", "ops"),
        ("import extension_cpp", "__init__"),
        ("from extension_cpp import load_errors", "__init__"),
    ],
)
def test_an_import_upward_is_found(source, other):
    modules = {"__init__": "", "_loader": source, "jit": "", "ops": "", "ops.one": "from extension_cpp import _loader"}
    assert upward(imports(modules)) == {("_loader", other)}


def test_imports_of_lower_floors_and_of_others_are_none():
    lines = [
        "import json, extension_cpp_tools",
        "from torch import extension_cpp",
        "from extension_cpp import _elf, _loader",
    ]
    source = "\n".join(lines)
    graph = imports({"__init__": "", "_elf": "", "_loader": "from extension_cpp import _elf", "jit": source})
    assert graph["jit"] == {"_elf", "_loader"} and upward(graph) == set() and circle(graph) == []


def test_a_circle_is_found():
    inside = "def build():\n    from extension_cpp.ops import c"
    modules = {
        "ops": "",
        "ops.a": "import extension_cpp.ops.b",
        "ops.b": inside,
        "ops.c": "from extension_cpp.ops.a import f",
    }
    assert upward(imports(modules)) == set() and set(circle(imports(modules))) == {"ops.a", "ops.b", "ops.c"}


def test_a_module_without_a_floor_is_found():
    with pytest.raises(AssertionError, match="_facts has no floor"):
        upward(imports({"_elf": "from extension_cpp import _facts", "_facts": ""}))


def exported(source: str, **modules: list[str]) -> list[str]:
    """`__all__` as a type checker finds it, which runs nothing: of lists of strings, and of other modules' `__all__`."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if not (isinstance(target, ast.Name) and target.id == "__all__"):
            continue
        match node.value:
            case ast.Attribute(value=ast.Name(id=module), attr="__all__"):
                names += modules[module]
            case value:
                names += ast.literal_eval(value)
    return names


def foreign_namespaces(stem: str, source: str) -> list[str]:
    """Of other families, in a file of the family `stem`: what two of them define in one is taken for the same."""
    return [name for name in re.findall(r"^namespace extension_cpp::(\w+)", source, re.MULTILINE) if name != stem]


def test_a_namespace_for_each_family():
    csrc = PACKAGE.parent / "csrc"
    files = [path for path in csrc.rglob("*") if path.suffix in (".cpp", ".cu", ".h", ".cuh")]
    stems = {path: path.relative_to(csrc).parts[0].partition(".")[0] for path in files}
    found = {
        path.name: names
        for path, stem in stems.items()
        if stem not in ("common", "module") and (names := foreign_namespaces(stem, path.read_text()))
    }
    assert len(files) > 20 and not found


def test_a_foreign_namespace_is_found():
    assert foreign_namespaces("one", "namespace extension_cpp::one {\nnamespace extension_cpp::two {") == ["two"]


def test_type_checkers_find_every_name():
    """tests/checkout/typed.py is what mypy makes of them."""
    modules = sources()
    ops = exported(modules["ops"])
    assert ops == extension_cpp.ops.__all__
    assert sorted(exported(modules["__init__"], ops=ops)) == sorted(extension_cpp.__all__)


def test_a_computed_list_of_names_is_found():
    with pytest.raises(ValueError, match="malformed node"):
        exported("__all__ = []\nif True:\n    __all__ += ['a', *ops.__all__]", ops=["b"])


@pytest.mark.parametrize("name", extension_cpp.ops.__all__)
def test_every_public_function_has_types(name):
    function = getattr(extension_cpp, name)
    hints = typing.get_type_hints(function)
    assert sorted(hints) == sorted([*inspect.signature(function).parameters, "return"])
    assert Any not in hints.values()
