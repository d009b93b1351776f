"""torchvision's nms and batched_nms by our kernels: torchvision's results, and no trace of it afterwards."""

import os
import threading
from importlib import metadata
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import python
from torch import Tensor

import extension_cpp
from extension_cpp.compat.torchvision import install, uninstall
from extension_cpp.doctor import findings, report
from extension_cpp.doctor.facts import Facts
from extension_cpp.ops._operator import reference_of
from extension_cpp.testing import DEVICES

try:
    import torchvision

    torch.ops.torchvision.nms.default  # noqa: B018
except Exception as error:
    reason = "torchvision is not installed" if isinstance(error, ImportError) else "torchvision is for another torch"
    pytest.skip(reason, allow_module_level=True)

from torchvision import ops

NAME = "torchvision::nms"
NAN, INF = float("nan"), float("inf")


def random_boxes(n: int, device: str, dtype: torch.dtype = torch.float32, classes: int = 5) -> tuple[Tensor, ...]:
    """Sixteenths, whose products are exact: torchvision on CUDA fuses them with sums. Boxes are equal or inverted; scores tie
    on the CPU, where torchvision says in which order these come."""
    generator = torch.Generator().manual_seed(n)
    low = torch.randint(0, 100, (n, 2), generator=generator) / 16
    side = torch.randint(-2, 40, (n, 2), generator=generator) / 16
    scores = torch.randperm(n, generator=generator) // (2 if device == "cpu" else 1)
    idxs = torch.randint(0, classes, (n,), generator=generator)
    boxes = torch.cat([low, low + side], 1)
    return boxes.to(device, dtype), scores.to(device, dtype), idxs.to(device)


def barely_overlapping(n: int, iou_threshold: float, seed: int) -> tuple[Tensor, Tensor]:
    """Boxes of which the last has an IoU with the first that is a little above the threshold."""
    generator = torch.Generator().manual_seed(seed)
    low = torch.rand(n, 2, generator=generator) * 100
    boxes = torch.cat([low, low + torch.rand(n, 2, generator=generator) * 100], 1)
    boxes[-1] = boxes[0]
    boxes[-1, 2] += (boxes[0, 2] - boxes[0, 0]) * (1 / (iou_threshold + 1e-5) - 1)
    return boxes, torch.rand(n, generator=generator)


