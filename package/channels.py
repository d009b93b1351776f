"""The channel to build against."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path

import rattler

from channel.local import ChannelError, LocalChannel
from channel.pins import Pins
from package.progress import console, relative


def choose_channel(dist: Path) -> tuple[str, LocalChannel | None]:
    """The URL of the channel that CHANNEL asks for, and the local channel if it is that."""
    wanted = os.environ.get("CHANNEL", "")
    local = LocalChannel(dist / "channel", Pins.load(), warn=console.print)
    if wanted in ("", "conda-forge"):
        url = rattler.Channel("conda-forge").base_url
        if wanted or answers(f"{url}noarch/repodata.json.zst"):
            console.print(f"channel: conda-forge ({'CHANNEL says so' if wanted else 'it answers'})")
            return "conda-forge", None
    if wanted in ("", "local"):
        reason = "CHANNEL says so" if wanted else "conda-forge does not answer; CHANNEL=conda-forge to insist"
        console.print(f"channel: local, in {relative(local.root)} ({reason})")
        return local.url, local
    if "://" not in wanted:
        if not (Path(wanted) / "noarch" / "repodata.json").exists():
            raise ChannelError(f"CHANNEL={wanted} is no conda channel: it has no noarch/repodata.json")
        wanted = Path(wanted).resolve().as_uri()
    console.print(f"channel: {wanted} (CHANNEL says so)")
    return wanted, None


def cache_for(url: str, dist: Path) -> Path | None:
    """Where packages are unpacked; two checkouts make packages of one name, so a checkout has a place of its own."""
    given = os.environ.get("RATTLER_CACHE_DIR")
    return Path(given) if given else dist.resolve() / "cache" if url != "conda-forge" else None


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=3):
            return True
    except OSError:
        return False
