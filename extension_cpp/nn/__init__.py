"""Modules made of the operators."""

from extension_cpp.nn.convrnn import ConvRNN

__all__ = ["ConvRNN"]
