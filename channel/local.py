"""The local conda channel, made of PyPI's wheels and this machine's Python and compiler.

It stands in for conda-forge where conda-forge can't be reached, with its names, build strings and run_exports, so that the
recipe can't tell the difference. pins.yaml says what is in it; recipes/ has what is no wheel. A package that is there is not
made again, each appears whole or not at all, and a lock keeps two runs apart.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import rattler_build
from filelock import FileLock

from channel.archive import File, Package, index_json, with_bytecode, write
from channel.pins import TORCH, Cuda, Pin, Pins, meta
from channel.wheels import DownloadError, Wheel, download

RECIPES = Path(__file__).parent / "recipes"
SUBDIR = "linux-64"
SUBDIRS = (SUBDIR, "noarch")
Report = Callable[[str], None]


class ChannelError(Exception):
    """Something that the user can fix; the message says what and how."""


def check_machine(python: str) -> None:
    """Raise ChannelError where this machine can't make a channel."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        here = f"{platform.system()} {platform.machine()}"
        raise ChannelError(f"the local channel is made on Linux x86_64, and this is {here}: use CHANNEL=conda-forge")
    if f"{sys.version_info.major}.{sys.version_info.minor}" != python:
        version = platform.python_version()
        raise ChannelError(
            f"the local channel's wheels are for Python {python}, and this is {version}: PYTHON=python{python}"
        )
    if "deb_system" in sysconfig.get_scheme_names():  # It looks for packages in dist-packages, where conda has none.
        raise ChannelError(
            "the local channel has this machine's Python in it, which can't be Debian's own: PYTHON=<one that apt did not "
            "install>, as pyenv's, or CHANNEL=conda-forge"
        )
    for tool in (os.environ.get("CC", "cc"), os.environ.get("CXX", "c++")):
        if shutil.which(tool) is None:
            raise ChannelError(
                f"no compiler: {tool} is not on PATH. Install g++ (apt-get install g++) or set CC and CXX"
            )


