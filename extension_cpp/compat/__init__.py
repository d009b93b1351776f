"""Operators of other libraries that run the kernels of this package: one module for each library.

Nothing is on unless a program asks for it: by `install()` of a module, or for a whole process by an environment variable
(_environment.py).
"""

from extension_cpp.compat import torchvision

__all__ = ["torchvision"]
