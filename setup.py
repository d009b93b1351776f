"""Compiles csrc/*.cpp into extension_cpp/_C, and csrc/*.cu and extension_cpp/triton into _C_cuda.so next to it.

An operator edits nothing here.

Both libraries use only the LibTorch stable ABI of torch 2.10 and CPython's limited API of 3.10, so that one build works with
all later versions of both. extension_cpp/_build.py has the flags, and the environment variables that are read.
"""

import json
import sys
from importlib import util
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def module(name):
    """A module of the package, which can't be imported before it is built."""
    spec = util.spec_from_file_location(name, ROOT / "extension_cpp" / f"{name}.py")
    loaded = sys.modules[name] = util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


_build, _machine = module("_build"), module("_machine")


def or_exit(function, *args):
    """What `function` returns; the reason alone, without a traceback, where the build can't be done."""
    try:
        return function(*args)
    except _build.BuildError as error:
        sys.exit(f"extension_cpp: {error}")


class NinjaBuild(build_ext):
    """Compiles each file on its own, in parallel, and only what has changed since the last build."""

    nvcc, reason = or_exit(_build.find_nvcc)

    def get_ext_filename(self, fullname):
        # _C_cuda is no Python module: it only registers kernels, and depends on no version of Python.
        if fullname.endswith("_cuda"):
            return f"{fullname.replace('.', '/')}.so"
        return super().get_ext_filename(fullname)

    def finalize_options(self):
        super().finalize_options()
        self.build_temp = "build/ninja"  # setuptools takes a new folder for each editable install

    def run(self):
        self.of_checkout = self.inplace or self.editable_mode  # setuptools changes the first while it runs
        super().run()

    def build_extensions(self):
        for_cuda = ()
        said = f"CPU only ({self.reason})"
        if self.nvcc:
            # A checkout's own libraries are tried out here; what is installed may have been built for other machines.
            without = _build.WITHOUT_GPU if self.of_checkout else "all"
            gpus = [gpu.architecture for gpu in _machine.nvidia().gpus]
            for_cuda, why = _build.architectures(gpus, without)
            listed = f"architectures {' '.join(for_cuda)} ({why}; to change it: TORCH_CUDA_ARCH_LIST=8.0, or all)"
            said = f"CPU and CUDA ({self.reason}), {listed}"
            said += f", Triton's kernels {_build.triton_version() or 'left out: Triton is not installed'}"
        print(f"extension_cpp: building for {said}", flush=True)
        sources = _build.contents(ROOT, bool(self.nvcc))  # Now: they may change meanwhile.
        or_exit(self.compile, for_cuda)
        targets = [Path(self.get_ext_fullpath(ext.name)) for ext in self.extensions]
        for target in targets:
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(ROOT / self.build_temp / target.name), str(target))
        if not self.nvcc:  # An earlier build with CUDA must not get into a package for CPU only.
            for folder in {targets[0].parent, ROOT / "extension_cpp" if self.of_checkout else targets[0].parent}:
                (folder / "_C_cuda.so").unlink(missing_ok=True)
        if self.of_checkout:  # For tests/conftest.py.
            (ROOT / "build" / "compiled.json").write_text(json.dumps(sources))

    def compile(self, architectures):
        build = ROOT / self.build_temp
        build.mkdir(parents=True, exist_ok=True)
        with _build.alone(build):
            self.run_ninja(build, architectures)

    def run_ninja(self, build, architectures):
        commands = _build.rules(self.nvcc, self.include_dirs, architectures)
        libraries = {Path(self.get_ext_fullpath(ext.name)).name: ext.sources for ext in self.extensions}
        needed = find("extension_cpp/triton/*.*") + find("extension_cpp/ops/*.py")
        ahead = _build.ahead(self.nvcc, architectures, libraries, needed, self.build_temp)
        _build.write_ninja(build / "build.ninja", commands, libraries, self.build_temp, ahead)
        if self.of_checkout:
            (ROOT / "compile_commands.json").write_text(_build.compile_commands(build / "build.ninja", ROOT))
        for line in _build.run_ninja(build / "build.ninja", ROOT):
            print(line, end="", flush=True)


def find(pattern):
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern) if path.is_file())


common = find("csrc/common/*.cpp")
extensions = [Extension("extension_cpp._C", find("csrc/*.cpp") + common, py_limited_api=True)]
if NinjaBuild.nvcc:
    extensions.append(Extension("extension_cpp._C_cuda", find("csrc/*.cu") + common, py_limited_api=True))
setup(
    ext_modules=extensions,
    cmdclass={"build_ext": NinjaBuild},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
