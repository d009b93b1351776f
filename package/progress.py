"""What a long step is doing, and how long each took."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).parent.parent
# On two cores, from nothing, in seconds.
USUAL = {
    "local channel": 40,
    "local channel with CUDA": 100,
    "check of the local channel": 3,
    "build cpu": 40,
    "build cuda": 170,
    "test": 130,
    "install": 5,
    "call": 5,
}

console = Console(width=None if Console().is_terminal else 120, highlight=False)


def relative(path: Path) -> str:
    return os.path.relpath(path, ROOT)


class Log:
    """The lines of a long step: the last one on a terminal, every one in the file."""

    def __init__(self, file: Path, status, title: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.file, self.status, self.title = file.open("w"), status, title
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        self.lines.append(line)
        print(f"{time.monotonic():.1f} {line}", file=self.file, flush=True)
        if line.strip():
            self.status.update(f"{self.title}: [dim]{line.strip()[:80].replace('[', '(')}")


class Steps:
    """Runs the steps one by one, says what each is and how long it usually takes, and keeps how long it took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, title: str, long: bool = True) -> Iterator:
        start = time.monotonic()
        usual = max((seconds for known, seconds in USUAL.items() if title.startswith(known)), default=0)
        announced = f"{title} (usually {usual} s)" if long else title
        if not console.is_terminal:
            console.print(f"{announced} ...")
        with console.status(announced) as status:
            yield status
        self.seconds[title] = time.monotonic() - start
