"""What the local channel is made of, as pins.yaml says, and the forms that a version of CUDA has for other tools."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from packaging.utils import canonicalize_name

FILE = Path(__file__).parent / "pins.yaml"
TORCH = ("libtorch", "pytorch", "pytorch-cpu", "pytorch-gpu")  # What conda-forge makes of PyTorch.


@dataclass(frozen=True, order=True)
class Cuda:
    """A version of CUDA. Each form that another tool wants is made here and nowhere else."""

    major: int
    minor: int

    @classmethod
    def parse(cls, version: str) -> Cuda:
        major, minor = version.split(".")
        return cls(int(major), int(minor))

    def __str__(self) -> str:
        """13.0: the recipe's cuda_compiler_version, and the driver for CONDA_OVERRIDE_CUDA."""
        return f"{self.major}.{self.minor}"

    @property
    def name(self) -> str:
        """cuda130: the beginning of a build string, on conda-forge too."""
        return f"cuda{self.major}{self.minor}"

    @property
    def requirement(self) -> str:
        """What a package needs that runs with this version and with later ones of the same major version."""
        return f"cuda-version >={self},<{self.major + 1}"


@dataclass(frozen=True)
class Pin:
    """A wheel: the line of a requirements file, and the conda package that is made of it."""

    wheel: str
    full_version: str
    line: str
    name: str

    @property
    def version(self) -> str:
        """Without the local part: 2.13.0 for PyPI's 2.13.0+cpu."""
        return self.full_version.split("+")[0]

    def packages(self, cuda: Cuda | None) -> list[str]:
        """The names of the packages that the wheel becomes: its own, and what conda-forge has apart from it."""
        if self.name == "pytorch":
            return ["pytorch", "libtorch", meta(cuda)]
        # Python finds CUDA's runtime in one place, nvcc its headers in another.
        return [self.name, *(["cuda-cudart-dev_linux-64"] if self.name == "cuda-cudart" else [])]


@dataclass(frozen=True)
class CudaPins:
    """What the variant for one version of CUDA needs in addition."""

    driver: str
    libraries: tuple[Pin, ...]
    compiler: tuple[Pin, ...]

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the conda packages by name."""
        return {pin.name: pin.version for pin in (*self.libraries, *self.compiler)}


@dataclass(frozen=True)
class Pins:
    """The content of pins.yaml."""

    python: str
    names: dict[str, str]
    wheels: tuple[Pin, ...]
    cpu: tuple[Pin, ...]
    cuda: dict[Cuda, CudaPins]
    pinning: dict[str, list[str]]

    @classmethod
    def load(cls, file: Path = FILE) -> Pins:
        data = yaml.safe_load(file.read_text())
        names = data["names"]

        def pins(lines: list[str]) -> tuple[Pin, ...]:
            return tuple(pin(line) for line in lines)

        def pin(line: str) -> Pin:
            wheel, version = line.split()[0].split("==")
            return Pin(canonicalize_name(wheel), version, line, conda_name(wheel, names))

        cuda = {
            Cuda.parse(version): CudaPins(each["driver"], pins(each["libraries"]), pins(each["compiler"]))
            for version, each in data["cuda"].items()
        }
        pinning = {**data["pinning"], "cuda_compiler_version": ["None", *map(str, cuda)]}
        return cls(data["python"], names, pins(data["wheels"]), pins(data["cpu"]), cuda, pinning)

    @property
    def tag(self) -> str:
        """py311: a part of the build strings of what works with this Python only."""
        return f"py{self.python.replace('.', '')}"

    def packages(self, cuda: Cuda | None) -> set[tuple[str, str]]:
        """Names and versions of the packages that one variant needs in addition to those that all need."""
        pins = (*self.cuda[cuda].libraries, *self.cuda[cuda].compiler) if cuda else self.cpu
        found = {(name, pin.version) for pin in pins for name in pin.packages(cuda)}
        if cuda is None:
            return found
        versions = self.cuda[cuda].versions
        nvcc, runtime = versions["cuda-nvcc-tools"], versions["cuda-cudart"]
        made = {"cuda-version": str(cuda), "cuda-nvcc_linux-64": nvcc, "cuda-cudart-dev": runtime}
        return {*found, *made.items()}

    def groups(self, cudas: list[Cuda]) -> Iterator[tuple[Cuda | None, tuple[Pin, ...]]]:
        """What is downloaded at a time: torch by itself, as it takes longest to write and the others come in the meantime."""
        for cuda in (None, *cudas):
            pins = (*self.cuda[cuda].libraries, *self.cuda[cuda].compiler) if cuda else (*self.cpu, *self.wheels)
            yield cuda, tuple(pin for pin in pins if pin.wheel == "torch")
            yield cuda, tuple(pin for pin in pins if pin.wheel != "torch")


def meta(cuda: Cuda | None) -> str:
    """The package without files by which users ask for a build of PyTorch."""
    return "pytorch-gpu" if cuda else "pytorch-cpu"


def conda_name(wheel: str, names: dict[str, str]) -> str:
    """The conda package's name for a wheel's."""
    wheel = canonicalize_name(wheel)
    return names.get(re.sub(r"-cu\d+$", "", wheel), wheel)


def main() -> None:
    """Print the lines of the wheels that compile for the newest CUDA: pip install -r."""
    newest = max((pins := Pins.load()).cuda)
    runtime = [pin for pin in pins.cuda[newest].libraries if pin.name == "cuda-cudart"]
    for pin in (*pins.cuda[newest].compiler, *runtime):
        print(pin.line)


if __name__ == "__main__":
    main()
