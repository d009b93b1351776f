"""Solving and installing environments."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import rattler

from channel.local import ChannelError
from package.progress import console
from package.variant import Variant


async def solve(channels: list[str], specs: Sequence[str], variant: Variant | None = None) -> list:
    """The records that the solver picks for a variant; without one, for this machine or CONDA_OVERRIDE_CUDA's."""
    here = rattler.VirtualPackageOverrides.from_env()
    machine = variant.machine() if variant else rattler.VirtualPackage.detect(here)
    try:
        return await rattler.solve(channels, specs, virtual_packages=machine)
    except Exception as error:
        raise ChannelError(f"no environment has {', '.join(specs)}:\n{error}") from error


async def install(
    specs: Sequence[str],
    channels: list[str],
    prefix: Path,
    variant: Variant | None = None,
    cache: Path | None = None,
) -> list[str]:
    """Solve and install; returns names and versions of the packages."""
    records = await solve(channels, specs, variant)
    if prefix.exists():
        shutil.rmtree(prefix)
    await rattler.install(records, prefix, cache and cache / "pkgs", show_progress=console.is_terminal)
    return [f"{record.name.normalized} {record.version}" for record in records]
