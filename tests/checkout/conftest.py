"""Ends the run without Python's own clean-up, which py-rattler's threads make crash now and then (package/__main__.py)."""

import json
import os
import sys
from pathlib import Path

import pytest
from clones import PROCS, ROOT, make

status = 0


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    global status
    status = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "packages" in getattr(item, "fixturenames", ()):
            item.add_marker("packages")


@pytest.fixture(scope="session")
def packages() -> dict[str, Path]:
    """The packages of this checkout, as `make package` makes them; there already if that ran before."""
    done = make(VARIANT="all")
    assert done.returncode == 0, done.stdout + done.stderr
    states = json.loads((ROOT / "dist" / "packages.json").read_text())
    return {proc: ROOT / "dist" / "conda" / "linux-64" / states[proc]["package"] for proc in PROCS}
