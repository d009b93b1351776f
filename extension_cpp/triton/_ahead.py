"""Compiles the formulas of this folder ahead of time, for _C_cuda.so: setup.py runs it where it builds for CUDA.

    python extension_cpp/triton/_ahead.py TRITON NVCC OUT LIBRARY ARCHITECTURE...

with Triton of the version TRITON writes OUT.cu, which registers the operators, and OUT.cpp and OUT.bin with the machine code.
The operators are those of LIBRARY, _C with their schemas, whose family has no .cu file and whose Triton kernel is a formula.
Which kernels there are of each, csrc/common/triton.cuh says: it chooses from them.

The same sources, Triton and nvcc give the same bytes, wherever they lie.
"""

import sys

if __name__ == "__main__":
    del sys.path[0]  # This folder: an operator's file may be called as a module of Python is.

import hashlib
import importlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TUNED = Path(__file__).with_name("tuned.json")
MOST_SHARED = 48 * 1024  # bytes, which a kernel has without asking for more
DEFAULT = {"BLOCK": 1024, "num_warps": 4}
NUMBERS = {"float": "double", "int": "int64_t", "bool": "bool"}


@dataclass(frozen=True)
class Target:
    """An architecture of the list that nvcc compiles for, and what to make for it: machine code, or PTX."""

    name: str
    ptx: bool

    @property
    def number(self) -> int:
        """90 for 9.0a."""
        return int(re.sub(r"\D", "", self.name))

    @property
    def sm(self) -> str:
        return self.name.replace(".", "")


@dataclass(frozen=True)
class Job:
    """A kernel for one architecture."""

    operator: str
    formula: int
    dtype: str
    variant: Any
    """What the launcher tells apart, but for the size."""
    target: Target
    block: int
    warps: int


@dataclass(frozen=True)
class Made:
    """What became of a job: the name of the kernel in its image, the bytes of shared memory that it needs, and the image."""

    entry: str
    shared: int
    image: bytes


@dataclass
class Ahead:
    """An operator that is compiled ahead."""

    operator: Any
    line: str
    """Its signature."""
    kernels: list[Any]
    """One for each formula."""
    dtypes: list[Any]
    tables: list[list[tuple[Job, ...]]] = field(default_factory=list)
    """Of each formula the kernels by dtype and variant, each a job for each target."""


operators: dict[str, Ahead] = {}
"""By name. The processes that compile inherit it."""


def load(library: Path) -> None:
    """Fill `operators` from the sources, with the schemas of `library`: the package is not built yet."""
    package = ModuleType("extension_cpp")
    package.__path__ = [str(ROOT / "extension_cpp")]
    sys.modules["extension_cpp"] = package
    import torch

    torch.ops.load_library(library)
    importlib.import_module("extension_cpp._loader").libraries["_C"] = library
    importlib.import_module("extension_cpp.ops")
    signature_of = importlib.import_module("extension_cpp.ops._operator").signature_in(library)
    declared = importlib.import_module("extension_cpp.ops._backends").operators
    for name, operator in sorted(declared.items()):
        line = signature_of(operator.qualified.encode())
        if line and (kernels := kernels_of(operator)):
            operators[name] = Ahead(operator, line.decode(), kernels, list(operator.signature.arguments[0].dtypes))


def kernels_of(operator: Any) -> list[Any]:
    """The kernels of an operator that the launcher can run; none of one that CUDA C++ or Triton alone can."""
    if not operator.triton or (ROOT / "csrc" / f"{operator.stem}.cu").exists():
        return []
    function = operator.triton_kernel()
    types = [str(argument.type) for argument in operator.schema.arguments]
    if not hasattr(function, "prepare") or not {*types} <= {"Tensor", "Optional[Tensor]", *NUMBERS}:
        return []
    function.prepare(operator)
    return function.kernels if function.fits() else []


def configuration(tuned: dict[str, Any], job: tuple[str, Any], target: Target, size: str) -> tuple[int, int]:
    """What tuned.json has for the GPUs of an architecture, or the default."""
    operator, dtype = job
    found = tuned.get(f"{target.number // 10}.{target.number % 10}", {}).get(operator, {})
    chosen = found.get(name_of(dtype), {}).get(size, DEFAULT)
    return chosen["BLOCK"], chosen["num_warps"]


def plan(targets: list[Target]) -> None:
    """Fill in the tables."""
    tuned = json.loads(TUNED.read_text()) if TUNED.exists() else {}
    for name, ahead in operators.items():
        for formula in range(len(ahead.kernels)):
            rows: list[tuple[Job, ...]] = []
            for dtype in ahead.dtypes:
                of_targets = []
                for target in targets:
                    variants = ahead.kernels[formula].variants(partial(configuration, tuned, (name, dtype), target))
                    of_targets.append([Job(name, formula, name_of(dtype), v, target, *how) for v, *how in variants])
                rows += zip(*of_targets)
            ahead.tables.append(rows)


