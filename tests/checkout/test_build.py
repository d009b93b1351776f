"""The build: its switches, what it leaves out, and what the libraries may depend on."""

import fcntl
import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch
from clones import clone, environment, lean

import extension_cpp
from extension_cpp import _build

ROOT = Path(__file__).parents[2]
LIBRARIES = sorted(Path(extension_cpp.__file__).parent.glob("_C*.so"))
NVCC = shutil.which("nvcc")
TRITON = _build.triton_version()  # Empty where the build has none.


QUICK = {"USE_CUDA": "0", "DEBUG": "1"}  # Without optimisation, as what most tests look at doesn't depend on it.
FOR_CUDA = {"USE_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "7.5;12.0+PTX"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the sources, for builds that must not touch this one's."""
    return lean(tmp_path_factory.mktemp("build") / "with a space", "add_one")


@pytest.fixture(scope="module")
def cuda(checkout, tmp_path_factory) -> Path:
    """Another copy, compiled for CUDA once for all tests that look at that, with a function that they call."""
    copy = tmp_path_factory.mktemp("cuda") / "with a space"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns("build", "*.so"))
    (copy / "csrc" / "add_one.cu").write_text(f'#include "add_one.cpp"\n{ERRORS}')
    done = build(copy, **FOR_CUDA)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "building for CPU and CUDA" in done.stdout
    return copy


def build(checkout: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    arguments = arguments or ("build_ext", "--inplace")
    kept = {k: v for k, v in os.environ.items() if k not in ("USE_CUDA", "CUDA_HOME", "DEBUG", "TORCH_CUDA_ARCH_LIST")}
    return subprocess.run(
        [sys.executable, "setup.py", *arguments],
        cwd=checkout,
        env={**kept, **variables},
        capture_output=True,
        text=True,
    )


def without_nvcc() -> str:
    """PATH less the folders that have an nvcc."""
    folders = os.environ["PATH"].split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if not (Path(folder) / "nvcc").exists())


@pytest.mark.builds
def test_incremental(checkout):
    """A second build compiles nothing; one header recompiles what includes it, in parallel; CPU only says so."""
    first = build(checkout, **QUICK, MAX_JOBS="2")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "extension_cpp: building for CPU only (USE_CUDA=0)" in first.stdout
    commands = json.loads((checkout / "compile_commands.json").read_text())  # For editors.
    assert {"csrc/add_one.cpp", "csrc/module.cpp"} < {command["file"] for command in commands}
    (checkout / "extension_cpp" / "_C_cuda.so").touch()
    second = build(checkout, **QUICK)
    assert "ninja: no work to do." in second.stdout
    assert not (checkout / "extension_cpp" / "_C_cuda.so").exists()  # Of an earlier build with CUDA.
    (checkout / "csrc" / "common" / "loop.h").touch()
    third = build(checkout, **QUICK)
    assert "add_one.cpp.o" in third.stdout and "module.cpp.o" not in third.stdout


