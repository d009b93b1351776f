"""The benchmarks: they measure what they say, and a slower operator is noticed. All seconds are those of a fake clock."""

import ast
import ctypes
import json
import platform
import re
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import extension_cpp
from benchmarks import __main__ as command
from benchmarks import compare, contenders, harness, limits, load, records
from benchmarks.harness import OURS, Case, Disagreement, Grid
from benchmarks.records import Results, ResultsError
from benchmarks.report import words

CEILINGS = {"bytes": 1e9, "operations": {"float32": 1e9}, "by": {"float32": "multiply-adds"}}


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Clock:
    """Seconds that pass only where a test says so, whatever else the machine does."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, seconds: float, function=lambda a, b: (a + b) * 2):
        """The function, which takes so long."""

        def run(*inputs):
            self.now += seconds
            return function(*inputs)

        return run


@pytest.fixture
def clock() -> Clock:
    return Clock()


def quiet() -> load.Load:
    """A machine that runs nothing else: every reading is a second later, all of it ours."""
    readings = iter(range(1_000_000))
    return load.Load(lambda: (now := float(next(readings)), now, now), cpus=1)


def case(**changes) -> Case:
    """Twice the sum of two vectors, by two contenders."""
    two = {OURS: lambda a, b: (a + b) * 2, "peer": lambda a, b: torch.add(a, b).mul_(2)}
    return replace(
        Case("op", "cpu", two, lambda: tuple(torch.randn(2, 2**16)), lambda a, b: 2 * a + 2 * b, bytes=3 * 2**18),
        **changes,
    )


def grid(clock: Clock, ours: float, peer: Callable[[int, int], float], wrong: bool = False) -> Grid:
    """Of sizes 1 and 20, but not of both 20."""
    return Grid(
        "op",
        "cpu",
        torch.float32,
        ("M", "N"),
        (1, 20),
        clock.taking(ours, torch.sub if wrong else torch.add),
        ("peer", lambda m, n: clock.taking(peer(int(m), int(n)), torch.add)(m, n)),
        lambda m, n: (torch.tensor([float(m)]), torch.tensor([float(n)])),
        lambda m, n: m * n < 400,
        reason=lambda m, n: "Physics." if n > m else "",
    )


def record(ratio: float, low: float, high: float, contender: str = "peer") -> dict:
    return {"op": "op", "case": "forward", "contender": contender, "ratio": ratio, "ratio_quartiles": [low, high]}


class TestHarness:
    def test_contenders_take_turns(self):
        turns = []
        calls = {name: lambda name=name: turns.append(name) for name in "ab"}
        times = harness.alternate(calls, lambda call: call() or float(len(turns)), rounds=3)
        assert turns == list("abbaab")
        assert times == {"a": [1, 4, 5], "b": [2, 3, 6]}

    def test_medians_and_quartiles(self):
        values = [5.0, 1.0, 4.0, 2.0, 3.0]
        assert harness.quartiles(values) == (2, statistics.median(values), 4)
        assert harness.quartiles([7.0]) == (7, 7, 7)

    def test_ratios_are_those_of_a_round(self):
        """A machine that slows down moves both, and the ratio not at all."""
        ours, peer = harness.summarise(case(), {OURS: [1.0, 2.0, 4.0], "peer": [3.0, 6.0, 12.0]})
        assert (ours["median"], ours["quartiles"]) == (2, [1.5, 3]) and "ratio" not in ours
        assert (peer["median"], peer["ratio"], peer["ratio_quartiles"]) == (6, 3, [3, 3])

    @pytest.mark.parametrize(("seconds", "moved"), [(1e-4, 0), (0.02, 3 * 2**18)])
    def test_measures(self, clock, seconds, moved):
        """Calls that are short, many at a time, and calls that are long, one at a time."""
        both = {OURS: clock.taking(seconds), "peer": clock.taking(3 * seconds)}
        ours, peer = harness.measure(case(contenders=both, rounds=3, bytes=moved), clock)
        assert ours["contender"] == OURS and peer["contender"] == "peer"
        assert ours["median"] == pytest.approx(seconds) and ours["rounds"] == 3
        assert peer["ratio"] == pytest.approx(3) and ours["bytes"] == moved

    def test_a_part_is_a_limit(self, clock):
        both = {OURS: clock.taking(0.1), "peer": clock.taking(0.3)}
        found = harness.measure(case(contenders=both, part=clock.taking(0.04), bytes=0), clock)
        assert [record["contender"] for record in found] == [OURS, "peer"]
        assert [record["part"] for record in found] == pytest.approx([0.04, 0.04])
        assert found[1]["ratio"] == pytest.approx(3)

    def test_slow_cases_have_fewer_rounds(self, clock):
        for seconds, rounds in ((1e-4, 7), (0.14, 5), (2.0, 3)):
            slow = case(contenders={OURS: clock.taking(seconds), "peer": clock.taking(seconds)}, bytes=0)
            assert harness.measure(slow, clock)[0]["rounds"] == rounds, seconds

    def test_a_grid(self, clock):
        """A time of ours and of the peer for each of the sizes that fit, and the worst of them."""
        (found,) = harness.measure(grid(clock, 0.02, lambda m, n: 0.01 if n > m else 0.03), clock)
        assert found["ours"][:3] == pytest.approx([0.02] * 3) and found["contender"] == "peer"
        assert found["theirs"][:3] == pytest.approx([0.03, 0.01, 0.03])
        assert found["ours"][3] is None and found["theirs"][3] is None
        of_all = records.Map(found)
        assert of_all.ratios == pytest.approx({(1, 1): 1.5, (1, 20): 0.5, (20, 1): 1.5})
        assert of_all.below == 1 and of_all.worst == ("M 1, N 20", pytest.approx(0.5))
        assert of_all.mean == pytest.approx((1.5 * 1.5 * 0.5) ** (1 / 3))
        assert of_all.reasons == [("Physics.", [("M 1, N 20", pytest.approx(0.5))])]
        assert Results({}, [found]).cases() == {}

    def test_a_grid_of_wrong_results(self, clock):
        with pytest.raises(
            Disagreement, match=r"op: a grid of M, N, float32 on cpu, M = 1, N = 1: not what peer computes"
        ):
            harness.measure(grid(clock, 0.02, lambda m, n: 0.01, wrong=True), clock)

    def test_a_wrong_result_is_not_timed(self):
        wrong = case(contenders={**case().contenders, "wrong": lambda a, b: a + b})
        with pytest.raises(harness.Disagreement, match=r"op: forward on cpu: wrong is not what the reference computes"):
            harness.measure(wrong)

    def test_a_result_of_another_does_not_count(self):
        """Who writes nothing into `out` doesn't pass with what the reference wrote there."""

        def out(a, b, out):
            return torch.add(a, b, out=out)

        lazy = case(
            inputs=lambda: tuple(torch.randn(3, 8)),
            reference=out,
            contenders={OURS: out, "lazy": lambda a, b, out: out},
        )
        with pytest.raises(harness.Disagreement, match="lazy is not what"):
            harness.measure(lazy)

    @pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1), (torch.int64, 1)])
    def test_tolerances_are_those_of_the_dtype(self, dtype, error):
        ones = torch.ones(4, dtype=dtype)
        off = case(contenders={OURS: lambda: ones + error}, inputs=tuple, reference=lambda: ones)
        with pytest.raises(harness.Disagreement):
            harness.verify(off, ())
        harness.verify(replace(off, contenders={OURS: lambda: ones + 0}), ())

    def test_every_part_of_a_result_is_compared(self):
        n = 2**20 + 5
        for i in (0, n - 1):
            off = case(inputs=tuple, reference=lambda: torch.ones(n), contenders={OURS: lambda i=i: torch.ones(n)})
            harness.verify(off, ())
            wrong = replace(off, contenders={OURS: lambda i=i: torch.ones(n).index_fill_(0, torch.tensor(i), 2)})
            with pytest.raises(harness.Disagreement, match="is not what the reference computes"):
                harness.verify(wrong, ())
        with pytest.raises(harness.Disagreement, match="shape"):
            harness.verify(replace(off, contenders={OURS: lambda: torch.ones(1, n)}), ())

    def test_inputs_rotate_through_more_than_the_cache(self, clock, monkeypatch):
        monkeypatch.setattr(harness, "cache_bytes", lambda: 2**25)  # A machine's may need more sets than there may be.
        inputs = case().inputs()
        sets = harness.input_sets(case(contenders={OURS: clock.taking(1e-9)}), inputs, clock)
        assert len({a.data_ptr() for a, _ in sets}) == len(sets)
        assert len(sets) * case().bytes > 4 * harness.cache_bytes()
        assert len(sets) < 1_000
        assert len(harness.input_sets(case(contenders={OURS: clock.taking(0.02)}), inputs, clock)) == 3
        seen = []
        call = harness.rotated(lambda a, b: seen.append(a.data_ptr()), sets[:3])
        for _ in range(4):
            call()
        assert seen == [a.data_ptr() for a, _ in [*sets[:3], sets[0]]]

    def test_the_short_form_has_one_thread(self, clock):
        counts = set()
        counted = clock.taking(0.02, lambda a, b: counts.add(torch.get_num_threads()) or (a + b) * 2)
        peers = {OURS: counted, "peer": counted}
        torch.set_num_threads(2)
        (alone,) = harness.short_form([case(), case(short=True, contenders=peers, rounds=1)])
        assert alone.name == "forward, one thread"
        assert all(record["threads"] == 1 for record in harness.measure(alone, clock))
        assert counts == {1} and torch.get_num_threads() == 2

    def test_the_short_form_compiles_nothing_that_has_another_peer(self):
        two, compiled = case().contenders, {"compiled peer": lambda a, b: (a + b) * 2}
        only = {OURS: two[OURS], **compiled}
        forms = harness.short_form(
            [case(short=True, contenders={**two, **compiled}), case(short=True, contenders=only)]
        )
        assert [list(form.contenders) for form in forms] == [list(two), list(only)]

    def test_steps_of_training(self):
        step = contenders.backward(lambda a, b: a * b)
        a, b = (torch.randn(3, requires_grad=True) for _ in range(2))
        for _ in range(2):  # Gradients don't pile up.
            grad_a, grad_b = step(torch.ones(3), a, b)
        torch.testing.assert_close((grad_a, grad_b), (b.detach(), a.detach()))

    def test_what_is_not_there_is_said(self, capsys, monkeypatch):
        def nothing():
            raise harness.Unavailable("no dist/conda: make package")

        lacking = Case("op", "cpu", {OURS: nothing}, workload="size", timer=harness.reported, rounds=1)
        monkeypatch.setattr(command, "cases", lambda family, device: iter([lacking]))
        assert command.main(["--op", "package", "--device", "cpu", "--commit", "x"]) == 0
        assert "not measured: op: size: no dist/conda: make package" in capsys.readouterr().out

    def test_no_family_needs_another(self):
        """So that removing one breaks no other."""
        for path in Path(command.__file__).parent.glob("bench_*.py"):
            imported = [node.module or "" for node in ast.walk(ast.parse(path.read_text())) if hasattr(node, "module")]
            assert not [module for module in imported if "bench_" in module], path.name


