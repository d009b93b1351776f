"""What a program needs of this package, for PyInstaller, which finds this by the entry point in pyproject.toml."""

from pathlib import Path


def folders() -> list[str]:
    """Where PyInstaller looks for hooks."""
    return [str(Path(__file__).parent)]