@pytest.mark.builds
def test_an_old_library_is_named(checkout):
    """pytest alone compiles nothing: it names sources with other contents than those that were compiled."""

    def says() -> list[str]:
        tests = ["-q", "--collect-only", "-p", "no:cacheprovider", "tests/test_add_one.py"]
        command = [sys.executable, "-m", "pytest", *tests]
        done = subprocess.run(command, cwd=checkout, env=environment(checkout), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return re.findall(
            r"^(.*) changed since the tested library was compiled: make build$", done.stdout, re.MULTILINE
        )

    header, another = checkout / "csrc" / "common" / "loop.h", checkout / "csrc" / "another.cpp"
    assert build(checkout, **QUICK).returncode == 0
    header.touch()
    assert says() == []
    written = header.read_text()
    header.write_text(f"{written}// Changed.\n")
    another.touch()
    assert says() == ["csrc/another.cpp, csrc/common/loop.h"]
    assert build(checkout, **QUICK).returncode == 0
    assert says() == []
    header.write_text(written)
    another.unlink()
    assert says() == ["csrc/another.cpp, csrc/common/loop.h"]


def test_damaged_log(tmp_path):
    """One that ninja can't read costs one compilation of everything, not one at every build."""
    (tmp_path / "one.c").write_text("int one;\n")
    rule = "rule cc\n  command = cc -MD -MF $out.d -c $in -o $out\n  depfile = $out.d\n  deps = gcc\n"
    (tmp_path / "build.ninja").write_text(f"builddir = .\n{rule}build one.o: cc one.c\n")

    def compiles() -> bool:
        return any("cc -MD" in line for line in _build.run_ninja(tmp_path / "build.ninja", tmp_path))

    assert [compiles(), compiles()] == [True, False]
    with (tmp_path / ".ninja_deps").open("ab") as log:  # As two ninjas at a time leave it: with a number twice.
        log.write(struct.pack("<I8sI", 12, b"again.o", ~1 & 0xFFFFFFFF))
    compiles()
    assert not (tmp_path / ".ninja_deps").exists()
    assert [compiles(), compiles()] == [True, False]


def test_one_at_a_time(tmp_path):
    with _build.alone(tmp_path), open(tmp_path / "lock") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(tmp_path / "lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_torch_without_cuda(tmp_path, monkeypatch):
    """CUDA code is not compiled for it unless that is asked for."""
    (tmp_path / "nvcc").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    for torch_cuda, wanted, found in ((False, "", False), (False, "1", True), (True, "", True), (True, "0", False)):
        monkeypatch.setenv("USE_CUDA", wanted)
        monkeypatch.setattr(_build, "torch_has_cuda", lambda has=torch_cuda: has)
        assert bool(_build.find_nvcc()[0]) == found
    monkeypatch.undo()
    assert _build.torch_has_cuda() == (torch.version.cuda is not None)


def test_a_new_source_with_a_wrong_schema(checkout):
    """It needs no edit of another file; an error of the import names it, as an exception while loading ends a process."""
    source = checkout / "csrc" / "another.cpp"
    source.write_text("""
#include "common/register.h"
namespace extension_cpp::another {
const Operator kAnother("another(Tensr x) -> Tensor", "x: ... -> ...");
Tensor another(const Tensor& x) { return x; }
EXTENSION_CPP_REGISTER(m) { m.add<&another>(kAnother); }
}
""")
    done = build(checkout, **QUICK)
    source.unlink()
    assert done.returncode == 0 and "another.cpp.o" in done.stdout, done.stdout
    run = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]"
    run += f"; sys.path.insert(0, {str(checkout)!r}); import extension_cpp"
    done = subprocess.run([sys.executable, "-c", run], cwd="/", capture_output=True, text=True)
    said = done.stderr.partition("ImportError: ")[2]
    assert done.returncode == 1 and re.match(
        r"_C.abi3.so could not register its operators; correct the source and make build\n"
        r"csrc/another.cpp:6: another: PyTorch refuses the schema another\(Tensr x\) -> Tensor\n",
        said,
    ), done.stderr


def test_debug(checkout):
    done = build(checkout, **QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    library = (checkout / "extension_cpp" / "_C.abi3.so").read_bytes()
    assert b".debug_info" in library
    assert b".debug_info" not in LIBRARIES[0].read_bytes()


def test_no_nvcc(checkout):
    without = build(checkout, PATH=without_nvcc(), DEBUG="1")
    assert "building for CPU only (no nvcc on PATH; USE_CUDA=1 makes that an error)" in without.stdout
    insisting = build(checkout, PATH=without_nvcc(), USE_CUDA="1")
    assert insisting.returncode == 1
    assert "USE_CUDA=1 needs nvcc, and there is none on PATH: install the CUDA toolkit" in insisting.stderr
    elsewhere = build(checkout, USE_CUDA="1", CUDA_HOME="/nowhere")
    assert "there is none in /nowhere/bin" in elsewhere.stderr


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("USE_CUDA", "yes", "USE_CUDA must be 0 or 1, got 'yes'"),
        ("TORCH_CUDA_ARCH_LIST", "Hopper", "TORCH_CUDA_ARCH_LIST must be like \"8.0;9.0+PTX\", got 'Hopper' in it"),
    ],
)
def test_wrong_switches(checkout, variable, value, message):
    if variable == "TORCH_CUDA_ARCH_LIST" and not NVCC:
        pytest.skip("read only where nvcc is found")
    done = build(checkout, **{"USE_CUDA": "1", variable: value})
    assert done.returncode == 1 and message in done.stderr, done.stderr


def test_compiler_errors_are_shown_as_they_are(checkout):
    source = checkout / "csrc" / "broken.cpp"
    source.write_text("int broken = ;\n")
    done = build(checkout, **QUICK)
    source.unlink()
    assert done.returncode == 1 and "broken.cpp:1:14: error" in done.stdout
    assert "Traceback" not in done.stderr and "the compiler's own message is above" in done.stderr


