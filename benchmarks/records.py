"""The results: JSON lines, the first of which says what the others depend on."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

import extension_cpp
from benchmarks.harness import OURS

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
SCHEMA = 3
GENERATED = ("benchmarks/results", "benchmarks/pictures", "benchmarks/README.md", "README.md")


BEHIND = 0.95
"""A cell whose best peer takes less than so many times ours needs a reason."""


class ResultsError(Exception):
    """Results that are missing or can't be read, in words for the user."""


class Map:
    """What a grid's record says: how many times longer than ours the peer takes, by sizes."""

    def __init__(self, record: dict):
        self.record = record
        cells = itertools.product(record["values"], repeat=len(record["axes"]))
        self.ratios = {
            sizes: theirs / ours for sizes, ours, theirs in zip(cells, record["ours"], record["theirs"]) if ours
        }

    @property
    def below(self) -> int:
        return sum(ratio < BEHIND for ratio in self.ratios.values())

    @property
    def mean(self) -> float:
        return statistics.geometric_mean(self.ratios.values())

    def place(self, sizes: tuple[int, ...]) -> str:
        return ", ".join(f"{axis} {size:,}" for axis, size in zip(self.record["axes"], sizes))

    @property
    def worst(self) -> tuple[str, float]:
        sizes, ratio = min(self.ratios.items(), key=lambda item: item[1])
        return self.place(sizes), ratio

    @property
    def reasons(self) -> list[tuple[str, list[tuple[str, float]]]]:
        """Each reason that is declared for cells that are below, and those from the worst on; no reason is the last."""
        below = {
            sizes: ratio for sizes, ratio in sorted(self.ratios.items(), key=lambda item: item[1]) if ratio < BEHIND
        }
        reason_of = {tuple(sizes): why for why, cells in self.record.get("reasons", {}).items() for sizes in cells}
        found: dict[str, list[tuple[str, float]]] = {}
        for sizes, ratio in below.items():
            found.setdefault(reason_of.get(sizes, ""), []).append((self.place(sizes), ratio))
        return sorted(found.items(), key=lambda item: (not item[0], -len(item[1])))


@dataclass
class Results:
    """What one run on one device found out about one family."""

    header: dict
    records: list[dict]

    @property
    def family(self) -> str:
        return self.header["family"]

    @property
    def device(self) -> str:
        return self.header["device"]

    def cases(self, whole: bool = False) -> dict[tuple[str, str], list[dict]]:
        """Records by operator and case, ours first; without grids; `whole` leaves out those with fewer threads, for the short
        form."""
        grouped: dict[tuple[str, str], list[dict]] = {}
        for record in self.records:
            if "axes" in record or (whole and "threads" in record):
                continue
            grouped.setdefault((record["op"], record["case"]), []).append(record)
        return grouped

    def limit(self, record: dict) -> float | None:
        """The least seconds a case can take on its machine: to move its bytes, to do its operations, or a part of them."""
        ceilings = self.header["ceilings"]
        seconds = record.get("copy") or (record["bytes"] / ceilings["bytes"] if record["bytes"] else 0.0)
        seconds = max(seconds, record.get("part", 0.0))
        if record["operations"]:
            seconds = max(seconds, record["operations"] / ceilings["operations"][record["dtype"] or "float32"])
        return seconds or None

    @property
    def of_operators(self) -> bool:
        """Not of the package, whose contenders are no peers."""
        return self.family != "package"

    @property
    def of_models(self) -> bool:
        """Which are measured where torchvision is, and have a document of their own."""
        return self.family == "torchvision"

    @property
    def of_package(self) -> bool:
        """Of what users install, which the README is about."""
        return self.of_operators and not self.of_models and self.family not in ("examples", "scaling")

    def cells(self) -> list[dict]:
        """The best peer's record of each case that has a peer; its ratio says how many times longer than ours it takes."""
        cases = self.cases(whole=True).values() if self.of_operators else ()
        return [peer for case in cases if (peer := best_peer(case))]

    def behind(self) -> list[dict]:
        """The cells where the best peer is faster, the worst first."""
        return sorted((cell for cell in self.cells() if cell["ratio"] < BEHIND), key=lambda cell: cell["ratio"])

    def grids(self) -> list[Map]:
        return [Map(record) for record in self.records if "axes" in record]

    def text(self) -> str:
        return "\n".join(map(json.dumps, [self.header, *self.records])) + "\n"

    def save(self) -> Path:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / file_name(self.family, self.device, self.header["machine"])
        path.write_text(self.text())
        return path


