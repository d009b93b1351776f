"""The benchmarks: what they measure is what they say, and a slower operator is noticed."""

import json
import statistics
import time
from dataclasses import replace

import pytest
import torch

import extension_cpp
from benchmarks import __main__ as command
from benchmarks import compare, contenders, harness, records
from benchmarks.harness import OURS, Case
from benchmarks.records import Results, ResultsError


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def case(**changes) -> Case:
    """Twice the sum of two vectors, by two contenders."""
    two = {OURS: lambda a, b: (a + b) * 2, "peer": lambda a, b: torch.add(a, b).mul_(2)}
    return replace(
        Case("op", "cpu", two, lambda: tuple(torch.randn(2, 2**16)), lambda a, b: 2 * a + 2 * b, bytes=3 * 2**18),
        **changes,
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

    def test_measures(self):
        ours, peer = harness.measure(case(rounds=3))
        assert ours["contender"] == OURS and peer["contender"] == "peer"
        assert 1e-6 < ours["median"] < 1 and ours["rounds"] == 3 and 0.01 < peer["ratio"] < 100
        assert ours["bytes"] == 3 * 2**18

    def test_a_wrong_result_is_not_timed(self):
        wrong = case(contenders={**case().contenders, "wrong": lambda a, b: a + b})
        with pytest.raises(AssertionError, match=r"op: forward on cpu: wrong is not what the reference computes"):
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
        with pytest.raises(AssertionError, match="lazy is not what"):
            harness.measure(lazy)

    @pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1), (torch.int64, 1)])
    def test_tolerances_are_those_of_the_dtype(self, dtype, error):
        ones = torch.ones(4, dtype=dtype)
        off = case(contenders={OURS: lambda: ones + error}, inputs=tuple, reference=lambda: ones)
        with pytest.raises(AssertionError):
            harness.verify(off, ())
        harness.verify(replace(off, contenders={OURS: lambda: ones + 0}), ())

    def test_every_part_of_a_result_is_compared(self):
        n = 2**20 + 5
        for i in (0, n - 1):
            off = case(inputs=tuple, reference=lambda: torch.ones(n), contenders={OURS: lambda i=i: torch.ones(n)})
            harness.verify(off, ())
            wrong = replace(off, contenders={OURS: lambda i=i: torch.ones(n).index_fill_(0, torch.tensor(i), 2)})
            with pytest.raises(AssertionError, match="is not what the reference computes"):
                harness.verify(wrong, ())
        with pytest.raises(AssertionError, match="shape"):
            harness.verify(replace(off, contenders={OURS: lambda: torch.ones(1, n)}), ())

    def test_inputs_rotate_through_more_than_the_cache(self):
        inputs = case().inputs()
        quick = case(contenders={OURS: lambda a, b: None})
        sets = harness.input_sets(quick, inputs)
        assert len({a.data_ptr() for a, _ in sets}) == len(sets)
        assert len(sets) * case().bytes > 4 * harness.cache_bytes()
        slow = case(contenders={OURS: lambda a, b: time.sleep(0.02)})
        assert len(harness.input_sets(slow, inputs)) <= 3
        seen = []
        call = harness.rotated(lambda a, b: seen.append(a.data_ptr()), sets[:3])
        for _ in range(4):
            call()
        assert seen == [a.data_ptr() for a, _ in [*sets[:3], sets[0]]]

    def test_the_short_form_has_one_thread(self):
        counts = set()
        peers = {name: lambda a, b: counts.add(torch.get_num_threads()) or (a + b) * 2 for name in (OURS, "peer")}
        torch.set_num_threads(2)
        (alone,) = harness.short_form([case(), case(short=True, contenders=peers, rounds=1)])
        assert alone.name == "forward, one thread"
        assert all(record["threads"] == 1 for record in harness.measure(alone))
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

        lacking = Case("op", "cpu", {OURS: nothing}, kind="size", timer=harness.reported, rounds=1)
        monkeypatch.setattr(command, "cases", lambda family, device: iter([lacking]))
        monkeypatch.setattr(records.Results, "save", lambda self: pytest.fail("saved"))
        assert command.main(["--op", "package", "--device", "cpu", "--no-save", "--commit", "x"]) == 0
        assert "not measured: op: size: no dist/conda: make package" in capsys.readouterr().out


class TestResults:
    def test_every_time_is_a_share_of_the_limit(self):
        ceilings = {"bytes": 100.0, "operations": {"float32": 10.0}}
        results = Results({"ceilings": ceilings}, [])
        limit = {"bytes": 50, "operations": 0, "dtype": "float32"}
        assert results.limit(limit) == 0.5
        assert results.limit({**limit, "operations": 20}) == 2
        assert results.limit({**limit, "bytes": 0}) is None

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
        assert command.main(["--compare", "nothing"]) == 1


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

    def test_the_command(self, monkeypatch, capsys):
        """Says what changed, and saves what was measured."""
        saved = []
        peers = {OURS: lambda a, b: (a + b) * 2, "peer": lambda a, b: 2 * (a + b)}
        monkeypatch.setattr(command, "cases", lambda family, device: iter([case(contenders=peers, rounds=3)]))
        ours = {"op": "op", "case": "forward", "contender": OURS}
        then = Results({"commit": "abc1234"}, [ours, record(1000, 1000, 1000)])
        monkeypatch.setattr(records, "load_at", lambda commit, family, device: then)
        monkeypatch.setattr(Results, "save", lambda self: saved.append(self.text()))
        assert command.main(["--op", "muladd", "--device", "cpu", "--threads", "1", "--compare", "abc1234"]) == 0
        printed = capsys.readouterr().out
        assert "muladd since abc1234" in printed and "slower" in printed
        (text,) = saved
        again = records.parse(text, "saved")
        assert [r["contender"] for r in again.records] == [OURS, "peer"] and again.header["ceilings"]["bytes"] > 1e8

    @pytest.mark.parametrize("slowdown", [1, 3])
    def test_the_short_form_notices_a_slowdown(self, slowdown, monkeypatch, capsys):
        """One that is planted: the work is done three times."""

        def ours(a, b):
            for _ in range(slowdown):
                result = (a + b) * 2
            return result

        def busy_seconds(call) -> float:
            """Of this process, so that the test means the same on a machine that others use."""
            start = time.process_time()
            for _ in range(50):
                call()
            return time.process_time() - start

        peer = {"peer": lambda a, b: (a + b) * 2}
        planted = case(short=True, contenders={OURS: ours, **peer}, timer=busy_seconds)
        header = {"schema": records.SCHEMA, "machine": records.machine("cpu")}
        name = {"case": "forward, one thread"}
        then = Results(header, [{"op": "op", **name, "contender": OURS}, record(1, 0.99, 1.01) | name])
        monkeypatch.setattr(command, "cases", lambda family, device: iter([planted]))
        monkeypatch.setattr(records, "load_one", lambda family, device: then)
        status = command.main(["--check", "--op", "muladd", "--device", "cpu"])
        assert status == (slowdown > 1)
        assert ("slower: op: forward, one thread: peer takes" in capsys.readouterr().out) == (slowdown > 1)