def by_definition(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """By torchvision's own IoU, box by box."""
    rest, keep = scores.argsort(descending=True, stable=True), []
    while len(rest):
        keep.append(rest[0])
        rest = rest[1:][ops.box_iou(boxes[rest[:1]], boxes[rest[1:]])[0] <= iou_threshold]
    return torch.stack(keep)


def ours_in(call) -> set[str]:
    """Which of our operators run in a call, as a profile shows them."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:  # Without CUDA's own functions.
        call()
    return {event.name for event in profile.events() if event.name.startswith("extension_cpp::")}


def state() -> tuple:
    """All that an installation changes."""
    functions = {name: value for name, value in vars(ops.boxes).items() if callable(value)}
    registered = {name for name in torch.library._impls if name.startswith("torchvision/")}
    return torch._C._dispatch_dump(NAME), functions, vars(ops).copy(), extension_cpp.backends(), registered


@pytest.fixture(autouse=True)
def nothing_stays():
    before = state()
    yield
    uninstall()
    assert state() == before


@pytest.mark.parametrize("device", DEVICES)
class TestResults:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("n", [0, 1, 7, 300, 1500])
    def test_nms(self, device, dtype, n):
        """Also of strided tensors."""
        boxes, scores, _ = random_boxes(n, device, dtype)
        wide = torch.zeros(n, 9, device=device, dtype=dtype)
        wide[:, 1::2] = boxes
        rounded = [1 / 3] if device == "cpu" else []  # torchvision on CUDA rounds a threshold to float32.
        for iou_threshold in (0.5, 0.0, 0.25, 1.0, 2.0, *rounded):
            expected = ops.nms(boxes, scores, iou_threshold)
            with install():
                assert torch.equal(ops.nms(boxes, scores, iou_threshold), expected)
                assert torch.equal(ops.nms(wide[:, 1::2], scores, iou_threshold), expected)

    @pytest.mark.parametrize("n", [0, 1, 7, 300, 1500])
    def test_batched_nms(self, device, n):
        """1,500 boxes are more than torchvision moves apart on the CPU."""
        boxes, scores, idxs = random_boxes(n, device)
        scores = torch.randperm(n, generator=torch.Generator().manual_seed(n)).to(scores)  # In another order if equal.
        expected = ops.batched_nms(boxes, scores, idxs, 0.5)
        with install():
            assert torch.equal(ops.batched_nms(boxes, scores, idxs, 0.5), expected)
            # A name that was imported before is led there too, and both ways agree.
            assert torch.equal(ops.boxes._batched_nms_vanilla(boxes, scores, idxs, 0.5), expected)
            assert torch.equal(ops.boxes._batched_nms_coordinate_trick(boxes, scores, idxs, 0.5), expected)

    @pytest.mark.parametrize("iou_threshold", [0.2, 0.5, 0.8])
    @pytest.mark.parametrize("seed", range(5))
    def test_barely_overlapping(self, device, iou_threshold, seed):
        boxes, scores = barely_overlapping(1000, iou_threshold, seed)
        expected = by_definition(boxes, scores, iou_threshold)
        with install():
            assert torch.equal(ops.nms(boxes.to(device), scores.to(device), iou_threshold).cpu(), expected)

    def test_classes_do_not_meet(self, device):
        """Where torchvision moves classes apart: below zero not far enough, and far off by less than a number has room."""
        boxes = torch.tensor([[-90.0, -90, -80, -80], [-79, -79, -69, -69], [0, 0, 1e-3, 1e-3]], device=device)
        far = boxes[:2] + 1e8
        scores, idxs = torch.tensor([0.9, 0.8, 0.7], device=device), torch.tensor([0, 1, 2], device=device)
        for moved in (boxes, torch.cat([far, boxes[2:]])):
            expected = reference_of(extension_cpp.batched_nms)(moved, scores, idxs, 0.5)
            with install():
                assert torch.equal(ops.batched_nms(moved, scores, idxs, 0.5), expected)

    def test_runs_ours(self, device):
        boxes, scores, idxs = random_boxes(300, device)
        assert not ours_in(lambda: (ops.nms(boxes, scores, 0.5), ops.batched_nms(boxes, scores, idxs, 0.5)))
        with install():
            assert ours_in(lambda: ops.nms(boxes, scores, 0.5)) == {"extension_cpp::nms"}
            assert ours_in(lambda: ops.batched_nms(boxes, scores, idxs, 0.5)) == {"extension_cpp::batched_nms"}
            assert extension_cpp.backends()[NAME][device] == "native"

    def test_left_to_torchvision(self, device):
        """With its results and its errors."""
        boxes, scores, idxs = random_boxes(30, device)
        calls = [
            lambda: ops.nms(boxes[0], scores, 0.5),
            lambda: ops.nms(boxes[:, :3], scores, 0.5),
            lambda: ops.nms(boxes, scores[:3], 0.5),
            lambda: ops.nms(boxes, scores[:, None], 0.5),
            lambda: ops.nms(boxes.int(), scores.int(), 0.5),
            lambda: ops.nms(boxes.bfloat16(), scores.bfloat16(), 0.5),
            lambda: ops.nms(boxes.to("meta"), scores, 0.5),
            lambda: ops.batched_nms(torch.empty(0, dtype=torch.int64, device=device), None, None, None),
        ]
        # torchvision's batched_nms calls its nms.
        batched = [
            lambda: ops.batched_nms(boxes, scores, idxs[:3], 0.5),
            lambda: ops.batched_nms(boxes, scores, idxs.float(), 0.5),
            lambda: ops.batched_nms(boxes, scores, idxs == 0, 0.5),
        ]
        if device == "cpu":
            quantized = [torch.quantize_per_tensor(t.abs() * 10, 2.0, 10, torch.quint8) for t in (boxes, scores)]
            calls += [
                lambda: ops.nms(*quantized, 0.5),
                lambda: ops.nms(boxes.half(), scores.half(), 0.5),
                lambda: ops.nms(boxes, scores.double(), 0.5),
            ]

        def outcome(call):
            try:
                result = call()
                return result.shape if result.is_meta else result.tolist()
            except Exception as error:
                return type(error), str(error).split("\n")[0]

        expected = [outcome(call) for call in calls + batched]
        assert [type(result) for result in expected].count(list) >= 3
        with install():
            assert [outcome(call) for call in calls + batched] == expected
            assert not ours_in(lambda: [outcome(call) for call in calls])
            assert ours_in(lambda: [outcome(call) for call in batched]) == {"extension_cpp::nms"}

    def test_half(self, device):
        """On the CPU torchvision has none, except under autocast."""
        boxes, scores, _ = random_boxes(300, device)  # Exact in float16.
        expected = ops.nms(boxes, scores, 0.5)
        with install():
            if device == "cuda":
                assert torch.equal(ops.nms(boxes.half(), scores.half(), 0.5), expected)
            with torch.autocast(device, torch.bfloat16):
                assert torch.equal(ops.nms(boxes.half(), scores.half(), 0.5), expected)
                assert ours_in(lambda: ops.nms(boxes.half(), scores.half(), 0.5)) == {"extension_cpp::nms"}

    def test_gradients(self, device):
        """The boxes may need one; indices have none."""
        boxes, scores, idxs = random_boxes(30, device)
        boxes.requires_grad_()
        with install():
            for keep in (ops.nms(boxes, scores, 0.5), ops.batched_nms(boxes, scores, idxs, 0.5)):
                assert not keep.requires_grad
                (grad,) = torch.autograd.grad(boxes[keep].sum(), boxes)
                assert torch.equal(grad.sum(1).nonzero().squeeze(1), keep.sort().values)

    def test_opcheck(self, device):
        with install():
            torch.library.opcheck(torch.ops.torchvision.nms, (*random_boxes(30, device)[:2], 0.5))


@given(
    st.lists(st.tuples(*[st.sampled_from([0.0, -0.0, 1, 2, 2.5, 4, -3, NAN, INF, -INF])] * 5), max_size=12),
    st.sampled_from([0.5, 0.0, 0.25, 1.0, -1.0, NAN]),
)
def test_any_numbers(rows, iou_threshold):
    table = torch.tensor(rows, dtype=torch.float32).reshape(-1, 5)
    expected = ops.nms(table[:, :4], table[:, 4], iou_threshold)
    with install():
        assert torch.equal(ops.nms(table[:, :4], table[:, 4], iou_threshold), expected)


class TestPrograms:
    """A program that was compiled before runs ours from then on, and one that was compiled meanwhile torchvision's again."""

    @staticmethod
    def head(boxes: Tensor, scores: Tensor, idxs: Tensor) -> tuple[Tensor, Tensor]:
        return ops.nms(boxes * 2, scores, 0.5), ops.batched_nms(boxes * 2, scores, idxs, 0.5)

    @pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
    @pytest.mark.parametrize("first", [False, True])
    def test_compiled(self, backend, first):
        arguments = random_boxes(300, "cpu")
        expected = self.head(*arguments)
        torch._dynamo.reset()
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            step = torch.compile(self.head, backend=backend)
            for on in (first, not first, first, not first):
                (install if on else uninstall)()
                assert all(map(torch.equal, step(*arguments), expected))
                ran = ours_in(lambda: step(*arguments))
                assert ran == ({"extension_cpp::nms", "extension_cpp::batched_nms"} if on else set())
        torch._dynamo.reset()

    def test_compiled_without_breaks(self):
        arguments = random_boxes(300, "cpu")
        expected = self.head(*arguments)
        torch._dynamo.reset()
        with install(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            step = torch.compile(self.head, backend="aot_eager", fullgraph=True)
            assert all(map(torch.equal, step(*arguments), expected))
        torch._dynamo.reset()

    @pytest.mark.parametrize("make", [torch.jit.script, lambda f: torch.jit.trace(f, random_boxes(30, "cpu"))])
    @pytest.mark.parametrize("first", [False, True])
    def test_scripted(self, make, first, tmp_path):
        """It is saved with torchvision's operators alone."""

        def head(boxes: Tensor, scores: Tensor, idxs: Tensor) -> tuple[Tensor, Tensor]:
            return ops.nms(boxes * 2, scores, 0.5), ops.batched_nms(boxes * 2, scores, idxs, 0.5)

        arguments = random_boxes(300, "cpu")
        expected = self.head(*arguments)
        (install if first else uninstall)()
        program = make(head)
        for on in (first, not first, first):
            (install if on else uninstall)()
            for _ in range(3):  # The second call is optimised.
                assert all(map(torch.equal, program(*arguments), expected))
            assert ours_in(lambda: program(*arguments)) == ({"extension_cpp::nms"} if on else set())
        torch.jit.save(program, str(tmp_path / "program.pt"))
        load = f"import torchvision; torch.jit.load({str(tmp_path / 'program.pt')!r}); print([*sys.modules])"
        done = python(f"import sys, torch; {load}")
        assert done.returncode == 0 and "'extension_cpp'" not in done.stdout, done.stderr

    @pytest.mark.parametrize("strict", [False, True])
    def test_exported(self, strict):
        """Also with torchvision's operators alone."""

        class Head(torch.nn.Module):
            def forward(self, *arguments):
                return TestPrograms.head(*arguments)

        arguments = random_boxes(300, "cpu")
        with install():
            program = torch.export.export(Head(), arguments, strict=strict)
            assert "extension_cpp" not in program.graph_module.code and "torchvision.nms" in program.graph_module.code
            assert all(map(torch.equal, program.module()(*arguments), self.head(*arguments)))

    @pytest.mark.slow
    def test_detector(self, monkeypatch):
        """Unchanged, with the same detections."""
        # Scores of random weights tie, and torchvision's order of these is any.
        for name in ("_batched_nms_vanilla", "_batched_nms_coordinate_trick"):
            monkeypatch.setattr(ops.boxes, name, reference_of(extension_cpp.batched_nms))
        torch.manual_seed(0)
        make = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn
        model = make(weights=None, weights_backbone=None, box_score_thresh=0.0).eval()
        images = [torch.rand(3, 200, 300)]
        expected = model(images)[0]
        with install():
            found = model(images)[0]
            assert ours_in(lambda: model(images)) >= {"extension_cpp::batched_nms"}
        assert len(expected["boxes"]) > 1
        assert all(torch.equal(found[name], expected[name]) for name in expected)


class TestInstallation:
    def test_blocks(self):
        """A block ends what it began, and nothing else."""
        off = state()
        with install():
            on = state()
            with install():
                assert state()[3] == on[3]
            assert state() == on
        assert state() == off
        install()
        with install():
            pass
        assert state()[0] == on[0]
        uninstall()
        assert state() == off
        block = install()
        with block, block:
            uninstall()
            assert state() == off
        assert state() == off
        with pytest.raises(ZeroDivisionError), install():
            1 / 0  # noqa: B018
        assert state() == off

    def test_blocks_of_threads(self):
        """One that ends first leaves the other's."""
        entered, leave = threading.Event(), threading.Event()

        def other() -> None:
            with install():
                entered.set()
                leave.wait()

        thread = threading.Thread(target=other)
        thread.start()
        entered.wait()
        with install():
            pass
        assert NAME in extension_cpp.backends()
        leave.set()
        thread.join()
        assert NAME not in extension_cpp.backends()

    def test_calls_of_threads(self):
        """Calls go on, each by one or the other, while it is installed and uninstalled."""
        boxes, scores, idxs = random_boxes(40, "cpu")
        expected = ops.nms(boxes, scores, 0.5), ops.batched_nms(boxes, scores, idxs, 0.5)
        done, wrong = threading.Event(), []

        def work() -> None:
            while not done.is_set():
                try:
                    results = ops.nms(boxes, scores, 0.5), ops.batched_nms(boxes, scores, idxs, 0.5)
                    if not all(map(torch.equal, results, expected)):
                        wrong.append(results)
                except Exception as error:
                    wrong.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(300):
            with install():
                ops.nms(boxes, scores, 0.5)
            ops.nms(boxes, scores, 0.5)
        done.set()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_where_ours_is_not_native(self):
        code = """
import torch, torchvision, extension_cpp
before = torch._C._dispatch_dump("torchvision::nms")
with extension_cpp.compat.torchvision.install():
    assert torch._C._dispatch_dump("torchvision::nms") == before
    assert extension_cpp.backends()["torchvision::nms"] == {}
    assert torchvision.ops.batched_nms(torch.ones(3, 4), torch.ones(3), torch.arange(3), 0.5).tolist() == [0, 1, 2]
"""
        done = python(code, EXTENSION_CPP_BACKEND="reference")
        assert done.returncode == 0, done.stderr


class TestEnvironment:
    CHECK = "assert extension_cpp.backends()['torchvision::nms']['cpu'] == 'native', extension_cpp.backends()"

    LOOKS = "extension_cpp, importlib.util; importlib.util.find_spec('torchvision'); import torchvision"

    @pytest.mark.parametrize("imports", ["torchvision, extension_cpp", "extension_cpp, torchvision", LOOKS])
    def test_on(self, imports):
        done = python(f"import {imports}; {self.CHECK}", EXTENSION_CPP_COMPAT="torchvision")
        assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.parametrize("imports", ["torchvision", "torch, torchvision"])
    def test_without_an_import(self, imports):
        """A program that has never heard of this package."""
        if not metadata.entry_points(group="torch.backends", name="extension_cpp"):
            pytest.skip("the package is not installed: its entry points are unknown")
        on = f"import {imports}, sys; extension_cpp = sys.modules['extension_cpp']; {self.CHECK}"
        loaded = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
        done = python(on, fresh=True, EXTENSION_CPP_COMPAT="torchvision", **loaded)
        assert (done.returncode, done.stderr) == (0, "")
        done = python(f"import {imports}, sys; assert 'extension_cpp' not in sys.modules", fresh=True, **loaded)
        assert (done.returncode, done.stderr) == (0, "")

    def test_off(self):
        """Importing installs nothing, and imports nothing."""
        code = "import sys, extension_cpp; assert 'torchvision' not in sys.modules; import torchvision"
        done = python(f"{code}; assert 'torchvision::nms' not in extension_cpp.backends()")
        assert (done.returncode, done.stderr) == (0, "")

    def test_unknown(self):
        done = python("import extension_cpp", EXTENSION_CPP_COMPAT="torchvision,other")
        wanted = "in the environment variable EXTENSION_CPP_COMPAT names must be torchvision, got 'other'"
        assert done.returncode == 1 and wanted in done.stderr

    def test_torchvision_is_missing(self):
        """A process that doesn't import it is as any; who asks for ours is told."""
        code = "import sys; sys.modules['torchvision'] = None; import extension_cpp as e"
        done = python(f"{code}; e.nms; e.compat.torchvision.install()", EXTENSION_CPP_COMPAT="torchvision")
        assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr and "Warning" not in done.stderr

    def test_torchvision_without_operators(self, tmp_path):
        """As where its library is for another PyTorch, which it says when they are called."""
        package = tmp_path / "torchvision" / "ops"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").touch()
        (package / "boxes.py").touch()
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import extension_cpp, torchvision"
        done = python(code, EXTENSION_CPP_COMPAT="torchvision")
        why = "torchvision has no operators: its library is for another PyTorch"
        assert (
            done.returncode == 0
            and f"EXTENSION_CPP_COMPAT=torchvision has no effect: compat.torchvision: {why}" in done.stderr
        )
        done = python(f"{code}; extension_cpp.compat.torchvision.install()")
        assert done.returncode == 1 and f"RuntimeError: compat.torchvision: {why}" in done.stderr

    def test_doctor(self, capsys):
        """It says that it is on; and why not, where it was asked for."""
        facts = Facts(probe={"compat": {"torchvision": ""}})
        report.report(facts, [])
        assert "compat         torchvision (EXTENSION_CPP_COMPAT)" in capsys.readouterr().out
        assert "compat" not in {finding.name for finding in findings.diagnose(facts)}
        facts = Facts(probe={"compat": {"torchvision": "ImportError: it is not there"}})
        (found,) = (finding for finding in findings.diagnose(facts) if finding.name == "compat")
        assert found.how == "ImportError: it is not there" and found.fix == "unset EXTENSION_CPP_COMPAT"
        report.report(facts, [])
        assert "compat" not in capsys.readouterr().out
        wrong = "ImportError: extension_cpp: in the environment variable EXTENSION_CPP_COMPAT names must be torchvision"
        (found,) = (f for f in findings.diagnose(Facts(probe={"error": wrong})) if f.name == "compat")
        assert found.severity == "error"

    def test_probe(self):
        """What the doctor asks of another process."""
        probe = Path(report.__file__).with_name("_probe.py")
        run = f"runpy.run_path({str(probe)!r}, run_name='__main__')"
        code = f"import json, sys, runpy; sys.argv[1:] = [json.dumps(sys.path)]; {run}"
        done = python(code, EXTENSION_CPP_COMPAT="torchvision")
        assert '"compat": {"torchvision": ""}' in done.stdout and '"torchvision::nms": {"cpu": "native"' in done.stdout
        assert "torchvision::nms" not in python(code, **{**os.environ, "EXTENSION_CPP_COMPAT": ""}).stdout
