"""`make bench`: times every operator that has a benchmark, on the devices present, and commits to benchmarks/results/.

make bench BENCH="--op muladd --device cpu"   one family, one device
make bench BENCH="--no-save"                  look only
"""

import argparse
import importlib
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import harness

FAMILIES = sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=FAMILIES, action="append", help="a family; all without it")
    parser.add_argument("--device", choices=("cpu", "cuda"), action="append", help="a device; all present without it")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--no-save", action="store_true", help="print, but leave the committed results alone")
    options = parser.parse_args()
    missing = [device for device in options.device or () if device not in DEVICES]
    if missing:
        parser.error(f"there is no {missing[0]} device here, only {', '.join(DEVICES)}")
    torch.set_num_threads(options.threads)
    console = Console(width=None if Console().is_terminal else 150)
    for family in options.op or FAMILIES:
        bench = importlib.import_module(f"benchmarks.bench_{family}")
        for device in options.device or DEVICES:
            cases = list(bench.cases(device))
            if cases:
                harness.run(family, device, cases, not options.no_save, console)


if __name__ == "__main__":
    main()
