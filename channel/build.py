"""Builds a local conda channel from PyPI's wheels and this machine's Python and compiler.

It stands in for conda-forge where that can't be reached, with its names, build strings and run_exports, so that the recipe
can't tell the difference. wheels.txt pins the wheels; recipes/ has what is no wheel. A package that is there is never
rebuilt, each appears whole or not at all, and a lock keeps two runs apart.
"""

from __future__ import annotations

import asyncio
import configparser
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import rattler
import rattler_build
import yaml
from filelock import FileLock
from packaging.metadata import Metadata
from packaging.utils import canonicalize_name, parse_wheel_filename

HERE = Path(__file__).parent
WHEELS = HERE / "wheels.txt"
SUBDIR = "linux-64"
PYTHON = "3.11"
CUDA = "13.0"
CONDA_NAMES = {
    "torch": "pytorch",
    "typing-extensions": "typing_extensions",
    # PyPI's is a list of extras; conda-forge has the whole toolkit under that name.
    "cuda-toolkit": "cuda-toolkit-extras",
    "nvidia-cublas": "libcublas",
    "nvidia-cuda-cccl": "cuda-cccl_linux-64",
    "nvidia-cuda-crt": "cuda-crt-dev_linux-64",
    "nvidia-cuda-cuobjdump": "cuda-cuobjdump",
    "nvidia-cuda-cupti": "cuda-cupti",
    "nvidia-cuda-nvcc": "cuda-nvcc-tools",
    "nvidia-cuda-nvrtc": "cuda-nvrtc",
    "nvidia-cuda-runtime": "cuda-cudart",
    "nvidia-cudnn-cu13": "libcudnn",
    "nvidia-cufft": "libcufft",
    "nvidia-cufile": "libcufile",
    "nvidia-curand": "libcurand",
    "nvidia-cusolver": "libcusolver",
    "nvidia-cusparse": "libcusparse",
    "nvidia-cusparselt-cu13": "cusparselt",
    "nvidia-nccl-cu13": "nccl",
    "nvidia-nvjitlink": "libnvjitlink",
    "nvidia-nvshmem-cu13": "libnvshmem3",
    "nvidia-nvtx": "cuda-nvtx",
    "nvidia-nvvm": "cuda-nvvm-tools",
}
# Of these the compiler wants files in the environment's own folders; of the others Python looks them up.
TOOLKIT = ("cuda-cccl_linux-64", "cuda-crt-dev_linux-64", "cuda-cuobjdump", "cuda-nvcc-tools", "cuda-nvvm-tools")
TARGET = "targets/x86_64-linux"
Report = Callable[[str], None]

# A script that finds its interpreter beside itself, wherever the environment lies.
SCRIPT = """#!/bin/sh
'''exec' "$(dirname "$(readlink -f "$0")")/python" "$0" "$@"
' '''
import sys
from {module} import {name}
sys.exit({call}())
"""


class ChannelError(Exception):
    """Something the user can mend; the message says what and how."""


def conda_name(name: str) -> str:
    name = canonicalize_name(name)
    return CONDA_NAMES.get(name, name)


