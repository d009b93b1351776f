"""`make package`: from csrc/ to an installed conda package.

Builds recipe/ against a channel, runs the package's own tests, puts it into dist/conda, installs it from there with a solver
into dist/env, and calls an operator in that environment; each variant by itself.

VARIANT   cpu (default), cuda (every CUDA that the channel can build for) or all; none of them needs a GPU
CHANNEL   conda-forge, local, a URL or a path; unset: conda-forge if it answers within seconds, else the local channel
DIST      the folder for all that is made; unset: dist
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn

import rattler
import rattler_build
import yaml
from filelock import FileLock
from rich.table import Table

from channel.local import SUBDIR, ChannelError, LocalChannel
from channel.pins import Pins
from package.channels import cache_for, choose_channel
from package.engine import RECIPE, Engine
from package.install import install
from package.progress import ROOT, Log, Steps, console, relative
from package.variant import Variant

VARIANTS = ("cpu", "cuda", "all")


def source_filter() -> dict[str, list[str]]:
    """What the recipe takes from the checkout: the patterns to include and to exclude."""
    try:
        return yaml.safe_load((RECIPE / "recipe.yaml").read_text())["source"]["filter"]
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise ChannelError(f"recipe/recipe.yaml can't be read: {error}") from error


def source_files() -> Iterator[Path]:
    """The files that the recipe's source filter lets through."""
    patterns = source_filter()
    for included in patterns["include"]:
        path = ROOT / included.removesuffix("/**")
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            # As the engine's, a pattern's ** is any number of folders.
            name = f"/{file.relative_to(ROOT).as_posix()}"
            if file.is_file() and not any(fnmatchcase(name, f"/{each}") for each in patterns["exclude"]):
                yield file


