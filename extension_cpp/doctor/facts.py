"""What there is on this machine and in this package, for the report and the findings.

Nothing here imports torch or loads a kernel: the version of torch and the libraries are read from their files, and the
rest is asked of another process (_probe.py), which may die.
"""

import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from extension_cpp import _elf, _loader, _machine
from extension_cpp._machine import Gpu, text_of
from extension_cpp._version import __version__
from extension_cpp.doctor.libraries import Library, read_library
from extension_cpp.doctor.origin import Origin, Preference, cpu_preferences, find_origin, other_copies, pixi_manifest


@dataclass
class Torch:
    folder: Path
    version: str
    cuda: str | None

    @property
    def number(self) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:2])


@dataclass
class Facts:
    package: Path = _loader.FOLDER
    version: str = __version__
    prefix: Path = Path(sys.prefix)
    platform: str = ""
    libraries: list[Library] = field(default_factory=list)
    origin: Origin = field(default_factory=lambda: Origin("unknown", "unknown"))
    others: list[Path] = field(default_factory=list)
    """Further copies of the package, which this one hides."""
    torch: Torch | None = None
    driver: int | None = None
    """The newest CUDA that the driver supports, 12040 for 12.4."""
    driver_name: str = ""
    driver_error: str = ""
    gpus: list[Gpu] = field(default_factory=list)
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES."""
    conda: bool = False
    pixi: str = ""
    """The manifest of a pixi environment."""
    preferences: list[Preference] = field(default_factory=list)
    cpus: int = 1
    simd: str = ""
    simd_possible: str = ""
    backend: str = ""
    """EXTENSION_CPP_BACKEND."""
    probe: dict[str, Any] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    """What can't be read, and why."""

    def library(self, stem: str) -> Library | None:
        return next((library for library in self.libraries if library.path.name.split(".")[0] == stem), None)


def gather() -> Facts:
    # A library must be for the platform of the interpreter.
    facts = Facts(platform=_elf.platform_of(_elf.read(Path(sys.executable), 64)) or platform.system())

    def attempt(what: str, ask: Callable[[], Any], otherwise: Any = None) -> Any:
        """A fact, or `otherwise` if it can't be read: its own files may be damaged, and other facts are still of use."""
        try:
            return ask()
        except Exception as error:
            facts.unread.append(f"{what}: {type(error).__name__}: {error}")
            return otherwise

    facts.torch = attempt("the version of torch", find_torch)
    facts.conda = (facts.prefix / "conda-meta").is_dir()
    folder = facts.torch.folder if facts.torch else None
    for path in sorted(facts.package.glob("_C*")):
        if path.suffix in (".so", ".pyd", ".dll", ".dylib"):
            ask = partial(read_library, path, facts.platform, folder, facts.unread)
            facts.libraries.append(attempt(path.name, ask, Library(path, damage="it can't be read")))
    facts.others = attempt("other copies", partial(other_copies, facts.package), [])
    facts.driver = _machine.driver_version()
    facts.visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    nvidia = _machine.nvidia()
    facts.driver_name, facts.driver_error, facts.gpus = nvidia.driver, nvidia.error, nvidia.gpus
    if nvidia.missing and facts.driver is not None:
        facts.unread.append(f"the GPUs: {nvidia.missing}")
    if facts.conda:
        facts.pixi = attempt("pixi's manifest", partial(pixi_manifest, facts.prefix), "")
        facts.preferences = attempt("what conda's solver was told", lambda: list(cpu_preferences(facts.prefix)), [])
    facts.cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    facts.simd, facts.simd_possible = _machine.simd(os.environ.get("EXTENSION_CPP_SIMD", "")), _machine.simd()
    facts.backend = os.environ.get("EXTENSION_CPP_BACKEND", "")
    facts.probe = attempt("torch, from inside", probe, {})
    loaded = facts.probe.get("library")
    origin = partial(find_origin, facts.package, facts.prefix, Path(loaded) if loaded else None)
    facts.origin = attempt("where the package came from", origin, facts.origin)
    return facts


def find_torch() -> Torch | None:
    """The torch that an import would find, by its files."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    text = text_of(folder / "version.py")
    version = re.search(r"^__version__ = ['\"](.+?)['\"]", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b.*= ['\"](.+?)['\"]", text, re.MULTILINE)
    return Torch(folder, version[1] if version else "unknown", cuda[1] if cuda else None)


def probe() -> dict[str, Any]:
    """What _probe.py printed, all of it or until its process died."""
    command = [sys.executable, str(Path(__file__).with_name("_probe.py")), json.dumps(sys.path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
        code, said, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        code, said, errors = None, (error.stdout or b"").decode(), "it did not answer within two minutes"
    facts: dict[str, Any] = {}
    for line in said.splitlines():
        if line.startswith('{"extension_cpp": '):
            facts.update(json.loads(line)["extension_cpp"])
    if not facts.get("finished"):
        died = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
        facts["died"] = f"{died}{': ' + errors.strip().splitlines()[-1] if errors.strip() else ''}"
    return facts
