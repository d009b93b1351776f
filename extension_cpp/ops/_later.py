"""What is registered with a module of PyTorch's once somebody imports that: it takes longer to import than this package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
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
        if name not in _waiting:
            return None
        callbacks = _waiting.pop(name)
        spec: Any = importlib.util.find_spec(name)  # That of the other finders.
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_run(module: Any) -> None:
            execute(module)
            for run in callbacks:
                run(module)

        spec.loader.exec_module = execute_and_run
        return spec