def fingerprint(*others: str) -> str:
    """Of all that decides what the package is, but for the commit's time, which changes with other files too."""
    digest = hashlib.sha256("\0".join([sys.version, rattler_build.rattler_build_version(), *others]).encode())
    for path in (*source_files(), *sorted(RECIPE.iterdir()), *sorted((ROOT / "package").glob("*.py"))):
        digest.update(f"{relative(path)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def source_date() -> int:
    """The time of the commit; says which changes are not committed."""
    git = ["git", "-C", str(ROOT)]
    done = subprocess.run([*git, "log", "-1", "--format=%ct"], capture_output=True, text=True)
    patterns = source_filter()
    sources = ["recipe", *patterns["include"], *(f":(exclude,glob){pattern}" for pattern in patterns["exclude"])]
    status = [*git, "status", "--porcelain", "--", *sources]
    changed = subprocess.run(status, capture_output=True, text=True).stdout.splitlines()
    if changed:
        count = f"{len(changed)} uncommitted change{'s' * (len(changed) > 1)}"
        console.print(f"note: {count} will be in the package: {changed[0][3:]} ...")
    return int(os.environ.get("SOURCE_DATE_EPOCH") or done.stdout.strip() or 315532800)


def ask(prefix: Path) -> str:
    program = [str(prefix / "bin" / "python"), "-I", str(ROOT / "tests" / "smoke.py")]
    done = subprocess.run(program, capture_output=True, text=True, cwd=prefix)
    if done.returncode:
        raise ChannelError(f"the installed package does not answer:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def make(wanted: str, dist: Path) -> None:
    """Build, test, install and call each variant; what was made already is only called again."""
    if wanted not in VARIANTS:
        raise ChannelError(f"VARIANT must be {', '.join(VARIANTS[:-1])} or {VARIANTS[-1]}, got {wanted!r}")
    steps = Steps()
    epoch = source_date()
    url, local = choose_channel(dist)
    # A path that CHANNEL names is a local channel that was made before.
    pinning = LocalChannel(dist, Pins.load()).pinning() if url.startswith("file:") else {}
    engine = Engine(url, epoch, cache_for(url, dist), pinning)
    rendered = [variant for variant in engine.render() if wanted == "all" or variant.name.startswith(wanted)]
    cudas = [variant.cuda for variant in rendered if variant.cuda]

    def ensure(title: str, verify: bool, long: bool = True) -> None:
        if local:
            with steps(title, long) as status:
                local.report = lambda what: status.update(f"{title}: [dim]{what}")
                local.ensure(cudas, verify)

    ensure(f"local channel{' with CUDA' if cudas else ''}", verify=False, long=bool(local and local.lacking(cudas)))
    state_file, work = dist / "packages.json", dist / "work"
    states = json.loads(state_file.read_text()) if state_file.exists() else {}
    marks = {each: fingerprint(each.name, url, local.digest(each.cuda) if local else "") for each in rendered}
    stale = [each for each in rendered if not is_made(each, states.get(each.name, {}), marks[each], dist)]
    for variant in (each for each in rendered if each not in stale):
        console.print(f"{variant.name}: nothing has changed since this package was built and tested")
    if stale:
        ensure("check of the local channel", verify=True)
        with emptied(work):
            built = {variant: build(engine, variant, work, dist, steps) for variant in stale}
            summaries = test_all(engine, built, dist, steps)
            for variant, package in built.items():
                with steps(f"install {variant.name}"):
                    package = add_to_channel(package, variant, dist)
                    channels = [(dist / "conda").resolve().as_uri(), url]
                    specs = [f"extension_cpp * {variant.name}*", "python"]
                    asyncio.run(install(specs, channels, dist / "env" / variant.name, variant, engine.cache))
                took = {step: round(steps.seconds[f"{step} {variant.name}"], 1) for step in ("build", "test")}
                made = {"package": package.name, "tests": summaries[variant], "seconds": took}
                states[variant.name] = {"fingerprint": marks[variant], **made}
                state_file.write_text(json.dumps(states, indent=1) + "\n")
    for variant in rendered:
        with steps(f"call {variant.name}"):
            answer = ask(dist / "env" / variant.name)
        show(dist, variant, states[variant.name], steps.seconds, answer)


def is_made(variant: Variant, state: dict, mark: str, dist: Path) -> bool:
    there = (dist / "conda" / SUBDIR / state.get("package", "none")).exists()
    return there and state["fingerprint"] == mark and (dist / "env" / variant.name / "conda-meta").exists()


@contextmanager
def emptied(folder: Path) -> Iterator[None]:
    """Without what is in a folder, before and after."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def build(engine: Engine, variant: Variant, work: Path, dist: Path, steps: Steps) -> Path:
    title = f"build {variant.name}"
    with steps(title) as status:
        return engine.build(
            variant, work / variant.name, Log(dist / "logs" / f"build-{variant.name}.log", status, title)
        )


def test_all(engine: Engine, built: dict[Variant, Path], dist: Path, steps: Steps) -> dict[Variant, str]:
    """Test the packages at the same time, as most tests keep one core busy. Returns what pytest said of each."""

    def one(variant: Variant) -> str | ChannelError:
        start, title = time.monotonic(), f"test {variant.name}"
        package = built[variant]
        try:
            return engine.test(variant, package, Log(dist / "logs" / f"test-{variant.name}.log", status, title))
        except ChannelError as error:
            failed = dist / "failed" / package.name
            failed.parent.mkdir(exist_ok=True)
            os.replace(package, failed)
            where = f"the package's tests failed; it is in {relative(failed)}, not in the channel"
            return ChannelError(f"{where}\n{error}")
        finally:
            steps.seconds[title] = time.monotonic() - start

    title = f"test {' and '.join(variant.name for variant in built)}" + " at the same time" * (len(built) > 1)
    with steps(title) as status, ThreadPoolExecutor() as pool:
        results = dict(zip(built, pool.map(one, built)))
    errors = [str(result) for result in results.values() if isinstance(result, ChannelError)]
    if errors:
        raise ChannelError("\n".join(errors))
    return {variant: str(result) for variant, result in results.items()}


def add_to_channel(package: Path, variant: Variant, dist: Path) -> Path:
    """In place of the package of this variant that was there."""
    target = dist / "conda"
    (target / SUBDIR).mkdir(parents=True, exist_ok=True)
    (target / "noarch").mkdir(exist_ok=True)
    for old in (target / SUBDIR).glob(f"extension_cpp-*-{variant.name}_*.conda"):
        old.unlink()
    os.replace(package, target / SUBDIR / package.name)
    asyncio.run(rattler.index.index_fs(target, force=True, write_zst=False, write_shards=False))
    return target / SUBDIR / package.name


def show(dist: Path, variant: Variant, state: dict, seconds: dict[str, float], answer: str) -> None:
    package = dist / "conda" / SUBDIR / state["package"]
    own = [
        f"{title} {took:.1f} s"
        for title, took in seconds.items()
        if " channel" in title or title.endswith(variant.name)
    ]
    table = Table("", "", show_header=False, title=package.name, title_justify="left")
    table.add_row("package", f"{relative(package)}, {package.stat().st_size / 1e3:.0f} kB")
    table.add_row("environment", relative(dist / "env" / variant.name))
    table.add_row("tests", state["tests"])
    table.add_row("time", ", ".join(own))
    table.add_row("answer", answer)
    console.print(table)


def main() -> int:
    dist = Path(os.environ.get("DIST", ROOT / "dist"))
    try:
        dist.mkdir(parents=True, exist_ok=True)
        with FileLock(dist / ".lock"):
            make(os.environ.get("VARIANT", "cpu"), dist)
    except (ChannelError, OSError) as error:
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
