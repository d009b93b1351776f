"""The build engine, rattler-build, in a process of its own for each variant.

The engine reads the driver to solve for, its cache and the place of its temporary folders from environment variables, so two
variants can't share a process. The command line is this file: `python -m package.engine`, with a request on standard input.
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
from dataclasses import dataclass, field
from pathlib import Path

import rattler_build

from channel.local import SUBDIR, ChannelError
from package.install import solve
from package.progress import ROOT, Log, relative
from package.reproducible import make_reproducible
from package.variant import Variant

RECIPE = ROOT / "recipe"


@dataclass(frozen=True)
class Engine:
    """Builds and tests a recipe's variants against a channel."""

    url: str
    epoch: int
    """The time that the packages have: the commit's, so that building twice gives the same bytes."""
    cache: Path | None = None
    pinning: dict[str, list[str]] = field(default_factory=dict)
    """What stands in for conda-forge's global pinning."""
    recipe: Path = RECIPE

    def render(self) -> dict[Variant, rattler_build.RenderedVariant]:
        here = rattler_build.JinjaConfig(platform=rattler_build.PlatformConfig(target_platform=SUBDIR))
        config = rattler_build.VariantConfig.from_file_with_context(self.recipe / "variants.yaml", here)
        config = config.merge(rattler_build.VariantConfig(self.pinning))
        try:
            rendered = rattler_build.Stage0Recipe.from_file(self.recipe / "recipe.yaml").render(config)
        except rattler_build.RattlerBuildError as error:
            raise ChannelError(f"recipe/recipe.yaml can't be read: {error}") from error
        return {Variant.of(each.variant["cuda_compiler_version"]): each for each in rendered}

    def build(self, variant: Variant, out: Path, log: Log) -> Path:
        """The package's path, in `out`."""
        result = self.run(variant, out, log, do="build", out=str(out))
        if "error" in result:
            unsolved = "resolve dependencies" in result["error"]
            reasons = asyncio.run(self.unsolvable(variant)) if unsolved else f"{result['error']}\n{excerpt(log)}"
            raise ChannelError(f"the build failed:\n{reasons}")
        package = Path(result["package"])
        make_reproducible(package, self.epoch)
        return package

    def test(self, variant: Variant, package: Path, log: Log) -> str:
        """Run the tests that the package carries; returns what pytest says in its last line."""
        result = self.run(variant, package.parent, log, do="test", package=str(package))
        if "error" in result:
            seen = {line.strip() for line in log.lines}
            unseen = [line for line in result["error"].splitlines() if line.strip() not in seen]
            raise ChannelError("\n".join([*unseen, excerpt(log)]))
        summaries = re.findall(r"(\d+ passed.*?) in [\d.]+s", "\n".join(log.lines))
        return summaries[-1] if summaries else "passed"

    def run(self, variant: Variant, folder: Path, log: Log, **request: str) -> dict[str, str]:
        """What the engine answers to a request; its log lines go to `log`, its temporary folders don't stay."""
        folder.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.mkdtemp(dir=folder, prefix="t")
        cache = {"RATTLER_CACHE_DIR": str(self.cache)} if self.cache else {}
        own = {"TMPDIR": temporary, "SOURCE_DATE_EPOCH": str(self.epoch), "PYTHONPATH": str(ROOT), **cache}
        fields = {"url": self.url, "pinning": self.pinning, "recipe": str(self.recipe), "variant": variant.name}
        reply = Path(temporary, "reply.json")
        try:
            with subprocess.Popen(
                [sys.executable, "-m", "package.engine", reply],
                env={**os.environ, **own, **variant.environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            ) as child:
                assert child.stdin and child.stdout
                child.stdin.write(json.dumps({**fields, **request}))
                child.stdin.close()
                for line in child.stdout:
                    log.add(line.rstrip("\n"))
            if not reply.exists():
                return {"error": f"the build engine ended with status {child.returncode}\n"}
            return json.loads(reply.read_text())
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    async def unsolvable(self, variant: Variant) -> str:
        """Why the recipe's environments can't be solved, in the solver's words; the engine says only that they can't."""
        needs = self.render()[variant].recipe.requirements.to_dict()
        reasons = []
        for part in ("build", "host"):
            try:
                await solve([self.url], needs[part], variant)
            except ChannelError as error:
                reasons.append(f"{part}: {error}")
        return "\n".join(reasons) or "the solver finds no fault with each environment by itself"


def excerpt(log: Log) -> str:
    """The lines of a log that tell why: those with an error, then the end."""
    lines = (
        "\n".join(log.lines).split("Script failed with status")[0].splitlines()
    )  # The engine's own advice comes after.
    errors = [line for line in lines[:-15] if re.search(r"\berror\b|^E  ", line, re.IGNORECASE)]
    return "\n".join([*errors[:15], *lines[-15:], f"The whole log is in {relative(Path(log.file.name))}"])


def plain(line: str) -> str:
    """Without colours."""
    return re.sub(r"\x1b\[[\d;]*m", "", line)


class Printer:
    """The engine's log lines on standard output."""

    def on_log(self, event) -> None:
        try:
            print(plain(event.message), flush=True)
        except BrokenPipeError:  # The parent was killed.
            os._exit(1)


def answer(request: dict) -> dict[str, str]:
    try:
        if request["do"] == "test":
            package = rattler_build.Package.from_file(request["package"])
            results = package.run_tests(channel=[request["url"]], progress_callback=Printer())  # type: ignore[arg-type]
            # The log has most of it, but not why an environment can't be solved.
            failed = [plain(line) for result in results if not result.success for line in result.output]
            return {} if all(results) else {"error": "".join(f"{line}\n" for line in failed[-15:])}
        engine = Engine(request["url"], 0, None, request["pinning"], Path(request["recipe"]))
        (rendered,) = (each for variant, each in engine.render().items() if variant.name == request["variant"])
        built = rendered.run_build(
            rattler_build.ToolConfiguration(test_strategy="skip"),
            request["out"],
            channels=[request["url"]],
            package_format="conda:1",  # It is written once more, and smaller, by make_reproducible().
            no_include_recipe=True,
            progress_callback=Printer(),  # type: ignore[arg-type]
        )
        return {"package": str(built.packages[0])}
    except rattler_build.RattlerBuildError as error:
        return {"error": f"{error}\n"}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(answer(json.load(sys.stdin))))
    sys.stdout.flush()
    os._exit(0)  # As leave() in package/__main__.py.
