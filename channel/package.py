"""`make package`: from csrc/ to an installed conda package.

Builds recipe/ against a channel, runs the package's own tests, puts it into dist/conda, installs it from there with a solver
into dist/env, and calls an operator in that environment; each variant by itself.

VARIANT   cpu (default), cuda (every CUDA that the channel can build for) or all; none of them needs a GPU
CHANNEL   conda-forge, local, a URL or a path; unset: conda-forge if it answers within seconds, else the local channel
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import rattler
import rattler_build
from conda_package_streaming.create import anonymize, conda_builder
from conda_package_streaming.package_streaming import CondaComponent, stream_conda_component
from filelock import FileLock
from rich.console import Console
from rich.table import Table

from channel.build import SUBDIR, ChannelError, LocalChannel, pins

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipe"
VARIANTS = ("cpu", "cuda", "all")
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "csrc", "extension_cpp", "tests", "recipe", "channel")

console = Console(width=None if Console().is_terminal else 120, highlight=False)


class Log:
    """Shows what a long step is doing: its last line on a terminal, every line in the file."""

    def __init__(self, file: Path, status, title: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.file, self.status, self.title = file.open("w"), status, title
        self.lines: list[str] = []

    def on_log(self, event) -> None:
        for line in re.sub(r"\x1b\[[\d;]*m", "", event.message).splitlines():
            self.lines.append(line)
            print(f"{time.monotonic():.1f} {line}", file=self.file, flush=True)
            if line.strip():
                self.status.update(f"{self.title}: [dim]{line.strip()[:80].replace('[', '(')}")


class Steps:
    """Runs the steps one by one and remembers how long each took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, title: str) -> Iterator:
        start = time.monotonic()
        if not console.is_terminal:
            console.print(f"{title} ...")
        with console.status(title) as status:
            yield status
        self.seconds[title] = time.monotonic() - start


def choose_channel(dist: Path) -> tuple[str, LocalChannel | None]:
    """The URL of the channel to build against, and the local channel if it is that."""
    wanted = os.environ.get("CHANNEL", "")
    local = LocalChannel(dist / "channel")
    if wanted in ("", "conda-forge"):
        url = rattler.Channel("conda-forge").base_url
        if wanted or answers(f"{url}noarch/repodata.json.zst"):
            console.print(f"channel: conda-forge ({'CHANNEL says so' if wanted else 'it answers'})")
            return "conda-forge", None
    # Two checkouts make packages of one name: each unpacks them in a place of its own.
    os.environ.setdefault("RATTLER_CACHE_DIR", str(dist.resolve() / "cache"))
    if wanted == "":
        console.print(
            f"channel: local, in {relative(local.root)} (conda-forge does not answer; CHANNEL=conda-forge to insist)"
        )
        return local.url, local
    if wanted == "local":
        console.print(f"channel: local, in {relative(local.root)} (CHANNEL says so)")
        return local.url, local
    if "://" not in wanted:
        if not (Path(wanted) / "noarch" / "repodata.json").exists():
            raise ChannelError(f"CHANNEL={wanted} is no conda channel: it has no noarch/repodata.json")
        wanted = Path(wanted).resolve().as_uri()
    console.print(f"channel: {wanted} (CHANNEL says so)")
    return wanted, None


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=3):
            return True
    except (OSError, urllib.error.URLError):
        return False


def relative(path: Path) -> str:
    return os.path.relpath(path, ROOT)


def source_files() -> Iterator[Path]:
    for name in SOURCES:
        path = ROOT / name
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (f for f in files if f.is_file() and not re.search(r"/(__pycache__/|\.)|\.so$", f"/{relative(f)}"))


