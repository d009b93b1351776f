"""What solvers pick: machines that only exist here, on conda-forge's metadata. docs/install.md has the table."""

import asyncio
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import ClassVar

import pytest

engine = pytest.importorskip("package.engine")

import conda_forge  # noqa: E402
import selection  # noqa: E402
from selection import CASES, CHANNELS, NAME, ROOT, Record, Unsolvable, environment, name_of, solve  # noqa: E402

RESULTS = json.loads(selection.RESULTS.read_text())
EMPTY = {"build": "0", "build_number": 0, "depends": []}


@pytest.fixture(scope="module", params=CHANNELS)
def url(request, tmp_path_factory) -> str:
    """With all variants, and with those that the local channel can build."""
    return selection.channel(tmp_path_factory.mktemp("channel"), CHANNELS[request.param])


def test_rows():
    assert selection.picks("pixi") == RESULTS["pixi"]["picks"], "make selection"


@pytest.mark.long
@pytest.mark.parametrize("solver", selection.CONDA_SOLVERS)
def test_rows_by_conda(solver):
    if solver not in selection.conda_solvers():
        pytest.skip(f"no conda with the solver {solver} on PATH")
    if solver not in RESULTS:
        pytest.skip(f"what {solver} picks is not committed yet: make selection")
    assert selection.picks(solver) == RESULTS[solver]["picks"], "make selection"


def test_the_table_of_the_document():
    page = selection.PAGE.read_text()
    assert selection.with_table(page, RESULTS) == page, "make selection"


DRIVERS = ("", "12.0", "12.2", "12.4", "12.6", "12.8", "12.9", "13.0", "13.1", "13.2")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
THERE = {
    "nothing": (),
    "CPU": ("pytorch=2.11.0=cpu*",),
    "CUDA 12.9": ("pytorch=2.12.1=cuda129*",),
    "CUDA 13.0": ("pytorch=2.12.1=cuda130*",),
    "old": ("pytorch=2.9.1",),
}
ASKED = (NAME, f"{NAME}=*=cpu*", f"{NAME}=*=cuda*")
MACHINES = [
    (driver, PYTHONS[at % (len(PYTHONS) - (there == "old"))], there, asked)  # That was not built for the newest.
    for at, (driver, there, asked) in enumerate(itertools.product(DRIVERS, THERE, ASKED))
]


def major(cuda: str) -> int:
    """Of 13.0 or CUDA 13.0; 0 for none."""
    found = re.search(r"(\d+)\.", cuda)
    return int(found[1]) if found else 0


@pytest.mark.parametrize(("driver", "python", "there", "asked"), MACHINES)
def test_machines(url, driver, python, there, asked):
    """Whatever the machine is: what is installed works on it, and nothing else changed without a reason."""
    has = [cuda for cuda in (12, 13) if any(proc.startswith(f"cuda{cuda}") for proc in procs_of(url))]
    usable = [cuda for cuda in has if cuda <= major(driver)]
    # pytorch was installed where there was a driver for it.
    before = solve(url, [f"python={python}", *THERE[there]], driver if there in ("nothing", "old") else "13.2")
    wanted = [f"python={python}", *(["pytorch"] if THERE[there] else []), asked]
    if asked.endswith("cuda*") and not usable:
        with pytest.raises(Unsolvable, match="__cuda"):
            solve(url, wanted, driver, before)
        return
    after, was = environment(solve(url, wanted, driver, before)), environment(before)
    ours, theirs = after[NAME].cuda, after["pytorch"].cuda
    assert (ours == "CPU") == (theirs == "CPU"), f"half CPU, half CUDA: {after}"
    assert max(major(ours), major(theirs)) <= major(driver), f"no driver for it: {after}"
    if asked.endswith("*"):
        assert (ours == "CPU") == asked.endswith("cpu*")
    elif there == "nothing":
        assert major(ours) == max(usable, default=0)
    assert after["python"] == was["python"]
    if there not in ("nothing", "old"):
        works = major(there) <= major(driver) and (there == "CPU" or bool(usable))
        asks_for_other = (asked.endswith("cuda*") and there == "CPU") or (asked.endswith("cpu*") and there != "CPU")
        assert (after["pytorch"] == was["pytorch"]) == (works and not asks_for_other)


def procs_of(url: str) -> list[str]:
    index = json.loads((Path(url.removeprefix("file://")) / "linux-64" / "repodata.json").read_text())
    return [each["build"] for each in index["packages.conda"].values() if each["name"] == NAME]


def test_there_are_many_machines():
    assert len(MACHINES) >= 100 and {python for _, python, _, _ in MACHINES} == set(PYTHONS)


