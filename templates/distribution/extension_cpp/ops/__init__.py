"""The operators, one module a family."""

__all__ = []