def best_peer(case: list[dict]) -> dict | None:
    """The fastest of the peers; not another way to run ours."""
    peers = [record for record in case[1:] if not record["contender"].startswith(OURS)]
    return min(peers, key=lambda record: record["ratio"], default=None)


def file_name(family: str, device: str, machine: str) -> str:
    """Results of several machines stand side by side."""
    return f"{family}-{device}-" + re.sub(r"\W+", "-", machine.removeprefix("NVIDIA ").lower()).strip("-") + ".jsonl"


def parse(text: str, source: str) -> Results:
    """Read results; an error where they are not of this schema."""
    try:
        header, *records = map(json.loads, text.splitlines())
        schema = header["schema"]
    except (ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"{source} has no benchmark results: {error!r}") from error
    if schema != SCHEMA:
        why = "`make bench` measures them anew" if schema < SCHEMA else "they are of a later commit"
        raise ResultsError(f"{source} has results of schema {schema}, and this reads schema {SCHEMA}: {why}")
    return Results(header, records)


def load(folder: Path = RESULTS) -> list[Results]:
    """All committed results, CPU before CUDA."""
    found = [parse(path.read_text(), relative(path)) for path in sorted(folder.glob("*.jsonl"))]
    return sorted(found, key=lambda results: (results.device, results.family))


def leading(found: list[Results], among: list[Results] | None = None) -> list[Results]:
    """Those of one machine of each type of device: that with the most results, of two the later name."""
    counts = Counter((results.device, results.header["machine"]) for results in among or found)
    best: dict[str, tuple[int, str]] = {}
    for results in found:
        machine = results.header["machine"]
        best[results.device] = max(best.get(results.device, (0, "")), (counts[results.device, machine], machine))
    return [results for results in found if results.header["machine"] == best[results.device][1]]


def load_one(family: str, device: str) -> Results:
    """Those of this machine, or of another with such a device."""
    own = RESULTS / file_name(family, device, machine(device))
    path = next((path for path in (own, *sorted(RESULTS.glob(f"{family}-{device}*.jsonl"))) if path.exists()), None)
    if path is None:
        raise ResultsError(f'there are no results of {family} on {device}: make bench BENCH="--op {family}"')
    return parse(path.read_text(), relative(path))


def load_at(commit: str, family: str, device: str) -> Results:
    """The results of this machine that a commit has."""
    name = f"benchmarks/results/{file_name(family, device, machine(device))}"
    if git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}") is None:
        raise ResultsError(f"there is no commit {commit} here" if git("rev-parse") is not None else "no git here")
    text = git("show", f"{commit}:{name}")
    if text is None:
        raise ResultsError(f"commit {commit} has no results of {family} on {device} ({name})")
    return parse(text, f"{name} of commit {commit}")


def relative(path: Path) -> str:
    return os.path.relpath(path, ROOT)


def git(*arguments: str) -> str | None:
    """What git says; None where it fails or isn't there."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None


def commit() -> str:
    """What was measured: the commit, with "-dirty" where anything differs from it but what a benchmark itself writes."""
    known = git("rev-parse", "--short", "HEAD")
    if known is None:
        return "unknown"
    changed = git("status", "--porcelain", "--", ".", *(f":!{path}" for path in GENERATED))
    return f"{known}-dirty" if changed else known


def machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    described = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*: (.*)", described, re.MULTILINE)
    vectors = next((name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in described), "")
    threads = torch.get_num_threads()
    cores = f"{threads} core{'s' * (threads > 1)} of {model[1].strip() if model else platform.processor()}"
    return f"{cores} with {vectors}" if vectors else cores


def versions(device: str) -> dict[str, str]:
    found = {
        "extension_cpp": extension_cpp.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device == "cuda":
        import triton

        found |= {"cuda": str(torch.version.cuda), "triton": triton.__version__}
    if "torchvision" in sys.modules:  # where a family has it as a peer
        found["torchvision"] = sys.modules["torchvision"].__version__
    return found


def artefacts() -> dict[str, str]:
    """Hashes of the libraries that were measured, and the conda package that they came in."""
    libraries = sorted(Path(extension_cpp.__file__).parent.glob("_C*.so"))
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in libraries}
    for path in Path(sys.prefix, "conda-meta").glob("extension_cpp-*.json"):
        package = json.loads(path.read_text())
        found[package["fn"]] = package.get("sha256", "")[:16]
    return found


def header(family: str, device: str, measured: str, ceilings: dict) -> dict:
    """What results depend on."""
    return {
        "schema": SCHEMA,
        "family": family,
        "device": device,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "machine": machine(device),
        "commit": measured,
        "artefacts": artefacts(),
        "versions": versions(device),
        "ceilings": ceilings,
    }