@pytest.mark.skipif(not NVCC, reason="no nvcc")
@pytest.mark.builds
def test_cuda_architectures_and_wheels(cuda):
    """The list of architectures is honoured, and a wheel for CPU made after one for CUDA has no CUDA in it."""
    ninja = next((cuda / "build").rglob("build.ninja")).read_text()
    flags = re.findall(r"-gencode=arch=(\S+?),code=(\S+)", ninja)
    assert flags == [("compute_75", "sm_75"), ("compute_120", "sm_120"), ("compute_120", "compute_120")]
    assert "-march" not in ninja
    done = build(cuda, "bdist_wheel", "--dist-dir", "cuda", **FOR_CUDA)
    assert "ninja: no work to do." in done.stdout, done.stdout + done.stderr
    assert build(cuda, "bdist_wheel", "--dist-dir", "cpu", USE_CUDA="0").returncode == 0
    (for_cuda,), (cpu,) = (sorted((cuda / variant).iterdir()) for variant in ("cuda", "cpu"))
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert for_cuda.name == cpu.name == f"extension_cpp-{extension_cpp.__version__}-cp310-abi3-{platform}.whl"
    names = {wheel: {Path(n).name for n in zipfile.ZipFile(wheel).namelist()} for wheel in (for_cuda, cpu)}
    assert "_C_cuda.so" in names[for_cuda] and "_C_cuda.so" not in names[cpu] and "_C.abi3.so" in names[cpu]
    # As `make wheel` does: nothing of torch gets in, and nothing is newer than the tag says.
    excluded = re.findall(r"--exclude '(.*?)'", (ROOT / "Makefile").read_text())
    options = [option for library in excluded for option in ("--exclude", library)]
    repair = ["auditwheel", "repair", *options, "--wheel-dir", cuda / "repaired", for_cuda]
    subprocess.run(repair, env=scripts(), check=True)
    (repaired,) = (cuda / "repaired").iterdir()
    assert re.search(r"-cp310-abi3-manylinux_2_\d+_x86_64\.whl$", repaired.name)
    assert {Path(n).name for n in zipfile.ZipFile(repaired).namelist() if not n.endswith("/")} == names[for_cuda]


def test_build_commands_of_the_documents():
    """They name the recipe and conda-forge and nothing else, which test_package.py builds from."""
    document = (ROOT / "docs" / "build.md").read_text()
    assert "\nconda-build recipe/ -c conda-forge\n" in document
    assert "\nrattler-build build -r recipe/recipe.yaml -c conda-forge\n" in document


def audit(checkout: Path) -> str:
    """What the audit of the architectures says of the library in a copy of the checkout."""
    run = f"""
import sys
sys.meta_path = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "")]
sys.path.insert(0, {str(checkout)!r})
import extension_cpp, pytest
assert extension_cpp.__file__.startswith({str(checkout)!r})
pytest.main(["-q", "-p", "no:cacheprovider", {str(ROOT / "tests" / "test_libraries.py")!r}, "-k", "architectures"])
"""
    done = subprocess.run([sys.executable, "-c", run], cwd=checkout, env=scripts(), capture_output=True, text=True)
    if "cuobjdump is not installed" in done.stdout:
        pytest.skip("cuobjdump is not installed")
    assert re.search(r"1 (passed|failed)", done.stdout), done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not NVCC, reason="no nvcc")
@pytest.mark.builds
def test_architectures_are_audited(cuda):
    """One that is declared without being there, and one that is there without being declared."""
    library = cuda / "extension_cpp" / "_C_cuda.so"
    content = library.read_bytes()
    declared = b"architectures 7.5/12.0+PTX;"
    assert content.count(declared) == 1
    for other, said in (
        (b"architectures 8.6/12.0+PTX;", "machine code is missing for architecture ['86']"),
        (b"architectures 12.0+PTX;    ", "machine code is there for architecture ['75'], not declared"),
    ):
        library.write_bytes(content.replace(declared, other))
        assert said in audit(cuda)
    library.write_bytes(content)


# Calls the function that words the error of a failed launch.
ERRORS = """
#include "common/launch.cuh"

extern "C" __attribute__((visibility("default"))) const char* explain(int error) {
  static std::string text;
  text = extension_cpp::explain(static_cast<cudaError_t>(error), "7.0");
  return text.c_str();
}
"""


