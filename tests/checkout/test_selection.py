"""What the solver picks: machines that only exist here, against the metadata of the recipe. docs/install.md has the table."""

import asyncio
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import rattler
import rattler.exceptions

engine = pytest.importorskip("package.engine")

ROOT = Path(__file__).parents[2]


class Case(NamedTuple):
    have: str
    type: str
    get: str
    cuda: str | None
    """The newest CUDA that the machine's driver can run."""
    wanted: tuple[str, ...]
    build: str
    """How the build string must begin, or what the error must name."""
    pytorch: str = ""
    """How pytorch's version and build string must begin."""
    before: tuple[str, ...] = ()
    """What was installed before, on a machine with a driver for CUDA 13.0."""
    local: str = ""
    """As `build`, of a channel that has no packages for CUDA 12."""


INSTALL = "`conda install extension_cpp`"
EXTENSION = ("extension_cpp",)
CASES = [
    Case("no NVIDIA driver", INSTALL, "CPU", None, EXTENSION, "cpu"),
    Case("a driver for CUDA 13.0 or newer", INSTALL, "CUDA 13.0", "13.0", EXTENSION, "cuda130"),
    Case("a driver for CUDA 13.0 or newer", INSTALL, "CUDA 13.0", "13.2", EXTENSION, "cuda130"),
    Case("a driver for CUDA 13.0 or newer", INSTALL, "CUDA 13.0", "14.0", EXTENSION, "cuda130"),
    Case(
        "a driver for CUDA 12",
        INSTALL,
        "CUDA 12.9; CPU from a channel that has none for CUDA 12, as the local one",
        "12.9",
        EXTENSION,
        "cuda129",
        local="cpu",
    ),
    Case(
        "a driver for CUDA 12",
        INSTALL,
        "CUDA 12.9; CPU from a channel that has none for CUDA 12, as the local one",
        "12.4",
        EXTENSION,
        "cuda129",
        local="cpu",
    ),
    Case(
        "a driver, but you want CPU",
        "`conda install 'extension_cpp=*=cpu*'`",
        "CPU, and pytorch for CPU",
        "13.0",
        ("extension_cpp * cpu*",),
        "cpu",
        "2.14.1 cpu",
    ),
    Case(
        "a driver, but you want CPU",
        "`conda install extension_cpp 'pytorch=*=cpu*'`",
        "CPU, and pytorch for CPU",
        "13.0",
        ("extension_cpp", "pytorch * cpu*"),
        "cpu",
        "2.14.1 cpu",
    ),
    Case(
        "no driver, but you want CUDA",
        "`conda install 'extension_cpp=*=cuda*'`",
        "an error: there is no `__cuda`",
        None,
        ("extension_cpp * cuda*",),
        "error: __cuda",
    ),
    Case(
        "a driver for CUDA 12, but no package for it",
        "`conda install 'extension_cpp=*=cuda*'`",
        "an error: there is no `__cuda >=13`",
        "12.4",
        ("extension_cpp * cuda*",),
        "cuda129",
        local="error: __cuda >=13",
    ),
    Case(
        "a CPU pytorch, and a driver",
        INSTALL,
        "CUDA 13.0, and pytorch becomes its CUDA build",
        "13.0",
        EXTENSION,
        "cuda130",
        "2.14.1 cuda130",
        before=("pytorch 2.10.* cpu*",),
    ),
    Case(
        "a CPU pytorch, no driver",
        INSTALL,
        "CPU, and pytorch stays as it is",
        None,
        EXTENSION,
        "cpu",
        "2.10.0 cpu",
        before=("pytorch 2.10.* cpu*",),
    ),
    Case(
        "a CUDA pytorch, and its driver",
        INSTALL,
        "CUDA, and pytorch stays as it is",
        "13.0",
        EXTENSION,
        "cuda130",
        "2.10.0 cuda130",
        before=("pytorch 2.10.* cuda130*",),
    ),
    Case(
        "a CUDA pytorch, and its driver",
        INSTALL,
        "CUDA, and pytorch stays as it is",
        "13.0",
        EXTENSION,
        "cuda130",
        "2.10.0 cuda129",
        before=("pytorch 2.10.* cuda129*",),
    ),
    Case(
        "a CUDA pytorch that must not become a CPU one",
        "`conda install extension_cpp 'pytorch=*=cuda*'`",
        "CUDA, or an error: there is no `__cuda >=13`",
        "12.9",
        ("extension_cpp", "pytorch * cuda*"),
        "cuda129",
        "2.10.0 cuda129",
        before=("pytorch 2.10.* cuda129*",),
        local="error: __cuda >=13",
    ),
    Case(
        "a pytorch below 2.10",
        INSTALL,
        "what you would get without it, and pytorch is updated",
        "13.0",
        EXTENSION,
        "cuda130",
        "2.14.1 cuda130",
        before=("pytorch 2.9.* cuda130*",),
    ),
    Case(
        "a pytorch below 2.10 that must stay",
        "`conda install extension_cpp 'pytorch=2.9'`",
        "an error: it needs `pytorch >=2.10`",
        "13.0",
        ("extension_cpp", "pytorch 2.9.*"),
        "error: pytorch >=2.10",
        before=("pytorch 2.9.* cuda130*",),
    ),
]
FOUND_LATER = Case(
    "the CPU package, and a driver since",
    "`conda update extension_cpp`",
    "CUDA 13.0, and pytorch becomes its CUDA build",
    "13.0",
    EXTENSION,
    "cuda130",
    "2.14.1 cuda130",
)
NOTHING = Case(
    "a driver that must not count", "`CONDA_OVERRIDE_CUDA= conda install extension_cpp`", "CPU", None, EXTENSION, "cpu"
)
ELSEWHERE = Case(
    "no driver, but one where it will run",
    "`CONDA_OVERRIDE_CUDA=13.0 conda install extension_cpp`",
    "CUDA 13.0",
    "13.0",
    EXTENSION,
    "cuda130",
)