class TestCommand:
    @pytest.fixture(autouse=True)
    def saved(self, monkeypatch) -> list[str]:
        """What was saved, which no test writes."""
        texts: list[str] = []
        monkeypatch.setattr(Results, "save", lambda self: texts.append(self.text()))
        monkeypatch.setattr(limits, "measure", lambda device, dtypes: CEILINGS)
        return texts

    @pytest.fixture
    def run(self, monkeypatch, clock):
        def run(cases: list[Case], *options: str) -> int:
            monkeypatch.setattr(command, "cases", lambda family, device: iter(cases))
            return command.main(["--op", "muladd", "--device", "cpu", "--commit", "x", *options], clock, quiet())

        return run

    def test_saves_only_when_told(self, run, clock, saved):
        usual = case(contenders={OURS: clock.taking(0.02), "peer": clock.taking(0.03)}, reason="It must.")
        assert run([usual]) == 0 and saved == []
        assert run([usual], "--save") == 0
        (text,) = saved
        again = records.parse(text, "saved")
        assert [r["contender"] for r in again.records] == [OURS, "peer"] and again.header["ceilings"] == CEILINGS
        assert again.records[1]["reason"] == "It must."

    def test_one_failure_costs_no_other_results(self, run, clock, saved, capsys):
        """A case that disagrees with its reference, and one that raises, are named at the end."""
        peer = {"peer": clock.taking(0.02)}
        good = case(contenders={OURS: clock.taking(0.02), **peer})
        wrong = replace(good, op="wrong", contenders={OURS: lambda a, b: a, **peer})
        broken = replace(good, op="broken", contenders={OURS: lambda a, b: a.no_such_method(), **peer})
        assert run([wrong, broken, good], "--save") == 1
        assert {record["op"] for record in records.parse(saved[0], "saved").records} == {"op"}
        said = " ".join(capsys.readouterr().out.split())
        assert "error: wrong: forward on cpu: extension_cpp is not what the reference computes" in said
        assert "benchmarks/bench_muladd.py allows it with Case(tolerance=...)" in said
        assert "error: broken: forward on cpu: AttributeError: 'Tensor' object has no attribute" in said
        assert said.endswith("2 cases failed and are not in them")

    def test_says_which_cells_are_behind(self, run, clock, capsys):
        times = {"fast": 2.0, "near": 0.96, "slow": 0.5, "excused": 0.6}
        found = [
            case(
                op=name,
                contenders={OURS: clock.taking(0.02), "peer": clock.taking(0.02 * ratio)},
                reason="Physics." if name == "excused" else "",
            )
            for name, ratio in times.items()
        ]
        assert run(found) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "below 0.95 of the best peer: 2 of 4 cells" in said
        lines = said.split("cells ")[1]
        slow = "slow: forward on cpu: peer takes 0.50 times as long as ours: no reason is declared"
        assert lines.replace(records.machine("cpu"), "cpu").startswith(slow)
        assert "peer takes 0.60 times as long as ours: Physics." in lines

    def test_says_what_a_grid_found(self, run, clock, capsys):
        assert run([grid(clock, 0.02, lambda m, n: 0.01 if n > m else 0.03)]) == 0
        said = " ".join(capsys.readouterr().out.split())
        counted = "op: a grid of M, N, float32 on"
        assert (
            counted in said and "1 of 3 cells below 0.95 of peer, geometric mean 1.04, worst 0.50 at M 1, N 20" in said
        )
        assert "1 cell, the worst 0.50 at M 1, N 20: Physics." in said

    def test_compares_with_a_commit(self, run, clock, monkeypatch, capsys):
        ours = {"op": "op", "case": "forward", "contender": OURS}
        then = Results({"commit": "abc1234"}, [ours, record(1000, 1000, 1000)])
        monkeypatch.setattr(records, "load_at", lambda commit, family, device: then)
        usual = case(contenders={OURS: clock.taking(0.02), "peer": clock.taking(0.02)})
        assert run([usual], "--compare", "abc1234") == 0
        printed = capsys.readouterr().out
        assert "muladd since abc1234" in printed and "slower" in printed

    @pytest.mark.parametrize("machine", ["quiet", "busy", "another of that name"])
    @pytest.mark.parametrize("slowdown", [1, 3])
    def test_the_short_form_notices_a_slowdown(self, slowdown, machine, clock, monkeypatch, capsys):
        """One that is planted, and decides nothing while other processes use the machine, or on another processor."""
        both = {OURS: clock.taking(0.02 * slowdown), "peer": clock.taking(0.02)}
        planted = case(short=True, contenders=both)
        name = {"case": "forward, one thread"}
        header = {"schema": records.SCHEMA, "machine": "the same", "ceilings": {"operations": {"float32": 500e9}}}
        rate = 100e9 if machine == "another of that name" else 400e9
        monkeypatch.setattr(limits, "multiply_adds", lambda dtype, clock: rate)
        then = Results(header, [{"op": "op", **name, "contender": OURS}, record(1, 0.99, 1.01) | name])
        monkeypatch.setattr(records, "machine", lambda device: "the same")
        monkeypatch.setattr(command, "cases", lambda family, device: iter([planted]))
        monkeypatch.setattr(records, "load_one", lambda family, device: then)
        watched = quiet()
        if machine == "busy":
            readings = iter(range(1_000_000))
            watched.read = lambda: (now := float(next(readings)), 0.3 * now, now)
        status = command.main(["--check", "--op", "muladd", "--device", "cpu"], clock, watched)
        said = " ".join(capsys.readouterr().out.split())
        assert status == (slowdown > 1 and machine == "quiet")
        assert ("slower: op: forward, one thread: peer takes" in said) == (slowdown > 1 and rate != 100e9)
        assert ("nothing is decided, as the machine is busy: this process had a CPU for 30%" in said) == (
            machine == "busy"
        )
        assert ("of one with 500 GFLOP/s in float32, where this one does 100" in said) == (rate == 100e9)