@pytest.mark.builds
@pytest.mark.skipif(not NVCC, reason="no nvcc")
def test_errors_of_a_launch(cuda):
    """A GPU that the package has no kernel for, a driver that is too old: the cause and the command that fixes it."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (12, 0)
    lacks_kernel = capability < (12, 0) and capability != (7, 5)
    run = f"""
import ctypes, os, sys
sys.meta_path = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "")]
sys.path.insert(0, {str(cuda)!r})
import torch, extension_cpp
explain = ctypes.CDLL({str(cuda / "extension_cpp" / "_C_cuda.so")!r}, mode=os.RTLD_LAZY).explain
explain.restype = ctypes.c_char_p
for error in (209, 222, 35, 700):
    print(explain(error).decode())
if {lacks_kernel}:
    a = torch.ones(3, device="cuda")
    try:
        extension_cpp.my_op(a, 1.0)
    except RuntimeError as error:
        print(error)
    assert (a + a).tolist() == [2.0] * 3
"""
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True)
    image, ptx, driver, other, *called = done.stdout.splitlines()
    lacking = "this package has no kernel for a GPU of architecture {} with this driver, only for 7.5/12.0+PTX."
    assert image == ptx and image.startswith(lacking.format("7.0")), image
    assert image.endswith("TORCH_CUDA_ARCH_LIST=7.0 pip install .")
    assert driver.startswith("the NVIDIA driver is older than CUDA ") and driver.endswith("update the driver")
    assert other.startswith("CUDA says 'an illegal memory access was encountered' (cudaErrorIllegalAddress)")
    if lacks_kernel:
        found = "{}.{}".format(*capability)
        assert called[0].startswith(f"my_op: {lacking.format(found)}"), called


SOURCES = [str(path.relative_to(ROOT)) for folder in ("csrc", "csrc/common") for path in (ROOT / folder).glob("*.cpp")]
WARNINGS = {
    "g++": "-Wextra -Wconversion -Werror",
    # The sizes of the standard library have no sign, those of PyTorch have: GCC's -Wconversion leaves that out by itself.
    "clang++": "-Wextra -Wconversion -Wno-sign-conversion -Werror",
}


@pytest.mark.parametrize("source", sorted(SOURCES))
@pytest.mark.parametrize("compiler", WARNINGS)
@pytest.mark.builds
def test_no_warnings(compiler, source, tmp_path, monkeypatch):
    """Not of more either than a build asks for, as of a conversion that loses a part of the value."""
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler}")
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("CXXFLAGS", f"{WARNINGS[compiler]} -fsyntax-only")
    command = _build.rules(None, [sysconfig.get_path("include")])["cxx"].replace("$in", source)
    command = command.replace("$out", shlex.quote(str(tmp_path / "out")))
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("clang++"), reason="no clang++")
def test_clang(tmp_path):
    """Its library computes the same: nms, where a fused multiply-add would change what is kept, by each kind of vectors."""
    checkout = lean(tmp_path / "checkout", "nms")
    done = build(checkout, USE_CUDA="0", CXX="clang++")
    assert done.returncode == 0 and "warning" not in done.stdout, done.stdout + done.stderr
    for level in ("baseline", "avx2", ""):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/test_nms.py",
            "-k",
            "cpu and parity",
        ]
        variables = environment(checkout, EXTENSION_CPP_SIMD=level)
        done = subprocess.run(command, cwd=checkout, env=variables, capture_output=True, text=True)
        assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]


@pytest.mark.long
def test_address_sanitizer(tmp_path):
    """No kernel reads or writes outside of what was allocated, its own outputs included, which no test can guard."""
    checkout = clone(tmp_path / "checkout")
    done = build(checkout, USE_CUDA="0", CXXFLAGS="-fsanitize=address -g1 -O1", LDFLAGS="-fsanitize=address")
    assert done.returncode == 0, done.stdout + done.stderr
    # Flags of the environment, which conda's compilers set too, don't turn the kernels' vectors off.
    command = re.search(r"rule cxx\n  command = (.*)", next((checkout / "build").rglob("build.ninja")).read_text())[1]
    assert re.findall(r" -O\d", command) == [" -O1", " -O3"]
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("checkout", "__pycache__"))
    # The instrumented copy, not the one that is installed.
    run = f"""
