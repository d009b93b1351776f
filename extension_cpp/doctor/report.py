"""Prints what is installed and what is wrong, for people and as JSON."""

import argparse
import json
import shutil
import sys
import textwrap
from dataclasses import asdict

from extension_cpp.doctor.facts import Facts, gather
from extension_cpp.doctor.findings import Finding, cuda_version, diagnose
from extension_cpp.doctor.libraries import Library

try:
    from rich.console import Console
    from rich.text import Text
except ImportError:  # The same words without colors.
    Console = None  # type: ignore[assignment,misc]

VECTORS = {
    "baseline": "128 bits",
    "avx2": "256 bits (AVX2)",
    "avx512": "512 bits (AVX-512)",
    "avx512_bf16": "512 bits (AVX-512, bfloat16)",
    "amx": "512 bits (AVX-512), tiles of bfloat16 (AMX)",
}
COLORS = {"native": "green", "triton (compiled)": "green", "triton": "yellow", "reference": "red"}


def say(*parts: tuple[str, str]) -> None:
    """Print a line of texts in their styles. The line isn't wrapped here, so that a command can be copied as a whole."""
    if Console is None:
        print("".join(text for text, _ in parts).rstrip())
    else:
        Console(soft_wrap=True, highlight=False).print(Text.assemble(*parts))


def show(title: str, rows: list[tuple[str, ...]], style: str = "bold") -> None:
    """Print a title and aligned rows."""
    say((title, style))
    widths = [max(map(len, column)) for column in zip(*rows)]
    widths[-1] = 0
    for name, *cells in rows:
        parts = [(f"  {name:{widths[0]}}", "cyan")]
        say(*parts, *((f"  {cell:{width}}", COLORS.get(cell, "")) for cell, width in zip(cells, widths[1:])))
    say()


def wrapped(text: str, indent: int) -> str:
    """Text wrapped to the width of the terminal, if it is printed to one; lines after the first are indented."""
    if not sys.stdout.isatty():
        return text
    width = max(shutil.get_terminal_size().columns - indent, 40)
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * indent}".join(lines)


def variant(facts: Facts) -> str:
    library = facts.library("_C_cuda")
    return f"CUDA {cuda_version(library.cuda)}" if library and library.cuda else "CUDA" if library else "CPU"


def built_for(library: Library | None) -> str:
    return ", ".join(library.architectures) if library and library.architectures else "none: built for CPU only"


def report(facts: Facts, findings: list[Finding]) -> None:
    torch, library = facts.torch, facts.library("_C_cuda")
    driver = "none" if facts.driver is None else f"supports CUDA {cuda_version(facts.driver)}"
    runtime = [f"{cuda_version(library.cuda)} in the package"] if library and library.cuda else []
    runtime += [f"{torch.cuda} in torch"] if torch and torch.cuda else []
    threads = facts.probe.get("threads")
    rows: list[tuple[str, ...]] = [
        ("version", facts.version),
        ("variant", variant(facts)),
        ("from", facts.origin.text),
        ("folder", str(facts.package)),
        ("torch", f"{torch.version} in {torch.folder}" if torch else "not installed"),
        ("CUDA runtime", ", ".join(runtime) or "none"),
        ("CUDA driver", f"{facts.driver_name} {driver}".strip()),
        ("GPUs", ", ".join(f"{gpu.name} ({gpu.arch})" for gpu in facts.gpus) or "none"),
        ("architectures", built_for(library)),
        ("threads", f"{threads or 'unknown'} of {facts.cpus} CPUs"),
        ("vectors", VECTORS.get(facts.simd, "unknown")),
    ]
    if compat := [name for name, error in facts.probe.get("compat", {}).items() if not error]:
        rows.append(("compat", f"{', '.join(compat)} (EXTENSION_CPP_COMPAT)"))
    show("extension_cpp", rows)
    if backends := facts.probe.get("backends", {}):
        device_types = list(dict.fromkeys(device_type for used in backends.values() for device_type in used))
        table = [
            (name, *(used.get(device_type, "none") for device_type in device_types)) for name, used in backends.items()
        ]
        show("operators", [("", *device_types), *table])
    if findings:
        things = "1 thing" if len(findings) == 1 else f"{len(findings)} things"
        say((f"{things} to fix: {sys.executable} -m extension_cpp doctor", "bold red"))
    else:
        say(("nothing to fix", "bold green"))


def doctor(facts: Facts, findings: list[Finding]) -> None:
    for number, finding in enumerate(findings, 1):
        rows: list[tuple[str, ...]] = [("seen by", wrapped(finding.how, 11)), ("fix", finding.fix)]
        show(f"{number}. {finding.what}", rows, "bold red")
    for what in facts.unread:
        say((f"not looked at: {what}", "yellow"))
    if not findings:
        say((f"nothing wrong: extension_cpp {facts.version}, {variant(facts)}, in {facts.package}", "bold green"))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m extension_cpp",
        description="What is installed and which backends are used; with `doctor`, what is wrong and what fixes it.",
    )
    commands = parser.add_subparsers(dest="command", metavar="doctor")
    command = commands.add_parser(
        "doctor", help="what is wrong or slower than it could be; exits with 1 if anything is"
    )
    command.add_argument("--json", action="store_true", help="findings and facts as JSON")
    options = parser.parse_args()
    facts = gather()
    findings = diagnose(facts)
    if options.command is None:
        report(facts, findings)
        return 0
    if options.json:
        said = {"findings": [asdict(f) for f in findings], "unread": facts.unread, "facts": asdict(facts)}
        print(json.dumps(said, indent=1, default=str))
    else:
        doctor(facts, findings)
    return 1 if findings else 0
