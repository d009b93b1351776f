"""`make features`: writes docs/features.md."""

from pathlib import Path

from extension_cpp import _features
from extension_cpp.testing import Contract, contracts

HERE = Path(__file__).parent


def document() -> str:
    return _features.document(contracts(HERE), Contract)


if __name__ == "__main__":
    _features.PAGE.parent.mkdir(exist_ok=True)
    _features.PAGE.write_text(document())
    print(_features.PAGE)
