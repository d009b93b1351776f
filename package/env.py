"""`make env`: the development environment of environment.yml in dist/dev.

All of it from conda-forge; what the local channel lacks is left out, and named. CUDA=0 leaves out CUDA.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import yaml
from rattler import MatchSpec

from channel.local import SUBDIRS, ChannelError, LocalChannel
from channel.pins import conda_name
from package.__main__ import leave
from package.channels import cache_for, choose_channel
from package.install import install
from package.progress import ROOT, Steps, console, relative

# conda-forge's metapackages, and what the local channel has in their place.
STAND_INS = {"cxx-compiler": "gxx_linux-64", "cuda-toolkit": "cuda-nvcc_linux-64"}


def specs(cuda: bool) -> list[str]:
    """The conda packages of environment.yml, with or without the lines marked CUDA."""
    lines = (ROOT / "environment.yml").read_text().splitlines()
    kept = [line for line in lines if cuda or not line.endswith("# CUDA")]
    return [spec for spec in yaml.safe_load("\n".join(kept))["dependencies"] if isinstance(spec, str)]


def by_pip() -> list[str]:
    """What environment.yml leaves to pip."""
    (listed,) = (
        spec["pip"]
        for spec in yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
        if isinstance(spec, dict)
    )
    return [spec.replace(" ", "") for spec in listed]


def available(wanted: list[str], local: LocalChannel) -> tuple[list[str], list[str]]:
    """Which of the specs a local channel has packages for, under its own names, and which it hasn't."""
    there = {path.name.rsplit("-", 2)[0] for subdir in SUBDIRS for path in (local.root / subdir).glob("*.conda")}
    have: list[str] = []
    lack: list[str] = []
    for spec in wanted:
        name, _, rest = spec.partition(" ")
        name = STAND_INS.get(name) or conda_name(name, local.pins.names)
        (have if name in there else lack).append(f"{name} {rest}".strip() if name in there else spec)
    return have, lack


def main() -> int:
    dist = Path(os.environ.get("DIST", ROOT / "dist"))
    steps = Steps()
    try:
        dist.mkdir(parents=True, exist_ok=True)
        wanted = specs(cuda=os.environ.get("CUDA", "1") != "0")
        url, local = choose_channel(dist)
        if local:
            with steps("local channel"):
                local.ensure(verify=True)
            wanted, lacking = available(wanted, local)
            if lacking:
                console.print(f"not in the local channel, and left out: {', '.join(lacking)}")
        with steps("install"):
            exact = [str(MatchSpec(spec)) for spec in wanted]
            installed = asyncio.run(install(exact, [url], dist / "dev", cache=cache_for(url, dist)))
    except (ChannelError, OSError) as error:
        console.print(f"[red]error:[/red] {error}", markup=True)
        return 1
    folder = dist.resolve() / "dev"
    console.print(f"{len(installed)} packages in {relative(folder)}; what only PyPI has comes with")
    quoted = " ".join(f"'{spec}'" for spec in by_pip())
    console.print(f"  {relative(folder)}/bin/python -m pip install {quoted}", soft_wrap=True)
    console.print(f"to use it: conda activate {relative(folder)}; without conda", soft_wrap=True)
    console.print(f"  export CONDA_PREFIX={folder} PATH={folder}/bin:$PATH", soft_wrap=True)
    return 0


if __name__ == "__main__":
    leave(main())
