"""A channel without files that has conda-forge's metadata of PyTorch, CUDA and Python, for solvers.

conda_forge.json is a snapshot: what conda-forge's recipes render to, with the commits that it was made of. To make it anew,
clone the feedstocks into one folder, and run

    python tests/checkout/conda_forge.py FOLDER

With the name of a channel in place of a folder, it says what that channel's index has otherwise: of conda-forge, what changed
since, or what is rendered wrongly here.

It has the records that decide which variant is installed, and of their requirements those that name one of these packages or
a virtual one; hashes are zeros. What a compiler and a host export to a package is added, as conda-build does (`exports`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import jinja2
import rattler
import yaml

SNAPSHOT = Path(__file__).with_suffix(".json")
# Branches, the newest first; of the versions of PyTorch one is too old for this package.
FEEDSTOCKS = {
    "pytorch-cpu-feedstock": ["main", "v2.12.x", "v2.11.x", "v2.10.x", "v2.9.x"],
    "cuda-version-feedstock": ["main"],
    "python-feedstock": ["main", "3.13", "3.12", "3.11", "3.10"],
    "python_abi-feedstock": ["main"],
    "python-abi3-feedstock": ["main"],
}
PACKAGES = ("libtorch", "pytorch", "pytorch-cpu", "pytorch-gpu", "cuda-version", "python", "python_abi", "cpython")
PACKAGES += ("python-gil", "python-freethreading", "python-abi3", "_python_abi3_support")


def exports(spec: str) -> list[str]:
    """What a requirement of `build` or `host` adds to those of a package: the run_exports of conda-forge's packages."""
    name, version = (*spec.split(" "), "")[:2]
    version = re.sub(r"\.\*$", "", version)
    major = version.split(".")[0]
    if name.startswith("cuda-nvcc_"):
        return [f"cuda-version >={version},<{int(major) + 1}"]
    if name.startswith("sysroot_"):
        return [f"__glibc >={version},<3.0.a0"]
    if name == "python" and version:
        return [f"python_abi {version}.* *_cp{version.replace('.', '')}"]
    if name == "python-abi3":
        return ["_python_abi3_support 1.*", f"cpython >={version}"]
    return []


def rendered(text: str, config: Mapping[str, str]) -> dict:
    """A recipe in conda-build's first format: selectors, then Jinja. The hashes in build strings are zeros."""
    python = config.get("python", "").split(".*")[0].replace(".", "")
    platforms = ("linux", "unix", "linux64", "x86", "x86_64", "win", "win64", "osx", "arm64", "aarch64", "ppc64le")
    names = {
        **{name: name in platforms[:5] for name in platforms},
        **{"arm_variant_type": "None", "vc": "14", "os": SimpleNamespace(environ={})},
        **{"build_platform": "linux-64", "target_platform": "linux-64", "py": int(python or 0), **config},
    }

    names |= {key: value == "True" for key, value in names.items() if value in ("True", "False")}

    def selected(line: str) -> bool:
        found = re.search(r"(?<!\S)# \[(.+)\]\s*$", line)
        return not found or bool(eval(found[1], {"__builtins__": {"int": int, "float": float}}, names))

    def compiler(language: str) -> str:
        return f"cuda-nvcc_linux-64 {config['cuda_compiler_version']}" if language == "cuda" else "gxx_linux-64"

    template = jinja2.Template("\n".join(filter(selected, text.splitlines())))

    def render(exact: str) -> dict:
        """With what pin_subpackage gives for libtorch."""
        functions = {
            "compiler": compiler,
            "stdlib": lambda language: f"sysroot_linux-64 {config['c_stdlib_version']}",
            "pin_subpackage": lambda name, **_: f"{name} {exact}".strip(),
            "pin_compatible": lambda name, **_: name,
        }
        strings = {"PKG_HASH": "0000000", "PKG_BUILDNUM": "@", "CONDA_PY": python}
        return yaml.load(template.render(**names, **functions, **strings), yaml.BaseLoader)  # A version is no number.

    first = render("")
    return render(f"{first['package']['version']} {first.get('build', {}).get('string', '')}")


def records(recipe: dict, config: Mapping[str, str]) -> Iterator[dict]:
    """Of the outputs that PACKAGES names."""
    package, version = recipe["package"]["name"], recipe["package"]["version"]
    for output in recipe.get("outputs") or [{"name": package}]:
        fields = recipe if output["name"] == package else output
        build = {"number": recipe.get("build", {}).get("number", "0"), **(fields.get("build") or {})}
        if output["name"] not in PACKAGES or build.get("skip") == "true":
            continue
        needs = fields.get("requirements") or {}
        needs = {"run": needs} if isinstance(needs, list) else needs
        ignored = {spec.split(" ")[0] for spec in build.get("ignore_run_exports_from") or ()}
        before = [
            spec for part in ("build", "host") for spec in needs.get(part) or () if spec.split(" ")[0] not in ignored
        ]
        python = config.get("python", "").split(" ")[0]
        exported = [each for spec in before for each in exports(f"python {python}" if spec == "python" else spec)]
        run = [pinned(spec, python) for spec in needs.get("run") or ()]
        yield {
            "name": output["name"],
            "version": output.get("version", version),
            "build": build.get("string", "h0000000_@").replace("@", build["number"]),
            "build_number": int(build["number"]),
            "depends": sorted({spec for spec in (*run, *exported) if is_kept(spec)}),
            "constrains": sorted(spec for spec in needs.get("run_constrained") or () if is_kept(spec)),
        }


