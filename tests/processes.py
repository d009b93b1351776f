"""Python processes for tests: forks of one that has imported torch, which takes seconds in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import extension_cpp

PACKAGE = Path(extension_cpp.__file__).parent
# An editable install would find the libraries that a copy lacks.
START = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]"
SERVER = """
import json, os, sys, traceback
import torch
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if not pid:
        status = 0
        for number, file in ((1, request["out"]), (2, request["err"])):
            os.dup2(os.open(file, os.O_WRONLY), number)
        os.environ.clear()
        os.environ.update(request["variables"])
        os.chdir("/")
        try:
            exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
        except BaseException as error:
            status = 1
            if not isinstance(error, SystemExit):
                traceback.print_exc()
            elif not error.code or isinstance(error.code, int):
                status = error.code or 0
            else:
                print(error.code, file=sys.stderr)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@cache
def server() -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    )


def python(
    code: str, path: Path = PACKAGE.parent, fresh: bool = False, **variables: str
) -> subprocess.CompletedProcess:
    """Run code with the package in `path`; `fresh`, in a process that has imported nothing."""
    code = f"{START}\nsys.path.insert(0, {str(path)!r})\n{code}"
    # Where the package is installed, `import torch` would look for it: not for the one in `path`.
    every = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **variables}
    if fresh or "LD_LIBRARY_PATH" in variables:  # Which is read once, at the start.
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", env=every)
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        forker = server()
        assert forker.stdin and forker.stdout
        print(
            json.dumps({"code": code, "variables": every, "out": out.name, "err": err.name}),
            file=forker.stdin,
            flush=True,
        )
        return subprocess.CompletedProcess(code, int(forker.stdout.readline()), out.read(), err.read())