class LocalChannel:
    """A channel at `root`; `ensure()` makes what it lacks."""

    def __init__(
        self, root: Path, pins: Pins, report: Report = lambda what: None, warn: Report = lambda what: None
    ) -> None:
        self.root, self.pins, self.report, self.warn = root.resolve(), pins, report, warn
        self.verified: set[Path] = set()
        self.added: set[Path] = set()

    @property
    def url(self) -> str:
        return self.root.as_uri()

    def lacking(self, cudas: Collection[Cuda] = ()) -> list[tuple[Cuda | None, list[Pin]]]:
        """The wheels whose packages are not there yet, each once, in groups for one download each."""
        found = []
        seen: set[tuple[str, str, str]] = set()
        for cuda, pins in self.pins.groups(sorted(cudas)):
            wanted = {(name, pin.version, build_of(name, cuda)): pin for pin in pins for name in pin.packages(cuda)}
            lacking = list(dict.fromkeys(pin for key, pin in wanted.items() if key not in seen and not self.has(*key)))
            seen |= wanted.keys()
            found += [(cuda, lacking)] if lacking else []
        return found

    def ensure(self, cudas: Collection[Cuda] = (), verify: bool = False) -> None:
        """Make what is lacking, for the CPU variant and those of `cudas`.

        Packages that are there are compared with the index: their sizes, and with `verify` their content too. Installers
        don't look at packages of a local channel, so this comes before anything is installed.
        """
        check_machine(self.pins.python)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with FileLock(self.root / ".lock"):
                for left in self.root.glob(".work-*"):  # of a run that was killed
                    shutil.rmtree(left)
                for subdir in SUBDIRS:
                    (self.root / subdir).mkdir(exist_ok=True)
                self.drop_damaged(verify)
                self.make(sorted(cudas))
                self.index()
        except (OSError, rattler_build.RattlerBuildError) as error:
            free = shutil.disk_usage(next(path for path in self.root.parents if path.exists())).free / 1e9
            raise ChannelError(
                f"{self.root} could not be made: {error} ({free:.1f} GB are free there; run it again to go on)"
            ) from error

    def make(self, cudas: list[Cuda]) -> None:
        # Two packages are written at a time, while the next wheels are downloaded and other processes compile Python.
        with (
            tempfile.TemporaryDirectory(dir=self.root, prefix=".work-") as folder,
            ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as compilers,
            ThreadPoolExecutor(2) as pool,
        ):
            work = Path(folder)
            jobs = [pool.submit(self.make_python, work, compilers)]
            try:
                for cuda, lacking in self.lacking(cudas):
                    for pin, wheel in self.download(lacking):
                        jobs.append(pool.submit(self.make_wheel, pin, wheel, cuda, work, compilers))
                self.make_recipes(cudas, work)
                for job in jobs:
                    job.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def drop_damaged(self, verify: bool) -> None:
        """Remove packages that are not what the index says, so that they are made again."""
        for path, record in self.indexed():
            if not path.exists() or path in self.verified:
                continue
            damaged = path.stat().st_size != record["size"]
            if verify and not damaged:
                self.report(f"checking {record['name']}")
                damaged = sha256(path) != record["sha256"]
                self.verified.add(path)
            if damaged:
                self.warn(f"{path} is damaged; it is made again")
                path.unlink()
                self.verified.discard(path)

    def indexed(self) -> Iterator[tuple[Path, dict]]:
        """The packages of the index, with what it says of each."""
        for subdir in SUBDIRS:
            index = self.root / subdir / "repodata.json"
            records = json.loads(index.read_text())["packages.conda"] if index.exists() else {}
            for name, record in sorted(records.items()):
                yield self.root / subdir / name, record

    def index(self) -> None:
        """Write the index; rattler's own indexer takes a minute for PyTorch and CUDA, as it reads more of each package."""
        known = dict(self.indexed())
        there = {path for subdir in SUBDIRS for path in (self.root / subdir).glob("*.conda")}
        new = self.added | (there - known.keys())  # A run can end before its index.
        if not new and there == known.keys():
            return
        self.report("index")
        for subdir in SUBDIRS:
            paths = sorted(path for path in there if path.parent.name == subdir)
            records = {path.name: record_of(path) if path in new else known[path] for path in paths}
            head = {"info": {"subdir": subdir}, "packages": {}, "repodata_version": 1}
            written = self.root / subdir / ".repodata.json"
            written.write_text(json.dumps({**head, "packages.conda": records}, indent=1))
            os.replace(written, self.root / subdir / "repodata.json")
        self.added.clear()

    def digest(self, cuda: Cuda | None) -> str:
        """Of the packages that a variant can be built from: what only other variants need doesn't change it."""
        others = set().union(*(self.pins.packages(other) for other in (None, *self.pins.cuda) if other != cuda))
        others -= self.pins.packages(cuda)
        digest = hashlib.sha256()
        for path, record in self.indexed():
            name, build = record["name"], record["build"]
            if (name, record["version"]) not in others and build.startswith(build_of(name, cuda)):
                digest.update(f"{path.name} {record['sha256']}\n".encode())
        return digest.hexdigest()

    def has(self, name: str, version: str, build: str = "") -> bool:
        return any(any((self.root / subdir).glob(f"{name}-{version}-{build}*.conda")) for subdir in SUBDIRS)

    def add(self, package: Path, subdir: str) -> None:
        """Move a finished package in; a rename, so that it is never seen half written."""
        target = self.root / subdir / package.name
        os.replace(package, target)
        self.verified.add(target)
        self.added.add(target)

    def write(self, work: Path, files: Iterable[File], package: Package) -> None:
        self.report(package.name)
        self.add(write(package, files, work), package.subdir)

    def download(self, pins: list[Pin]) -> list[tuple[Pin, Path]]:
        self.report("wheels")
        try:
            return download(self.root / ".wheels", pins)
        except DownloadError as error:
            raise ChannelError(
                f"the wheels that pins.yaml lists could not be had; run it again to go on. pip says:\n{error}"
            ) from error

    def make_wheel(self, pin: Pin, path: Path, cuda: Cuda | None, work: Path, compilers: Executor) -> None:
        wheel = Wheel(path, self.pins.python)
        needs_cuda = [cuda.requirement] if cuda else []
        plain = partial(Package, pin.name, pin.version)
        if pin.name == "pytorch":
            self.make_torch(pin, wheel, cuda, work, compilers)
            path.unlink()
            return
        for dev in pin.packages(cuda)[1:]:
            self.write(work, wheel.toolkit(), Package(dev, pin.version, "h0_0", SUBDIR, needs_cuda))
        if cuda and pin in self.pins.cuda[cuda].compiler:
            self.write(work, wheel.toolkit(), plain("h0_0", SUBDIR, needs_cuda))
        elif wheel.pure:
            depends = [f"python {wheel.metadata.requires_python or '>=3.10'}", *wheel.requirements(self.pins, cuda)]
            self.write(work, wheel.files(), plain("pyhd8ed1ab_0", "noarch", depends))
        else:
            files = with_bytecode(list(wheel.files()), compilers, sys.implementation.cache_tag)
            self.write(work, files, plain(f"{self.pins.tag}h0000000_0", SUBDIR, self.requirements(wheel, cuda)))
        path.unlink()

    def requirements(self, wheel: Wheel, cuda: Cuda | None) -> list[str]:
        """Of a package for one Python."""
        return [f"python {self.pins.python}.*", self.python_abi, *wheel.requirements(self.pins, cuda)]

    def make_torch(self, pin: Pin, wheel: Wheel, cuda: Cuda | None, work: Path, compilers: Executor) -> None:
        """conda-forge's split: the libraries, what Python needs in addition, and a name by which users ask for the build."""
        number = 200 if cuda else 0
        build, end = f"{build_of('pytorch', cuda)}generic", f"h0000000_{number}"
        needs_cuda = [cuda.requirement] if cuda else []
        only = [f"{name} {pin.version if name == meta(cuda) else '<0.0a0'}" for name in ("pytorch-cpu", "pytorch-gpu")]
        needs = {
            "libtorch": ["libstdcxx", *needs_cuda],
            "pytorch": [
                f"libtorch {pin.version} {build}_{end}",
                *self.requirements(wheel, cuda),
                *(["__cuda", *needs_cuda] if cuda else []),
            ],
            meta(cuda): [f"pytorch {pin.version} {build}*{number}"],
        }
        # Recipes on the stable ABI ignore them.
        exports = {"weak": [f"pytorch {pin.version}.*", f"libtorch {pin.version}.*"]}
        files = list(wheel.files())
        others = [file for file in files if not is_library(file.path)]
        content: dict[str, Iterable[File]] = {
            "libtorch": [file for file in files if is_library(file.path)],
            "pytorch": with_bytecode(others, compilers, sys.implementation.cache_tag),
        }
        for name in pin.packages(cuda):
            constrains = [] if name == meta(cuda) else only
            string = f"{build}_{self.pins.tag}_{end}" if name == "pytorch" else f"{build}_{end}"
            for old in (self.root / SUBDIR).glob(f"{name}-{pin.version}-{build}*.conda"):  # of another build string
                old.unlink()
            package = Package(name, pin.version, string, SUBDIR, needs[name], constrains, exports, number)
            self.write(work, content.get(name, ()), package)

    @property
    def python_abi(self) -> str:
        return f"python_abi {self.pins.python}.* *_cp{self.pins.python.replace('.', '')}"

    def make_python(self, work: Path, compilers: Executor) -> None:
        """The interpreter that runs this, under conda-forge's name."""
        version = platform.python_version()
        if not self.has("python", version):
            exports = {"weak": [self.python_abi], "noarch": ["python"]}
            build = "h0000000_0_cpython"
            package = Package("python", version, build, SUBDIR, constrains=[self.python_abi], run_exports=exports)
            files = with_bytecode(list(python_files(work)), compilers, sys.implementation.cache_tag)
            self.write(work, files, package)

    def make_recipes(self, cudas: list[Cuda], work: Path) -> None:
        """What is no wheel."""
        self.recipe(work, "abi.yaml", version=platform.python_version(), minor=self.pins.python)
        gcc, glibc = system_versions()
        cc, cxx = (shutil.which(os.environ.get(name, default)) for name, default in (("CC", "cc"), ("CXX", "c++")))
        self.recipe(work, "system.yaml", gcc=gcc, glibc=glibc, cc=str(cc), cxx=str(cxx))
        for cuda in cudas:
            pins = self.pins.cuda[cuda]
            versions = {name.replace("-", "_"): version for name, version in pins.versions.items()}
            self.recipe(work, "cuda.yaml", cuda=str(cuda), next=cuda.major + 1, driver=pins.driver, **versions)

    def recipe(self, work: Path, file: str, **context: str | int) -> None:
        """Build the outputs that are lacking of a recipe of recipes/, with `context` for what it leaves open."""
        recipe = rattler_build.Stage0Recipe.from_file(RECIPES / file)
        config = rattler_build.RenderConfig(extra_context=dict(context))
        tools = rattler_build.ToolConfiguration(test_strategy="skip")
        out = tempfile.mkdtemp(dir=work)
        for variant in recipe.render(rattler_build.VariantConfig(), config):
            package = variant.recipe.package
            if self.has(package.name, package.version):
                continue
            self.report(package.name)
            result = variant.run_build(tools, out, channels=[], package_format="conda:1", no_include_recipe=True)
            for path in result.packages:
                self.add(Path(path), result.platform)

    def pinning(self) -> dict[str, list[str]]:
        """What conda-forge's global pinning says, for this channel, which has one torch for each variant and one Python."""
        gcc, glibc = system_versions()
        major = gcc.split(".")[0]
        found = {"c_compiler_version": [major], "cxx_compiler_version": [major], "c_stdlib_version": [glibc]}
        only = {"host_pytorch": ["*"], "oldest_python": [self.pins.python]}
        return {**self.pins.pinning, **found, **only}


