"""What is registered with a module of PyTorch's once somebody imports that: it takes longer to import than this package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import dropwhile, islice
from typing import Any

_waiting: dict[str, list[Callable[[Any], Any]]] = {}


def when_imported(name: str, run: Callable[[Any], Any]) -> None:
    """Call `run` with the module of that name, now or right after it is imported."""
    if module := sys.modules.get(name):
        run(module)
        return
    _waiting.setdefault(name, []).append(run)
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of the finders that come next. Libraries look for it to see what is installed: the callbacks wait for the
        module to be executed."""
        if name not in _waiting:
            return None
        rest = islice(dropwhile(lambda finder: finder is not _Finder, [*sys.meta_path]), 1, None)
        spec: Any = next(filter(None, (finder.find_spec(name, path, target) for finder in rest)), None)
        if spec is None or spec.loader is None:  # A folder of that name has no loader.
            return spec
        execute = spec.loader.exec_module

        def execute_and_run(module: Any) -> None:
            execute(module)
            # By the module's own name: a loader, as that of a zip file, can be that of other modules too.
            for run in _waiting.pop(module.__spec__.name, ()):
                run(module)

        spec.loader.exec_module = execute_and_run
        return spec
