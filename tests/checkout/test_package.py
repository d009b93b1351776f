"""The recipe, the local channel and `make package`: what they make, and what they say when something is wrong."""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import ClassVar

import pytest
import rattler
import rattler_build
import yaml
from clones import PROCS, clone, make
from elftools.elf.elffile import ELFFile

import extension_cpp

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
build = pytest.importorskip("channel.build")
env = pytest.importorskip("channel.env")
package = pytest.importorskip("channel.package")

CHANNEL = ROOT / "dist" / "channel"
os.environ["RATTLER_CACHE_DIR"] = str(ROOT / "dist" / "cache")  # As `make package` has it, wherever a test builds.


@pytest.fixture(params=PROCS)
def made(request, packages) -> Path:
    return packages[request.param]


@pytest.fixture
def channel(packages, tmp_path) -> Path:
    """A copy of the local channel that a test may spoil."""
    shutil.copytree(
        CHANNEL, tmp_path / "channel", copy_function=os.link, ignore=shutil.ignore_patterns(".lock", ".work*")
    )
    return tmp_path / "channel"


def index(channel: Path) -> None:
    import asyncio

    for file in channel.glob("*/repodata.json"):
        file.unlink()  # A link to the original's.
    asyncio.run(rattler.index.index_fs(channel, force=True, write_zst=False, write_shards=False))


class TestRecipe:
    # Compiler, C library, and how conda-forge's global pinning names the compiler.
    PLATFORMS: ClassVar = {
        "linux-64": ("gxx_linux-64", "sysroot_linux-64 2.28.*", "gxx"),
        "linux-aarch64": ("gxx_linux-aarch64", "sysroot_linux-aarch64 2.28.*", "gxx"),
        "osx-arm64": ("clangxx_osx-arm64", "macosx_deployment_target_osx-arm64 11.0.*", "clangxx"),
        "win-64": ("vs2022_win-64", "vs_win-64", "vs2022"),
    }

    @pytest.mark.parametrize("platform", PLATFORMS)
    @pytest.mark.parametrize("pinned", [False, True], ids=["plain", "with conda-forge's compilers"])
    def test_render(self, platform, pinned):
        """Requirements and build string of each variant on each platform, with nothing but the recipe's folder."""
        compiler, stdlib, name = self.PLATFORMS[platform]
        target = rattler_build.PlatformConfig(target_platform=platform)
        here = rattler_build.JinjaConfig(platform=target)
        config = rattler_build.VariantConfig.from_file_with_context(ROOT / "recipe" / "variants.yaml", here)
        if pinned:
            pins = {"cxx_compiler": [name], "cxx_compiler_version": ["14"]}
            config = config.merge(rattler_build.VariantConfig(pins))
        recipe = rattler_build.Stage0Recipe.from_file(ROOT / "recipe" / "recipe.yaml")
        rendered = recipe.render(config, rattler_build.RenderConfig(platform=target))
        by_proc = {
            str(each.recipe.to_dict()["build"]["string"]).split("_")[0]: each.recipe.to_dict() for each in rendered
        }
        assert sorted(by_proc) == ["cpu", *(["cuda129", "cuda130"] if platform != "osx-arm64" else [])]
        for proc, recipe in by_proc.items():
            cuda = f"{proc[4:6]}.{proc[6:]}" if proc != "cpu" else ""
            build = f"pytorch * {'cuda' if cuda else 'cpu'}*"
            nvcc = f"cuda-nvcc_{platform}"
            needs = recipe["requirements"]
            compilers = [f"{compiler} 14.*" if pinned else compiler, stdlib, "ninja"]
            assert needs["build"] == [*compilers, *([f"{nvcc} {cuda}.*"] if cuda else [])]
            assert needs["host"] == [
                *("python", "python-abi3 3.10.*", "pip", "setuptools >=77", "pytorch >=2.10", build),
                *((f"cuda-version {cuda}.*", "cuda-cudart-dev") if cuda else ()),
            ]
            driver = [f"__cuda >={cuda[:2]}"] if cuda else []
            assert needs["run"] == ["python >=3.10", "pytorch >=2.10,<3", build, *driver, "rich"]
            ignored = ["pytorch", "libtorch", *(["cuda-cudart-dev", nvcc] if cuda else [])]
            assert needs["ignore_run_exports"] == {"from_package": ignored}
            number = 200 + int(cuda[:2]) if cuda else 0
            assert re.fullmatch(rf"{proc}_h[0-9a-f]{{7}}_{number}", recipe["build"]["string"])
            assert recipe["build"]["number"] == number

    def test_folder_holds_nothing_else(self):
        """A second variant file or a v0 recipe beside them would change what conda-build does."""
        assert sorted(path.name for path in (ROOT / "recipe").iterdir()) == ["recipe.yaml", "variants.yaml"]

    def test_variants_are_lists_of_strings(self):
        for values in yaml.safe_load((ROOT / "recipe" / "variants.yaml").read_text()).values():
            plain = [value["then"] if isinstance(value, dict) else value for value in values]
            assert all(isinstance(value, str) for value in plain)

    def test_version_agrees(self):
        text = (ROOT / "recipe" / "recipe.yaml").read_text()
        version = re.search(r'__version__ = "(.*)"', (ROOT / "extension_cpp" / "_version.py").read_text())[1]
        assert f'version: "{version}"' in text


