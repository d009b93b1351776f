"""What this machine has: the NVIDIA driver, its GPUs, the instructions of its processor. Initializes no device."""

import ctypes
import platform
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

DRIVER_NOT_LOADED = 9


@dataclass
class Gpu:
    name: str
    architecture: tuple[int, int]

    @property
    def arch(self) -> str:
        return "{}.{}".format(*self.architecture)


@dataclass
class Nvidia:
    """What NVML, the driver's management library, says."""

    driver: str = ""
    """The version of the driver, "550.54.14"."""
    gpus: list[Gpu] = field(default_factory=list)
    error: str = ""
    """What the driver answers instead."""
    missing: str = ""
    """Why there is no NVML to ask."""


def driver_version() -> int | None:
    """The newest CUDA that the NVIDIA driver supports, 12040 for 12.4; None without a driver."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        version = ctypes.c_int()
        return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None
    except (OSError, AttributeError):
        return None


def nvidia() -> Nvidia:
    try:
        return ask(ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"))
    except (OSError, AttributeError) as error:
        return Nvidia(missing=str(error))


def ask(nvml: ctypes.CDLL) -> Nvidia:
    code = nvml.nvmlInit_v2()
    if code == DRIVER_NOT_LOADED and not nvidia_on_bus():
        return Nvidia()  # The driver's files alone, as in an image for machines with and without a GPU.
    if code:
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        return Nvidia(error=f"NVML says '{(nvml.nvmlErrorString(code) or b'?').decode()}' ({code})")
    found, text, count = Nvidia(), ctypes.create_string_buffer(96), ctypes.c_uint()
    if nvml.nvmlSystemGetDriverVersion(text, 96) == 0:
        found.driver = text.value.decode(errors="replace")
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for i in range(count.value):
        device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(device))
        nvml.nvmlDeviceGetName(device, text, 96)
        if nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) == 0:
            found.gpus.append(Gpu(text.value.decode(errors="replace"), (major.value, minor.value)))
    nvml.nvmlShutdown()
    return found


def nvidia_on_bus() -> bool:
    displays = Path("/sys/bus/pci/devices").glob("*/class")
    return any(text_of(f).startswith("0x03") and text_of(f.with_name("vendor")).strip() == "0x10de" for f in displays)


def simd(wanted: str = "") -> str:
    """The instructions that the CPU kernels use, of those `wanted` in EXTENSION_CPP_SIMD."""
    cpuinfo = text_of(Path("/proc/cpuinfo"))
    flags = re.search(r"^flags\s*:(.*)", cpuinfo, re.MULTILINE)
    if platform.machine() not in ("x86_64", "AMD64") or not flags:
        return ""
    have = set(flags[1].split())
    if wanted == "baseline" or not {"avx2", "fma", "f16c"} <= have:
        return "baseline"
    if wanted == "avx2" or not {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= have:
        return "avx2"
    if wanted == "avx512" or "avx512_bf16" not in have:
        return "avx512"
    if wanted == "avx512_bf16":
        return "avx512_bf16"
    if {"amx_bf16", "amx_tile"} <= have:
        return "amx"
    return "avx512" if "GenuineIntel" in cpuinfo else "avx512_bf16"


def text_of(file: Path) -> str:
    """The text of a file; nothing where there is no file."""
    return file.read_text(errors="replace") if file.is_file() else ""