def record(name: str, version: str, build: str = "0", depends: tuple = (), constrains: tuple = ()) -> dict:
    number = int(build.rsplit("_")[-1])
    fields = {"name": name, "version": version, "build": build, "build_number": number, "subdir": "linux-64"}
    return {**fields, "depends": [*depends], "constrains": [*constrains], "sha256": "0" * 64, "size": 1, "timestamp": 1}


def channel(folder: Path, procs: tuple[str, ...]) -> str:
    """conda-forge as far as a solver needs it, with this recipe's packages for `procs`."""
    records = [
        record("python", "3.11.7"),
        record("python", "3.12.1"),
        record("rich", "15.0"),
        record("pyelftools", "0.33"),
    ]
    for cuda in ("12.9", "13.0"):
        records.append(record("cuda-version", cuda, constrains=(f"__cuda >={cuda.split('.')[0]}",)))
    for version in ("2.9.1", "2.10.0", "2.14.1"):
        records.append(record("pytorch", version, "cpu_generic_0", ("python >=3.11",)))
        for cuda in ("12.9", "13.0"):
            pin = f"cuda-version >={cuda},<{int(cuda[:2]) + 1}"
            build = f"cuda{cuda.replace('.', '')}_generic_200"
            records.append(record("pytorch", version, build, ("python >=3.11", "__cuda", pin)))
    for variant, rendered in engine.Engine("", 0).render().items():
        if variant.name in procs:
            recipe = rendered.recipe.to_dict()
            needs = tuple(recipe["requirements"]["run"])
            records.append(record("extension_cpp", recipe["package"]["version"], recipe["build"]["string"], needs))
    for subdir, listed in (("linux-64", records), ("noarch", [])):
        (folder / subdir).mkdir()
        packages = {f"{r['name']}-{r['version']}-{r['build']}.conda": r for r in listed}
        index = {"info": {"subdir": subdir}, "packages": {}, "packages.conda": packages, "repodata_version": 1}
        (folder / subdir / "repodata.json").write_text(json.dumps(index))
    return folder.as_uri()


@pytest.fixture(scope="module", params=["conda-forge", "local"])
def url(request, tmp_path_factory) -> str:
    """With all variants, and with those that the local channel can build."""
    procs = ("cpu", "cuda129", "cuda130") if request.param == "conda-forge" else ("cpu", "cuda130")
    return channel(tmp_path_factory.mktemp(request.param), procs)