class TestBuild:
    """The environments of conda-forge's builds, with what its pinning says of packages that are named without a version."""

    PINNED: ClassVar = {"pytorch": ["2.12"], "libtorch": ["2.12"]}
    HOST = ("pip", "setuptools", "cuda-cudart-dev", "triton")

    @pytest.fixture(scope="class")
    @classmethod
    def url(cls, tmp_path_factory) -> str:
        others = [{"name": name, "version": "80.0", **EMPTY} for name in cls.HOST]
        return conda_forge.write(tmp_path_factory.mktemp("host"), others)

    def host(self, variant: engine.Variant, python: str) -> list[str]:
        pins = {**self.PINNED, "python": [f"{python}.* *_cpython"]}
        rendered = engine.Engine("", 0, pinning=pins).render()[variant]
        needs = rendered.recipe.requirements.to_dict()["host"]
        return [f"{spec} {rendered.variant[spec]}" if spec in rendered.variant else spec for spec in needs]

    @pytest.mark.parametrize("cuda", ["None", "12.9", "13.0"])
    def test_against_the_oldest_torch(self, url, cuda):
        variant = engine.Variant.of(cuda)
        found = environment(solve(url, self.host(variant, "3.10"), variant.driver))
        assert found["pytorch"].version == found["libtorch"].version == "2.10.0"
        assert found["libtorch"].build.startswith(f"{variant.name}_") and found["python"].version.startswith("3.10.")

    def test_other_pythons_can_not_build(self, url):
        """For which the recipe is skipped."""
        with pytest.raises(Unsolvable, match="python"):
            solve(url, self.host(engine.Variant.of("None"), "3.11"), "")


class TestStandIn:
    def test_closed(self):
        """Each requirement is of a package that is there, or of the machine; each pytorch has its build of libtorch."""
        records = conda_forge.load()["records"]
        names = {each["name"] for each in records}
        needs = {spec for each in records for spec in each["depends"]}
        assert {name for spec in needs if not (name := spec.split(" ")[0]).startswith("__")} <= names
        assert names == set(conda_forge.PACKAGES)
        there = {f"{each['name']} {each['version']} {each['build']}" for each in records}
        assert {spec for spec in needs if spec.startswith("libtorch ")} <= there

    def test_differences(self, tmp_path):
        """A channel with other hashes is the same; not one where a build needs something else, or PyTorch is newer."""
        url = conda_forge.write(tmp_path)
        index = tmp_path / "linux-64" / "repodata.json"
        index.write_text(index.read_text().replace("h0000000", "h12ab34f"))
        assert conda_forge.differences(url) == []
        text = index.read_text()
        (other := tmp_path / "other" / "linux-64").mkdir(parents=True)
        shutil.copytree(tmp_path / "noarch", tmp_path / "other" / "noarch")
        old = '"depends": ["__cuda", "__glibc >=2.28,<3.0.a0", "cuda-version >=13.0,<14", "libtorch 2.13.0 cuda130_mkl'
        assert old in text
        (other / "repodata.json").write_text(text.replace(old, old.replace("13.0,", "13.1,"), 1))
        (said,) = conda_forge.differences((tmp_path / "other").as_uri())
        assert re.match(
            r"pytorch 2\.13\.0 cuda130_mkl_py31\d_h0000000_302 needs .*cuda-version >=13.1,<14.*snapshot", said
        )
        conda_forge.write(tmp_path / "newer", [{"name": "pytorch", "version": "2.15.0", **EMPTY}])
        assert conda_forge.differences((tmp_path / "newer").as_uri()) == ["there is a pytorch 2.15.0"]

    def test_rendering(self, tmp_path, monkeypatch):
        """Selectors, Jinja, pins and exports, of a feedstock as git has it; and no other label's builds."""
        feedstock = tmp_path / "pytorch-cpu-feedstock"
        (feedstock / ".ci_support").mkdir(parents=True)
        (feedstock / "recipe").mkdir()
        variant = "channel_targets: [conda-forge {}]\ncuda_compiler_version: ['{}']\nc_stdlib_version: ['2.28']\n"
        variant += "is_rc: ['False']\npython: [3.10.* *_cpython, 3.13.* *_cp313]\n"
        for name, text in (
            ("recipe/meta.yaml", META),
            (".ci_support/linux_64_a.yaml", variant.format("main", "13.0")),
            (".ci_support/linux_64_b.yaml", variant.format("main", "None")),
            (".ci_support/linux_64_c.yaml", variant.format("pytorch_rc", "13.0")),
            (".ci_support/osx_64_d.yaml", variant.format("main", "None")),
        ):
            (feedstock / name).write_text(text)
        git = ["git", "-C", feedstock, "-c", "user.name=test", "-c", "user.email=test@localhost"]
        for command in (("init", "-q", "-b", "main"), ("add", "."), ("commit", "-qm", "x")):
            subprocess.run([*git, *command], check=True)
        monkeypatch.setattr(conda_forge, "FEEDSTOCKS", {"pytorch-cpu-feedstock": ["main"]})
        made = conda_forge.snapshot(tmp_path)
        found = {f"{each['name']} {each['build']}": each for each in made["records"]}
        assert sorted(found) == [
            "libtorch cpu_h0000000_1",
            "libtorch cuda130_h0000000_201",
            "pytorch cpu_py310_h0000000_1",
            "pytorch cpu_py313_h0000000_1",
            "pytorch cuda130_py310_h0000000_201",
            "pytorch cuda130_py313_h0000000_201",
        ]
        assert found["pytorch cuda130_py310_h0000000_201"] == {
            **{"name": "pytorch", "version": "2.20", "build": "cuda130_py310_h0000000_201", "build_number": 201},
            "depends": [
                *("__cuda", "__glibc >=2.28,<3.0.a0", "cuda-version >=13.0,<14"),
                "libtorch 2.20 cuda130_h0000000_201",
                *("python >=3.10,<3.11.0a0", "python_abi 3.10.* *_cp310"),
            ],
            "constrains": ["pytorch-cpu <0.0a0"],
        }
        assert found["libtorch cpu_h0000000_1"]["depends"] == ["__glibc >=2.28,<3.0.a0"]
        commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
        assert [each["commit"] for each in made["made"]["of"]] == [commit]