import sys
sys.meta_path = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "")]
sys.path.insert(0, {str(checkout)!r})
import extension_cpp, pytest
assert extension_cpp.__file__.startswith({str(checkout)!r})
selected = "cpu and not reference and (parity or layouts or touched or half_values or torch_mul or torch_add or many_dim)"
sys.exit(pytest.main(["-q", "--quick", "-p", "no:cacheprovider", "tests", "-k", selected]))
"""
    compiler = os.environ.get("CXX", "c++")
    found = [
        subprocess.check_output([compiler, f"-print-file-name={name}.so"], text=True)
        for name in ("libasan", "libstdc++")
    ]
    variables = {
        "LD_PRELOAD": " ".join(map(str.strip, found)),
        "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0",
    }
    done = subprocess.run(
        [sys.executable, "-c", run], cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0 and re.search(r"\d{2,} passed", done.stdout), (done.stdout + done.stderr)[-4000:]


@pytest.mark.long
def test_pip_install(checkout, tmp_path):
    """With an environment of its own for the build, into which pip installs PyTorch."""
    (tmp_path / "constraint.txt").write_text(f"torch=={torch.__version__}\n")
    variables = {**os.environ, **QUICK, "PIP_CONSTRAINT": str(tmp_path / "constraint.txt")}
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", target, checkout]
    done = subprocess.run(pip, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (target / "extension_cpp" / "_C.abi3.so").exists()


def test_build_of_a_wheel(checkout, tmp_path):
    wheel = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path / "wheel", checkout]
    done = subprocess.run(wheel, env={**os.environ, **QUICK}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (tmp_path / "wheel").iterdir()
    assert "-cp310-abi3-" in file.name


@pytest.mark.parametrize(
    ("gpus", "without", "variable", "built"),
    [
        ([(12, 0), (9, 0), (6, 1), (8, 9), (9, 0)], "all", "", "8.9 9.0a 12.0+PTX"),
        ([(7, 0)], "8.0+PTX", "", "8.0+PTX"),
        ([], "all", "", _build.ARCHITECTURES.replace(";", " ")),
        ([(8, 9)], "all", "8.0, 9.0", "8.0 9.0"),
        ([(8, 9)], "8.0+PTX", "all", _build.ARCHITECTURES.replace(";", " ")),
    ],
    ids=["several", "too old", "none", "variable", "all"],
)
def test_what_is_compiled_for(monkeypatch, gpus, without, variable, built):
    """The GPUs that are there, each once, with all the instructions that they have."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", variable)
    assert " ".join(_build.architectures(gpus, without)[0]) == built


def test_what_is_made_from_another_architecture():
    """One compilation for both, where the list has both; else, and for PTX, its own."""
    flags = _build.architecture_flags(["8.0+PTX", "9.0a", "12.0"])[1:]
    assert [flag.removeprefix("-gencode=arch=") for flag in flags] == [
        "compute_80,code=sm_80",
        "compute_80,code=compute_80",
        "compute_90a,code=sm_90a",
        "compute_80,code=sm_120",
    ]
    assert _build.architecture_flags(["9.0a", "12.0"])[-1] == "-gencode=arch=compute_120,code=sm_120"
    assert _build.architecture_flags(["8.0", "12.0+PTX"])[2] == "-gencode=arch=compute_120,code=sm_120"
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    asked = [int(n) for path in sources for n in re.findall(r"__CUDA_ARCH__ *>=? *(\d+)", path.read_text())]
    assert max(asked, default=0) < 1000 or not _build.MADE_FROM, "a source has code of its own for Blackwell"


def test_what_is_distributed_is_for_all_architectures():
    """Whatever GPU the machine has that builds it."""
    assert "      TORCH_CUDA_ARCH_LIST: all\n" in (ROOT / "recipe" / "recipe.yaml").read_text()
    kept = {name: value for name, value in os.environ.items() if name != "TORCH_CUDA_ARCH_LIST"}
    done = subprocess.run(
        ["make", "--dry-run", "wheel"], cwd=ROOT, env=kept, capture_output=True, text=True, check=True
    )
    assert 'TORCH_CUDA_ARCH_LIST="all"' in done.stdout