class TestLoad:
    @pytest.mark.parametrize(
        ("ours", "busy", "said"),
        [
            (1.0, 1.0, ""),
            (0.95, 1.3, ""),
            (0.5, 2.0, "this process had a CPU for 50% of the time, other processes used 75% of the machine"),
            (1.0, 2.0, "this process had a CPU for 100% of the time, other processes used 50% of the machine"),
            (0.5, 0.0, "this process had a CPU for 50% of the time, other processes used 0% of the machine"),
        ],
        ids=["alone", "nearly alone", "waits", "with a neighbour", "without /proc"],
    )
    def test_of_two_cpus(self, ours, busy, said):
        readings = iter([(0.0, 0.0, 0.0), (4.0, 4 * ours, 4 * busy)])
        watched = load.Load(lambda: next(readings), cpus=2)
        assert watched.disturbed() == ""
        with watched.watch():
            pass
        assert watched.disturbed() == said

    def test_reads_this_machine(self):
        (now, ours, busy), (later, more, busier) = load.read(), load.read()
        assert later >= now and more >= ours > 0 and busier >= busy


class TestLimits:
    def test_operations_of_the_loop(self):
        """Two for each of twelve sums of a vector, in each step."""
        library = contenders.compiled_cpp(limits.LOOP, *limits.FLAGS)
        for name, width in (("float32", 4), ("float64", 8)):
            found = getattr(library, name)(ctypes.c_int64(10), ctypes.byref(ctypes.c_double()))
            assert found % (10 * 12 * 2) == 0 and found // (10 * 12 * 2) * width in (16, 32, 64)

    @pytest.mark.skipif(platform.machine() != "x86_64", reason="other instructions")
    def test_the_compiler_leaves_none_out(self, tmp_path):
        (tmp_path / "loop.cpp").write_text(limits.LOOP)
        command = ["c++", "-O3", *limits.FLAGS, "-march=haswell", "-S", "-o", "-", "loop.cpp"]
        code = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
        assert [len(re.findall(rf"\tvfmadd\w+p{precision}\t", code)) for precision in "sd"] == [12, 12]

    def test_the_fastest_is_the_limit(self, monkeypatch):
        rates = {"float32": 4.0, "bfloat16": 0.0, "float64": 2.0}
        tiles = {"bfloat16_in_tiles": 8.0}
        monkeypatch.setattr(limits, "multiply_adds", lambda dtype, clock: (rates | tiles)[dtype])
        monkeypatch.setattr(limits, "product", lambda device, dtype, clock: {"bfloat16": 9.0}.get(dtype, 3.0))
        monkeypatch.setattr(limits, "copy", lambda device, clock: 1.0)
        found = limits.measure("cpu", rates)
        assert found["operations"] == {"bfloat16": 9, "float32": 4, "float64": 3}
        assert found["by"] == {"bfloat16": "a product", "float32": "multiply-adds", "float64": "a product"}
        tiles["bfloat16_in_tiles"] = 10.0
        assert limits.measure("cpu", ["bfloat16"])["operations"] == {"bfloat16": 10}

    def test_without_a_compiler(self, monkeypatch):
        monkeypatch.setenv("PATH", "")
        contenders.compiled_cpp.cache_clear()
        assert limits.multiply_adds.__wrapped__("float32") == 0

    def test_rates(self, clock, monkeypatch):
        monkeypatch.setattr(limits, "LARGE", {"cpu": 1000})
        monkeypatch.setattr(limits, "best", lambda device, clock, function, *inputs: 0.01)
        assert limits.copy.__wrapped__("cpu", clock) == 8 * 1000 / 0.01
        assert limits.product.__wrapped__("cpu", "float32", clock) == pytest.approx(2 * 256**3 / 0.01, rel=1e-4)

    def test_what_reached_them_is_said(self):
        """Results from before it was recorded are of a product."""
        header = {"machine": "this one", "ceilings": CEILINGS}
        new = "this one: a copy moves 1.00 GB/s, multiply-adds 1.00 GFLOP/s in float32"
        assert words.describe(Results(header, [])) == new
        old = {**header, "ceilings": {key: CEILINGS[key] for key in ("bytes", "operations")}}
        assert words.describe(Results(old, [])) == new.replace("multiply-adds", "a product")


