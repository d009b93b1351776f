"""What there is on this machine and in this package, for the report to show and the doctor to judge.

Nothing here imports torch or loads a kernel: torch's version is read from its files, libraries as ELF data, GPUs from the
driver's own management library, and the rest is asked of another process (_probe.py).
"""

import ctypes
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

from extension_cpp import _loader
from extension_cpp._libraries import Library, platform_of, read_library
from extension_cpp._origin import Origin, Wish, cpu_wishes, find_origin, other_copies, pixi_manifest, read
from extension_cpp._version import __version__

DRIVER_NOT_LOADED = 9


@dataclass
class Torch:
    folder: Path
    version: str
    cuda: str | None

    @property
    def number(self) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:2])


@dataclass
class Gpu:
    name: str
    architecture: tuple[int, int]

    @property
    def arch(self) -> str:
        return "{}.{}".format(*self.architecture)


@dataclass
class Facts:
    package: Path = _loader.FOLDER
    version: str = __version__
    prefix: Path = Path(sys.prefix)
    platform: str = ""
    libraries: list[Library] = field(default_factory=list)
    origin: Origin = field(default_factory=lambda: Origin("unknown", "unknown"))
    others: list[Path] = field(default_factory=list)
    """Further copies of the package that Python could find, which this one hides."""
    torch: Torch | None = None
    driver: int | None = None
    """The newest CUDA that the driver serves, 12040 for 12.4."""
    driver_name: str = ""
    driver_error: str = ""
    gpus: list[Gpu] = field(default_factory=list)
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES."""
    conda: bool = False
    pixi: str = ""
    """The manifest of a pixi environment."""
    wishes: list[Wish] = field(default_factory=list)
    cpus: int = 1
    simd: str = ""
    simd_possible: str = ""
    backend: str = ""
    """EXTENSION_CPP_BACKEND."""
    probe: dict[str, Any] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    """What could not be looked at, and why."""

    def library(self, stem: str) -> Library | None:
        return next((library for library in self.libraries if library.path.name.split(".")[0] == stem), None)


def gather() -> Facts:
    # The interpreter's own, which is what a library must be for.
    facts = Facts(platform=platform_of(Path(sys.executable).read_bytes()[:64]) or platform.system())

    def attempt(what: str, ask: Callable[[], Any], otherwise: Any = None) -> Any:
        """A fact; one that can't be read, as its files are damaged too, doesn't keep the others back."""
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
    facts.driver = _loader.driver_version()
    facts.visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    attempt("the GPUs", partial(read_gpus, facts))
    if facts.conda:
        facts.pixi = attempt("pixi's manifest", partial(pixi_manifest, facts.prefix), "")
        facts.wishes = attempt("what conda's solver was told", lambda: list(cpu_wishes(facts.prefix)), [])
    facts.cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    facts.simd, facts.simd_possible = simd(os.environ.get("EXTENSION_CPP_SIMD", "")), simd("")
    facts.backend = os.environ.get("EXTENSION_CPP_BACKEND", "")
    facts.probe = attempt("torch, from inside", probe, {})
    loaded = facts.probe.get("library")
    origin = partial(find_origin, facts.package, facts.prefix, Path(loaded) if loaded else None)
    facts.origin = attempt("where the package came from", origin, facts.origin)
    return facts


def find_torch() -> Torch | None:
    """The torch that an import would find, from its files."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    file = folder / "version.py"
    text = file.read_text() if file.exists() else ""
    version = re.search(r"^__version__ = ['\"](.+?)['\"]", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b.*= ['\"](.+?)['\"]", text, re.MULTILINE)
    return Torch(folder, version[1] if version else "unknown", cuda[1] if cuda else None)


def read_gpus(facts: Facts) -> None:
    """Names, architectures and the driver, from NVML, which initialises no device."""
    try:
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        code = nvml.nvmlInit_v2()
        if code:
            nvml.nvmlErrorString.restype = ctypes.c_char_p
            if code == DRIVER_NOT_LOADED and not nvidia_on_bus():
                return  # Its files alone, as on an image that machines with and without a GPU start from.
            facts.driver_error = f"NVML says '{(nvml.nvmlErrorString(code) or b'?').decode()}' ({code})"
            return
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlSystemGetDriverVersion(text, 96) == 0:
            facts.driver_name = text.value.decode()
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for i in range(count.value):
            device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(device))
            nvml.nvmlDeviceGetName(device, text, 96)
            if nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) == 0:
                facts.gpus.append(Gpu(text.value.decode(), (major.value, minor.value)))
        nvml.nvmlShutdown()
    except (OSError, AttributeError) as error:
        if facts.driver is not None:
            facts.unread.append(f"the GPUs: {error}")


def nvidia_on_bus() -> bool:
    displays = Path("/sys/bus/pci/devices").glob("*/class")
    return any(read(f).startswith("0x03") and read(f.with_name("vendor")).strip() == "0x10de" for f in displays)


def simd(wanted: str) -> str:
    """The instructions that the CPU kernels choose, as csrc/simd.h does it."""
    flags = set(re.findall(r"^flags\s*:(.*)", read(Path("/proc/cpuinfo")), re.MULTILINE)[0:1] or [""])
    have = set(" ".join(flags).split())
    if platform.machine() not in ("x86_64", "AMD64") or not have:
        return ""
    if wanted == "baseline" or not {"avx2", "fma"} <= have:
        return "baseline"
    wide = {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= have
    return "avx512" if wide and wanted != "avx2" else "avx2"


def probe() -> dict[str, Any]:
    """What _probe.py says, up to where it died."""
    command = [sys.executable, str(Path(__file__).with_name("_probe.py")), json.dumps(sys.path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
        code, said, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        code, said, errors = None, (error.stdout or b"").decode(), "it did not answer for two minutes"
    facts: dict[str, Any] = {}
    for line in said.splitlines():
        if line.startswith('{"extension_cpp": '):
            facts.update(json.loads(line)["extension_cpp"])
    if not facts.get("finished"):
        died = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
        facts["died"] = f"{died}{': ' + errors.strip().splitlines()[-1] if errors.strip() else ''}"
    return facts
