"""What `import torch` runs in any process where the package is installed: an entry point of torch.backends.

A module next to the package, as importing one in the package would import all of it.
"""

import os


def load() -> None:
    """Import the package if the environment asks for its kernels in other libraries (extension_cpp/compat)."""
    if os.environ.get("EXTENSION_CPP_COMPAT"):
        import extension_cpp  # noqa: F401
