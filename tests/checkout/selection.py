"""Which packages solvers pick on machines that only exist here; `make selection` writes what they do into docs/install.md.

The channel is conda_forge.py's with this recipe's packages. Two programs solve: py-rattler, as pixi does, and conda, where
there is one, with each solver that it has. What they picked is committed (selection.json) with their versions, so that the
document can be compared where there is no conda.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import rattler
import rattler.exceptions

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import conda_forge  # noqa: E402

from package.engine import Engine  # noqa: E402

RESULTS = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "install.md"
MARKS = ("<!-- selection: written by make selection -->\n", "<!-- end of selection -->\n")
NAME = "extension_cpp"
# What conda-forge builds for, and what a channel has that was built where conda-forge can't be reached.
CHANNELS = {"all": ("cpu", "cuda129", "cuda130"), "no CUDA 12": ("cpu", "cuda130")}
CONDA_SOLVERS = ("libmamba", "rattler", "classic")  # In the order in which conda prefers them.
GLIBC = "2.36"


class Record(NamedTuple):
    version: str
    build: str

    @property
    def cuda(self) -> str:
        """CPU or CUDA 13.0."""
        found = re.match(r"cuda(\d+)(\d)_", self.build)
        return f"CUDA {found[1]}.{found[2]}" if found else "CPU"


Environment = dict[str, Record]


@dataclass(frozen=True)
class Case:
    have: str
    typed: str
    """The command, after `conda` or `pixi`, with its specs in quotes where a shell wants them."""
    drivers: tuple[str, ...]
    """The newest CUDA that the driver can run; empty: no driver. All of them give the same."""
    before: tuple[str, ...] = ()
    """What was typed before, so that it is wanted further on."""
    with_before: tuple[str, ...] = ()
    """What else the environment was solved with, which nobody typed."""
    driver_before: str = "13.0"

    @property
    def specs(self) -> tuple[str, ...]:
        return tuple(self.typed.replace("'", "").split()[1:])

    @property
    def row(self) -> str:
        """How the table's row begins."""
        return f"| {self.have} | `{self.typed}` |"

    @property
    def is_update(self) -> bool:
        return self.typed.startswith("update")


