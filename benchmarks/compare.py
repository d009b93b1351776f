"""Whether the operators became faster or slower: by their ratio to a peer in the same run, never by absolute time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace

from rich.table import Table

from benchmarks import harness
from benchmarks.harness import ROUNDS, Case, Clock
from benchmarks.load import Load
from benchmarks.records import Results, best_peer

FLOOR = 0.1
"""The least noise that is assumed: what a ratio moves by from one process to the next."""
SHORT_FLOOR = {True: 0.5, False: 1.0}
"""The same for the short form, on the machine of the committed results and on another: a busy neighbour on the same
processor slows down arithmetic more than it does Python, so that ratios of unlike contenders move by a third."""
ATTEMPTS = 3
NOISY = 0.5


@dataclass
class Change:
    """How many times longer than ours a peer takes, then and now."""

    op: str
    case: str
    peer: str
    then: float
    now: float
    noise: float
    """By how much of it a ratio may move without meaning anything."""

    @property
    def verdict(self) -> str:
        if self.now > self.then * (1 + self.noise):
            return "faster"
        return "slower" if self.now * (1 + self.noise) < self.then else "same"

    def __str__(self) -> str:
        return (
            f"{self.op}: {self.case}: {self.peer} takes {self.now:.2f} times as long, "
            f"{self.then:.2f} in the committed results, noise {self.noise:.0%}"
        )


def spread(record: dict) -> float:
    low, high = record["ratio_quartiles"]
    return (high - low) / record["ratio"]


def noisy(results: Results) -> list[str]:
    """The cases that another process disturbed: their ratio to the best peer is too uncertain to compare with."""
    cases = results.cases()
    return [": ".join(key) for key, case in cases.items() if (best := best_peer(case)) and spread(best) > NOISY]


def change(then: dict, now: dict) -> Change:
    noise = max(FLOOR, spread(then) + spread(now))
    return Change(then["op"], then["case"], then["contender"], then["ratio"], now["ratio"], noise)


def changes(then: Results, now: Results) -> tuple[list[Change], list[str]]:
    """A change a case, by the peer that was best then; and what can't be compared, with the reason."""
    found, left_out = [], []
    earlier, later = then.cases(), now.cases()
    for key in {**earlier, **later}:
        title = ": ".join(key)
        if key not in earlier or key not in later:
            left_out.append(f"{title}: only {'now' if key in later else 'then'}")
        elif (best := best_peer(earlier[key])) is None:
            left_out.append(f"{title}: it has no peer")
        elif match := [record for record in later[key][1:] if record["contender"] == best["contender"]]:
            found.append(change(best, match[0]))
        else:
            left_out.append(f"{title}: {best['contender']} was not measured now")
    return found, left_out


def with_best_peer(case: Case, committed: list[dict], rounds: int, floor: float, clock: Clock) -> Change | None:
    """One case of the short form compared with one peer; None where the committed records or the case have none."""
    peer = best_peer([{}, *(peer for peer in committed if peer["contender"] in case.contenders)])
    if peer is None:
        return None
    ours = next(iter(case.contenders))
    pair = {name: case.contenders[name] for name in (ours, peer["contender"])}
    mine, now = harness.measure(replace(case, contenders=pair, rounds=rounds), clock)
    # Where other processes are busy, the best rounds of both are those that they didn't disturb.
    ratio = max(now["ratio"], now["best"] / mine["best"])
    noise = max(floor, spread(peer), spread(now))
    return Change(case.op, case.name, peer["contender"], peer["ratio"], ratio, noise)


def check(
    cases: Iterable[Case], then: Results, same_machine: bool, load: Load, clock: Clock = time.perf_counter
) -> list[Change]:
    """Measure the short form's cases. What seems slower is measured again, after the others and for longer."""
    committed = then.cases()
    found: dict[str, Change] = {}
    pending = list(harness.short_form(cases))
    for attempt in range(ATTEMPTS):
        slower = []
        for case in pending:
            peers = committed.get((case.op, case.name), [{}])[1:]
            # What a GPU does is timed on the GPU.
            with load.watch() if case.device == "cpu" else nullcontext():
                result = with_best_peer(case, peers, ROUNDS * 2**attempt, SHORT_FLOOR[same_machine], clock)
            if result:
                found[f"{case.op}: {case.name}"] = result
                slower += [case] if result.verdict == "slower" else []
        pending = slower
    return list(found.values())


def table(title: str, found: Iterable[Change]) -> Table:
    """A row a case, what changed most first."""
    shown = Table(title=title, title_justify="left")
    for column in ("operator", "case", "peer"):
        shown.add_column(column)
    for column in ("then", "now", "change", "noise"):
        shown.add_column(column, justify="right")
    shown.add_column("verdict")
    colours = {"faster": "green", "slower": "red", "same": "dim"}
    for c in sorted(found, key=lambda c: (c.verdict == "same", c.now / c.then)):
        numbers = f"{c.then:.2f}", f"{c.now:.2f}", f"{c.now / c.then - 1:+.0%}", f"± {c.noise:.0%}"
        shown.add_row(c.op, c.case, c.peer, *numbers, f"[{colours[c.verdict]}]{c.verdict}")
    return shown