def name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def compile_kernel(job: Job, cache: Path) -> Made:
    """As Triton compiles it just in time, but for what is known of the arguments: csrc/common/triton.cuh passes the rest."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import compiler
    from triton.compiler import ASTSource

    # A formula needs no instruction that only one architecture has: as nvcc's, its code then runs on the later ones of the
    # same first number, and its PTX on all later ones.
    compiler.sm_arch_from_capability = lambda capability: f"sm_{job.target.sm}"
    os.environ["TRITON_CACHE_DIR"] = str(cache / job.target.sm)  # Its keys don't know of the line above.
    kernel = operators[job.operator].kernels[job.formula]
    names, constants = kernel.plain.arg_names, kernel.constants(job.variant, job.block)
    types = kernel.types(getattr(torch, job.dtype)) | dict.fromkeys(constants, "constexpr")
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in kernel.aligned(job.variant)}
    made = triton.compile(
        ASTSource(kernel.plain, types, constants, aligned),
        target=GPUTarget("cuda", job.target.number, 32),
        options={"num_warps": job.warps, "enable_fp_fusion": True},
    )
    meta, ptx = made.metadata, made.asm["ptx"]
    parameters = ptx[ptx.index(".entry") :].partition(")")[0].count(".param ")
    if parameters > len(names) - len(constants) + 2:
        raise RuntimeError(
            f"{job.operator}: this Triton's kernels have parameters that csrc/common/triton.cuh doesn't know"
        )
    if meta.num_warps != job.warps or meta.shared > MOST_SHARED or meta.global_scratch_size:
        raise RuntimeError(f"{job.operator}: its formula needs memory that csrc/common/triton.cuh doesn't give it")
    return Made(meta.name, meta.shared, packed(job.target, ptx.encode() if job.target.ptx else made.asm["cubin"]))


def packed(target: Target, code: bytes) -> bytes:
    """Compressed, as the driver reads it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "code").write_bytes(code)
        image = f"--image3=kind={'ptx' if target.ptx else 'elf'},sm={target.sm},file=code"
        program = Path(os.environ["TRITON_PTXAS_PATH"]).with_name("fatbinary")
        subprocess.run([program, "--64", "--create=image", "--compress-mode=size", image], cwd=folder, check=True)
        return Path(folder, "image").read_bytes()


def compile_all(cache: Path) -> dict[Job, Made]:
    every = dict.fromkeys(
        job for ahead in operators.values() for table in ahead.tables for jobs in table for job in jobs
    )
    workers = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        return dict(zip(every, pool.map(partial(compile_kernel, cache=cache), every, chunksize=4)))


def write(out: Path, version: str, made: dict[Job, Made]) -> None:
    content, places = bytearray(), {}
    for job, each in made.items():
        content += bytes(-len(content) % 16)
        places[job] = len(content)
        content += each.image
    common = os.path.relpath(ROOT / "csrc" / "common" / "triton.cuh", out.parent)
    lines = [
        f"// Written by extension_cpp/triton/_ahead.py with Triton {version}.",
        "#if !defined(__CUDA_ARCH__)  // nvcc has nothing to compile for a device here.",
        f'#include "{common}"',
        "",
        "namespace extension_cpp::triton {",
        "namespace {",
        "",
    ]
    kernels: dict[tuple[Job, ...], str] = {}
    for jobs in (jobs for ahead in operators.values() for table in ahead.tables for jobs in table):
        if jobs not in kernels:
            kernels[jobs] = f"kernel{len(kernels)}"
            lines += [
                f"Image images_of_{kernels[jobs]}[] = {{",
                *(f"    {image_line(job, made[job], places[job])}," for job in jobs),
                "};",
                f"Kernel {kernels[jobs]}(images_of_{kernels[jobs]});",
            ]
    for number, ahead in enumerate(operators.values()):
        lines += operator_lines(number, ahead, kernels)
    lines += [
        "",
        "}  // namespace",
        "",
        "EXTENSION_CPP_REGISTER(m) {",
        *(f"  m.add<&call{number}>(op{number});" for number in range(len(operators))),
        "}",
        "",
        "}  // namespace extension_cpp::triton",
        "",
        "// The architectures, and the operators.",
        'extern "C" __attribute__((visibility("default"))) const char* extension_cpp_compiled() {',
        f'  return EXTENSION_CPP_BUILT_FOR "{"".join(f" {name}" for name in operators)}";',
        "}",
        "#endif",
    ]
    update(out.with_suffix(".bin"), bytes(content))
    update(out.with_suffix(".cu"), "\n".join([*lines, ""]).encode())
    # With the hash ninja sees what is new.
    update(
        out.with_suffix(".cpp"),
        f"""// Written by extension_cpp/triton/_ahead.py. SHA-256: {hashlib.sha256(content).hexdigest()}
asm(R"(
.section .rodata
.balign 16
.globl extension_cpp_triton_images
.hidden extension_cpp_triton_images
extension_cpp_triton_images:
.incbin "{out.with_suffix(".bin").as_posix()}"
.previous
)");
""".encode(),
    )


