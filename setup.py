"""Compiles csrc/*.cpp into extension_cpp/_C and csrc/*.cu into extension_cpp/_C_cuda.so; a new operator edits nothing here.

Both libraries use only the LibTorch stable ABI of torch 2.10 and CPython's limited API of 3.10, so that one build serves
all later versions of both. Read from the environment:

USE_CUDA               1: build _C_cuda, 0: don't; unset: build it where nvcc is found
CUDA_HOME              where to look for bin/nvcc before PATH
TORCH_CUDA_ARCH_LIST   "8.0;9.0+PTX"; its default covers Turing to Blackwell
DEBUG                  1: no optimisation, with debug information
MAX_JOBS               how many files to compile at a time
CXX CXXFLAGS LDFLAGS   the compiler and flags to add
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
ARCHITECTURES = "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"
STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DPy_LIMITED_API=0x030a0000"]
DEBUG = os.environ.get("DEBUG", "0") not in ("", "0")


def find_nvcc():
    """The path of nvcc, or None for a build without CUDA, and why."""
    wanted = os.environ.get("USE_CUDA", "")
    if wanted not in ("", "0", "1"):
        sys.exit(f"extension_cpp: USE_CUDA must be 0 or 1, got {wanted!r}")
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")
    if wanted == "1" and not nvcc:
        sys.exit(
            f"extension_cpp: USE_CUDA=1 needs nvcc, and there is none {f'in {home}/bin' if home else 'on PATH'}: install "
            "the CUDA toolkit 12.8 or newer (conda install -c conda-forge cuda-nvcc cuda-cudart-dev) or set CUDA_HOME"
        )
    if wanted == "0":
        return None, "USE_CUDA=0"
    return nvcc, f"nvcc is {nvcc}" if nvcc else "no nvcc on PATH; USE_CUDA=1 makes that an error"


def architecture_flags():
    """nvcc's -gencode flags for TORCH_CUDA_ARCH_LIST, and the list itself for the library to tell."""
    architectures = re.split(r"[;,\s]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip() or ARCHITECTURES)
    flags = [f"-DEXTENSION_CPP_ARCHITECTURES={'/'.join(architectures)}"]
    for arch in architectures:
        match = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", arch)
        if not match:
            sys.exit(f'extension_cpp: TORCH_CUDA_ARCH_LIST must be like "8.0;9.0+PTX", got {arch!r} in it')
        number = match[1] + match[2]
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match[3]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


class NinjaBuild(build_ext):
    """Compiles each file on its own, in parallel, and only what has changed since the last build."""

    nvcc, reason = find_nvcc()

    def get_ext_filename(self, fullname):
        # _C_cuda is no Python module: it only registers kernels, and depends on no version of Python.
        if fullname.endswith("_cuda"):
            return f"{fullname.replace('.', '/')}.so"
        return super().get_ext_filename(fullname)

    def finalize_options(self):
        super().finalize_options()
        self.build_temp = "build/ninja"  # setuptools takes a new folder for each editable install

    def rules(self):
        """The commands of build.ninja, by name."""
        from torch.utils import cpp_extension  # Only to learn where torch's headers and libraries are.

        include, library = cpp_extension.include_paths()[0], cpp_extension.library_paths()[0]
        # No path of this machine gets into the libraries: messages name csrc/... and include/torch/...
        host = ["-fPIC", "-fvisibility=hidden", "-Wall", "-g" if DEBUG else "-g0"]
        host += [f"-ffile-prefix-map={include}=include"] if " " not in include else []  # nvcc can't pass a space on
        optimise = "-O0" if DEBUG else "-O3"
        common = ["-std=c++20", "-isystem", include, *STABLE_ABI]
        python = [flag for path in self.include_dirs for flag in ("-isystem", path)]
        cxx = shlex.split(os.environ.get("CXX", "c++"))
        # Through libtorch.so, libtorch_cuda.so comes into scope at load time; a CPU build of torch has no such file.
        # A build ID would hash the paths of this build, which nothing else in the file depends on.
        plain = [] if DEBUG else ["-Wl,-s", "-Wl,--build-id=none"]
        # libstdc++ comes first: PyTorch's wheels export some of its newer symbols, without the version to be recorded here.
        torch = ["-Wl,-lstdc++", f"-L{library}", "-Wl,--no-as-needed,-ltorch,--as-needed", "-ltorch_cpu", *plain]
        output = "-MMD -MF $out.d -c $in -o $out"
        env = {name: os.environ.get(name, "") for name in ("CXXFLAGS", "LDFLAGS")}
        rules = {
            # Conda's flags have -O2, with which GCC leaves most of the kernels' loops as they are: the last one counts.
            "cxx": f"{shlex.join([*cxx, *common, *host, *python])} {env['CXXFLAGS']} {optimise} {output}",
            "link_cxx": f"{shlex.join(cxx)} -shared $in -o $out {shlex.join(torch)} {env['LDFLAGS']}",
        }
        if self.nvcc:
            # conda-forge's nvcc brings its own host compiler in these flags.
            given = "-ccbin" in os.environ.get("NVCC_PREPEND_FLAGS", "")
            nvcc = [self.nvcc, *([] if given else ["-ccbin", cxx[0]])]
            device = [
                optimise,
                *architecture_flags(),
                "--threads=2",
                "-DUSE_CUDA",
                "-G" if DEBUG else "--compress-mode=size",
            ]
            wrapped = [flag for option in host for flag in ("-Xcompiler", option)]
            linked = [option.replace("-Wl,", "-Xlinker=") for option in torch]
            # nvcc makes the names of internal symbols from a random number and the folder; made from the file's name alone,
            # they are the same in every build.
            names = "--frandom-seed=$in -Xcudafe --orig_src_path_name=$in"
            rules["nvcc"] = f"{shlex.join([*nvcc, *common, *device, *wrapped])} {names} {output}"
            rules["link_nvcc"] = (
                f"{shlex.join(nvcc)} -shared -cudart=static --no-device-link $in -o $out {shlex.join(linked)}"
            )
        return rules

    def build_extensions(self):
        backends = "CPU and CUDA" if self.nvcc else "CPU only"
        print(f"extension_cpp: building for {backends} ({self.reason})", flush=True)
        build = Path(self.build_temp)
        (ROOT / build).mkdir(parents=True, exist_ok=True)
        lines = [f"builddir = {build}"]
        for name, command in self.rules().items():
            lines += [f"rule {name}", f"  command = {command}", f"  description = {name} $out"]
            lines += [] if name.startswith("link") else ["  depfile = $out.d", "  deps = gcc"]
        targets = [Path(self.get_ext_fullpath(ext.name)) for ext in self.extensions]
        for ext, target in zip(self.extensions, targets):
            compiler = "nvcc" if ext.name.endswith("_cuda") else "cxx"
            objects = {f"{build}/{Path(source).name}.o": source for source in ext.sources}
            lines += [f"build {obj}: {compiler} {source}" for obj, source in objects.items()]
            lines += [f"build {build / target.name}: link_{compiler} {' '.join(objects)}"]
        (ROOT / build / "build.ninja").write_text("\n".join(lines) + "\n")
        jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        try:
            subprocess.run(["ninja", *jobs, "-f", str(build / "build.ninja")], cwd=ROOT, check=True)
        except FileNotFoundError:
            sys.exit("extension_cpp: the build needs ninja: pip install ninja")
        except subprocess.CalledProcessError:
            sys.exit("extension_cpp: the compilation failed; the compiler's own message is above")
        for target in targets:
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(ROOT / build / target.name), str(target))
        if not self.nvcc:  # An earlier build with CUDA must not get into a package for CPU only.
            for folder in {targets[0].parent, ROOT / "extension_cpp" if self.inplace else targets[0].parent}:
                (folder / "_C_cuda.so").unlink(missing_ok=True)


sources = {
    suffix: sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob(f"*.{suffix}")) for suffix in ("cpp", "cu")
}
extensions = [Extension("extension_cpp._C", sources["cpp"], py_limited_api=True)]
if NinjaBuild.nvcc:
    extensions.append(Extension("extension_cpp._C_cuda", sources["cu"], py_limited_api=True))
setup(
    ext_modules=extensions,
    cmdclass={"build_ext": NinjaBuild},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