class TestResults:
    def test_every_time_is_a_share_of_the_limit(self):
        ceilings = {"bytes": 100.0, "operations": {"float32": 10.0}}
        results = Results({"ceilings": ceilings}, [])
        limit = {"bytes": 50, "operations": 0, "dtype": "float32"}
        assert results.limit(limit) == 0.5
        assert results.limit({**limit, "operations": 20}) == 2
        assert results.limit({**limit, "bytes": 0}) is None
        assert results.limit({**limit, "part": 3.0}) == 3

    def test_provenance(self):
        header = records.header("muladd", "cpu", "abc", {})
        assert header["schema"] == records.SCHEMA and header["commit"] == "abc"
        assert header["versions"]["torch"] == torch.__version__ and header["machine"]
        assert len(header["artefacts"]["_C.abi3.so"]) == 16

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                json.dumps({"schema": records.SCHEMA - 1}),
                r"old has results of schema \d+, .* measures them anew",
            ),
            (json.dumps({"schema": records.SCHEMA + 1}), "they are of a later commit"),
            ("", "old has no benchmark results"),
            ("<<<<<<< HEAD", "old has no benchmark results"),
            ('{"date": 1}', "old has no benchmark results: KeyError"),
        ],
    )
    def test_other_schemas_and_no_results(self, text, message):
        with pytest.raises(ResultsError, match=message):
            records.parse(text, "old")

    def test_commits(self):
        if records.git("rev-parse", "HEAD") is None:
            pytest.skip("no git")
        with pytest.raises(ResultsError, match="there is no commit nothing here"):
            records.load_at("nothing", "muladd", "cpu")
        with pytest.raises(ResultsError, match="commit HEAD has no results of nothing on cpu"):
            records.load_at("HEAD", "nothing", "cpu")
        assert command.main(["--op", "matmul", "--compare", "nothing"]) == 1


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--op", "nothing"], "there is no benchmark of 'nothing'; there are families add_one, "),
            (["--device", "tpu"], "there is no device 'tpu' here, only cpu"),
            (["--device", "cuda"], "there is no device 'cuda' here, only cpu"),
        ],
    )
    def test_message(self, arguments, message, capsys):
        if torch.cuda.is_available() and "cuda" in arguments:
            pytest.skip("there is a GPU")
        with pytest.raises(SystemExit):
            command.parse(arguments)
        assert message in " ".join(capsys.readouterr().err.split())

    def test_an_operator_stands_for_its_family(self):
        assert command.parse(["--op", "mymul"]).op == ["muladd"]

    def test_every_operator_is_measured(self):
        measured = {case.op for family in command.FAMILIES for case in command.cases(family, "cpu")}
        assert measured >= set(extension_cpp.ops.__all__)


