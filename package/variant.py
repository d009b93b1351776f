"""A variant of the package: for the CPU, or for one version of CUDA."""

from __future__ import annotations

from dataclasses import dataclass

from rattler import VirtualPackage, VirtualPackageOverrides
from rattler.virtual_package import Override

from channel.pins import Cuda


@dataclass(frozen=True, order=True)
class Variant:
    name: str
    """cpu or cuda130: the beginning of the build string."""
    cuda: Cuda | None

    @classmethod
    def of(cls, cuda_compiler_version: str) -> Variant:
        """The variant for a value of the recipe's variant key."""
        cuda = None if cuda_compiler_version == "None" else Cuda.parse(cuda_compiler_version)
        return cls(cuda.name if cuda else "cpu", cuda)

    @property
    def driver(self) -> str:
        """The version of `__cuda` to solve for, whatever this machine has: building and testing need no GPU."""
        return str(self.cuda or "")

    @property
    def environment(self) -> dict[str, str]:
        """As the build engine and conda read it; an empty value means that there is no driver."""
        return {"CONDA_OVERRIDE_CUDA": self.driver}

    def machine(self) -> list[VirtualPackage]:
        """This machine with the variant's driver, for a solver."""
        return VirtualPackage.detect(VirtualPackageOverrides(cuda=Override.string(self.driver)))