def check_machine() -> None:
    """Raise ChannelError where this machine can't make a channel."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        here = f"{platform.system()} {platform.machine()}"
        raise ChannelError(f"the local channel is made on Linux x86_64, and this is {here}: use CHANNEL=conda-forge")
    if f"{sys.version_info.major}.{sys.version_info.minor}" != PYTHON:
        version = platform.python_version()
        raise ChannelError(
            f"the local channel's wheels are for Python {PYTHON}, and this is {version}: PYTHON=python{PYTHON}"
        )
    for tool in (os.environ.get("CC", "cc"), os.environ.get("CXX", "c++")):
        if shutil.which(tool) is None:
            raise ChannelError(
                f"no compiler: {tool} is not on PATH. Install g++ (apt-get install g++) or set CC and CXX"
            )


class Pin(NamedTuple):
    """A line of wheels.txt."""

    name: str
    version: str
    line: str

    @property
    def cuda(self) -> bool:
        """Whether only the CUDA variant needs it."""
        return self.line.endswith("# CUDA")

    @property
    def package(self) -> tuple[str, str]:
        """Name and version of the conda package that it becomes."""
        return conda_name(self.name), self.version.split("+")[0]


def wheel_pins() -> list[Pin]:
    lines = [line for line in WHEELS.read_text().splitlines() if line and not line.startswith("#")]
    return [Pin(*line.split(" ")[0].split("==", 1), line) for line in lines]


def download(folder: Path, wanted: list[Pin], report: Report) -> list[Path]:
    """The wheels wanted, checked against their hashes; what is there already is not fetched again."""
    folder.mkdir(parents=True, exist_ok=True)
    report("wheels")
    listed = folder / "wanted.txt"
    listed.write_text("".join(f"{pin.line}\n" for pin in wanted))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", "--dest", folder, "--find-links", folder, "-r", listed]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = "\n".join(line for line in done.stderr.splitlines() if line.startswith(("ERROR", "    ")))
        raise ChannelError(
            f"the wheels that {WHEELS.name} lists could not be had; run it again to go on. pip says:\n{said}"
        )
    keys = {(canonicalize_name(pin.name), pin.version) for pin in wanted}
    return sorted(path for path in folder.glob("*.whl") if wheel_key(path) in keys)


def wheel_key(path: Path) -> tuple[str, str]:
    name, version, _, _ = parse_wheel_filename(path.name)
    return name, str(version)


def unpack(wheel: Path, tree: Path, site_packages: str, scripts: str) -> Metadata:
    """Lay a wheel's files out as an installed package has them; returns its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tree / site_packages)
    root = tree / site_packages
    (info,) = root.glob("*.dist-info")
    for data in root.glob("*.data"):
        for kind, target in (("purelib", root), ("platlib", root), ("scripts", tree / scripts), ("data", tree)):
            if (data / kind).exists():
                shutil.copytree(data / kind, target, dirs_exist_ok=True)
        shutil.rmtree(data)
    for script in (tree / scripts).glob("*"):
        script.chmod(0o755)
    if (info / "entry_points.txt").exists():
        entries = configparser.ConfigParser(delimiters="=")
        entries.optionxform = str  # type: ignore[assignment,method-assign]
        entries.read(info / "entry_points.txt")
        for name, target in entries["console_scripts"].items() if entries.has_section("console_scripts") else ():
            module, _, call = target.split("[")[0].strip().partition(":")
            (tree / scripts).mkdir(parents=True, exist_ok=True)
            path = tree / scripts / name
            path.write_text(SCRIPT.format(module=module, name=call.split(".")[0], call=call))
            path.chmod(0o755)
    (info / "INSTALLER").write_text("conda\n")
    (info / "RECORD").unlink(missing_ok=True)
    return Metadata.from_email((info / "METADATA").read_bytes(), validate=False)


def requirements(metadata: Metadata) -> Iterator[str]:
    """The wheel's requirements on this platform, as conda writes them."""
    # Of PyPI's cuda-toolkit, which is a list of extras, torch asks for what wheels.txt pins.
    everything = metadata.name == "cuda-toolkit"
    libraries = {canonicalize_name(pin.name) for pin in wheel_pins() if pin.cuda and pin.package[0] not in TOOLKIT}
    for requirement in metadata.requires_dist or ():
        if everything and canonicalize_name(requirement.name) not in libraries:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": "all" if everything else ""}):
            yield f"{conda_name(requirement.name)} {requirement.specifier}".strip()


