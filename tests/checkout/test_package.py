"""The recipe, the local channel and `make package`: what they make, and what they say when something is wrong."""

import asyncio
import base64
import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import ClassVar

import pytest
import rattler
import rattler_build
import yaml
from clones import PROCS, clone, lean, make
from conda_package_streaming.package_streaming import CondaComponent, stream_conda_component
from elftools.elf.elffile import ELFFile

import extension_cpp

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
local = pytest.importorskip("channel.local")
package = pytest.importorskip("package.__main__")

from channel import archive  # noqa: E402
from channel.archive import File, Package, write  # noqa: E402
from channel.pins import FILE, Cuda, Pins  # noqa: E402
from package import env, prepare  # noqa: E402
from package.engine import Engine  # noqa: E402
from package.install import install, solve  # noqa: E402
from package.progress import Log  # noqa: E402
from package.reproducible import make_reproducible  # noqa: E402
from package.variant import Variant  # noqa: E402

CHANNEL = ROOT / "dist" / "channel"
RECIPE_TEXT = (ROOT / "recipe" / "recipe.yaml").read_text()
CPU = Variant("cpu", None)
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


@pytest.fixture
def small(packages, tmp_path) -> Path:
    """A checkout of one family, whose package has few tests."""
    checkout = lean(tmp_path / "a check out", min(ROOT.glob("extension_cpp/ops/[!_]*.py")).stem)
    for file in checkout.glob("tests/test_*.py"):
        if file.name != "test_libraries.py":
            file.unlink()
    return checkout


def quiet_log(folder: Path, name: str = "log") -> Log:
    return Log(folder / name, type("Quiet", (), {"update": lambda self, text: None})(), name)


def render(folder: Path, **options) -> subprocess.CompletedProcess:
    """What the engine's command line makes of the recipe: of its interfaces this one leaves out what is skipped."""
    recipe = [str(ROOT / "recipe" / "recipe.yaml")]
    program = "import json, sys; from rattler_build.cli_api import build_recipes; build_recipes(**json.load(sys.stdin))"
    given = json.dumps({"recipes": recipe, "render_only": True, **options})
    return subprocess.run([sys.executable, "-c", program], input=given, capture_output=True, text=True, cwd=folder)