def build_of(name: str, cuda: Cuda | None) -> str:
    """How the build string begins of the packages that have several builds of a version: those of PyTorch."""
    return "" if name not in TORCH else f"{cuda.name}_" if cuda else "cpu_"


def is_library(path: str) -> bool:
    """Whether a file of torch's wheel is in conda-forge's libtorch: what C++ needs of it."""
    _, _, inside = path.partition("/site-packages/torch/")
    return inside.startswith(("lib/", "include/", "share/")) and "libtorch_python" not in inside


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def record_of(package: Path) -> dict:
    """What an index says of a package."""
    return {**index_json(package), "sha256": sha256(package), "size": package.stat().st_size}


def python_files(work: Path) -> Iterator[File]:
    """The running interpreter's files, without its packages and tests."""
    base, name = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
    skipped = {"site-packages", "test", "tests", "idlelib", "__pycache__"}
    for folder in (base / "lib" / name, base / "include" / name):
        for at, folders, names in os.walk(folder):
            folders[:] = sorted(set(folders) - skipped)
            yield from (on_disk(Path(at, each), base) for each in sorted(names) if not each.endswith(".a"))
    for shared in sorted((base / "lib").glob("libpython3*.so*")):
        yield on_disk(shared, base)
    program = work / name
    shutil.copy2(base / "bin" / name, program)
    subprocess.run(["patchelf", "--set-rpath", "$ORIGIN/../lib", program], check=True)
    yield File(f"bin/{name}", program.stat().st_size, lambda: program.open("rb"), executable=True)
    yield from (File(f"bin/{alias}", target=name) for alias in ("python", "python3"))
    yield File.of(f"lib/{name}/site-packages/README.txt", b"Packages are installed here.\n")


def on_disk(path: Path, base: Path) -> File:
    relative = path.relative_to(base).as_posix()
    if path.is_symlink():
        return File(relative, target=os.readlink(path))
    # Where Python was configured to be: the other files don't say.
    configured = path.name.startswith("_sysconfigdata") or path.parent.name.startswith("config-")
    prefix = str(base) if configured and os.fsencode(base) in path.read_bytes() else ""
    status = path.stat()
    return File(relative, status.st_size, lambda: path.open("rb"), bool(status.st_mode & 0o100), prefix=prefix)


def system_versions() -> tuple[str, str]:
    """The versions of the system's g++ and C library."""
    command = [os.environ.get("CXX", "c++"), "-dumpfullversion"]
    gcc = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return gcc, platform.libc_ver()[1]