class TestPackage:
    def test_small_and_without_traces(self, made, tmp_path):
        """Small, no path of the builder in any file, no library that looks outside of its environment."""
        assert made.stat().st_size < (6_000_000 if "cuda" in made.name else 700_000)
        files = unpack(made, tmp_path)
        assert len(files) > 15
        for file in files:
            content = file.read_bytes()
            for path in (ROOT, Path.home(), Path(sys.prefix)):
                assert os.fsencode(path) not in content, f"{path} in {file}"
            if content.startswith(b"\x7fELF"):
                assert all(path.startswith("$ORIGIN") for path in run_paths(file)), run_paths(file)

    def test_metadata(self, made):
        loaded = rattler_build.Package.from_file(made)
        assert loaded.noarch == "python" and loaded.subdir == "linux-64"  # For every Python, on this platform.
        cuda = "cuda" in made.name
        assert {"pytorch >=2.10,<3", f"pytorch * {'cuda' if cuda else 'cpu'}*"} <= set(loaded.depends)
        # One minor version of torch, of Python or of CUDA, which the run_exports of what it was built with would add.
        assert not [spec for spec in loaded.depends if re.match(r"(lib)?torch.*2\.1[34]|python_abi|cuda-", spec)]
        assert [spec for spec in loaded.depends if "__cuda" in spec] == (["__cuda >=13"] if cuda else [])
        assert any(spec.startswith("libstdcxx >=") for spec in loaded.depends)
        assert loaded.license == "BSD-3-Clause" and loaded.test_count == 2  # Its contents are tested while building.

    def test_variants_differ_in_cuda_alone(self, packages, tmp_path):
        """File by file; _C only as far as the headers of two versions of torch compile differently."""
        trees = {proc: tmp_path / proc for proc in PROCS}
        for proc, tree in trees.items():
            unpack(packages[proc], tree)
        cpu, cuda = (
            {str(path.relative_to(tree)): path.read_bytes() for path in tree.rglob("*") if path.is_file()}
            for tree in trees.values()
        )
        name = "unpacked/site-packages/extension_cpp"
        assert set(cuda) - set(cpu) == {f"{name}/_C_cuda.so"} and not set(cpu) - set(cuda)
        record = f"{name}-{extension_cpp.__version__}.dist-info/RECORD"
        different = {path for path in cpu if cpu[path] != cuda[path] and "/info/" not in path} - {record}
        assert different <= {f"{name}/_C.abi3.so"}
        assert interface(trees["cpu"] / name / "_C.abi3.so") == interface(trees["cuda130"] / name / "_C.abi3.so")
        lines = [set(tree[record].decode().splitlines()) for tree in (cpu, cuda)]
        assert lines[1] - lines[0] == {"extension_cpp/_C_cuda.so,,"} and not lines[0] - lines[1]

    def test_reproducible(self, packages, tmp_path, monkeypatch):
        """Built again in another folder, of the same commit's time: the same bytes.

        The CUDA package is made in the same way; of its compiler test_build.py shows it.
        """
        unpack(packages["cpu"], tmp_path)
        made = json.loads((tmp_path / "unpacked" / "info" / "index.json").read_text())
        monkeypatch.setenv("SOURCE_DATE_EPOCH", str(made["timestamp"] // 1000))
        monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        log = package.Log(tmp_path / "log", type("Quiet", (), {"update": lambda self, text: None})(), "build")
        again = package.build(package.render("cpu", local=True)["cpu"], CHANNEL.as_uri(), tmp_path / "again", log)
        assert again.name == packages["cpu"].name
        assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(packages["cpu"].read_bytes()).digest()

    def test_again_does_nothing(self, packages):
        done = make(VARIANT="all")
        for proc in PROCS:
            assert f"{proc}: nothing has changed since this package was built and tested" in done.stdout
        assert "operators do as documented under torch 2.13.0+cpu, on the CPU" in done.stdout
        assert "operators do as documented under torch 2.14.1+cu130, with CUDA kernels" in done.stdout

    @pytest.mark.parametrize("proc", PROCS)
    def test_report_and_doctor(self, packages, proc):
        """In the environment that it was installed into; the CUDA package needs no GPU for nothing to be wrong."""
        program = [ROOT / "dist" / "env" / proc / "bin" / "python", "-m", "extension_cpp"]
        done = subprocess.run(program, cwd="/", capture_output=True, text=True)
        build = packages[proc].name.removesuffix(".conda").split("-")[2]
        assert re.search(rf"^  from +conda: \S+ {build} from \S+/dist/conda$", done.stdout, re.MULTILINE), done.stdout
        assert re.search(rf"^  variant +{'CUDA 13.0' if proc == 'cuda130' else 'CPU'}$", done.stdout, re.MULTILINE)
        done = subprocess.run([*program, "doctor"], cwd="/", capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.startswith("nothing wrong: "), done.stdout

    @pytest.mark.parametrize(
        ("driver", "proc"), [("", "cpu"), ("12.9", "cpu"), ("13.0", "cuda130"), ("14.1", "cuda130")]
    )
    def test_solver_picks_the_variant(self, packages, monkeypatch, driver, proc):
        """Of the packages themselves, with all that they bring; test_selection.py has the other machines."""
        import asyncio

        monkeypatch.setenv("CONDA_OVERRIDE_CUDA", driver)
        channels = [(ROOT / "dist" / "conda").as_uri(), CHANNEL.as_uri()]
        found = {r.name.normalized: str(r.build) for r in asyncio.run(package.solve(channels, ["extension_cpp"]))}
        assert found["extension_cpp"].startswith(f"{proc}_") and found["pytorch"].startswith(f"{proc}_")
        assert ("libcublas" in found) == (proc != "cpu")


def interface(library: Path) -> set[str]:
    """What a library takes from torch and Python and gives to them; of the C++ runtime, headers may take more or less."""
    lines = subprocess.check_output(["nm", "-D", library], text=True).splitlines()
    symbols = {tuple(line.split()[-2:]) for line in lines}  # Less the addresses.
    return {f"{kind} {name}" for kind, name in symbols if re.match(r"aoti_torch_|torch_|_?Py", name)}


def run_paths(library: Path) -> list[str]:
    with library.open("rb") as stream:
        tags = list(ELFFile(stream).get_section_by_name(".dynamic").iter_tags())
    paths = [tag.rpath for tag in tags if tag.entry.d_tag == "DT_RPATH"]
    paths += [tag.runpath for tag in tags if tag.entry.d_tag == "DT_RUNPATH"]
    return [path for joined in paths for path in joined.split(":")]


def unpack(file: Path, folder: Path) -> list[Path]:
    import asyncio

    from rattler.package_streaming import extract

    result = extract(file, folder / "unpacked")
    if asyncio.iscoroutine(result):
        asyncio.run(result)
    return [path for path in (folder / "unpacked").rglob("*") if path.is_file()]


def ensure(channel: Path) -> list[str]:
    said: list[str] = []
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    build.LocalChannel(channel, said.append, said.append).ensure()
    return said


class TestLocalChannel:
    def test_goes_on_where_it_stopped(self, channel):
        """An interrupted run leaves no half package; the next makes what is lacking and nothing else."""
        (gone,) = (channel / "noarch").glob("iniconfig-*.conda")
        gone.unlink()
        (channel / ".work-of-a-run-that-was-killed").mkdir()
        before = {path: path.stat().st_mtime_ns for path in channel.glob("*/*.conda")}
        assert ensure(channel) == ["wheels", "iniconfig", "index"]
        assert gone.exists() and {path: path.stat().st_mtime_ns for path in before} == before
        assert ensure(channel) == []

    def test_damaged_package(self, channel):
        (victim,) = (channel / "noarch").glob("pluggy-*.conda")
        content = victim.read_bytes()
        victim.unlink()
        victim.write_bytes(content[: len(content) // 2])
        assert f"{victim} is damaged; it is made again" in ensure(channel)
        assert hashlib.sha256(victim.read_bytes()).hexdigest() in (channel / "noarch" / "repodata.json").read_text()

    def test_two_runs_at_once(self, channel):
        for pattern in ("iniconfig-*", "pluggy-*", "mdurl-*"):
            next((channel / "noarch").glob(pattern)).unlink()
        with get_context("spawn").Pool(2) as pool:
            said = pool.map(ensure, [channel, channel])
        assert sorted(map(len, said)) == [0, 5]  # One made them, the other found them.

    def test_wrong_hash(self, channel, tmp_path, monkeypatch):
        pins = build.WHEELS.read_text()
        wrong = tmp_path / "wheels.txt"
        wrong.write_text(re.sub(r"(iniconfig==\S+ --hash=sha256:)\w{8}", r"\g<1>00000000", pins))
        monkeypatch.setattr(build, "WHEELS", wrong)
        next((channel / "noarch").glob("iniconfig-*")).unlink()
        with pytest.raises(build.ChannelError, match=r"(?s)run it again to go on.*DO NOT MATCH THE HASHES"):
            ensure(channel)

    def test_no_network(self, channel, monkeypatch):
        next((channel / "noarch").glob("iniconfig-*")).unlink()
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
        with pytest.raises(build.ChannelError, match=r"(?s)could not be had; run it again to go on.*iniconfig"):
            ensure(channel)

    @pytest.mark.parametrize(
        "module, name, error",
        [
            (build.os, "replace", OSError(errno.ENOSPC, "No space left on device")),
            (rattler_build, "assemble_package", rattler_build.RattlerBuildError("No space left on device")),
        ],
        ids=["python", "engine"],
    )
    def test_full_disk(self, channel, monkeypatch, module, name, error):
        next((channel / "noarch").glob("iniconfig-*")).unlink()
        (channel / ".work-killed").mkdir()

        def full(*_, **__):
            raise error

        monkeypatch.setattr(module, name, full)
        with pytest.raises(build.ChannelError, match=r"could not be made: .*No space left.* GB are free there"):
            ensure(channel)
        monkeypatch.undo()
        assert ensure(channel) and not list(channel.glob(".work-*")) and any((channel / "noarch").glob("iniconfig-*"))

    def test_wrong_machine(self, monkeypatch):
        monkeypatch.setenv("CXX", "no-such-compiler")
        with pytest.raises(build.ChannelError, match=r"no-such-compiler is not on PATH\. Install g"):
            build.check_machine()
        monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
        with pytest.raises(build.ChannelError, match="use CHANNEL=conda-forge"):
            build.check_machine()
        monkeypatch.undo()
        monkeypatch.setattr(build, "PYTHON", "3.9")
        with pytest.raises(build.ChannelError, match=r"wheels are for Python 3.9, and this is .*: PYTHON=python3.9"):
            build.check_machine()


class TestBadInput:
    def test_unknown_variant(self):
        done = make(VARIANT="rocm")
        assert done.returncode == 1 and "error: VARIANT must be cpu, cuda or all, got 'rocm'" in done.stdout

    def test_no_channel(self):
        done = make(CHANNEL="/nowhere")
        assert (
            done.returncode == 1
            and "CHANNEL=/nowhere is no conda channel: it has no noarch/repodata.json" in done.stdout
        )

    def test_channel_without_pytorch(self, channel, tmp_path):
        for file in (channel / "linux-64").glob("pytorch-*"):
            file.unlink()
        index(channel)
        done = make(CHANNEL=str(channel), DIST=str(tmp_path / "dist"))
        assert done.returncode == 1 and "error: the build failed" in done.stdout
        assert re.search(r"No candidates were found for pytorch", done.stdout), done.stdout

    def test_unreadable_recipe_and_uncommitted_changes(self, packages, tmp_path):
        checkout = clone(tmp_path / "checkout")
        (checkout / "recipe" / "recipe.yaml").write_text("package: [extension_cpp\n")
        done = make(cwd=checkout, CHANNEL=str(CHANNEL), DIST=str(tmp_path / "dist"))
        assert "note: 1 uncommitted change will be in the package: recipe/recipe.yaml" in done.stdout
        assert done.returncode == 1 and "error: recipe/recipe.yaml can't be read" in done.stdout

    def test_compiler_error(self, packages, tmp_path):
        checkout = clone(tmp_path / "checkout")
        (checkout / "csrc" / "broken.cpp").write_text("int broken = ;\n")
        done = make(cwd=checkout, CHANNEL=str(CHANNEL), DIST=str(tmp_path / "dist"))
        assert done.returncode == 1 and "broken.cpp:1:14: error" in done.stdout

    def test_failed_tests_keep_a_package_out_of_the_channel(self, packages, tmp_path):
        checkout, dist = clone(tmp_path / "checkout"), tmp_path / "dist"
        (checkout / "tests" / "smoke.py").write_text("raise SystemExit('this package is no good')\n")
        done = make(cwd=checkout, CHANNEL=str(CHANNEL), DIST=str(dist))
        assert done.returncode == 1 and "this package is no good" in done.stdout
        assert "the package's tests failed; it is in" in done.stdout
        assert list((dist / "failed").glob("*.conda")) and not list((dist / "conda").rglob("*.conda"))
        assert not (dist / "env").exists()

    def test_cuda_without_a_compiler_for_it(self, channel, tmp_path):
        """The solver's reason, which the engine keeps to itself."""
        next((channel / "linux-64").glob("cuda-nvcc_*")).unlink()
        index(channel)
        done = make(CHANNEL=str(channel), DIST=str(tmp_path / "dist"), VARIANT="cuda")
        assert done.returncode == 1 and "No candidates were found for cuda-nvcc_linux-64" in done.stdout, done.stdout


class TestEnvironment:
    def test_solves_against_the_local_channel(self, packages):
        import asyncio

        have, lack = env.available(env.specs(cuda=True), CHANNEL)
        assert {spec.split(" ")[0] for spec in have} >= {
            "python",
            "pytorch",
            "numpy",
            "setuptools",
            "ninja",
            "gxx_linux-64",
            "cuda-nvcc_linux-64",
        }
        assert {spec.split(" ")[0] for spec in lack} >= {"conda-build", "rattler-build"}
        assert len(asyncio.run(package.solve([CHANNEL.as_uri()], have))) > 30

    def test_cuda_is_one_option(self):
        with_cuda, without = env.specs(cuda=True), env.specs(cuda=False)
        assert set(with_cuda) - set(without) == {"cuda-toolkit >=12.8,<14"}
        assert "grep -v '# CUDA' environment.yml" in (ROOT / "environment.yml").read_text()

    def test_pins_agree_with_the_recipe(self):
        recipe = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text().replace("${{ python_min }}", "3.10"))
        needs = recipe["requirements"]
        plain = [
            spec
            for part in ("build", "host", "run")
            for spec in needs[part]
            if isinstance(spec, str) and "$" not in spec
        ]
        wanted = {spec.split(" ")[0]: spec for spec in env.specs(cuda=True)}
        for name in ("setuptools", "ninja", "pip"):
            assert wanted[name] in plain
        assert wanted["pytorch"] in needs["run"]

    def test_tools_agree(self):
        """The engine's versions are pinned once; what environment.yml installs by pip is named there too."""
        environment = yaml.safe_load((ROOT / "environment.yml").read_text())
        (by_pip,) = (spec["pip"] for spec in environment["dependencies"] if isinstance(spec, dict))
        pyproject = (ROOT / "pyproject.toml").read_text()
        assert all(f'"{name}' in pyproject for name in by_pip)
