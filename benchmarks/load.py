"""How busy the machine was with something else while this process measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

LEAST_OURS = 0.9
MOST_OTHERS = 0.25


def read() -> tuple[float, float, float]:
    """Seconds of the clock, of this process on a CPU, and of all CPUs with anything (0 where there is no /proc)."""
    stat = Path("/proc/stat")
    fields = stat.read_text().split("\n", 1)[0].split()[1:9] if stat.exists() else []
    user, nice, system, _idle, _waiting, *interrupts = map(int, fields or [0] * 5)
    return time.monotonic(), time.process_time(), (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


@dataclass
class Load:
    """What one thread of this process got of a CPU, and what other processes took of all CPUs, while it was watched."""

    read: Callable[[], tuple[float, float, float]] = read
    cpus: int = field(default_factory=lambda: os.cpu_count() or 1)
    seconds: float = 0.0
    ours: float = 0.0
    busy: float = 0.0

    @contextmanager
    def watch(self) -> Iterator[None]:
        before = self.read()
        yield
        elapsed, ours, busy = (b - a for a, b in zip(before, self.read()))
        self.seconds, self.ours, self.busy = self.seconds + elapsed, self.ours + ours, self.busy + busy

    def disturbed(self) -> str:
        """What makes the measurements meaningless; nothing on a quiet machine."""
        if not self.seconds:
            return ""
        ours, others = self.ours / self.seconds, (self.busy - self.ours) / (self.seconds * self.cpus)
        if ours >= LEAST_OURS and others <= MOST_OTHERS:
            return ""
        others = max(others, 0.0)
        return f"this process had a CPU for {ours:.0%} of the time, other processes used {others:.0%} of the machine"
