"""`python -m extension_cpp`: what is installed and what serves; `doctor`: what is wrong, and what mends it.

Works where the package can't be imported, and where torch, rich or pyelftools are missing.
"""

import argparse
import json
import shutil
import sys
import textwrap

from extension_cpp import _doctor
from extension_cpp._facts import Facts, gather
from extension_cpp._libraries import Library

try:
    from rich.console import Console
    from rich.text import Text
except ImportError:  # The same words, without colours.
    Console = None  # type: ignore[assignment,misc]

VECTORS = {"baseline": "128 bits", "avx2": "256 bits (AVX2)", "avx512": "512 bits (AVX-512)"}
COLOURS = {"native": "green", "triton": "yellow", "reference": "red"}


def say(*parts: tuple[str, str]) -> None:
    """A line of texts in their styles. Never broken: a terminal does that itself, and then a command can be copied."""
    if Console is None:
        print("".join(text for text, _ in parts).rstrip())
    else:
        Console(soft_wrap=True, highlight=False).print(Text.assemble(*parts))


def show(title: str, rows: list[tuple[str, ...]], style: str = "bold") -> None:
    """A title and aligned rows."""
    say((title, style))
    widths = [max(map(len, column)) for column in zip(*rows)]
    widths[-1] = 0
    for name, *cells in rows:
        parts = [(f"  {name:{widths[0]}}", "cyan")]
        say(*parts, *((f"  {cell:{width}}", COLOURS.get(cell, "")) for cell, width in zip(cells, widths[1:])))
    say()


def wrapped(text: str, indent: int) -> str:
    """Broken to the width of a terminal, if that is where it goes, with lines that begin below its own beginning."""
    if not sys.stdout.isatty():
        return text
    width = max(shutil.get_terminal_size().columns - indent, 40)
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * indent}".join(lines)


def variant(facts: Facts) -> str:
    library = facts.library("_C_cuda")
    return f"CUDA {_doctor.cuda_version(library.cuda)}" if library and library.cuda else "CUDA" if library else "CPU"


def built_for(library: Library | None) -> str:
    return ", ".join(library.architectures) if library and library.architectures else "none: built for CPU only"


def report(facts: Facts, findings: list[_doctor.Finding]) -> None:
    torch, library = facts.torch, facts.library("_C_cuda")
    driver = "none" if facts.driver is None else f"serves CUDA {_doctor.cuda_version(facts.driver)}"
    runtime = [f"{_doctor.cuda_version(library.cuda)} in the package"] if library and library.cuda else []
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
        (
            "vectors",
            VECTORS.get(facts.simd, "unknown"),
        ),
    ]
    show("extension_cpp", rows)
    if served := facts.probe.get("backends", {}):
        kinds = list(dict.fromkeys(kind for by_kind in served.values() for kind in by_kind))
        table = [(name, *(by_kind.get(kind, "none") for kind in kinds)) for name, by_kind in served.items()]
        show("operators", [("", *kinds), *table])
    if findings:
        things = "1 thing" if len(findings) == 1 else f"{len(findings)} things"
        say((f"{things} to mend: {sys.executable} -m extension_cpp doctor", "bold red"))
    else:
        say(("nothing to mend", "bold green"))


def doctor(facts: Facts, findings: list[_doctor.Finding]) -> None:
    for number, finding in enumerate(findings, 1):
        rows: list[tuple[str, ...]] = [("seen by", wrapped(finding.how, 11)), ("mend", finding.mend)]
        show(f"{number}. {finding.what}", rows, "bold red")
    for what in facts.unread:
        say((f"not looked at: {what}", "yellow"))
    if not findings:
        say((f"nothing wrong: extension_cpp {facts.version}, {variant(facts)}, in {facts.package}", "bold green"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m extension_cpp", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    commands = parser.add_subparsers(dest="command", metavar="doctor")
    command = commands.add_parser(
        "doctor", help="what is not as fast or as native as it could be; exits with 1 if anything"
    )
    command.add_argument("--json", action="store_true", help="findings and facts for machines")
    options = parser.parse_args()
    facts = gather()
    findings = _doctor.diagnose(facts)
    if options.command is None:
        report(facts, findings)
        return 0
    if options.json:
        print(json.dumps(_doctor.report(facts, findings), indent=1, default=str))
    else:
        doctor(facts, findings)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