@pytest.mark.skipif(not NVCC, reason="no nvcc")
def test_the_first_line_says_what_is_built(checkout):
    """And how to change it. Nothing is compiled, as there is no compiler."""
    kept = {"PATH": os.environ["PATH"], "CXX": "no-such-compiler", "USE_CUDA": "1"}
    there = "" if torch.cuda.is_available() else f"{_build.WITHOUT_GPU} (no GPU of 7.5 or newer is here; "
    for variables, listed in (({"TORCH_CUDA_ARCH_LIST": "8.0 9.0"}, "8.0 9.0 (as the environment says; "), ({}, there)):
        done = build(checkout, "--quiet", "build_ext", "--inplace", **variables, **kept)
        first = done.stdout.splitlines()[0]
        assert done.returncode == 1 and first.startswith("extension_cpp: building for CPU and CUDA (nvcc is "), (
            done.stdout
        )
        assert f", architectures {listed}" in first and "to change it: TORCH_CUDA_ARCH_LIST=8.0, or all" in first


def makes(folder: Path, environment: Path, fails: str, *targets: str, **variables: str) -> subprocess.CompletedProcess:
    """What make runs where `environment` has programs that only say their names, and fail if their arguments have `fails`."""
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("pyproject.toml", "extension_cpp/_version.py", "locked/tools.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).open("a").close()  # Its time stays that of the first call.
    (environment / "bin").mkdir(parents=True, exist_ok=True)
    for name in ("python", "clang-format"):
        program = environment / "bin" / name
        program.write_text(f'#!/bin/sh\necho "ran $0 $*"\ncase "$*" in *{fails}*) exit 1;; esac\n')
        program.chmod(0o755)
    (environment / ".ready").touch()  # As a .venv has it.
    # These tests run in a make, and perhaps in an environment of conda.
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "CONDA"))}
    return subprocess.run(["make", *targets], cwd=folder, env=alone | variables, capture_output=True, text=True)


@pytest.mark.parametrize("failing", ["ruff", "pytest", "nothing"])
def test_make_test_reports_lint_and_tests(tmp_path, failing):
    """Whichever fails, with a line first that says what is done."""
    done = makes(tmp_path, tmp_path / ".venv", failing, "test")
    assert (done.returncode == 0) == (failing == "nothing")
    assert re.match(r"make test: compiles, lints and tests; usually \w+ minutes", done.stdout), done.stdout
    assert "python -m ruff check" in done.stdout and "python -m pytest" in done.stdout
    assert ("make test: lint failed" in done.stdout and "make format" in done.stdout) == (failing == "ruff")


def test_make_in_a_conda_environment(tmp_path):
    """One that has PyTorch is what everything runs in; base, which is active in every shell of many users, is not."""
    environment = tmp_path / "envs" / "dev"
    (environment / "conda-meta").mkdir(parents=True)
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    done = makes(checkout, checkout / ".venv", "nothing", "libraries", CONDA_PREFIX=str(environment))
    assert "ran .venv/bin/python setup.py" in done.stdout
    shutil.rmtree(checkout / ".venv")
    record = environment / "conda-meta" / "pytorch-2.13.0-cpu_mkl_py312_h0000000_102.json"
    record.touch()
    for targets, ran in (
        (("test",), ("setup.py --quiet build_ext", "-m pip install", "-m ruff check", "-m mypy", "-m pytest")),
        (("bench",), ("-m benchmarks --save", "-m benchmarks.report")),
        (("package",), ("-m package",)),
        (("op", "NAME=a"), ("-m templates.op add a",)),
    ):
        done = makes(checkout, environment, "nothing", *targets, CONDA_PREFIX=str(environment))
        assert done.returncode == 0, done.stdout + done.stderr
        for each in ran:
            assert f"ran {environment}/bin/python {each}" in done.stdout, done.stdout
    assert not list(checkout.glob(".venv*"))
    assert "-m pip install" not in done.stdout  # Once, as long as the environment is the same one.
    os.utime(record, (2_000_000_000, 2_000_000_000))
    assert "-m pip install" in makes(checkout, environment, "nothing", "build", CONDA_PREFIX=str(environment)).stdout