META = """
{% set build = 1 %}
{% if cuda_compiler_version != "None" %}
{% set build = build + 200 %}
{% endif %}
package: {name: libtorch, version: 2.20}
build:
  number: {{ build }}
  skip: true  # [is_rc]
  string: cuda{{ cuda_compiler_version | replace(".", "") }}_h{{ PKG_HASH }}_{{ build }}  # [cuda_compiler_version != "None"]
  string: cpu_h{{ PKG_HASH }}_{{ build }}  # [cuda_compiler_version == "None"]
  ignore_run_exports_from:
    - python *
requirements:
  build:
    - {{ stdlib("c") }}
  host:
    - python 3.12
outputs:
  - name: libtorch
  - name: pytorch
    build:
      string: cuda130_py{{ CONDA_PY }}_h{{ PKG_HASH }}_{{ build }}  # [cuda_compiler_version != "None"]
      string: cpu_py{{ CONDA_PY }}_h{{ PKG_HASH }}_{{ build }}  # [cuda_compiler_version == "None"]
    requirements:
      build:
        - {{ stdlib("c") }}
        - {{ compiler("cuda") }}  # [cuda_compiler_version != "None"]
        - make  # [win]
      host:
        - python
      run:
        - {{ pin_subpackage("libtorch", exact=True) }}
        - __cuda  # [cuda_compiler_version != "None"]
        - filelock
        - python
      run_constrained:
        - pytorch-cpu <0.0a0  # [cuda_compiler_version != "None"]
  - name: pytorch-tests
"""


def test_override(url, monkeypatch):
    """The variable by which users and builds tell the solver which driver to think of."""
    for driver, build in (("", "cpu_"), ("13.0", "cuda130_")):
        monkeypatch.setenv("CONDA_OVERRIDE_CUDA", driver)
        assert environment(asyncio.run(engine.solve([url], [NAME])))[NAME].build.startswith(build)


def test_words():
    """What the table says of an environment."""
    case, cpu, cuda = CASES[0], Record("2.11.0", "cpu_mkl_0"), Record("2.13.0", "cuda130_mkl_0")
    assert selection.told(case, {}, {NAME: cuda, "pytorch": cuda}) == "CUDA 13.0"
    assert selection.told(case, {"pytorch": cpu}, {NAME: cpu, "pytorch": cpu}) == "CPU; pytorch stays as it is"
    told = selection.told(case, {"pytorch": cpu}, {NAME: cuda, "pytorch": cuda})
    assert told == "CUDA 13.0; pytorch becomes 2.13.0 for CUDA 13.0"
    assert selection.said({"pixi": "CPU", "conda (classic)": "CUDA"}) == "pixi: CPU. conda (classic): CUDA"
    assert name_of("pytorch>=2.10") == name_of("pytorch=*=cpu*") == "pytorch"


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