def update(file: Path, content: bytes) -> None:
    """Not a file that is as it would be: nothing that is made of it is then made again."""
    if not file.exists() or file.read_bytes() != content:
        file.write_bytes(content)


def image_line(job: Job, made: Made, place: int) -> str:
    exact, ptx = (str(each).lower() for each in (job.target.name.endswith("a"), job.target.ptx))
    threads = 32 * job.warps
    return f'{{"{made.entry}", {job.target.number}, {exact}, {ptx}, {place}, {job.block}, {threads}, {made.shared}}}'


def operator_lines(number: int, ahead: Ahead, kernels: dict[tuple[Job, ...], str]) -> Iterator[str]:
    """The C++ of one operator: its formulas, and the function that is registered."""
    operator, arguments = ahead.operator, ahead.operator.schema.arguments
    schema = str(operator.schema).partition("::")[2]
    yield from (
        "",
        f"// {operator.name}",
        f"const Operator op{number}({json.dumps(schema)}, {json.dumps(ahead.line)});",
    )
    for formula, table in enumerate(ahead.tables):
        yield f"const Row rows{number}_{formula}[] = {{"
        width = len(table) // len(ahead.dtypes)
        for i, dtype in enumerate(ahead.dtypes):
            row = ", ".join(f"&{kernels[jobs]}" for jobs in table[i * width : (i + 1) * width])
            yield f'    {{dtypes::find("{name_of(dtype)}"), {dtype.itemsize}, {{{row}}}}},'
        yield "};"
    optional = [i for i in operator.tensors if str(arguments[i].type).startswith("Optional")]
    parameters = []
    for i, argument in enumerate(arguments):
        kind = NUMBERS.get(str(argument.type), "const Tensor&")
        parameters.append(f"{'const std::optional<Tensor>&' if i in optional else kind} {argument.name}")
    results = len(operator.schema.returns)
    returned = ("void", "Tensor")[results] if results < 2 else f"std::tuple<{', '.join(['Tensor'] * results)}>"
    yield f"{returned} call{number}({', '.join(parameters)}) {{"
    given = (f"{arguments[i].name} ? &*{arguments[i].name} : nullptr" for i in optional)
    tensors = [next(given) if i in optional else f"&{arguments[i].name}" for i in operator.tensors]
    # Of all numbers, of which it takes those that it needs.
    sizes = ", ".join(f'{{"{name}", {name}}}' for name in operator.signature.numbers)
    yield f"  const Call<{len(tensors)}> call(op{number}, {{{', '.join(tensors)}}}, {{{sizes}}});"
    lacking = ""
    for formula, kernel in enumerate(ahead.kernels):
        # What is read as an int64 has its bits.
        read = {"number": "static_cast<double>({})", "whole": "std::bit_cast<double>(static_cast<int64_t>({}))"}
        numbers = ", ".join(read[how].format(arguments[i].name) for i, how in kernel.numbers_at.items())
        if host := getattr(kernel, "host", ""):
            yield f"  return {host}(call, rows{number}_{formula}, std::array<double, {len(kernel.numbers_at)}>{{{numbers}}});"
            continue
        inputs = ", ".join(str(operator.tensors.index(i)) for i in kernel.inputs_at)
        shape = f"{len(kernel.inputs_at)}, {len(kernel.numbers_at)}"
        what = f"call, rows{number}_{formula}, {{{inputs}}}, {{{numbers}}}"
        if operator.written:
            line = f"write<{shape}>({operator.tensors.index(operator.written[0])}, {what})"
        else:
            line = f"compute<{results}, {shape}>({what})"
        needed = [arguments[i].name for i in kernel.inputs_at if i in optional]
        condition = f"if ({' && '.join(needed)}) " if needed else ""
        yield f"  {condition}return {line};"
        lacking = needed[0] if needed else ""
    if lacking:
        yield f'  fail(op{number}.name(), "{lacking} must be a tensor, got None");'
    yield "}"


def main() -> None:
    version, nvcc, out, library, *architectures = sys.argv[1:]
    for name in ("EXTENSION_CPP_BACKEND", "EXTENSION_CPP_JIT", "TRITON_INTERPRET"):
        os.environ.pop(name, None)
    # nvcc's own: a driver that runs nvcc's machine code runs this too. No line numbers: they come with the paths of files.
    ptxas = str(Path(nvcc).with_name("ptxas"))
    os.environ |= {"TRITON_PTXAS_PATH": ptxas, "TRITON_PTXAS_BLACKWELL_PATH": ptxas, "TRITON_DISABLE_LINE_INFO": "1"}
    load(Path(library).resolve())
    plan(
        [
            Target(name.removesuffix("+PTX"), ptx)
            for ptx in (False, True)
            for name in architectures
            if not ptx or "+" in name
        ]
    )
    write(Path(out), version, compile_all(Path(f"{out}-cache").resolve()))


if __name__ == "__main__":
    main()
