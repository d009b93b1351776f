"""`make env`: the development environment of environment.yml in dist/dev.

From conda-forge all of it; from the local channel what that has, saying what is left out. CUDA=0 leaves out CUDA.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import yaml
from rattler import MatchSpec

from channel.build import SUBDIR, ChannelError, conda_name
from channel.package import ROOT, choose_channel, console, install, leave, relative

# conda-forge's metapackages, and what the local channel has in their place.
STAND_INS = {"cxx-compiler": "gxx_linux-64", "cuda-toolkit": "cuda-nvcc_linux-64"}


def specs(cuda: bool) -> list[str]:
    """The conda packages of environment.yml, with or without the lines marked CUDA."""
    lines = (ROOT / "environment.yml").read_text().splitlines()
    kept = [line for line in lines if cuda or not line.endswith("# CUDA")]
    return [spec for spec in yaml.safe_load("\n".join(kept))["dependencies"] if isinstance(spec, str)]


def available(wanted: list[str], root: Path) -> tuple[list[str], list[str]]:
    """Which of the specs a local channel has packages for, under its own names, and which it hasn't."""
    there = {path.name.rsplit("-", 2)[0] for subdir in (SUBDIR, "noarch") for path in (root / subdir).glob("*.conda")}
    have, lack = [], []
    for spec in wanted:
        name, _, rest = spec.partition(" ")
        name = STAND_INS.get(name, conda_name(name) if name != "python" else name)
        (have if name in there else lack).append(f"{name} {rest}".strip() if name in there else spec)
    return have, lack


def main() -> int:
    dist = Path(os.environ.get("DIST", ROOT / "dist"))
    dist.mkdir(parents=True, exist_ok=True)
    try:
        wanted = specs(cuda=os.environ.get("CUDA", "1") != "0")
        url, local = choose_channel(dist)
        if local:
            with console.status("local channel"):
                local.ensure()
            wanted, lacking = available(wanted, local.root)
            if lacking:
                console.print(f"not in the local channel, and left out: {', '.join(lacking)}")
        installed = asyncio.run(install([str(MatchSpec(spec)) for spec in wanted], [url], dist / "dev"))
    except ChannelError as error:
        console.print(f"[red]error:[/red] {error}", markup=True)
        return 1
    console.print(
        f"{len(installed)} packages in {relative(dist / 'dev')}; use it with PATH={relative(dist / 'dev')}/bin:$PATH"
    )
    return 0


if __name__ == "__main__":
    leave(main())