class TestRecipe:
    # Compiler, C library, and how conda-forge's global pinning names the compiler.
    PLATFORMS: ClassVar = {
        "linux-64": ("gxx_linux-64", "sysroot_linux-64 2.28.*", "gxx"),
        "linux-aarch64": ("gxx_linux-aarch64", "sysroot_linux-aarch64 2.28.*", "gxx"),
        "osx-arm64": ("clangxx_osx-arm64", "macosx_deployment_target_osx-arm64 11.0.*", "clangxx"),
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
            cross = ["python", f"cross-python_{platform}"] if platform != "linux-64" else []
            arm = ["arm-variant * sbsa"] if cuda and platform == "linux-aarch64" else []
            nvcc = f"cuda-nvcc_{platform}"
            needs = recipe["requirements"]
            compilers = [f"{compiler} 14.*" if pinned else compiler, stdlib, "ninja"]
            assert needs["build"] == [*compilers, *([f"{nvcc} {cuda}.*"] if cuda else []), *arm, *cross]
            assert needs["host"] == [
                *("python", "python-abi3 3.10.*", "pip", "setuptools >=77", "pytorch 2.10.*", "libtorch 2.10.*"),
                *(build, f"lib{build.removeprefix('py')}"),
                *((f"cuda-version {cuda}.*", "cuda-cudart-dev") if cuda else ()),
                # Triton is run, which it isn't where the package is cross-compiled.
                *(["triton >=3.6"] if cuda and platform == "linux-64" else []),
            ]
            driver = [f"__cuda >={cuda[:2]}"] if cuda else []
            assert needs["run"] == ["python >=3.10", "pytorch >=2.10,<3", build, *driver, "rich"]
            ignored = {"from_package": ["pytorch", "libtorch", *(["cuda-cudart-dev"] if cuda else [])]}
            assert needs["ignore_run_exports"] == ({"by_name": ["cuda-version"], **ignored} if cuda else ignored)
            licenses = "BSD-3-Clause" + " AND LicenseRef-NVIDIA-End-User-License-Agreement" * bool(cuda)
            files = ["LICENSE", *(["licenses/cuda-runtime.txt"] if cuda else [])]
            assert (recipe["about"]["license"], recipe["about"]["license_file"]) == (licenses, files)
            assert "libcudart_static.a" in (ROOT / files[-1]).read_text() or not cuda
            number = 200 + int(cuda[:2]) if cuda else 0
            assert re.fullmatch(rf"{proc}_h[0-9a-f]{{7}}_{number}", recipe["build"]["string"])
            assert recipe["build"]["number"] == number

    def test_folder_holds_nothing_else(self):
        """A second variant file or a v0 recipe next to them would change what conda-build does."""
        assert sorted(path.name for path in (ROOT / "recipe").iterdir()) == ["recipe.yaml", "variants.yaml"]

    def test_variants_are_lists_of_strings(self):
        for values in yaml.safe_load((ROOT / "recipe" / "variants.yaml").read_text()).values():
            plain = [value["then"] if isinstance(value, dict) else value for value in values]
            assert all(isinstance(value, str) for value in plain)

    @pytest.mark.parametrize("abi3", [True, False])
    def test_conda_forge_renders_it_once(self, abi3, tmp_path):
        """For python_min alone, of the Pythons for which its pinning renders a recipe; for each without the limited API."""
        pythons = [("3.10.* *_cpython", True), ("3.11.* *_cpython", False)]
        listed = {"python": [name for name, _ in pythons], "is_python_min": [least for _, least in pythons]}
        pins = {**listed, "is_abi3": [abi3], "zip_keys": [["python", "is_python_min"]]}
        (tmp_path / "pins.yaml").write_text(yaml.safe_dump(pins))
        done = render(tmp_path, variant_config=[str(tmp_path / "pins.yaml")])
        assert done.returncode == 0, done.stderr
        found = re.findall(r'"build_string": "(cpu|cuda\d+)_', done.stdout)
        assert sorted(found) == sorted(["cpu", "cuda129", "cuda130"] * (1 if abi3 else 2))
        assert done.stdout.count('"version_independent": true') == (3 if abi3 else 0)

    def test_windows_is_skipped(self, tmp_path):
        """By the engine's command line, which knows of skip."""
        done = render(
            tmp_path, target_platform="win-64", variant_overrides={"c_stdlib": ["vs"], "c_stdlib_version": ["2022"]}
        )
        assert done.returncode == 0 and "build_string" not in done.stdout, done.stderr

    def test_conda_forges_tools_can_rewrite_it(self):
        """The updater rewrites the first context key that begins with build_; the linter renders without variables."""
        context = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text())["context"]
        (key,) = (key for key in context if key.startswith("build_"))
        assert key == "build_number" and type(context[key]) is int
        assert '(cuda_compiler_version ~ "") | split(".")' in context["cuda_major"]

    def test_temporary_files_have_a_folder_of_their_own(self):
        """What pytest and torch.compile call theirs in /tmp is the same for every user of the engine."""
        scripts = [test["script"] for test in yaml.safe_load(RECIPE_TEXT)["tests"] if "script" in test]
        (script,) = (lines for lines in scripts if any("pytest" in line for line in lines))
        at = next(i for i, line in enumerate(script) if 'TMPDIR="$(mktemp -d)"' in line)
        assert 'rm -rf "$TMPDIR"' in script[at] and not [line for line in script[:at] if "python " in line]

    def test_sources(self):
        """What `make package` looks at for changes is what the recipe packs: what git has, without tests/checkout."""
        tracked = subprocess.check_output(["git", "ls-files"], text=True, cwd=ROOT).splitlines()
        parts = (
            "csrc/",
            "extension_cpp/",
            "extension_cpp_autoload.py",
            "tests/",
            "setup.py",
            "pyproject.toml",
            "README.md",
            "LICENSE",
        )
        wanted = {name for name in tracked if name.startswith(parts) and not name.startswith("tests/checkout/")}
        found = {path.relative_to(ROOT).as_posix() for path in package.source_files()}
        assert wanted <= found and not [name for name in found if "__pycache__" in name or name.endswith(".so")]

    def test_version_agrees(self):
        text = (ROOT / "recipe" / "recipe.yaml").read_text()
        version = re.search(r'__version__ = "(.*)"', (ROOT / "extension_cpp" / "_version.py").read_text())[1]
        assert f'version: "{version}"' in text


