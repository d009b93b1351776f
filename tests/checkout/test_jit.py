"""Compiling just in time: the cache, what is said when it can't be done, and the examples, which run as they are."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from clones import lean

import extension_cpp
from extension_cpp import _jit, _loader, jit

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "jit"
QUICK = {"DEBUG": "1"}  # Without optimisation, as what these tests look at doesn't depend on it.
SCALED = str(torch.arange(6.0).reshape(2, 3).t() * 0.5)
WITHOUT_EDITABLE = (
    "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]"
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """One cache for all tests of this file that need no empty one."""
    return tmp_path_factory.mktemp("a cache")


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """The sources and the Python files, as a checkout has them before it is compiled."""
    return lean(tmp_path_factory.mktemp("sources") / "a checkout", "add_one")


def environment(cache: Path, **variables: str) -> dict[str, str]:
    # The scripts of this environment first: its ninja is the one that pip installed. The package is this checkout's.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": str(cache), **variables}


def python(code: str, cache: Path, path: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", f"{WITHOUT_EDITABLE}\nsys.path.insert(0, {str(path)!r})\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment(cache, **variables))


def run(script: Path, cache: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, script.name, *arguments]
    env = environment(cache, **QUICK)
    return subprocess.run(command, cwd=script.parent, capture_output=True, text=True, env=env)


@pytest.mark.parametrize("name", ["load_cpp.py", "load_cuda.py"])
@pytest.mark.builds
def test_examples(name, cache):
    done = run(EXAMPLES / name, cache)
    assert done.returncode == 0 and SCALED in done.stdout, done.stdout + done.stderr
    if name == "load_cuda.py":
        assert f"kernels for CPU{' and CUDA' if torch.version.cuda else ''}" in done.stdout


@pytest.mark.builds
def test_example_that_is_declared(cache):
    """What is derived from a declaration, and the contract, are those of the operator's own namespace."""
    done = run(EXAMPLES / "scale.py", cache)
    assert done.returncode == 0 and SCALED in done.stdout, done.stdout + done.stderr
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "parity or transforms or user"]
    env = environment(cache, **QUICK)
    done = subprocess.run([*command, "test_scale.py"], cwd=EXAMPLES, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and int(re.search(r"(\d+) passed", done.stdout)[1]) >= 8, done.stdout + done.stderr


@pytest.mark.long
def test_example_through_setuptools(cache, tmp_path):
    folder = Path(shutil.copytree(EXAMPLES, tmp_path / "example"))
    done = run(folder / "setup.py", cache, "build_ext", "--inplace")
    assert done.returncode == 0 and "warning" not in done.stdout + done.stderr, done.stdout + done.stderr
    done = run(folder / "import_built.py", cache)
    assert done.returncode == 0 and SCALED in done.stdout, done.stdout + done.stderr


LOAD = """
import torch
started = []
sys.addaudithook(lambda event, args: started.append(args[0]) if event == "subprocess.Popen" else None)
import extension_cpp
extension_cpp.jit.load()
assert extension_cpp.my_op(torch.ones(2), 0.5).tolist() == [0.5, 0.5]
from extension_cpp import add_one
assert add_one(torch.zeros(0, 4)).numel() == 0
assert "torch._dynamo" not in sys.modules
print(extension_cpp._loader.libraries["_C"], extension_cpp.load_errors, *started, sep="\\n")
"""


@pytest.mark.builds
def test_a_checkout_that_was_not_compiled(sources, cache):
    """Imports, says what to do where an operator is asked for, and compiles what has changed and nothing else."""
    said = python("import extension_cpp\nextension_cpp.my_op", cache, sources).stderr
    assert "ImportError: extension_cpp could not load its library _C" in said and "extension_cpp.jit.load()" in said
    assert "ImportError: extension_cpp could not" in python("from extension_cpp import add_one", cache, sources).stderr
    first = python(LOAD, cache, sources, **QUICK)
    assert first.returncode == 0, first.stdout + first.stderr
    compiled = set(re.findall(r"compiled (\S+),", first.stderr))
    assert compiled == {"add_one.cpp", "memory.cpp", "signature.cpp", "_C.so"}, first.stderr
    second = python(LOAD, cache, sources, **QUICK)
    assert second.stderr == "" and second.stdout == first.stdout
    # A load from the cache is quick: it imports no compiler of PyTorch, and starts nothing but ninja, which has no work.
    _, errors, *started = second.stdout.splitlines()
    assert errors == "{}" and len(started) <= 3 and {Path(name).name for name in started} <= {"ninja", "uname"}
    with (sources / "csrc" / "add_one.cpp").open("a") as file:
        file.write("// more\n")
    again = python(LOAD, cache, sources, **QUICK)
    assert re.findall(r"compiled (\S+),", again.stderr) == ["add_one.cpp", "_C.so"]
    flags = python(LOAD, cache, sources, **QUICK, CXXFLAGS="-g1")
    assert flags.returncode == 0 and flags.stdout.splitlines()[0] != first.stdout.splitlines()[0]


@pytest.mark.long
def test_in_place_of_a_compiled_build(sources, cache):
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    variables = environment(cache, USE_CUDA="0", **QUICK)
    subprocess.run(build, cwd=sources, env=variables, check=True, stdout=subprocess.DEVNULL)
    with pytest.raises(RuntimeError, match=r"registered by .*_C.*, and a process can .* EXTENSION_CPP_JIT=1 before"):
        jit.load()
    inside = "import extension_cpp, torch\nprint(extension_cpp._loader.libraries['_C'])"
    a = "print(extension_cpp.my_op(torch.ones(1), 1.0).item())"
    assert python(f"{inside}\n{a}", cache, sources).stdout.startswith(f"{sources}/extension_cpp/_C")
    replaced = python(f"{inside}\n{a}", cache, sources, EXTENSION_CPP_JIT="1", **QUICK)
    assert replaced.stdout.startswith(str(cache)) and replaced.stdout.endswith("1.0\n"), replaced.stderr
    report = subprocess.run(
        [sys.executable, "-m", "extension_cpp"],
        capture_output=True,
        text=True,
        cwd=sources,
        env=environment(cache, EXTENSION_CPP_JIT="1", COLUMNS="300", PYTHONPATH=str(sources), **QUICK),
    )
    assert "just in time" in report.stdout, report.stdout + report.stderr


# Sources that are wrong: an unknown function; wrong syntax and a float that is no double; a wrong schema, next to an unused
# variable a wrong signature, other arguments than those of the schema, and other results.
RIGHT = """
#define EXTENSION_CPP_NAMESPACE jit_errors
#include "common/register.h"
namespace {
using extension_cpp::Tensor;
const extension_cpp::Operator kSame("NAME(Tensor x) -> Tensor", "x: ... -> ...");
Tensor same(const Tensor& x) { return x; }
EXTENSION_CPP_REGISTER(m) { m.add<&same>(kSame); }
}
"""
ONE, TWO, THREE, FOUR = (RIGHT.replace("NAME", name) for name in ("one", "two", "three", "four"))
WRONG = [
    (ONE + "float helper(float, int);\nfloat (*used)(float, int) = &helper;\n", TWO),
    (ONE.replace("const Tensor& x)", "const Tensor& x, float)") + "int broken = ;\n", TWO),
    (
        ONE.replace("Tensor x)", "Tensr x)"),
        TWO.replace("x: ... ->", "x: T+ ->") + "static int not_used;\n",
        THREE.replace("Tensor x)", 'Tensor(a!) x, *, int[2] at=[1, 2], str how=\\"a, b\\", float y=0.5)'),
        FOUR.replace("-> Tensor", "-> (Tensor, Tensor)").replace("-> ...", "-> ..., ..."),
    ),
]


@pytest.mark.builds
def test_compiler_with_a_static_standard_library(cache, tmp_path):
    """Its symbols don't mix with those of PyTorch's copy, in which streams lose what follows, or crash."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/bash\nexec c++ -static-libstdc++ "${@/#-Wl,-lstdc++/-l:libstdc++.a}"  # As if there were no other.\n'
    )
    compiler.chmod(0o755)
    source = tmp_path / "rows.cpp"
    source.write_text(
        "#define EXTENSION_CPP_NAMESPACE static_ops\n"
        '#include "common/register.h"\n'
        "using namespace extension_cpp;\n"
        'const Operator kRows("rows(Tensor x) -> ()", "x: N 3 ->");\n'
        "void rows(const Tensor& x) { Call call(kRows, {&x}); }\n"
        "EXTENSION_CPP_REGISTER(m) { m.add<&rows>(kRows); }\n"
    )
    code = "import extension_cpp, torch\nextension_cpp.jit.load({!r})\ntorch.ops.static_ops.rows(torch.ones(2, 5))"
    done = python(code.format(str(source)), cache, CXX=str(compiler), **QUICK)
    assert "rows: x must have shape (N, 3), got (2, 5)\n" in done.stderr, done.stderr
    (library,) = cache.glob("rows-*/rows.so")
    assert "libstdc++" not in subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout


def test_what_a_source_has_wrong(tmp_path):
    """One error that names the source, without the compiler's command and without a long traceback; the process lives."""
    code = f"""
from extension_cpp import jit
from pathlib import Path
for i, texts in enumerate({WRONG!r}):
    sources = [Path({str(tmp_path)!r}, name) for name in ("one.cpp", "two.cpp", "three.cpp", "four.cpp")][:len(texts)]
    for source, text in zip(sources, texts):
        source.write_text(text)
    try:
        jit.load(*sources, name=f"wrong{{i}}")
    except jit.BuildError as error:
        print(error, flush=True)
jit.load(*sources, name="wrong2")
"""
    done = python(code, tmp_path / "cache", **QUICK)
    begin, where = "extension_cpp.jit.load: ", re.escape(f"{tmp_path}/")
    wrong = rf"""{begin}one.cpp uses helper\(float, int\), which no source of wrong0.so defines .*
{begin}the compiler found errors
{where}one.cpp:10:14: error: .*
(?s:.*) a float of a schema is a double in C\+\+, and this function has float
(?s:.*)
{begin}correct the source and start Python again
{where}one.cpp:8: one: PyTorch refuses the schema one\(Tensr x\) -> Tensor
unknown type specifier.*
one\(Tensr x\) -> Tensor
    ~~~~~ <--- HERE
{where}two.cpp:8: two: its signature must have sizes such as N, 4, N\+1 or 2\*N, got 'T\+'
{where}three.cpp:8: three: its function must take what its schema says, \(Tensor, int\[2\], str, float\), got \(Tensor\)
{where}four.cpp:8: four: its function must return what its schema says, \(Tensor, Tensor\), got \(Tensor\)
"""
    assert re.fullmatch(wrong, done.stdout), done.stdout + done.stderr
    assert done.returncode == 1 and "-fPIC" not in done.stdout and len(done.stderr.splitlines()) < 35, done.stderr
    assert done.stderr.count("compiled one.cpp") == 2 and "-Wunused-variable" in done.stderr, done.stderr


def test_kernels_without_an_operator(monkeypatch):
    """PyTorch takes a kernel under any name, and no call would reach it."""
    with torch.library._scoped_library("jit_errors", "IMPL") as library:
        monkeypatch.setattr(_jit, "load_once", lambda path: library.impl("saem", lambda x: x, "CPU"))
        monkeypatch.setattr(_loader, "registration_errors", lambda path: "")
        said = rf"{torch.library.__file__} registers kernels for jit_errors::saem, and no library has a schema of that name"
        with pytest.raises(jit.BuildError, match=re.escape(said)):
            _jit.load_all([Path("same.so")])


@pytest.mark.parametrize(("mode", "below"), [(0o777, "cache"), (0o777, "cache/made"), (0o1777, "cache")])
def test_cache_that_others_can_write(mode, below, tmp_path):
    """What lies there is loaded as it is. A folder like /tmp is right as long as the one in it is the user's."""
    folder = tmp_path / "cache" / "made"
    folder.mkdir(parents=True)
    _jit.refuse_writable_by_others(folder)
    (tmp_path / below).chmod(mode)
    if mode == 0o1777:
        return _jit.refuse_writable_by_others(folder)
    with pytest.raises(jit.BuildError, match=f"another user can write into {tmp_path / below}"):
        _jit.refuse_writable_by_others(folder)


def test_cache_of_another_user(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    folder.mkdir()
    user = os.getuid() + 1
    if os.getuid() == 0:  # Whose folders are right for everyone.
        os.chown(folder, user, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: user)
    with pytest.raises(jit.BuildError, match="another user can write into"):
        _jit.refuse_writable_by_others(folder)


@pytest.mark.builds
def test_two_processes_at_once(tmp_path):
    """One compiles, the other waits for it and loads the same."""
    code = f"{WITHOUT_EDITABLE}\nsys.path.insert(0, {str(ROOT)!r})\nexec(open('load_cpp.py').read())"
    start = [sys.executable, "-c", f"__file__ = {str(EXAMPLES / 'load_cpp.py')!r}\n{code}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(start, cwd=EXAMPLES, env=environment(tmp_path, **QUICK), **pipes) for _ in range(2)]
    said = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0] and all(SCALED in out for out, _ in said), said
    assert sorted(err.count("compiled scale.cpp") for _, err in said) == [0, 1], said


@pytest.mark.builds
def test_sources_of_one_name(tmp_path, monkeypatch):
    """Of two folders, and of the name of one in csrc/common/: the library has all of them."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", environment(tmp_path)["PATH"])
    monkeypatch.setenv("DEBUG", QUICK["DEBUG"])
    sources = [tmp_path / path for path in ("a/op.cpp", "b/op.cpp", "memory.cpp")]
    for i, source in enumerate(sources):
        source.parent.mkdir(exist_ok=True)
        source.write_text(f'extern "C" __attribute__((visibility("default"))) int number_{i}() {{ return {i}; }}\n')
    jit.load(*sources)
    (library,) = (tmp_path / "cache").glob("op-*/op.so")
    assert [ctypes.CDLL(str(library))[f"number_{i}"]() for i in range(len(sources))] == [0, 1, 2]


@pytest.mark.builds
def test_changed_after_it_was_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", environment(tmp_path)["PATH"])
    monkeypatch.setenv("DEBUG", QUICK["DEBUG"])
    source = tmp_path / "nothing.cpp"
    source.write_text('extern "C" int nothing() { return 0; }\n')
    jit.load(source)
    jit.load(source)
    source.write_text('extern "C" __attribute__((visibility("default"))) int nothing() { return 1; }\n')
    with pytest.raises(RuntimeError, match=r"nothing.so was loaded and has been compiled again since"):
        jit.load(source)


@pytest.mark.parametrize(
    ("source", "variables", "error", "message"),
    [
        ("kernel.py", {}, ValueError, r"sources must be .cpp and .cu files, got .*kernel.py"),
        ("none.cpp", {}, FileNotFoundError, r"there is no file .*none.cpp"),
        (
            "one.cpp",
            {"CXX": "no-such-compiler"},
            jit.BuildError,
            r"there is no compiler no-such-compiler: install g\+\+",
        ),
        ("one.cpp", {"PATH": ""}, jit.BuildError, r"there is no compiler c\+\+: install g\+\+"),
        ("one.cpp", {"PATH": "/usr/bin:/bin"}, jit.BuildError, r"the build needs ninja: pip install ninja"),
        ("one.cpp", {"USE_CUDA": "yes"}, jit.BuildError, r"USE_CUDA must be 0 or 1, got 'yes'"),
    ],
)
def test_what_it_lacks(tmp_path, monkeypatch, source, variables, error, message):
    if variables.get("PATH") and shutil.which("ninja", path=variables["PATH"]):
        pytest.skip("this system has a ninja of its own")
    (tmp_path / "one.cpp").write_text("")
    for name, value in environment(tmp_path / "cache", **variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=rf"^extension_cpp.jit.load: .*{message}"):
        jit.load(tmp_path / source)


def test_the_installed_package_has_the_sources():
    assert (jit.source_folder() / "common" / "check.h").exists()
    assert Path(extension_cpp.__file__).parent.parent in jit.source_folder().parents


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
@pytest.mark.long
def test_just_in_time_under_a_cuda_torch(packages, tmp_path):
    """An example for CPU and CUDA, and what the package carries of its sources in place of its compiled operators."""
    environment = ROOT / "dist" / "env" / "cuda130"
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    cache = str(tmp_path / "cache")
    variables = {"PATH": path, "TORCH_EXTENSIONS_DIR": cache, "TORCH_CUDA_ARCH_LIST": "7.5", **QUICK}

    def run(*arguments: str, **more: str) -> str:
        env = {**os.environ, **variables, **more}
        python = environment / "bin" / "python"
        done = subprocess.run([python, *arguments], cwd="/", env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "kernels for CPU and CUDA" in run(str(ROOT / "examples" / "jit" / "load_cuda.py"))
    (installed,) = environment.glob("lib/python*/site-packages/extension_cpp")
    copy = shutil.copytree(installed, tmp_path / "copy" / "extension_cpp")
    # Of all sources one kernel file for CUDA, as they take minutes, which the package's own build has taken.
    kernels = sorted(copy.glob("csrc/*.cu"), key=lambda path: path.stat().st_size)
    for file in kernels[1:]:
        file.unlink()
    show = "import extension_cpp; print(*extension_cpp._loader.libraries.values(), extension_cpp.load_errors)"
    libraries, errors = run("-c", show, EXTENSION_CPP_JIT="1", PYTHONPATH=str(copy.parent)).strip().rsplit(" ", 1)
    assert libraries.count(cache) == 2 and "_C_cuda.so" in libraries and errors == "{}"