class TestComparison:
    @pytest.mark.parametrize(
        ("then", "now", "verdict"),
        [
            (record(2, 1.99, 2.01), record(2.15, 2.14, 2.16), "same"),
            (record(2, 1.99, 2.01), record(2.5, 2.49, 2.51), "faster"),
            (record(2, 1.99, 2.01), record(1.6, 1.59, 1.61), "slower"),
            (record(2, 1.6, 2.4), record(1.6, 1.59, 1.61), "same"),
        ],
    )
    def test_verdicts_are_beyond_the_noise(self, then, now, verdict):
        assert compare.change(then, now).verdict == verdict

    def test_a_busy_machine_is_noticed(self):
        ours = {"op": "op", "case": "forward", "contender": OURS}
        assert compare.noisy(Results({}, [ours, record(1, 0.7, 1.3)])) == ["op: forward"]
        assert compare.noisy(Results({}, [ours, record(1, 0.9, 1.1)])) == []

    def test_by_the_peer_that_was_best(self):
        ours = {"op": "op", "case": "forward", "contender": OURS}
        then = Results({}, [ours, record(3, 3, 3, "slow peer"), record(1.5, 1.5, 1.5, "fast peer")])
        now = Results({}, [ours, record(1, 1, 1, "slow peer"), record(1.5, 1.5, 1.5, "fast peer")])
        (change,), left_out = compare.changes(then, now)
        assert (change.peer, change.verdict, left_out) == ("fast peer", "same", [])
        _, left_out = compare.changes(then, Results({}, [{**ours, "case": "new"}]))
        assert left_out == ["op: forward: only then", "op: new: only now"]