class TestPackage:
    def test_small_and_without_traces(self, made, tmp_path):
        """Small, no path of the builder in any file, no library that looks outside of its environment."""
        assert made.stat().st_size < (6_600_000 if "cuda" in made.name else 1_020_000)
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
        assert (
            "NVIDIA" in loaded.license
        ) == cuda and loaded.test_count == 3  # Its contents are tested while building.

    def test_record(self, made, tmp_path):
        """Each hash that it has is that of the installed file, and it names no file that is not there."""
        unpack(made, tmp_path)
        site = tmp_path / "unpacked" / "site-packages"
        files = {path.relative_to(site).as_posix(): path for path in site.rglob("*") if path.is_file()}
        (record,) = (path for name, path in files.items() if name.endswith(".dist-info/RECORD"))
        lines = [line.split(",") for line in record.read_text().splitlines()]
        assert sorted(name for name, _, _ in lines) == sorted(files)
        for name, digest, size in lines:
            content = files[name].read_bytes()
            found = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            assert (digest, size) in (("", ""), (f"sha256={found}", str(len(content)))), name

    def test_modes(self, made):
        """Whatever the builder's umask is."""
        modes = {member.mode for part in CondaComponent for _, member in stream_conda_component(made, component=part)}
        assert modes <= {0o644, 0o755}

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
        more = {f"{name}/_C_cuda.so", "unpacked/info/licenses/licenses/cuda-runtime.txt"}
        assert set(cuda) - set(cpu) == more and not set(cpu) - set(cuda)
        record = f"{name}-{extension_cpp.__version__}.dist-info/RECORD"
        different = {path for path in cpu if cpu[path] != cuda[path] and "/info/" not in path} - {record}
        assert different <= {f"{name}/_C.abi3.so"}
        assert interface(trees["cpu"] / name / "_C.abi3.so") == interface(trees["cuda130"] / name / "_C.abi3.so")
        lines = [set(tree[record].decode().splitlines()) for tree in (cpu, cuda)]
        assert lines[1] - lines[0] == {"extension_cpp/_C_cuda.so,,"} and not lines[0] - lines[1]

    @pytest.mark.long
    def test_any_folder(self, small, monkeypatch):
        """With spaces in its path, from the build to the call; and the same bytes from another one.

        The CUDA package is made in the same way; of its compiler test_build.py shows it.
        """
        done = make(cwd=small, CHANNEL=str(CHANNEL), RATTLER_CACHE_DIR=str(ROOT / "dist" / "cache"))
        assert done.returncode == 0 and "do as documented under torch" in done.stdout, done.stdout + done.stderr
        assert not (small / "dist" / "work").exists()
        (package,) = (small / "dist" / "conda").rglob("*.conda")
        other = small.parent / "other"
        shutil.copytree(small, other, ignore=shutil.ignore_patterns("dist", "__pycache__"))
        monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        pinning = local.LocalChannel(CHANNEL, Pins.load()).pinning()
        unpack(package, small)
        made = json.loads((small / "unpacked" / "info" / "index.json").read_text())
        cache = ROOT / "dist" / "cache"
        engine = Engine(CHANNEL.as_uri(), made["timestamp"] // 1000, cache, pinning, other / "recipe")
        again = engine.build(CPU, other / "dist", quiet_log(other))
        assert again.name == package.name
        assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(package.read_bytes()).digest()

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
        monkeypatch.setenv("CONDA_OVERRIDE_CUDA", driver)
        channels = [(ROOT / "dist" / "conda").as_uri(), CHANNEL.as_uri()]
        found = {r.name.normalized: str(r.build) for r in asyncio.run(solve(channels, ["extension_cpp"]))}
        assert found["extension_cpp"].startswith(f"{proc}_") and found["pytorch"].startswith(f"{proc}_")
        assert ("libcublas" in found) == (proc != "cpu")


def interface(library: Path) -> set[str]:
    """What a library takes from torch and Python and gives to them; of the C++ runtime, headers may take more or less."""
    lines = subprocess.check_output(["nm", "-D", library], text=True).splitlines()
    symbols = {tuple(line.split()[-2:]) for line in lines}  # Less the addresses.
    return {f"{binding} {name}" for binding, name in symbols if re.match(r"aoti_torch_|torch_|_?Py", name)}


def run_paths(library: Path) -> list[str]:
    with library.open("rb") as stream:
        tags = list(ELFFile(stream).get_section_by_name(".dynamic").iter_tags())
    paths = [tag.rpath for tag in tags if tag.entry.d_tag == "DT_RPATH"]
    paths += [tag.runpath for tag in tags if tag.entry.d_tag == "DT_RUNPATH"]
    return [path for joined in paths for path in joined.split(":")]


def unpack(file: Path, folder: Path) -> list[Path]:
    from rattler.package_streaming import extract

    result = extract(file, folder / "unpacked")
    if asyncio.iscoroutine(result):
        asyncio.run(result)
    return [path for path in (folder / "unpacked").rglob("*") if path.is_file()]


def ensure(channel: Path, pins: Pins | None = None, verify: bool = False) -> list[str]:
    said: list[str] = []
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    local.LocalChannel(channel, pins or Pins.load(), said.append, said.append).ensure(verify=verify)
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

    def test_run_that_ended_before_its_index(self, channel):
        index = channel / "noarch" / "repodata.json"
        content = json.loads(index.read_text())
        (gone,) = (name for name in content["packages.conda"] if name.startswith("pluggy-"))
        record = content["packages.conda"].pop(gone)
        index.unlink()  # A link to the original's.
        index.write_text(json.dumps(content))
        assert ensure(channel) == ["index"]
        assert json.loads(index.read_text())["packages.conda"][gone]["sha256"] == record["sha256"]

    @pytest.mark.parametrize("name", ["noarch/pluggy", "linux-64/sysroot_linux-64", "linux-64/python-3.11"])
    def test_damaged_package(self, channel, name):
        """A wheel's, a recipe's and the interpreter's."""
        (victim,) = channel.glob(f"{name}*.conda")
        content = victim.read_bytes()
        victim.unlink()
        victim.write_bytes(content[: len(content) // 2])
        assert f"{victim} is damaged; it is made again" in ensure(channel)
        (made,) = channel.glob(f"{name}*.conda")
        assert hashlib.sha256(made.read_bytes()).hexdigest() in (made.parent / "repodata.json").read_text()

    def test_replaced_package(self, channel):
        """One of the same size and time is not installed: installers don't look at what a local channel has."""
        (victim,) = (channel / "noarch").glob("pluggy-*.conda")
        content, status = bytearray(victim.read_bytes()), victim.stat()
        content[len(content) // 2] ^= 1
        victim.unlink()
        victim.write_bytes(content)
        os.utime(victim, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert f"{victim} is damaged; it is made again" in ensure(channel, verify=True)
        content[len(content) // 2] ^= 1
        assert victim.read_bytes() == content  # A package is the same to the byte each time.

    def test_two_runs_at_once(self, channel):
        for pattern in ("iniconfig-*", "pluggy-*", "mdurl-*"):
            next((channel / "noarch").glob(pattern)).unlink()
        with get_context("spawn").Pool(2) as pool:
            said = pool.map(ensure, [channel, channel])
        assert sorted(map(len, said)) == [0, 5]  # One made them, the other found them.

    def test_wrong_hash(self, channel, tmp_path):
        wrong = tmp_path / "pins.yaml"
        wrong.write_text(re.sub(r"(iniconfig==\S+ --hash=sha256:)\w{8}", r"\g<1>00000000", FILE.read_text()))
        next((channel / "noarch").glob("iniconfig-*")).unlink()
        with pytest.raises(local.ChannelError, match=r"(?s)run it again to go on.*DO NOT MATCH THE HASHES"):
            ensure(channel, Pins.load(wrong))

    def test_no_network(self, channel, monkeypatch):
        next((channel / "noarch").glob("iniconfig-*")).unlink()
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
        with pytest.raises(local.ChannelError, match=r"(?s)could not be had; run it again to go on.*iniconfig"):
            ensure(channel)

    @pytest.mark.parametrize(
        "module, name, error",
        [
            (local.os, "replace", OSError(errno.ENOSPC, "No space left on device")),
            (local, "write", OSError(errno.ENOSPC, "No space left on device")),
            (local.LocalChannel, "recipe", rattler_build.RattlerBuildError("No space left on device")),
        ],
        ids=["moving", "writing", "engine"],
    )
    def test_full_disk(self, channel, monkeypatch, module, name, error):
        for pattern in ("noarch/iniconfig-*", "linux-64/gxx_linux-64-*"):
            next(channel.glob(pattern)).unlink()
        (channel / ".work-killed").mkdir()

        def full(*_, **__):
            raise error

        monkeypatch.setattr(module, name, full)
        with pytest.raises(local.ChannelError, match=r"could not be made: .*No space left.* GB are free there"):
            ensure(channel)
        monkeypatch.undo()
        assert ensure(channel) and not list(channel.glob(".work-*")) and any((channel / "noarch").glob("iniconfig-*"))

    def test_wrong_machine(self, monkeypatch):
        monkeypatch.setenv("CXX", "no-such-compiler")
        with pytest.raises(local.ChannelError, match=r"no-such-compiler is not on PATH\. Install g"):
            local.check_machine("3.11")
        monkeypatch.setattr(local.platform, "machine", lambda: "aarch64")
        with pytest.raises(local.ChannelError, match="use CHANNEL=conda-forge"):
            local.check_machine("3.11")
        monkeypatch.undo()
        with pytest.raises(local.ChannelError, match=r"wheels are for Python 3.9, and this is .*: PYTHON=python3.9"):
            local.check_machine("3.9")
        monkeypatch.setattr(local.sysconfig, "get_scheme_names", lambda: ("deb_system", "venv"))
        with pytest.raises(local.ChannelError, match=r"can't be Debian's own: PYTHON="):
            local.check_machine(Pins.load().python)


def a_wheel(folder: Path, name: str, version: str, requires: tuple = (), files: tuple = (), tag="py3-none-any") -> str:
    """Writes a wheel; returns the line that pins it."""
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{stem}-{tag}.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    with zipfile.ZipFile(path, "w") as archive:
        for file in files:
            archive.writestr(file, "x = 1\n")
        archive.writestr(f"{stem}.dist-info/METADATA", metadata)
        archive.writestr(f"{stem}.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


TOY_RECIPE = """
context:
  cuda: ${{ cuda_compiler_version != "None" }}
package: {name: toy, version: "1"}
build:
  string: ${{ "cuda" ~ (cuda_compiler_version | replace(".", "")) if cuda else "cpu" }}_0
  script:
    content: [echo "made" > "$PREFIX/made"]
requirements:
  host:
    - if: cuda
      then: ["pytorch * [build=cuda*]", "cuda-version =${{ cuda_compiler_version }}"]
      else: ["pytorch * [build=cpu*]"]
  ignore_run_exports: {from_package: [pytorch]}
tests:
  - script: [test "$(cat "$PREFIX/made")" = made]
"""


class TestAnotherCuda:
    """A made-up CUDA 13.7 next to 13.0: an entry in pins.yaml, and small wheels of the names that the entry has."""

    TOOLS = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl")
    LIBTORCH = ("torch/lib/libtorch.so", "torch/include/torch/a.h")
    VARIANTS: ClassVar = [CPU, Variant("cuda130", Cuda(13, 0)), Variant("cuda137", Cuda(13, 7))]

    @pytest.fixture(scope="class")
    @classmethod
    def made(cls, tmp_path_factory):
        """The channel, whose Python is an empty package, and its digests for CUDA 13.0 without and with 13.7."""
        folder = tmp_path_factory.mktemp("another")
        (wheels := folder / "wheels").mkdir()
        data = yaml.safe_load(FILE.read_text())
        data["wheels"] = [a_wheel(wheels, name, "1.0") for name in ("pip", "ninja")]
        data["wheels"].append(a_wheel(wheels, "setuptools", "80.0"))
        data["wheels"].append(a_wheel(wheels, "triton", "3.8.0"))
        files = ("torch/__init__.py", "torch/bad.py", *cls.LIBTORCH, "torch/lib/libtorch_python.so")
        binary = {"files": files, "tag": "cp311-cp311-linux_x86_64"}
        data["cpu"] = [a_wheel(wheels, "torch", "2.13.0+cpu", **binary)]
        data["cuda"] = {"13.0": cls.entry(wheels, "13.0", "2.14.0", "13", binary)}
        pins = folder / "pins.yaml"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
            patch.setenv("PIP_NO_INDEX", "1")
            patch.setenv("PIP_FIND_LINKS", str(wheels))
            patch.setattr(local, "python_files", lambda work: [])
            digests = []
            for _ in range(2):
                pins.write_text(yaml.safe_dump(data))
                channel = local.LocalChannel(folder / "channel", Pins.load(pins))
                channel.ensure(channel.pins.cuda)
                digests.append(channel.digest(Cuda(13, 0)))
                # Of the same version of PyTorch, with a driver that 13.0 doesn't need.
                data["cuda"]["13.7"] = cls.entry(wheels, "13.7", "2.14.0+cu137", "13.5", binary)
        return channel, digests

    @classmethod
    def entry(cls, wheels: Path, cuda: str, torch: str, driver: str, binary: dict) -> dict:
        runtime = a_wheel(wheels, "nvidia-cuda-runtime", f"{cuda}.9", files=("nvidia/cu13/lib/libcudart.so.13",))
        needs = (f"nvidia-cuda-runtime=={cuda}.9",)
        tools = [a_wheel(wheels, name, f"{cuda}.88", files=("nvidia/cu13/bin/tool",)) for name in cls.TOOLS]
        libraries = [a_wheel(wheels, "torch", torch, needs, **binary), runtime]
        return {"driver": driver, "libraries": libraries, "compiler": tools}

    def engine(self, channel, recipe: Path = ROOT / "recipe") -> Engine:
        return Engine(channel.url, 1_700_000_000, channel.root / "cache", channel.pinning(), recipe)

    def test_packages(self, made):
        channel, digests = made
        names = {path.name.removesuffix(".conda") for path in (channel.root / "linux-64").glob("*.conda")}
        for cuda, name in (("13.0", "cuda130"), ("13.7", "cuda137")):
            wanted = {
                f"pytorch-2.14.0-{name}_generic_py311_h0000000_200",
                f"pytorch-gpu-2.14.0-{name}_generic_h0000000_200",
            }
            wanted |= {f"libtorch-2.14.0-{name}_generic_h0000000_200"}
            wanted |= {f"{tool}-{cuda}.88-h0_0" for tool in ("cuda-nvcc-tools", "cuda-crt-dev_linux-64")}
            assert wanted <= names, names
            assert [each for each in names if each.startswith(f"cuda-nvcc_linux-64-{cuda}.88-")]
        assert digests[0] == digests[1]  # 13.0 is not built again because 13.7 is there.

    def test_split(self, made):
        """As conda-forge's: pytorch needs its own build of libtorch, which has what C++ needs."""
        folder, site = made[0].root / "linux-64", "lib/python3.11/site-packages"
        for version, build, number in (("2.13.0", "cpu", 0), ("2.14.0", "cuda130", 200)):
            end = f"h0000000_{number}.conda"
            libtorch = rattler_build.Package.from_file(folder / f"libtorch-{version}-{build}_generic_{end}")
            pytorch = rattler_build.Package.from_file(folder / f"pytorch-{version}-{build}_generic_py311_{end}")
            assert sorted(libtorch.files) == sorted(f"{site}/{name}" for name in self.LIBTORCH)
            assert not set(libtorch.files) & set(pytorch.files)
            assert f"{site}/torch/lib/libtorch_python.so" in pytorch.files
            assert f"libtorch {version} {build}_generic_{end.removesuffix('.conda')}" in pytorch.depends
            assert pytorch.build_number == number

    def test_variants(self, made):
        """The recipe's, of the pins alone."""
        rendered = self.engine(made[0]).render()
        assert sorted(rendered) == self.VARIANTS
        for variant in self.VARIANTS[1:]:
            needs = rendered[variant].recipe.requirements.to_dict()
            assert f"cuda-version {variant.cuda}.*" in needs["host"]
            assert f"cuda-nvcc_linux-64 {variant.cuda}.*" in needs["build"]

    @pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
    def test_solved_with_its_own_driver(self, made, variant):
        channel, _ = made
        needs = self.engine(channel).render()[variant].recipe.requirements.to_dict()
        found = {r.name.normalized: r for r in asyncio.run(solve([channel.url], needs["host"], variant))}
        assert str(found["pytorch"].build).startswith(f"{variant.name}_")
        if not variant.cuda:
            return
        assert str(found["cuda-cudart"].version) == f"{variant.cuda}.9"
        tools = asyncio.run(solve([channel.url], [f"cuda-nvcc_linux-64 {variant.cuda}.*"], variant))
        versions = {str(r.version) for r in tools if r.name.normalized.startswith(("cuda-nv", "cuda-crt", "cuda-cccl"))}
        assert versions == {f"{variant.cuda}.88"}
        with pytest.raises(local.ChannelError, match="__cuda"):
            asyncio.run(solve([channel.url], needs["host"], CPU))

    def test_newer_driver(self, made):
        channel, _ = made
        with pytest.raises(local.ChannelError, match=r"__cuda >=13\.5"):
            asyncio.run(solve([channel.url], ["cuda-version 13.7.*"], Variant("cuda130", Cuda(13, 0))))

    def test_engine(self, made, tmp_path, monkeypatch):
        """One after the other in one run, each with its own driver whatever CONDA_OVERRIDE_CUDA is; nothing stays behind."""
        channel, _ = made
        monkeypatch.setenv("CONDA_OVERRIDE_CUDA", "12.1")
        (tmp_path / "recipe").mkdir()
        (tmp_path / "recipe" / "recipe.yaml").write_text(TOY_RECIPE)
        (tmp_path / "recipe" / "variants.yaml").write_text("{}\n")
        engine = self.engine(channel, tmp_path / "recipe")
        for variant in reversed(self.VARIANTS):
            out = tmp_path / "a folder" / variant.name
            log = quiet_log(tmp_path, variant.name)
            made_here = engine.build(variant, out, log)
            engine.test(variant, made_here, log)
            machines = [line for line in log.lines if "Platform: linux-64" in line]
            assert len(machines) == 2
            for machine in machines:
                assert re.findall(r"__cuda=([\d.]+)", machine) == ([variant.driver] if variant.cuda else [])
            assert re.search(rf"pytorch .* {variant.name}_generic", "\n".join(log.lines))
            assert not list(out.rglob("t*/.tmp*")) and not list(out.glob("t????????"))


class TestArchive:
    def test_installs(self, tmp_path):
        """Files, modes, links and a prefix to replace, as an installer finds them."""
        root, prefix = tmp_path / "channel", tmp_path / "prefix"
        (root / "linux-64").mkdir(parents=True)
        files = [File.of("bin/tool", b"#!/bin/sh\n", executable=True), File("bin/alias", target="tool")]
        files.append(replace(File.of("lib/config.txt", b"prefix=/old/place\n"), prefix="/old/place"))
        made = Package("toy", "1.0", "h0_0", "linux-64", run_exports={"weak": ["toy 1.0.*"]})
        first, again = (write(made, files, folder).read_bytes() for folder in (root / "linux-64", tmp_path))
        assert first == again
        asyncio.run(rattler.index.index_fs(root, write_zst=False, write_shards=False))
        asyncio.run(install(["toy"], [root.as_uri()], prefix, CPU, tmp_path / "cache"))
        assert (prefix / "bin" / "tool").stat().st_mode & 0o777 == 0o755
        assert os.readlink(prefix / "bin" / "alias") == "tool"
        assert (prefix / "lib" / "config.txt").read_text() == f"prefix={prefix}\n"
        (record,) = (prefix / "conda-meta").glob("toy-*.json")
        paths = {each["_path"]: each for each in json.loads(record.read_text())["paths_data"]["paths"]}
        assert paths["bin/tool"]["sha256"] == hashlib.sha256(b"#!/bin/sh\n").hexdigest()

    def test_reproducible(self, tmp_path):
        """Modes are those of a checkout under any umask."""
        made = Package("toy", "1.0", "h0_0", "linux-64")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(archive, "TIME", 5)
            written = write(made, [File.of("a", b""), File.of("b", b"", executable=True)], tmp_path)
        make_reproducible(written, 1_700_000_000)
        members = {member.name: member for _, member in stream_conda_component(written, component=CondaComponent.pkg)}
        assert {name: member.mode for name, member in members.items()} == {"a": 0o644, "b": 0o755}
        assert {member.mtime for member in members.values()} == {1_700_000_000}


class TestEngineEnvironment:
    @pytest.fixture
    def makes(self, monkeypatch, tmp_path):
        """The times that the environment was made, by a stand-in."""
        makes = []
        monkeypatch.setattr(prepare, "FOLDER", tmp_path / "venv")
        monkeypatch.setattr(
            prepare.venv, "create", lambda folder, **_: (makes.append(folder), folder.mkdir(exist_ok=True))
        )
        monkeypatch.setattr(prepare.subprocess, "run", lambda *_, **__: None)
        return makes

    def test_made_again_with_another_python(self, makes, monkeypatch, capsys):
        assert prepare.main() == prepare.main() == 0 and len(makes) == 1
        assert "usually" in capsys.readouterr().out  # Said before it is made.
        monkeypatch.setattr(prepare.sys, "version", "3.12.1 of another kind")
        assert prepare.main() == 0 and len(makes) == 2

    def test_no_ensurepip(self, makes, monkeypatch, capsys):
        """As Debian's Python without python3-venv."""
        monkeypatch.setattr(prepare, "find_spec", lambda name: None)
        assert prepare.main() == 1 and not makes
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and "has no ensurepip: apt-get install python3-venv" in line

    def test_nowhere_to_write(self, makes, monkeypatch, capsys):
        def full(*_, **__):
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(prepare.venv, "create", full)
        assert prepare.main() == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and line.endswith("could not be made: [Errno 30] Read-only file system")


class TestBadInput:
    def test_unknown_variant(self):
        done = make(VARIANT="rocm")
        assert done.returncode == 1 and "error: VARIANT must be cpu, cuda or all, got 'rocm'" in done.stdout

    def test_nowhere_to_write(self, tmp_path):
        """One line, as on a checkout that can only be read."""
        (tmp_path / "file").write_text("")
        done = make(DIST=str(tmp_path / "file" / "dist"))
        assert done.returncode == 1 and done.stdout.startswith("error: [Errno 20] Not a directory"), done.stdout
        assert len(done.stdout.splitlines()) == 1 and not done.stderr

    def test_no_channel(self):
        done = make(CHANNEL="/nowhere")
        assert (
            done.returncode == 1
            and "CHANNEL=/nowhere is no conda channel: it has no noarch/repodata.json" in done.stdout
        )

    def test_channel_without_pytorch(self, channel, tmp_path):
        for file in (channel / "linux-64").glob("pytorch-*"):
            file.unlink()
        local.LocalChannel(channel, Pins.load()).index()
        done = make(CHANNEL=str(channel), DIST=str(tmp_path / "dist"))
        assert done.returncode == 1 and "error: the build failed" in done.stdout
        assert re.search(r"No candidates were found for pytorch", done.stdout), done.stdout

    def test_unreadable_recipe(self, tmp_path):
        checkout = clone(tmp_path / "checkout")
        recipe = checkout / "recipe" / "recipe.yaml"
        for text in ("package: [extension_cpp\n", recipe.read_text().replace("requirements:", "requirement:")):
            recipe.write_text(text)
            done = make(cwd=checkout, CHANNEL="conda-forge", DIST=str(tmp_path / "dist"))
            assert done.returncode == 1 and "error: recipe/recipe.yaml can't be read" in done.stdout

    def test_uncommitted_changes(self, tmp_path):
        """Those of what the recipe packs."""
        checkout = clone(tmp_path / "checkout")
        for name in ("LICENSE", "Makefile", "tests/checkout/clones.py", "csrc/.hidden/file"):
            (checkout / name).parent.mkdir(exist_ok=True)
            (checkout / name).write_text("changed\n")
        done = make(cwd=checkout, CHANNEL="/nowhere", DIST=str(tmp_path / "dist"))
        assert "note: 1 uncommitted change will be in the package: LICENSE ..." in done.stdout

    def test_compiler_error(self, small, tmp_path):
        (small / "csrc" / "broken.cpp").write_text("int broken = ;\n")
        done = make(cwd=small, CHANNEL=str(CHANNEL), DIST=str(tmp_path / "dist"))
        assert done.returncode == 1 and "broken.cpp:1:14: error" in done.stdout

    def test_failed_tests_keep_a_package_out_of_the_channel(self, small, tmp_path):
        dist = tmp_path / "dist"
        (small / "tests" / "smoke.py").write_text("raise SystemExit('this package is no good')\n")
        done = make(cwd=small, CHANNEL=str(CHANNEL), DIST=str(dist))
        assert done.returncode == 1 and "this package is no good" in done.stdout
        assert "the package's tests failed; it is in" in done.stdout
        assert list((dist / "failed").glob("*.conda")) and not list((dist / "conda").rglob("*.conda"))
        assert not (dist / "env").exists()

    def test_cuda_without_a_compiler_for_it(self, channel, tmp_path):
        """The solver's reason, which the engine keeps to itself."""
        next((channel / "linux-64").glob("cuda-nvcc_*")).unlink()
        local.LocalChannel(channel, Pins.load()).index()
        done = make(CHANNEL=str(channel), DIST=str(tmp_path / "dist"), VARIANT="cuda")
        assert done.returncode == 1 and "No candidates were found for cuda-nvcc_linux-64" in done.stdout, done.stdout


class TestEnvironment:
    def test_solves_against_the_local_channel(self, packages):
        have, lack = env.available(env.specs(cuda=True), local.LocalChannel(CHANNEL, Pins.load()))
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
        assert len(asyncio.run(solve([CHANNEL.as_uri()], have))) > 30

    def test_cuda_is_one_option(self):
        with_cuda, without = env.specs(cuda=True), env.specs(cuda=False)
        assert set(with_cuda) - set(without) == {"cuda-toolkit >=12.8,<14", "cuda-cuobjdump"}
        assert "grep -v '# CUDA' environment.yml" in (ROOT / "environment.yml").read_text()

    def test_pins_agree_with_the_recipe(self):
        text = RECIPE_TEXT.replace("${{ python_min }}", "3.10").replace("${{ torch_min }}", "2.10")
        recipe = yaml.safe_load(text)
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
        """What make installs into .venv and .venv-conda is in the environment too, under conda-forge's names."""
        by_pip = env.by_pip()
        there = {re.split("[ =<>]", spec)[0] for spec in (*env.specs(cuda=True), *by_pip)}
        names = {"build": "python-build", "matplotlib": "matplotlib-base", "nvidia-cuda-cuobjdump": "cuda-cuobjdump"}
        groups = prepare.tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
        for listed in groups.values():
            for line in (line for line in listed if isinstance(line, str)):
                name = re.split("[ =<>;]", line)[0]
                assert names.get(name, name) in there, f"environment.yml has no {name}"
        dev = " ".join(str(line) for name in ("tools", "with-torch") for line in groups[name])
        assert all(re.split("[ =<>]", spec)[0] in dev for spec in by_pip)