def machine(cuda: str | None) -> list[rattler.GenericVirtualPackage]:
    there = {"__unix": "0", "__linux": "6.1", "__glibc": "2.36", **({"__cuda": cuda} if cuda else {})}
    build = rattler.package.build_string.BuildString("0")
    return [
        rattler.GenericVirtualPackage(rattler.PackageName(name), rattler.Version(version), build)
        for name, version in there.items()
    ]


def solve(url: str, specs: tuple[str, ...], cuda: str | None, installed: list = ()) -> list[rattler.RepoDataRecord]:
    platforms = ["linux-64", "noarch"]
    there = {"virtual_packages": machine(cuda), "locked_packages": list(installed)}
    return asyncio.run(rattler.solve([url], list(specs), platforms=platforms, **there))


def check(records: list[rattler.RepoDataRecord], build: str, pytorch: str) -> None:
    found = {r.name.normalized: f"{r.version} {r.build!s}" for r in records}
    ours, theirs = found["extension_cpp"].split(" ")[1], found["pytorch"].split(" ")[1]
    assert ours.startswith(f"{build}_"), found
    assert found["pytorch"].startswith(pytorch), found
    assert ours.startswith("cuda") == theirs.startswith("cuda"), f"half CPU, half CUDA: {found}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.have}, {case.cuda}")
def test_selection(url, case):
    build = case.local if case.local and "local" in url else case.build
    before = solve(url, case.before, "13.0") if case.before else []
    # What was installed by name stays wanted.
    wanted = (*case.wanted, *(("pytorch",) if before and not any("pytorch" in spec for spec in case.wanted) else ()))
    if build.startswith("error: "):
        with pytest.raises(rattler.exceptions.SolverError) as error:
            solve(url, wanted, case.cuda, before)
        assert build.removeprefix("error: ") in str(error.value), str(error.value)
    else:
        check(solve(url, wanted, case.cuda, before), build, "" if case.local else case.pytorch)


def test_a_driver_appears_and_disappears(url):
    """An update moves to CUDA with pytorch, and back."""
    first = solve(url, EXTENSION, None)
    check(first, "cpu", "2.14.1 cpu")
    others = [r for r in first if r.name.normalized != "extension_cpp"]
    second = solve(url, FOUND_LATER.wanted, FOUND_LATER.cuda, others)
    check(second, FOUND_LATER.build, FOUND_LATER.pytorch)
    check(solve(url, EXTENSION, None, second), "cpu", "2.14.1 cpu")


@pytest.mark.parametrize("case", [NOTHING, ELSEWHERE], ids=lambda case: case.have)
def test_override(url, case, monkeypatch):
    """The variable by which users and builds tell the solver which driver to think of."""
    monkeypatch.setenv("CONDA_OVERRIDE_CUDA", case.cuda or "")
    check(asyncio.run(engine.solve([url], list(case.wanted))), case.build, case.pytorch)


def test_the_table_of_the_document():
    """Each row of it is a case above, and each case a row."""
    text = (ROOT / "docs" / "install.md").read_text()
    rows = [f"| {case.have} | {case.type} | {case.get} |" for case in [*CASES, FOUND_LATER, NOTHING, ELSEWHERE]]
    table = text.split("| you have | you type | you get |\n|---|---|---|\n")[1].split("\n\n")[0].splitlines()
    assert sorted(set(rows)) == sorted(table)


def test_install_commands_of_the_readme(packages):
    """Channels and specs as each line names them, solved by the engine of pixi, the local channel for conda-forge."""
    readme = (ROOT / "README.md").read_text()
    lines = re.findall(r"`(?:conda|mamba) install (-c .*?)`|`pixi init (.*?) my_project.* pixi add (\w+)`", readme)
    commands = [f"{install}{channels} {spec}".strip() for install, channels, spec in lines]
    assert len(commands) == 3
    for command in commands:
        channels = [name.replace("$PWD", str(ROOT)) for name in re.findall(r"-c (\S+)", command)]
        channels = [(ROOT / "dist" / "channel").as_uri() if name == "conda-forge" else name for name in channels]
        records = asyncio.run(engine.solve(channels, [command.split()[-1]]))
        names = {record.name.normalized for record in records}
        assert {"extension_cpp", "pytorch", "python"} <= names and "gxx_linux-64" not in names