INSTALL, CUDA, CPU = "install extension_cpp", "install 'extension_cpp=*=cuda*'", "install 'extension_cpp=*=cpu*'"
TWELVE, THIRTEEN, ANY, NONE = ("12.0", "12.4", "12.9"), ("13.0", "13.2", "14.0"), ("12.4", "13.0"), ("",)
CASES = [
    Case("no NVIDIA driver", INSTALL, NONE),
    Case("a driver for CUDA 13.0 or newer", INSTALL, THIRTEEN),
    Case("a driver for CUDA 12", INSTALL, TWELVE),
    Case("a driver, but you want CPU", CPU, ANY),
    Case("a driver, but you want CPU", "install extension_cpp 'pytorch=*=cpu*'", ANY),
    Case("a driver, but you want CPU", "install extension_cpp pytorch-cpu", ANY),
    Case("no driver, but you want CUDA", CUDA, NONE),
    Case("a driver for CUDA 12, but you want CUDA 13.0", "install 'extension_cpp=*=cuda130*'", TWELVE),
    Case("a CPU pytorch, no driver", INSTALL, NONE, ("pytorch=2.11",), ("pytorch=2.11=cpu*",), ""),
    Case("a CPU pytorch, and a driver since", INSTALL, ("13.0",), ("pytorch",), ("pytorch=2.11=cpu*",), ""),
    Case("a CPU pytorch, and a driver since", CUDA, ("13.0",), ("pytorch",), ("pytorch=2.11=cpu*",), ""),
    Case(
        "a pytorch that was installed as `pytorch=*=cpu*`, and a driver",
        INSTALL,
        ("13.0",),
        ("pytorch=*=cpu*",),
        ("pytorch=2.11=cpu*",),
    ),
    Case(
        "a pytorch that was installed as `pytorch=*=cpu*`, and a driver",
        CUDA,
        ("13.0",),
        ("pytorch=*=cpu*",),
        ("pytorch=2.11=cpu*",),
    ),
    Case("a pytorch for CUDA 13.0, and its driver", INSTALL, ("13.0",), ("pytorch",), ("pytorch=2.11=cuda130*",)),
    Case(
        "a pytorch for CUDA 12.9, and a driver for CUDA 12",
        INSTALL,
        ("12.9",),
        ("pytorch",),
        ("pytorch=2.11=cuda129*",),
    ),
    Case(
        "a pytorch for CUDA 12.9, and a driver for CUDA 12",
        "install extension_cpp 'pytorch=*=cuda*'",
        *(("12.9",), ("pytorch",), ("pytorch=2.11=cuda129*",)),
    ),
    Case(
        "a pytorch for CUDA 12.9, and a driver for CUDA 13.0",
        INSTALL,
        ("13.0",),
        ("pytorch",),
        ("pytorch=2.11=cuda129*",),
    ),
    Case("a pytorch 2.9 that came with another package", INSTALL, ("13.0",), (), ("pytorch=2.9.1=cuda129*",)),
    Case(
        "a pytorch that was installed as `pytorch=2.9`",
        INSTALL,
        ("13.0",),
        ("pytorch=2.9",),
        ("pytorch=2.9.1=cuda129*",),
    ),
    Case(
        "a pytorch that was installed as `pytorch=2.9`",
        "install extension_cpp 'pytorch>=2.10'",
        *(("13.0",), ("pytorch=2.9",), ("pytorch=2.9.1=cuda129*",)),
    ),
    Case("extension_cpp for CPU, and a driver since", "update extension_cpp", ("13.0",), (NAME,), (), ""),
    Case("extension_cpp for CPU, and a driver since", CUDA, ("13.0",), (NAME,), (), ""),
    Case(
        "extension_cpp that was installed as `=*=cpu*`",
        "update extension_cpp",
        ("13.0",),
        ("extension_cpp=*=cpu*",),
        (),
    ),
    Case("extension_cpp for CUDA, and no driver any more", "update extension_cpp", NONE, (NAME,), ()),
]


def ours(procs: Sequence[str]) -> Iterator[dict]:
    """What the index says of this recipe's packages: as the engine resolves their requirements, exports included."""
    for variant, rendered in Engine("", 0).render().items():
        if variant.name in procs:
            recipe = rendered.recipe.to_dict()
            needs, build = recipe["requirements"], recipe["build"]
            ignored = needs["ignore_run_exports"]
            before = [
                spec
                for part in ("build", "host")
                for spec in needs[part]
                if spec.split(" ")[0] not in ignored["from_package"]
            ]
            exported = [
                each
                for spec in before
                for each in conda_forge.exports(spec)
                if each.split(" ")[0] not in ignored.get("by_name", ())
            ]
            name, version = recipe["package"]["name"], recipe["package"]["version"]
            fields = {"name": name, "version": version, "build": build["string"], "build_number": build["number"]}
            yield {**fields, "depends": sorted({*needs["run"], *exported}), "constrains": []}


def channel(folder: Path, procs: Sequence[str]) -> str:
    """conda-forge with this recipe's packages for `procs`; what they need apart from PyTorch and Python is empty there."""
    others = [dict(zip(("name", "version", "build"), each)) for each in (("rich", "15.0.0", "pyhcf101f3_0"),)]
    return conda_forge.write(folder, [*ours(procs), *({**each, "build_number": 0, "depends": []} for each in others)])


class Unsolvable(Exception):
    """What the solver says."""


def solve(url: str, specs: Sequence[str], driver: str, installed: Sequence[rattler.RepoDataRecord] = ()) -> list:
    """By py-rattler, on a machine with a driver for CUDA `driver`; what is installed is what it prefers."""
    there = {"__unix": "0", "__linux": "6.1", "__glibc": GLIBC, **({"__cuda": driver} if driver else {})}
    build = rattler.package.build_string.BuildString("0")
    machine = [
        rattler.GenericVirtualPackage(rattler.PackageName(name), rattler.Version(version), build)
        for name, version in there.items()
    ]
    wanted = [str(rattler.MatchSpec(spec)) for spec in specs]
    given = {"virtual_packages": machine, "locked_packages": list(installed), "platforms": ["linux-64", "noarch"]}
    try:
        return asyncio.run(rattler.solve([url], wanted, **given))
    except rattler.exceptions.SolverError as error:
        raise Unsolvable(str(error)) from error