@pytest.mark.long
def test_same_bytes_in_another_folder(checkout, tmp_path):
    """_C_cuda, here of one family, is all that CUDA packages add to what test_package.py shows of the CPU's."""
    copy = tmp_path / "another folder"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns("build", "*.so"))
    variables = {"USE_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "9.0a+PTX"} if NVCC else {"USE_CUDA": "0"}
    for folder in (checkout, copy):
        done = build(folder, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
    names = ["_C.abi3.so", *(["_C_cuda.so"] if NVCC else [])]
    for first, second in ([folder / "extension_cpp" / name for folder in (checkout, copy)] for name in names):
        assert first.read_bytes() == second.read_bytes(), f"{first.name} has other bytes"


@pytest.mark.long
def test_wheel_of_anyone(tmp_path):
    """In any folder, under any umask and in any time zone `make wheel` makes the same bytes."""
    first = lean(tmp_path / "first", min(ROOT.glob("extension_cpp/ops/[!_]*.py")).stem)
    second = tmp_path / "a second folder"
    shutil.copytree(first, second, ignore=shutil.ignore_patterns("build", "*.so"), copy_function=shutil.copyfile)
    (second / "build" / "lib" / "extension_cpp").mkdir(parents=True)
    (second / "build" / "lib" / "extension_cpp" / "of_an_earlier_build.py").write_text("")
    for path in filter(Path.is_file, first.rglob("*")):
        path.chmod(0o600)
    wheels = []
    for folder, umask, zone in ((first, 0o077, "Asia/Kolkata"), (second, 0o002, "America/Lima")):
        command = ["make", "wheel", "READY=", f"BIN={Path(sys.executable).parent}", "USE_CUDA=0"]
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "TZ": zone}, umask=umask, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        wheels += (folder / "dist" / "wheel").glob("*.whl")
    assert wheels[0].name == wheels[1].name and wheels[0].read_bytes() == wheels[1].read_bytes()


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
class TestLibraries:
    def test_torch_abi(self, library):
        """Every torch symbol is of the stable ABI, and torch 2.10 has them all."""
        pytest.importorskip("torch_abi_audit", reason="it needs Python 3.11")
        done = subprocess.run(["torch-abi-audit", "--json", library], capture_output=True, text=True, env=scripts())
        package = json.loads(done.stdout)
        (audited,) = package["extensions"] or package["bundled_libs"]
        assert audited["torch"]["stable"] and audited["torch"]["uses_torch"]
        assert audited["torch"]["unstable_symbols"] == audited["torch"]["unknown_shim_symbols"] == []
        assert audited["torch"]["min_torch_version"] == "2.10.0"

    def test_python_abi(self, library):
        """_C is within CPython's limited API of 3.10; _C_cuda knows no Python at all."""
        if library.name == "_C_cuda.so":
            done = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True)
            assert "aoti_torch" in done.stdout and not re.search(r" _?Py", done.stdout)
            return
        options = ["--strict", "--assume-minimum-abi3", "3.10", "--report"]
        done = subprocess.run(["abi3audit", *options, library], capture_output=True, text=True, env=scripts())
        assert done.returncode == 0, done.stdout + done.stderr
        (spec,) = json.loads(done.stdout)["specs"].values()
        assert spec["object"]["result"]["is_abi3"] and not spec["object"]["result"]["non_abi3_symbols"]

    def test_no_path_of_the_builder(self, library):
        content = library.read_bytes()
        for path in (ROOT, Path(sys.prefix), Path(torch.__file__).parent, Path.home()):
            assert os.fsencode(path) not in content, path

    def test_only_entry_points_are_exported(self, library):
        """Python's, and the functions that tell the signatures, what was wrong in them, and which kernels are Triton's."""
        done = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True)
        symbols = {line.split()[-1] for line in done.stdout.splitlines() if " T " in line}
        own = {"PyInit__C"} if library.name.startswith("_C.") else {"extension_cpp_compiled"} if TRITON else set()
        assert symbols == own | {"extension_cpp_signature", "extension_cpp_registration_errors"}


def scripts() -> dict[str, str]:
    """The environment, with this Python's own scripts first on PATH."""
    return {**os.environ, "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])}


def test_a_warning_is_shown_once():
    """Of a template each type has it, with other lines before it; an error is always shown."""
    first = ["a.h: In instantiation of 'f<float>':\n", "a.cpp:9:1:   required from here\n"]
    warning = ["a.h:3:5: warning: unused 'x'\n", "    3 |  int x;\n", "a.h:2:1: note: here\n"]
    second = [line.replace("float", "double") for line in first]
    error = ["In file included from a.cpp:1:\n", "a.h:7:1: error: no\n"]
    step = ["[1/2] cxx a.cpp.o\n"]
    said = [*step, *first, *warning, *second, *warning, *error, *error, *step]
    assert [*_build.once(said)] == [*step, *first, *warning, *error, *error, *step]
