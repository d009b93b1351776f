"""Makes .venv-conda, the environment of the build engine, with the Python that runs this file; it needs no torch.

Anew where another Python made it, or where other packages are asked for: those of locked/conda.txt, or with LOCKED=0 the
newest that pyproject.toml allows. Needs nothing but the standard library.
"""

import os
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".venv-conda"
HASHES = ROOT / "locked" / "conda.txt"


def main() -> int:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["conda"]
    locked = os.environ.get("LOCKED") != "0"
    wanted = "\n".join([sys.version, sys.base_prefix, *packages, HASHES.read_text() if locked else ""])
    made_with = FOLDER / "made-with"
    if made_with.exists() and made_with.read_text() == wanted:
        return 0
    if find_spec("ensurepip") is None:
        print(
            f"error: {sys.executable} has no ensurepip: apt-get install python3-venv, or PYTHON=<another>",
            file=sys.stderr,
        )
        return 1
    print(f"environment of the build engine, in {FOLDER.name} (usually 15 s) ...", flush=True)
    try:
        venv.create(FOLDER, clear=True, with_pip=True, symlinks=True)
        pip = [FOLDER / "bin" / "python", "-m", "pip", "install", "--quiet", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *(["--require-hashes", "-r", HASHES] if locked else packages)], check=True)
        made_with.write_text(wanted)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"error: {FOLDER} could not be made: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