def merged(first: Sequence[str], then: Sequence[str]) -> list[str]:
    """Of two specs of a package, what was typed last counts; a bare name asks for nothing more than was asked before."""
    found: dict[str, str] = {}
    for spec in (*first, *then):
        name = name_of(spec)
        if spec != name or name not in found:
            found[name] = spec
    return list(found.values())


def name_of(spec: str) -> str:
    return re.match(r"[\w-]+", spec)[0]  # type: ignore[index]


def installed_before(url: str, case: Case) -> list[rattler.RepoDataRecord]:
    specs = merged(case.before, case.with_before)
    return solve(url, specs, case.driver_before) if specs else []


def by_pixi(url: str, case: Case, driver: str, before: Sequence[rattler.RepoDataRecord]) -> Environment:
    """As pixi: the manifest's specs, and the lock file's packages apart from those to update."""
    kept = [each for each in before if not (case.is_update and each.name.normalized in case.specs)]
    specs = merged(case.before, () if case.is_update else case.specs)
    return environment(solve(url, specs, driver, kept))


def environment(records: Sequence[rattler.RepoDataRecord]) -> Environment:
    return {each.name.normalized: Record(str(each.version), str(each.build)) for each in records}


@cache
def conda() -> str:
    """The program; an empty string where there is none."""
    return shutil.which("conda") or os.environ.get("CONDA_EXE", "")


@cache
def conda_solvers() -> dict[str, str]:
    """Those that this conda has, with what the results say of them."""
    if not conda():
        return {}
    version = run_conda("--version").stdout.split()[-1]
    return {solver: f"conda {version} with {solver}" for solver in CONDA_SOLVERS if has_solver(solver)}


def has_solver(solver: str) -> bool:
    """Whether it can solve for nothing."""
    with tempfile.TemporaryDirectory() as folder:
        url = conda_forge.write(Path(folder, "channel"))
        given = ["create", "--dry-run", "--solver", solver, "--override-channels", "--channel", url]
        return run_conda(*given, "--prefix", f"{folder}/environment", "cuda-version").returncode == 0


def run_conda(*arguments: str, driver: str = "") -> subprocess.CompletedProcess:
    own = {"CONDA_OVERRIDE_CUDA": driver, "CONDA_OVERRIDE_GLIBC": GLIBC, "CONDA_ADD_PIP_AS_PYTHON_DEPENDENCY": "false"}
    own |= {"CONDARC": os.devnull, "CONDA_NUMBER_CHANNEL_NOTICES": "0"}
    return subprocess.run([conda(), *arguments], env={**os.environ, **own}, capture_output=True, text=True)


def by_conda(url: str, case: Case, driver: str, before: Sequence[rattler.RepoDataRecord], solver: str) -> Environment:
    """In an environment that has records of packages, and the history of what was typed, and no files."""
    with tempfile.TemporaryDirectory() as folder:
        meta = Path(folder, "environment", "conda-meta")
        meta.mkdir(parents=True)
        for each in before:
            fields = {**json.loads(each.to_json()), "files": [], "channel": url}
            (meta / f"{each.file_name.removesuffix('.conda')}.json").write_text(json.dumps(fields))
        typed = f"==> 2026-01-01 00:00:00 <==\n# cmd: conda create\n# update specs: {json.dumps(list(case.before))}\n"
        (meta / "history").write_text(typed if before else "")
        command = "update" if case.is_update else "install"
        given = ["--dry-run", "--json", "--yes", "--solver", solver, "--override-channels", "--channel", url]
        done = run_conda(command, *given, "--prefix", str(meta.parent), *case.specs, driver=driver)
    said = json.loads(done.stdout)
    if not said.get("success"):
        raise Unsolvable(said.get("message", done.stdout))
    actions = said.get("actions", {})
    gone = {each["name"] for each in actions.get("UNLINK", ())}
    there = {name: each for name, each in environment(before).items() if name not in gone}
    return there | {each["name"]: Record(each["version"], each["build_string"]) for each in actions.get("LINK", ())}