def fingerprint(*others: str) -> str:
    """Of all that decides what the package is, but for the commit's time, which changes with what isn't of it too."""
    digest = hashlib.sha256("\0".join([sys.version, rattler_build.rattler_build_version(), *others]).encode())
    for path in source_files():
        digest.update(f"{relative(path)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def set_source_date() -> None:
    """Give the package the time of the commit, so that building it twice gives the same bytes."""
    git = ["git", "-C", str(ROOT)]
    done = subprocess.run([*git, "log", "-1", "--format=%ct"], capture_output=True, text=True)
    os.environ.setdefault("SOURCE_DATE_EPOCH", done.stdout.strip() or "315532800")
    changed = subprocess.run([*git, "status", "--porcelain", "--", *SOURCES], capture_output=True, text=True).stdout
    if changed:
        count = len(changed.splitlines())
        console.print(
            f"note: {count} uncommitted change{'s' * (count > 1)} will be in the package: {changed.split()[1]} ..."
        )


def render(variant: str, local: bool) -> dict[str, rattler_build.RenderedVariant]:
    """The recipe for cpu, cuda or all, by the start of the build string: cpu, cuda129, cuda130.

    For the local channel with its pins, which stand in for conda-forge's global ones.
    """
    here = rattler_build.JinjaConfig(platform=rattler_build.PlatformConfig(target_platform=SUBDIR))
    config = rattler_build.VariantConfig.from_file_with_context(RECIPE / "variants.yaml", here)
    config = config.merge(rattler_build.VariantConfig(pins() if local else {}))
    try:
        rendered = rattler_build.Stage0Recipe.from_file(RECIPE / "recipe.yaml").render(config)
    except rattler_build.RattlerBuildError as error:
        raise ChannelError(f"recipe/recipe.yaml can't be read: {error}") from error
    found = {str(each.recipe.to_dict()["build"]["string"]).split("_")[0]: each for each in rendered}
    return {proc: each for proc, each in found.items() if variant == "all" or proc.startswith(variant)}


def build(rendered: rattler_build.RenderedVariant, url: str, work: Path, log: Log) -> Path:
    tools = rattler_build.ToolConfiguration(test_strategy="skip")
    try:
        result = rendered.run_build(
            tools, work, channels=[url], package_format="conda:19", no_include_recipe=True, progress_callback=log
        )
    except rattler_build.RattlerBuildError as error:
        reasons = asyncio.run(unsolvable(rendered, url)) if "resolve dependencies" in str(error) else excerpt(log)
        raise ChannelError(f"the build failed:\n{reasons}") from error
    package = Path(result.packages[0])
    make_reproducible(package, int(os.environ["SOURCE_DATE_EPOCH"]))
    return package


def make_reproducible(package: Path, epoch: int) -> None:
    """Write a package anew without what differs between builds: times, owners, and the path of a local channel."""

    def constant(name: str, content: bytes) -> bytes:
        if name not in ("info/index.json", "info/about.json"):
            return content
        fields = json.loads(content)
        if "timestamp" in fields:
            fields["timestamp"] = epoch * 1000
        if "depends" in fields:
            fields["depends"].sort()  # What run_exports add comes in any order.
        if "channels" in fields:
            fields["channels"] = ["conda-forge" if url.startswith("file:") else url for url in fields["channels"]]
        return json.dumps(fields, indent=2, sort_keys=True).encode()

    entries = []
    for component in CondaComponent:
        for archive, member in stream_conda_component(package, component=component):
            stream = archive.extractfile(member)
            content = None if stream is None else constant(member.name, stream.read())
            entries.append((anonymize(member), content))
    with tempfile.TemporaryDirectory(dir=package.parent) as folder:
        with conda_builder(package.stem, folder) as target:
            for member, content in sorted(entries, key=lambda entry: entry[0].name):
                member.mtime, member.size = epoch, len(content or b"")
                target.addfile(member, None if content is None else io.BytesIO(content))
        final = Path(folder, "final.conda")
        with zipfile.ZipFile(Path(folder, package.name)) as written, zipfile.ZipFile(final, "w") as target:
            for name in written.namelist():
                target.writestr(zipfile.ZipInfo(name, time.gmtime(epoch)[:6]), written.read(name))
        os.replace(final, package)


def test(package: Path, url: str, dist: Path, log: Log) -> str:
    """Run the tests that the package carries; returns what pytest says in its last line."""
    try:
        results = rattler_build.Package.from_file(package).run_tests(channel=[url], progress_callback=log)
        passed = all(result.success for result in results)
        reason = ""
    except rattler_build.RattlerBuildError as error:
        passed, reason = False, f"{error}\n"
    if not passed:
        failed = dist / "failed" / package.name
        failed.parent.mkdir(exist_ok=True)
        os.replace(package, failed)
        raise ChannelError(
            f"the package's tests failed; it is in {relative(failed)}, not in the channel\n{reason}{excerpt(log)}"
        )
    summaries = re.findall(r"(\d+ passed.*?) in [\d.]+s", "\n".join(log.lines))
    return summaries[-1] if summaries else "passed"


def excerpt(log: Log) -> str:
    """What of a log tells why: lines with an error, then the end."""
    lines = (
        "\n".join(log.lines).split("Script failed with status")[0].splitlines()
    )  # The engine's own advice comes after.
    errors = [line for line in lines[:-15] if re.search(r"\berror\b|^E  ", line, re.IGNORECASE)]
    return "\n".join([*errors[:15], *lines[-15:], f"The whole log is in {relative(Path(log.file.name))}"])


async def unsolvable(rendered: rattler_build.RenderedVariant, url: str) -> str:
    """Why the recipe's environments can't be solved, in the solver's words; the build says only that they can't."""
    needs = rendered.recipe.requirements.to_dict()
    reasons = []
    for part in ("build", "host"):
        try:
            await solve([url], needs[part])
        except ChannelError as error:
            reasons.append(f"{part}: {error}")
    return "\n".join(reasons) or "the solver finds no fault with it alone"


async def solve(channels: list[str], specs: list[str]) -> list[rattler.RepoDataRecord]:
    """What the solver picks on this machine, or on the one that CONDA_OVERRIDE_CUDA tells of."""
    machine = rattler.VirtualPackage.detect(rattler.VirtualPackageOverrides.from_env())
    try:
        return await rattler.solve(channels, specs, virtual_packages=machine)
    except Exception as error:
        raise ChannelError(f"no environment has {', '.join(specs)}:\n{error}") from error


async def install(specs: list[str], channels: list[str], prefix: Path) -> list[str]:
    """Solve and install; returns the names of the packages. The solver's reasons are the error."""
    records = await solve(channels, specs)
    if prefix.exists():
        shutil.rmtree(prefix)
    await rattler.install(records, prefix, show_progress=console.is_terminal)
    return [f"{record.name.normalized} {record.version}" for record in records]


def ask(prefix: Path) -> str:
    program = [prefix / "bin" / "python", "-I", ROOT / "tests" / "smoke.py"]
    done = subprocess.run(program, capture_output=True, text=True, cwd=prefix)
    if done.returncode:
        raise ChannelError(f"the installed package does not answer:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def make(variant: str, dist: Path) -> None:
    """Build, test, install and call each variant; what was made already only answers again."""
    if variant not in VARIANTS:
        raise ChannelError(f"VARIANT must be {', '.join(VARIANTS[:-1])} or {VARIANTS[-1]}, got {variant!r}")
    steps = Steps()
    url, local = choose_channel(dist)
    set_source_date()
    if local:
        with steps("local channel") as status:
            local.report = lambda what: status.update(f"local channel: [dim]{what}")
            local.ensure(cuda=variant != "cpu")
    state_file, work = dist / "packages.json", dist / "work"
    states = json.loads(state_file.read_text()) if state_file.exists() else {}
    shutil.rmtree(work, ignore_errors=True)
    wanted = render(variant, local=url.startswith("file:"))
    built: dict[str, Path] = {}
    marks: dict[str, str] = {}
    for proc, rendered in wanted.items():
        if proc != "cpu":  # The solver takes CUDA packages where there is a driver; building and testing needs none.
            os.environ.setdefault("CONDA_OVERRIDE_CUDA", f"{proc[4:-1]}.{proc[-1]}")
        digest = local.digest(proc != "cpu") if local else ""
        marks[proc] = fingerprint(proc, url, digest)
        state = states.get(proc, {})
        there = (dist / "conda" / SUBDIR / state.get("package", "none")).exists()
        if state.get("fingerprint") == marks[proc] and there and (dist / "env" / proc / "conda-meta").exists():
            console.print(f"{proc}: nothing has changed since this package was built and tested")
            continue
        with steps(f"build {proc}") as status:
            log = Log(dist / "logs" / f"build-{proc}.log", status, f"build {proc}")
            built[proc] = build(rendered, url, work / proc, log)
    summaries = test_all(built, url, dist, steps) if built else {}
    for proc, package in built.items():
        with steps(f"install {proc}"):
            package = add_to_channel(package, proc, dist)
            channels = [(dist / "conda").resolve().as_uri(), url]
            asyncio.run(install([f"extension_cpp * {proc}*", "python"], channels, dist / "env" / proc))
        took = {step: round(steps.seconds[f"{step} {proc}"], 1) for step in ("build", "test")}
        states[proc] = {"fingerprint": marks[proc], "package": package.name, "tests": summaries[proc], "seconds": took}
        state_file.write_text(json.dumps(states, indent=1) + "\n")
    shutil.rmtree(work, ignore_errors=True)
    for proc in wanted:
        with steps(f"call {proc}"):
            answer = ask(dist / "env" / proc)
        show(dist, proc, states[proc], steps.seconds, answer)


def test_all(built: dict[str, Path], url: str, dist: Path, steps: Steps) -> dict[str, str]:
    """Test the packages side by side, as most tests keep one core busy. Returns what pytest said of each."""

    def one(proc: str) -> str | ChannelError:
        start = time.monotonic()
        try:
            return test(built[proc], url, dist, Log(dist / "logs" / f"test-{proc}.log", status, f"test {proc}"))
        except ChannelError as error:
            return error
        finally:
            steps.seconds[f"test {proc}"] = time.monotonic() - start

    title = f"test {' and '.join(built)}" + " side by side" * (len(built) > 1)
    with steps(title) as status, ThreadPoolExecutor() as pool:
        results = dict(zip(built, pool.map(one, built)))
    errors = [str(result) for result in results.values() if isinstance(result, ChannelError)]
    if errors:
        raise ChannelError("\n".join(errors))
    return {proc: str(result) for proc, result in results.items()}


def add_to_channel(package: Path, proc: str, dist: Path) -> Path:
    """In place of the package of this variant that was there."""
    target = dist / "conda"
    (target / SUBDIR).mkdir(parents=True, exist_ok=True)
    (target / "noarch").mkdir(exist_ok=True)
    for old in (target / SUBDIR).glob(f"extension_cpp-*-{proc}_*.conda"):
        old.unlink()
    os.replace(package, target / SUBDIR / package.name)
    asyncio.run(rattler.index.index_fs(target, force=True, write_zst=False, write_shards=False))
    return target / SUBDIR / package.name


def show(dist: Path, proc: str, state: dict, seconds: dict[str, float], answer: str) -> None:
    package = dist / "conda" / SUBDIR / state["package"]
    own = [f"{title} {took:.1f} s" for title, took in seconds.items() if title.split()[-1] in (proc, "channel")]
    table = Table("", "", show_header=False, title=package.name, title_justify="left")
    table.add_row("package", f"{relative(package)}, {package.stat().st_size / 1e3:.0f} kB")
    table.add_row("environment", relative(dist / "env" / proc))
    table.add_row("tests", state["tests"])
    table.add_row("time", ", ".join(own))
    table.add_row("answer", answer)
    console.print(table)


def main() -> int:
    dist = Path(os.environ.get("DIST", ROOT / "dist"))
    dist.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(dist / ".lock"):
            make(os.environ.get("VARIANT", "cpu"), dist)
    except ChannelError as error:
        console.print(f"[red]error:[/red] {str(error).replace('[', chr(92) + '[')}")
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """End without Python's own clean-up: py-rattler's threads are still there then, and one run in ten or so crashes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
