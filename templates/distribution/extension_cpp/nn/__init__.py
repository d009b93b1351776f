"""Modules made of the operators, for ``torch.nn``."""

__all__: list[str] = []