def lay_out_toolkit(tree: Path, site_packages: str) -> None:
    """Move a wheel's part of the CUDA toolkit to where conda-forge's nvcc has it; leave nothing for Python."""
    toolkit = tree / site_packages / "nvidia" / f"cu{CUDA.split('.')[0]}"
    for folder, target in (
        ("bin", "bin"),
        ("nvvm", "nvvm"),
        ("include", f"{TARGET}/include"),
        ("lib", f"{TARGET}/lib"),
    ):
        if (toolkit / folder).exists():
            (tree / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(toolkit / folder, tree / target)
    for program in (path for part in ("bin", "nvvm/bin") for path in (tree / part).glob("*") if path.is_file()):
        program.chmod(0o755)
    shutil.rmtree(tree / "lib")


class LocalChannel:
    """A channel at `root`; `ensure()` makes what it lacks."""

    def __init__(self, root: Path, report: Report = lambda what: None, warn: Report = print) -> None:
        self.root, self.report, self.warn = root.resolve(), report, warn
        self.built = 0

    @property
    def url(self) -> str:
        return self.root.as_uri()

    def ensure(self, cuda: bool = False) -> None:
        """Make what is lacking; with `cuda`, what the CUDA variant needs too."""
        check_machine()
        self.root.mkdir(parents=True, exist_ok=True)
        with FileLock(self.root / ".lock"):
            try:
                for left in self.root.glob(".work-*"):  # of a run that was killed
                    shutil.rmtree(left)
                self.make(cuda)
            except (OSError, rattler_build.RattlerBuildError) as error:
                free = shutil.disk_usage(self.root).free / 1e9
                raise ChannelError(
                    f"{self.root} could not be made: {error} ({free:.1f} GB are free there; run it again to go on)"
                ) from error

    def make(self, cuda: bool) -> None:
        for subdir in (SUBDIR, "noarch"):
            (self.root / subdir).mkdir(exist_ok=True)
        self.drop_damaged()
        lacking = [pin for pin in wheel_pins() if (cuda or not pin.cuda) and not self.has(*pin.package)]
        # Two at a time, as most of it is waiting for the disk, and while the next are downloaded.
        with tempfile.TemporaryDirectory(dir=self.root, prefix=".work-") as work, ThreadPoolExecutor(2) as pool:
            made = []
            try:
                for which in (False, True):  # pip has no two versions of torch in one go.
                    wanted = [pin for pin in lacking if pin.cuda == which]
                    wheels = download(self.root / ".wheels", wanted, self.report) if wanted else []
                    largest_first = sorted(wheels, key=lambda wheel: -wheel.stat().st_size)
                    made += [pool.submit(self.make_wheel, wheel, Path(work)) for wheel in largest_first]
                self.make_python(Path(work))
                self.make_abi_packages(Path(work))
                self.make_system(Path(work))
                if cuda:
                    self.make_cuda(Path(work))
                for one in made:
                    one.result()
            finally:
                pool.shutdown(cancel_futures=True)
        if self.built or not (self.root / "noarch" / "repodata.json").exists():
            self.report("index")
            asyncio.run(rattler.index.index_fs(self.root, write_zst=False, write_shards=False))

    def drop_damaged(self) -> None:
        """Remove packages that are not what the index says they are, so that they are made again."""
        for subdir in (SUBDIR, "noarch"):
            index = self.root / subdir / "repodata.json"
            records = json.loads(index.read_text())["packages.conda"] if index.exists() else {}
            for name, record in records.items():
                path = self.root / subdir / name
                if path.exists() and is_damaged(path, record, index.stat().st_mtime):
                    self.warn(f"{path} is damaged; it is made again")
                    path.unlink()
                    self.built += 1

    def digest(self, cuda: bool) -> str:
        """Of the packages that a variant is built from: those for CUDA don't change the CPU variant."""
        names = ("cuda-", *("-".join(pin.package) for pin in wheel_pins() if pin.cuda))
        digest = hashlib.sha256()
        for subdir in (SUBDIR, "noarch"):
            records = json.loads((self.root / subdir / "repodata.json").read_text())["packages.conda"]
            for name, record in sorted(records.items()):
                if cuda or not name.startswith(names):
                    digest.update(f"{name} {record['sha256']}\n".encode())
        return digest.hexdigest()

    def has(self, name: str, version: str) -> bool:
        return any(list((self.root / subdir).glob(f"{name}-{version}-*.conda")) for subdir in (SUBDIR, "noarch"))

    def add(self, package: Path, subdir: str) -> None:
        """Move a finished package in; a rename, so that it is never seen half written."""
        os.replace(package, self.root / subdir / package.name)
        self.built += 1

    def assemble(self, work: Path, name: str, version: str, build: str, subdir: str, **fields) -> None:
        self.report(name)
        out = work / f"{name}-out"
        fields.setdefault("compression_level", 1)
        made = rattler_build.assemble_package(name, version, subdir, build, out, detect_prefix=False, **fields)
        self.add(Path(made.path), subdir)

    def recipe(self, work: Path, file: str, depends: Sequence[str] = (), **context: object) -> None:
        """Build a recipe of recipes/, with `context` and `depends` for what it leaves open."""
        lines = "".join(f"\n    - {spec}" for spec in depends)
        text = (HERE / "recipes" / file).read_text().replace("run: []", f"run:{lines}")
        recipe = rattler_build.Stage0Recipe.from_yaml(text)
        config = rattler_build.RenderConfig(extra_context=context)
        tools = rattler_build.ToolConfiguration(test_strategy="skip")
        out = tempfile.mkdtemp(dir=work)
        for variant in recipe.render(rattler_build.VariantConfig(), config):
            self.report(variant.recipe.package.name)
            result = variant.run_build(tools, out, channels=[], package_format="conda:1", no_include_recipe=True)
            for package in result.packages:
                self.add(Path(package), result.platform)

    def make_wheel(self, wheel: Path, work: Path) -> None:
        name, full, _, tags = parse_wheel_filename(wheel.name)
        name, version = conda_name(name), full.public
        if self.has(name, version):
            wheel.unlink()
            return
        tree = work / f"{name}-{full}"
        pure = all(tag.platform == "any" for tag in tags)
        site = "site-packages" if pure else f"lib/python{PYTHON}/site-packages"
        metadata = unpack(wheel, tree, site, "python-scripts" if pure else "bin")
        wheel.unlink()  # The package that is written next takes its room.
        depends = sorted(requirements(metadata))
        cuda = [f"cuda-version >={CUDA},<{int(CUDA.split('.')[0]) + 1}"]
        if name == "cuda-cudart":
            dev = work / "cuda-cudart-dev"
            shutil.copytree(tree, dev, symlinks=True)
            lay_out_toolkit(dev, site)
            self.assemble(work, f"{name}-dev_{SUBDIR}", version, "h0_0", SUBDIR, files_dir=dev, depends=cuda)
        if name in TOOLKIT:
            lay_out_toolkit(tree, site)
            self.assemble(work, name, version, "h0_0", SUBDIR, files_dir=tree, depends=cuda)
        elif pure:
            python = f"python {metadata.requires_python or '>=3.10'}"
            files = {"files_dir": tree, "noarch": "python", "depends": [python, *depends]}
            self.assemble(work, name, version, "pyhd8ed1ab_0", "noarch", **files)
        else:
            compile_python(tree)
            run = [f"python {PYTHON}.*", f"python_abi {PYTHON}.* *_cp311", *depends]
            if name == "pytorch":
                proc = "cpu" if full.local == "cpu" else f"cuda{CUDA.replace('.', '')}"
                run = [*run[1:], "libstdcxx", *([] if proc == "cpu" else [*cuda, "__cuda"])]
                self.recipe(work, "pytorch.yaml", version=version, tree=str(tree), proc=proc, depends=run)
            else:
                self.assemble(work, name, version, "py311h0000000_0", SUBDIR, files_dir=tree, depends=run)
        shutil.rmtree(tree)

    def make_python(self, work: Path) -> None:
        version = platform.python_version()
        if self.has("python", version):
            return
        base = Path(sys.base_prefix)
        tree = work / "python"
        skipped = shutil.ignore_patterns("site-packages", "test", "tests", "idlelib", "__pycache__", "*.a")
        library = Path("lib") / f"python{PYTHON}"
        shutil.copytree(base / library, tree / library, symlinks=True, ignore=skipped)
        shutil.copytree(base / "include" / f"python{PYTHON}", tree / "include" / f"python{PYTHON}")
        (tree / "bin").mkdir()
        shutil.copy2(base / "bin" / f"python{PYTHON}", tree / "bin")
        for alias in ("python", "python3"):
            (tree / "bin" / alias).symlink_to(f"python{PYTHON}")
        for shared in (base / "lib").glob("libpython3*.so*"):
            shutil.copy2(shared, tree / "lib", follow_symlinks=False)
        (tree / library / "site-packages").mkdir()
        (tree / library / "site-packages" / "README.txt").write_text("Packages are installed here.\n")
        subprocess.run(["patchelf", "--set-rpath", "$ORIGIN/../lib", tree / "bin" / f"python{PYTHON}"], check=True)
        compile_python(tree)
        self.recipe(work, "python.yaml", version=version, minor=PYTHON, tree=str(tree), old_prefix=str(base))
        shutil.rmtree(tree)

    def make_abi_packages(self, work: Path) -> None:
        """The small packages by which conda-forge says what a Python can load."""
        if not self.has("python-abi3", "3.10"):  # The last of them.
            self.recipe(work, "abi.yaml", version=platform.python_version(), minor=PYTHON)

    def make_cuda(self, work: Path) -> None:
        """What the CUDA variant needs beside wheels."""
        versions = {pin.name: pin.version for pin in wheel_pins()}
        nvcc, runtime = versions["nvidia-cuda-nvcc"], versions["nvidia-cuda-runtime"]
        if not self.has(f"cuda-nvcc_{SUBDIR}", nvcc):  # The last of them.
            self.recipe(work, "cuda.yaml", cuda=CUDA, nvcc=nvcc, runtime=runtime)

    def make_system(self, work: Path) -> None:
        compiler = shutil.which(os.environ.get("CXX", "c++")), shutil.which(os.environ.get("CC", "cc"))
        gcc, glibc = system_versions()
        if not self.has("gxx_linux-64", gcc):
            self.recipe(work, "system.yaml", gcc=gcc, glibc=glibc, cxx=compiler[0], cc=compiler[1])


def is_damaged(path: Path, record: dict, indexed: float) -> bool:
    """Whether a file is not what its record says; gigabytes that have not changed since then are not read again."""
    stat = path.stat()
    if stat.st_size != record["size"]:
        return True
    return stat.st_mtime > indexed and hashlib.sha256(path.read_bytes()).hexdigest() != record["sha256"]


def compile_python(tree: Path) -> None:
    """Make the .pyc files, in parallel; files that are no valid Python, as tests of parsers have, stay without."""
    command = [sys.executable, "-m", "compileall", "-q", "-j", "0", "-s", tree, "--invalidation-mode", "unchecked-hash"]
    subprocess.run([*command, tree], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def system_versions() -> tuple[str, str]:
    """The versions of the system's g++ and C library."""
    command = [os.environ.get("CXX", "c++"), "-dumpfullversion"]
    gcc = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return gcc, platform.libc_ver()[1]


def pins() -> dict[str, list[str]]:
    """What conda-forge's global pinning says, for this channel."""
    gcc, glibc = system_versions()
    major = gcc.split(".")[0]
    found = {"c_compiler_version": [major], "cxx_compiler_version": [major], "c_stdlib_version": [glibc]}
    return {**yaml.safe_load((HERE / "pins.yaml").read_text()), **found}