def told(case: Case, before: Environment, after: Environment) -> str:
    """For the table."""
    ours, theirs = after[NAME], after["pytorch"]
    if "pytorch" not in before:
        return ours.cuda if ours.cuda == theirs.cuda else f"{ours.cuda}, and pytorch for {theirs.cuda}"
    if theirs == before["pytorch"]:
        return f"{ours.cuda}; pytorch stays as it is"
    return f"{ours.cuda}; pytorch becomes {theirs.version} for {theirs.cuda}"


def refused(error: Unsolvable) -> str:
    named = next((name for name in ("__cuda", "pytorch") if name in str(error)), "")
    return f"an error that names `{named}`" if named else "an error"


def outcome(url: str, case: Case, solver: str) -> str:
    """What all drivers of a case give, by pixi or one of conda's solvers."""
    before = installed_before(url, case)
    found = set()
    for driver in case.drivers:
        try:
            given = (url, case, driver, before)
            after = by_pixi(*given) if solver == "pixi" else by_conda(*given, solver)
            found.add(told(case, environment(before), after))
        except Unsolvable as error:
            found.add(refused(error))
    assert len(found) == 1, f"{case}: {found}"
    return found.pop()


def picks(solver: str) -> dict[str, dict[str, str]]:
    """Of each case's row, by channel."""
    with tempfile.TemporaryDirectory() as folder:
        urls = {name: channel(Path(folder, name.replace(" ", "-")), procs) for name, procs in CHANNELS.items()}
        return {name: {case.row: outcome(url, case, solver) for case in CASES} for name, url in urls.items()}


def document(results: dict) -> str:
    """The table; where solvers differ, what each does."""
    newest = max(each["committed"] for each in conda_forge.load()["made"]["of"])
    versions = ", ".join(result["version"] for result in results.values())
    missing = [f"conda ({solver})" for solver in CONDA_SOLVERS if solver not in results]
    lines = [
        f"Solved by {versions}, with what conda-forge's recipes said on {newest}."
        + f" Not tried: {', '.join(missing)}." * bool(missing)
        + "\n",
        "| you have | you type | you get | from a channel without packages for CUDA 12 |",
        "|---|---|---|---|",
    ]
    for case in CASES:
        cells = [
            said({result["by"]: result["picks"][name][case.row] for result in results.values()}) for name in CHANNELS
        ]
        last = "the same" if cells[1] == cells[0] else cells[1]
        lines.append(f"{case.row} {cells[0]} | {last} |")
    return "\n".join(lines) + "\n"


def said(by_solver: dict[str, str]) -> str:
    solvers: dict[str, list[str]] = {}
    for solver, text in by_solver.items():
        solvers.setdefault(text, []).append(solver)
    if len(solvers) == 1:
        return next(iter(solvers))
    return ". ".join(f"{', '.join(names)}: {text}" for text, names in solvers.items())


def with_table(page: str, results: dict) -> str:
    before, rest = page.split(MARKS[0])
    return before + MARKS[0] + document(results) + MARKS[1] + rest.split(MARKS[1])[1]


def solvers() -> dict[str, dict[str, str]]:
    """Those that are here, with how the document calls them."""
    found = {"pixi": {"version": f"py-rattler {rattler.__version__} (as pixi)", "by": "pixi"}}
    for solver, version in conda_solvers().items():
        found[solver] = {"version": version, "by": f"conda ({solver})"}
    return found


def main() -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for solver, words in solvers().items():
        print(f"{words['version']} ...", flush=True)
        results[solver] = {**words, "picks": picks(solver)}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), results))
    print(f"{RESULTS}\n{PAGE}")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # As leave() in package/__main__.py.
