"""What a type checker sees of the package. mypy reads this in `make lint`, and nothing runs it.

An error that is expected and missing is one itself: mypy refuses a comment that ignores none.
"""

import extension_cpp
from extension_cpp import backends, use_backend

table: dict[str, dict[str, str]] = backends("cpu")
chosen: use_backend = extension_cpp.use_backend("reference")
names: list[str] = extension_cpp.ops.__all__
missing = extension_cpp.no_such_operator  # type: ignore[attr-defined]
extension_cpp.backends(1)  # type: ignore[arg-type]