def pinned(spec: str, python: str) -> str:
    """conda-forge pins a bare requirement on Python to the minor version that was built with; 3.10 stands for 3.10.*."""
    if spec != "python" or not python:
        return re.sub(r"^(python \d+\.\d+)$", r"\1.*", re.sub(r"\s+", " ", spec))
    major, minor = python.split(".")[:2]
    return f"python >={major}.{minor},<{major}.{int(minor) + 1}.0a0"


def is_kept(spec: str) -> bool:
    name = spec.split(" ")[0]
    return name in PACKAGES or name.startswith("__")


def of_feedstock(repository: Path, branch: str) -> Iterator[dict]:
    """For linux-64, and the label that users install from."""

    def git(*arguments: str) -> str:
        return subprocess.check_output(["git", "-C", str(repository), *arguments], text=True)

    recipe = git("show", f"{branch}:recipe/meta.yaml")
    for name in git("ls-tree", "--name-only", branch, ".ci_support/").splitlines():
        if not name.startswith(".ci_support/linux_64_"):
            continue
        variant = yaml.safe_load(git("show", f"{branch}:{name}"))
        one = {key: str(values[0]) for key, values in variant.items() if isinstance(values, list)}
        if one["channel_targets"] != "conda-forge main":
            continue
        for python in variant["python"] if repository.name.startswith("pytorch") else [""]:
            config = {**one, "python": python} if python else one
            yield from records(rendered(recipe, config), config)


def snapshot(folder: Path) -> dict:
    found: dict[str, dict] = {}
    sources = []
    for name, branches in FEEDSTOCKS.items():
        for branch in branches:
            log = ["git", "-C", str(folder / name), "log", "-1", "--format=%H %cs", branch]
            commit, committed = subprocess.check_output(log, text=True).split()
            sources.append({"feedstock": name, "branch": branch, "commit": commit, "committed": committed})
            for each in of_feedstock(folder / name, branch):
                found.setdefault(f"{each['name']}-{each['version']}-{each['build']}", each)
    how = "rendered from the recipes of conda-forge's feedstocks by tests/checkout/conda_forge.py"
    return {"made": {"on": str(date.today()), "how": how, "of": sources}, "records": list(found.values())}


def load() -> dict:
    return json.loads(SNAPSHOT.read_text())


def write(folder: Path, extra: Iterable[Mapping] = ()) -> str:
    """The channel of the snapshot's records and others; returns its address."""
    listed = [*load()["records"], *extra]
    packages = {}
    for each in listed:
        fields = {"subdir": "linux-64", "constrains": [], "sha256": "0" * 64, "size": 1, "timestamp": 1, **each}
        packages[f"{each['name']}-{each['version']}-{each['build']}.conda"] = fields
    for subdir, content in (("linux-64", packages), ("noarch", {})):
        (folder / subdir).mkdir(parents=True, exist_ok=True)
        index = {"info": {"subdir": subdir}, "packages": {}, "packages.conda": content, "repodata_version": 1}
        (folder / subdir / "repodata.json").write_text(json.dumps(index))
    return folder.resolve().as_uri()


def differences(channel: str) -> list[str]:
    """What a channel says otherwise of these packages: other requirements of a build, or a newer PyTorch."""
    found = asyncio.run(rattler.Gateway().query([channel], ["linux-64", "noarch"], list(PACKAGES), recursive=False))
    there = [json.loads(each.to_json()) for records in found for each in records]
    needs = {key(each): {without_hash(spec) for spec in each["depends"] if is_kept(spec)} for each in there}
    said = []
    for each in (ours := load()["records"]):
        theirs = needs.get(key(each), set(each["depends"]))
        if theirs != set(each["depends"]):
            said.append(f"{' '.join(key(each))} needs {sorted(theirs)}, the snapshot has {each['depends']}")
    newest, known = (max(map(numbers, records)) for records in (there, ours))
    return said + ([f"there is a pytorch {'.'.join(map(str, newest))}"] if newest > known else [])


def key(record: Mapping) -> tuple[str, str, str]:
    return record["name"], record["version"], without_hash(record["build"])


def without_hash(text: str) -> str:
    return re.sub(r"(?<![a-z0-9])h[0-9a-f]{7}(?![a-z0-9])", "h0000000", text)


def numbers(record: Mapping) -> tuple[int, ...]:
    """PyTorch's version; nothing of another package."""
    return tuple(map(int, record["version"].split("."))) if record["name"] == "pytorch" else ()


def main() -> None:
    if not Path(sys.argv[1]).is_dir():
        print("\n".join(said := differences(sys.argv[1])) or f"{sys.argv[1]} says the same")
        sys.stdout.flush()
        os._exit(bool(said))  # As leave() in package/__main__.py.
    made = snapshot(Path(sys.argv[1]))
    lines = ",\n".join(json.dumps(each) for each in made["records"])
    SNAPSHOT.write_text(f'{{\n"made": {json.dumps(made["made"], indent=1)},\n"records": [\n{lines}\n]\n}}\n')
    print(f"{SNAPSHOT}: {len(made['records'])} records")


if __name__ == "__main__":
    main()
