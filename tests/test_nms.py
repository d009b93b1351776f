"""nms, batched_nms and nms_padded: the contract, the definition, torchvision, and what is hard for a method that prunes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import extension_cpp
from extension_cpp.ops._operator import reference_of
from extension_cpp.testing import DEVICES, FLOATING, Case, Contract

try:
    import torchvision
except Exception:  # Absent, or made for another torch.
    torchvision = None

nms_reference, batched_nms_reference = map(reference_of, (extension_cpp.nms, extension_cpp.batched_nms))
INF, NAN = float("inf"), float("nan")
THRESHOLDS = [0.5, 0.0, -0.0, 1.0, 0.25, 1 / 3, 0.1, 0.7, 1e-20, -0.1, 2.0, INF, -INF, NAN]
needs_torchvision = pytest.mark.skipif(torchvision is None, reason="torchvision is not installed")


def random_boxes(n: int, field: float, seed: int = 0, *, side: int = 100) -> tuple[Tensor, Tensor]:
    """Boxes of side 1 to `side` in a square field, and scores without ties."""
    generator = torch.Generator().manual_seed(seed)
    low = torch.rand(n, 2, generator=generator, dtype=torch.float64) * field
    size = 1 + (side - 1) * torch.rand(n, 2, generator=generator, dtype=torch.float64)
    return torch.cat([low, low + size], 1), torch.randperm(n, generator=generator).double() / n


def clustered_boxes(n: int, clusters: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.rand(clusters, 2, generator=generator, dtype=torch.float64) * 1000
    low = centres[torch.randint(clusters, (n,), generator=generator)]
    low = low + 3 * torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return torch.cat([low, low + 40], 1), torch.randperm(n, generator=generator).double() / n


def grid_boxes(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Small whole numbers, so that boxes are equal, IoUs are at the threshold, and scores tie."""
    generator = torch.Generator().manual_seed(seed)
    low = torch.randint(0, 30, (n, 2), generator=generator)
    size = torch.randint(-1, 8, (n, 2), generator=generator)
    return torch.cat([low, low + size], 1).double(), torch.randint(0, 20, (n,), generator=generator).double()


def samples(device: str, dtype: torch.dtype):
    for boxes, scores in (
        random_boxes(7, 20, side=20),
        grid_boxes(65),
        random_boxes(300, 200),
        grid_boxes(0),
        grid_boxes(1),
        clustered_boxes(4200, 20),  # On CUDA, enough for a grid.
    ):
        yield boxes.to(device, dtype), scores.to(device, dtype), 0.5


def batched_samples(device: str, dtype: torch.dtype):
    for boxes, scores, iou_threshold in samples(device, dtype):
        idxs = torch.arange(len(scores), device=device) * 7919 % 11 - 3
        yield boxes, scores, idxs, iou_threshold


def padded_samples(device: str, dtype: torch.dtype):
    yield from samples(device, dtype)
    for boxes, scores, idxs, iou_threshold in batched_samples(device, dtype):
        yield boxes, scores, iou_threshold, idxs


def wrong_inputs(op: str, device: str):
    boxes, scores = torch.ones(3, 4, device=device), torch.ones(3, device=device)
    floating = "float16, bfloat16, float32 or float64"
    integers = "uint8, int8, int16, int32 or int64"
    yield (boxes[:, :3], scores), f"{op}: boxes must have shape (N, 4), got (3, 3)"
    yield (boxes[0], scores), f"{op}: boxes must have shape (N, 4), got (4,)"
    yield (boxes.int(), scores), f"{op}: boxes must have dtype {floating}, got int32"
    yield (boxes, scores[:2]), f"{op}: scores must have shape (N,) with N = 3, got (2,)"
    yield (boxes, boxes[:, :1]), f"{op}: scores must have shape (N,) with N = 3, got (3, 1)"
    wanted = floating.replace(" or ", ", ") + f", {integers}"
    yield (boxes, scores.to(torch.complex64)), f"{op}: scores must have dtype {wanted}, got complex64"
    if device == "cuda":
        yield (boxes, scores.cpu()), f"{op}: scores must be on the device of boxes, cuda:0, got cpu"
        yield (boxes.cpu(), scores), f"{op}: scores must be on the device of boxes, cpu, got cuda:0"


def wrong_classes(op: str, device: str):
    boxes, scores = torch.ones(3, 4, device=device), torch.ones(3, device=device)
    idxs = torch.zeros(3, device=device, dtype=torch.int64)
    integers = "uint8, int8, int16, int32 or int64"
    yield (boxes, scores, idxs[:2]), f"{op}: idxs must have shape (N,) with N = 3, got (2,)"
    yield (boxes, scores, idxs.float()), f"{op}: idxs must have dtype {integers}, got float32"
    for args, message in wrong_inputs(op, device):
        yield (*args, idxs), message


class TestNms(Contract):
    op = Case(
        function=extension_cpp.nms,
        samples=samples,
        errors=lambda device: (((*args, 0.5), message) for args, message in wrong_inputs("nms", device)),
        exact=True,
    )


class TestBatchedNms(Contract):
    op = Case(
        function=extension_cpp.batched_nms,
        samples=batched_samples,
        errors=lambda device: (((*args, 0.5), message) for args, message in wrong_classes("batched_nms", device)),
        exact=True,
    )


class TestNmsPadded(Contract):
    op = Case(
        function=extension_cpp.nms_padded,
        samples=padded_samples,
        errors=lambda device: (
            ((boxes, scores, 0.5, *idxs), message)
            for (boxes, scores, *idxs), message in wrong_classes("nms_padded", device)
        ),
        exact=True,
    )

    def test_cuda_graph(self):
        if self.backend == "reference":
            pytest.skip("the reference needs values on the host")
        super().test_cuda_graph()


def plain_nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> list[int]:
    """The definition, in numpy: each operation is rounded to the dtype of the computation."""
    compute = np.float64 if boxes.dtype == torch.float64 else np.float32
    scored = scores.cpu().double().numpy()
    order = np.lexsort((np.arange(len(scored)), -scored, ~np.isnan(scored)))  # NaN comes first.
    values = boxes.cpu().double().numpy().astype(compute)[order]
    dropped = np.zeros(len(values), dtype=bool)
    with np.errstate(all="ignore"):
        for i in range(len(values)):
            if not dropped[i]:
                dropped[i + 1 :] |= iou(values[i], values[i + 1 :]).astype(np.float64) > iou_threshold
    return order[~dropped].tolist()


def iou(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    def area(box):
        return (box[..., 2] - box[..., 0]) * (box[..., 3] - box[..., 1])

    side = np.fmin(a[..., 2:], b[..., 2:]) - np.fmax(a[..., :2], b[..., :2])
    side = np.fmax(side, side.dtype.type(0))
    inter = side[..., 0] * side[..., 1]
    return inter / (area(a) + area(b) - inter)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("n", [7, 300, 5000, 20_000])
def test_nan_with_a_sign(device, dtype, n):
    """It comes first as any NaN does, in the order of the boxes. PyTorch's sort on CUDA takes it for the least."""
    generator = torch.Generator().manual_seed(n)
    scores = torch.randn(n, generator=generator).to(dtype)
    one = torch.tensor(torch.nan, dtype=dtype).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    bits = scores.view(one.dtype)
    bits[::5], bits[2::5] = one, one | torch.iinfo(one.dtype).min
    low = 10 * torch.arange(n)[:, None].expand(n, 2)
    boxes, nan = torch.cat([low, low + 4], 1).float().to(device), scores.isnan()
    assert torch.signbit(scores[nan]).unique().tolist() == [False, True]
    first, order = nan.nonzero().squeeze(1), torch.where(nan, torch.inf, scores).sort(stable=True, descending=True)[1]
    scores = scores.to(device)
    kept = extension_cpp.nms(boxes, scores, 0.5).cpu()  # No two overlap.
    assert torch.equal(kept, order) and torch.equal(kept[: len(first)], first)
    if n <= 300:
        assert torch.equal(reference_of(extension_cpp.nms)(boxes, scores, 0.5).cpu(), order)


SPECIAL = [0.0, -0.0, 1.0, 2.0, 3.0, -1.0, INF, -INF, NAN, 3e38, -2e38, 1e-40, 2e-40, 1e-20, 1e20, 6e4]


@st.composite
def box_sets(draw) -> tuple[Tensor, Tensor]:
    n = draw(st.integers(0, 40))
    whole = st.integers(0, 7).map(float)
    coordinate = draw(
        st.sampled_from([whole, st.floats(0, 8, width=16), st.sampled_from(SPECIAL), st.sampled_from(SPECIAL) | whole])
    )
    rows = draw(st.lists(st.tuples(*[coordinate] * 4), min_size=n, max_size=n))
    score = draw(st.sampled_from([st.integers(0, 3).map(float), st.sampled_from([0.0, -0.0, 1.0, INF, -INF, NAN])]))
    scores = draw(st.lists(score, min_size=n, max_size=n))
    scale = draw(st.sampled_from([1.0, 0.1, 1e-20, 1e-23, 1e18]))
    return torch.tensor(rows, dtype=torch.float64).view(n, 4) * scale, torch.tensor(scores, dtype=torch.float64)


thresholds = st.sampled_from(THRESHOLDS) | st.fractions(0, 1, max_denominator=12).map(float)


@pytest.mark.parametrize("device", DEVICES)
class TestAgainstTheDefinition:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
    @given(box_set=box_sets(), iou_threshold=thresholds)
    def test_small_sets(self, device, dtype, box_set, iou_threshold):
        boxes, scores = (t.to(device, dtype) for t in box_set)
        want = plain_nms(boxes, scores, iou_threshold)
        assert extension_cpp.nms(boxes, scores, iou_threshold).tolist() == want
        assert nms_reference(boxes, scores, iou_threshold).tolist() == want

    @given(box_set=box_sets(), iou_threshold=thresholds, data=st.data())
    def test_classes(self, device, box_set, iou_threshold, data):
        boxes, scores = (t.to(device, torch.float32) for t in box_set)
        some = st.sampled_from([0, 1, 2, -1, 2**63 - 1, -(2**63)])
        idxs = torch.tensor(data.draw(st.lists(some, min_size=len(scores), max_size=len(scores))), dtype=torch.int64)
        got = extension_cpp.batched_nms(boxes, scores, idxs.to(device), iou_threshold)
        assert torch.equal(got, batched_nms_reference(boxes, scores, idxs.to(device), iou_threshold))

    @pytest.mark.parametrize("n", [0, 1, 2, 31, 63, 64, 65, 1000, 4096, 4097])
    def test_sizes(self, device, n):
        for seed, (boxes, scores) in enumerate((grid_boxes(n), random_boxes(n, 300), clustered_boxes(n, 20))):
            boxes, scores = boxes.float().to(device), scores.float().to(device)
            for iou_threshold in (0.5, (-0.0, 0.3, -0.5)[seed]):
                want = plain_nms(boxes, scores, iou_threshold)
                assert extension_cpp.nms(boxes, scores, iou_threshold).tolist() == want

    @pytest.mark.parametrize("iou_threshold", [0.0, 0.5, 0.8, 0.95])
    @pytest.mark.parametrize("best_first", [True, False])
    def test_piles(self, device, best_first, iou_threshold):
        """Each has half of the boxes that are left, so that a box may suppress most of them, all or few."""
        generator = torch.Generator().manual_seed(0)
        pile = torch.rand(5000, generator=generator).log2().floor().clamp(min=-10)
        low = 10 * pile[:, None] + 0.3 * torch.rand(5000, 2, generator=generator) ** 4
        boxes = torch.cat([low, low + 4], 1).to(device)
        scores = (torch.rand(5000, generator=generator) + pile * best_first).to(device)
        want = plain_nms(boxes, scores, iou_threshold)
        assert extension_cpp.nms(boxes, scores, iou_threshold).tolist() == want

    @pytest.mark.parametrize("iou_threshold", THRESHOLDS)
    def test_odd_boxes_among_many(self, device, iou_threshold):
        """Enough for every pruning, with boxes among them of which a bound could be wrong: it must be the exact test."""
        boxes, scores = random_boxes(4200, 500)
        odd = torch.tensor(SPECIAL, dtype=torch.float64)
        odd = odd[torch.randint(len(SPECIAL), (210, 4), generator=torch.Generator().manual_seed(1))]
        boxes[::20] = odd
        boxes[1::500] = torch.tensor([-1e9, -1e9, 1e9, 1e9], dtype=torch.float64)
        boxes[2::100] = boxes[2] + 0.01
        boxes[3::400, 2:] = boxes[3::400, :2] + 1e-22
        boxes, scores = boxes.float().to(device), scores.float().to(device)
        want = plain_nms(boxes, scores, iou_threshold)
        assert extension_cpp.nms(boxes, scores, iou_threshold).tolist() == want

    @pytest.mark.parametrize(
        "scale, iou_threshold",
        [
            (1e-3, 0.02),
            (1, 0.2),
            (1e3, 0.5),
            (1e6, 0.75),
            (1e17, 0.95),
            (1, 0.5),
            (1e6, 0.2),
            (1e-22, 0.5),
            (3e-24, 0.9),
        ],
    )
    def test_scales(self, device, scale, iou_threshold):
        """Sides over four orders of magnitude, near the origin and far from it; areas that overflow and underflow."""
        generator = torch.Generator().manual_seed(3)
        centres = torch.rand(4200, 2, generator=generator, dtype=torch.float64) * 300 + (1e5 if scale == 1 else 0)
        half = 10 ** (4 * torch.rand(4200, 2, generator=generator, dtype=torch.float64) - 2)
        boxes = (torch.cat([centres - half, centres + half], 1) * scale).float().to(device)
        boxes[2100:] = boxes[:2100] + 0.05 * (boxes[:2100, 2:] - boxes[:2100, :2]).repeat(1, 2)
        scores = torch.rand(4200, generator=generator).to(device)
        want = plain_nms(boxes, scores, iou_threshold)
        assert extension_cpp.nms(boxes, scores, iou_threshold).tolist() == want

    @pytest.mark.parametrize("iou_threshold", [0.04, 0.3, 0.5, 0.9, 1.0])
    def test_ratios_of_areas(self, device, iou_threshold):
        """Pairs of boxes of all sizes, one within the other, whose IoU is just above the threshold or just below."""
        generator = torch.Generator().manual_seed(0)
        at = torch.arange(2200)
        low = 100.0 * torch.stack([at % 47, at // 47], 1)
        outer = torch.cat([low, low + 2 ** (12 * torch.rand(2200, 1, generator=generator) - 6)], 1)
        inner, ratio = outer.clone(), iou_threshold * (1 + 1e-3 * torch.randn(2200, generator=generator))
        inner[:, 3] = outer[:, 1] + (outer[:, 3] - outer[:, 1]) * ratio
        boxes, scores = torch.cat([outer, inner]).to(device), torch.rand(4400, generator=generator).to(device)
        want = plain_nms(boxes, scores, iou_threshold)
        assert 2500 < len(want) < 4000 or iou_threshold == 1
        assert extension_cpp.nms(boxes, scores, iou_threshold).tolist() == want

    def test_large_sets(self, device):
        """200 far copies of one small set, whose results are known from one."""
        boxes, scores = grid_boxes(1000, seed=5)
        want = plain_nms(boxes, scores, 0.5)
        copies = torch.arange(200).repeat_interleave(1000)
        far = (boxes.repeat(200, 1) + 64.0 * copies[:, None]).float().to(device)
        got = extension_cpp.nms(far, scores.repeat(200).float().to(device), 0.5).cpu()
        members = torch.cat([torch.tensor(want) + 1000 * k for k in range(200)]).sort().values
        assert torch.equal(got.sort().values, members)
        assert torch.equal(got, members[scores.repeat(200)[members].sort(stable=True, descending=True).indices])
        shuffled = torch.randperm(200, generator=torch.Generator().manual_seed(0))[copies].to(device)
        same = boxes.repeat(200, 1).float().to(device)
        assert torch.equal(extension_cpp.batched_nms(same, scores.repeat(200).to(device), shuffled, 0.5).cpu(), got)

    def test_rounding(self, device):
        """No operation is fused with another: at thresholds where that alone decides, both boxes stay."""
        generator = torch.Generator().manual_seed(0)
        for dtype in (torch.float32, torch.float64):
            low = torch.rand(300, 2, 2, generator=generator, dtype=dtype) / 4
            pairs = torch.cat([low, low + 1 + torch.rand(300, 2, 2, generator=generator, dtype=dtype) / 4], 2)
            for boxes in pairs:
                exact = float(iou(*boxes.numpy()))
                below = float(np.nextafter(boxes.numpy().dtype.type(exact), -1))
                scores = torch.tensor([2, 1], device=device)
                assert len(extension_cpp.nms(boxes.to(device), scores, exact)) == 2
                assert len(extension_cpp.nms(boxes.to(device), scores, below)) == 1

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8], ids=str)
    def test_scores_of_another_dtype(self, device, dtype):
        boxes, scores = grid_boxes(300)
        boxes, scores = boxes.float().to(device), scores.to(device, dtype)
        assert torch.equal(extension_cpp.nms(boxes, scores, 0.5), nms_reference(boxes, scores, 0.5))
        idxs = (scores.to(torch.int64) % 3).to(torch.int16)
        want = batched_nms_reference(boxes, scores, idxs, 0.5)
        assert torch.equal(extension_cpp.batched_nms(boxes, scores, idxs, 0.5), want)

    def test_shifted_coordinates_would_be_wrong(self, device):
        """What moving classes apart, as torchvision does, costs in precision: with many classes, boxes become equal."""
        low = torch.arange(6.0, device=device)[:, None] / 8
        boxes = torch.cat([low, low, low + 0.125, low + 0.125], 1) + 1000
        scores, idxs = torch.arange(6.0, device=device), torch.full((6,), 10**6, device=device)
        shifted = boxes + (idxs.to(boxes) * (boxes.max() + 1))[:, None]
        assert len(nms_reference(shifted, scores, 0.5)) == 6  # They have no area left: 0/0 drops nothing.
        boxes[3:] = boxes[:3]
        shifted = boxes + (idxs.to(boxes) * (boxes.max() + 1))[:, None]
        assert len(nms_reference(shifted, scores, 0.5)) == 6
        assert extension_cpp.batched_nms(boxes, scores, idxs, 0.5).tolist() == [5, 4, 3]

    @pytest.mark.parametrize("case", ["equal", "chain", "nested", "below zero", "outliers", "all near"])
    @pytest.mark.parametrize("n", [4_000, 20_000])
    def test_worst_cases(self, device, case, n):
        """For a method that prunes, and for the one that tests few boxes on CUDA. bench_nms.py has times of such cases."""
        step = torch.arange(n, device=device, dtype=torch.float32)[:, None]
        unit = torch.tensor([0.0, 0.0, 4.0, 4.0], device=device)
        boxes, want = {
            "equal": (unit.repeat(n, 1), [n - 1]),
            "chain": (unit + step * unit.new_tensor([1, 0, 1, 0]), list(range(n - 1, -1, -2))),
            "nested": (unit.new_tensor([0, 0, 1, 1]) * (1 + step * 1e-4), None),
            "below zero": (unit + 10 * step, [n - 1]),
            # Groups of ten, a hundredth of them far off.
            "outliers": (unit + 10 * (step // 10) + 1e6 * (step // 10 % 100 == 7), list(range(n - 1, -1, -10))),
            # Long bars across each other and a box in the middle: all lie near each other, and few are kept.
            "all near": (torch.cat([-step % 50, step % 70, 1e4 + step % 50, 1e3 + step % 70], 1), None),
        }[case]
        scores = torch.arange(n, device=device).float()
        iou_threshold = {"below zero": -0.5, "all near": 0.99}.get(case, 0.5)
        got = extension_cpp.nms(boxes, scores, iou_threshold).tolist()
        assert got == (plain_nms(boxes, scores, iou_threshold) if want is None else want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(5, 20), (1, 1), (3, 0)], ids=str)
def test_vmap_is_one_call(device, shape):
    """Of nms_padded: as a loop over the batch, whatever the classes, equal scores too, and in a batch of batches."""
    generator = torch.Generator().manual_seed(0)
    low, side = (3 * torch.rand(*shape, 2, generator=generator) for _ in range(2))
    boxes = torch.cat([low, low + side], 2).to(device)
    scores = torch.rand(shape, generator=generator).round(decimals=1).to(device)
    classes = torch.randint(3, shape, generator=generator).to(device)
    calls: list[int] = []

    def padded(boxes: Tensor, scores: Tensor, *idxs: Tensor) -> tuple[Tensor, Tensor]:
        return extension_cpp.nms_padded(boxes, scores, 0.2, *idxs)

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.extend([1] * (function is torch.ops.extension_cpp.nms_padded.default))
            return function(*args, **(kwargs or {}))

    for idxs in ((), (classes.to(torch.uint8),), ((classes - 1) * 2**62,)):
        for boxes_dim in (0, None):
            args = [boxes if boxes_dim == 0 else boxes[0], scores, *idxs]
            dims = (boxes_dim, *[0] * (len(args) - 1))
            each = [padded(*(t if d is None else t[n] for t, d in zip(args, dims))) for n in range(shape[0])]
            want = tuple(map(torch.stack, zip(*each)))
            calls.clear()
            with Counter():
                got = torch.vmap(padded, dims)(*args)
            assert len(calls) == 1 and all(map(torch.equal, got, want))
            pairs = [t if d is None else torch.stack([t, t]) for t, d in zip(args, dims)]
            for got, one in zip(torch.vmap(torch.vmap(padded, dims), dims)(*pairs), want):
                assert torch.equal(got, torch.stack([one, one]))


@pytest.mark.parametrize("device", DEVICES)
@needs_torchvision
class TestAgainstTorchvision:
    @given(box_set=box_sets(), iou_threshold=thresholds)
    def test_small_sets(self, device, box_set, iou_threshold):
        boxes, scores = (t.float().to(device) for t in box_set)
        if device == "cuda":  # There the threshold is rounded to float32, and products are fused with sums.
            boxes, iou_threshold = boxes.nan_to_num(0, 0, 0).clamp(-8, 8).round(), torch.tensor(iou_threshold).item()
            iou_threshold = round(8 * iou_threshold) / 8 if abs(iou_threshold) <= 1 else iou_threshold
        got = extension_cpp.nms(boxes, scores, iou_threshold)
        assert torch.equal(got, torchvision.ops.nms(boxes, scores, iou_threshold))

    @pytest.mark.parametrize("field", [1000, 10_000])
    def test_random_sets(self, device, field):
        boxes, scores = (t.float().to(device) for t in random_boxes(10_000, field))
        assert torch.equal(extension_cpp.nms(boxes, scores, 0.5), torchvision.ops.nms(boxes, scores, 0.5))
        idxs = torch.arange(10_000, device=device) % 80
        got = extension_cpp.batched_nms(boxes, scores, idxs, 0.5)
        assert torch.equal(got, torchvision.ops.batched_nms(boxes, scores, idxs, 0.5))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_in_a_compiled_function(device):
    """The kept boxes, and what is computed from them, in one graph, for any number of boxes."""
    torch._dynamo.reset()

    def kept(boxes: Tensor, scores: Tensor) -> Tensor:
        keep = extension_cpp.nms(boxes.detach(), scores.detach(), 0.5)
        return (boxes[keep] * scores[keep, None]).sum(0)

    compiled = torch.compile(kept, fullgraph=True, dynamic=True)
    for n in (50, 60, 70):
        boxes, scores = (t.float().to(device).requires_grad_() for t in grid_boxes(n))
        torch.testing.assert_close(compiled(boxes, scores), kept(boxes, scores))
        compiled(boxes, scores).sum().backward()
        assert boxes.grad is not None and scores.grad is not None


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_of_two_selections():
    """Whose sizes only the values tell, each its own: no guard asks whether they are equal."""
    torch._dynamo.reset()

    def kept(boxes: Tensor, scores: Tensor, wanted: Tensor) -> Tensor:
        return extension_cpp.nms(boxes[wanted], scores[wanted.clone()], 0.5)

    boxes, scores = (t.float() for t in grid_boxes(50))
    compiled = torch.compile(kept, fullgraph=True, backend="aot_eager")
    for wanted in (scores > scores.median(), scores < scores.median(), scores > 2 * scores.max()):
        assert torch.equal(compiled(boxes, scores, wanted), kept(boxes, scores, wanted))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestCuda:
    @pytest.mark.parametrize("kind", ["any", "few values", "equal", "special", "descending", "strided"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int16, torch.int32, torch.float64], ids=str)
    @pytest.mark.parametrize("n", [4096, 8192, 8193, 140_000, 2**19, 2**19 + 1])
    def test_order(self, n, dtype, kind):
        """Scores are ranked by comparisons, sorted in one launch or by PyTorch: by their number and dtype."""
        scores = 1000 * torch.randn(n, 2, generator=torch.Generator().manual_seed(n))
        scores = {"few values": scores.sign(), "equal": torch.ones_like(scores)}.get(kind, scores).to(dtype)
        if kind == "special" and dtype.is_floating_point:
            for i, value in enumerate((NAN, -NAN, INF, -INF, 0.0, -0.0)):
                scores[i :: 7 + i] = value
        scores = scores.cuda()[:, 0] if kind == "strided" else scores[:, 0].contiguous().cuda()
        if kind == "descending":
            scores = scores.sort(descending=True).values
        at = torch.arange(n, device="cuda")
        low = 4.0 * torch.stack([at % 1024, at // 1024], 1)  # No two overlap.
        kept = extension_cpp.nms(torch.cat([low, low + 1], 1), scores, 0.5)
        want = torch.where(scores.isnan(), INF, scores).sort(stable=True, descending=True).indices
        if kind == "special":  # NaN comes first, then what is infinite.
            want = torch.cat([scores.isnan().nonzero()[:, 0], want[~scores[want].isnan()]])
        assert torch.equal(kept, want)

    @pytest.mark.parametrize("clusters", [1, 20, 200])
    @pytest.mark.parametrize("n", [33, 700, 4096])
    def test_few(self, n, clusters):
        """Boxes wait for some in many other tiles, of which few are kept."""
        boxes, scores = (t.float() for t in clustered_boxes(n, clusters))
        classes = torch.arange(n) % 3
        for idxs, iou_threshold in (((), 0.5), ((), 0.8), ((), -0.1), ((classes,), 0.5)):
            inputs = boxes, scores, iou_threshold, *idxs
            got = extension_cpp.nms_padded(*(t.cuda() if isinstance(t, Tensor) else t for t in inputs))
            want = extension_cpp.nms_padded(*inputs)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want))

    @pytest.mark.parametrize("n", [1000, 30_000])
    def test_replay(self, n):
        """What a graph starts from, each replay makes anew."""
        boxes, scores = (t.float().cuda() for t in random_boxes(n, 1000))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = extension_cpp.nms_padded(boxes, scores, 0.5)
        for _ in range(3):
            graph.replay()
            want = extension_cpp.nms_padded(boxes, scores, 0.5)
            assert all(torch.equal(got, result) for got, result in zip(results, want))
            scores.copy_(scores.roll(1))

    def test_capture_is_refused(self):
        boxes, scores = (t.cuda() for t in grid_boxes(10))
        graph = torch.cuda.CUDAGraph()
        refusal = pytest.raises(RuntimeError, match="nms: the size of its result is not known inside a CUDA graph")
        with refusal, torch.cuda.graph(graph):
            extension_cpp.nms(boxes, scores, 0.5)

    def test_memory(self):
        """In proportion to the number of boxes: no more than 100 MB for 200,000, and a million pass."""
        for n, limit in ((200_000, 100e6), (1_000_000, 500e6)):
            boxes, scores = (t.float().cuda() for t in random_boxes(n, 10_000))
            extension_cpp.nms(boxes, scores, 0.5)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            got = extension_cpp.nms(boxes, scores, 0.5)
            assert torch.cuda.max_memory_allocated() - before < limit
            assert torch.equal(got.cpu(), extension_cpp.nms(boxes.cpu(), scores.cpu(), 0.5))

    @pytest.mark.parametrize("n", [4_000, 30_000])
    def test_many_streams_at_once(self, n):
        """Calls that run side by side share the device without waiting for each other."""
        boxes, scores = (t.float().cuda() for t in random_boxes(n, 1000))
        want = extension_cpp.nms_padded(boxes, scores, 0.5)[0]
        streams = [torch.cuda.Stream() for _ in range(16)]
        torch.cuda.synchronize()
        results = []
        for stream in streams * 4:
            with torch.cuda.stream(stream):
                results.append(extension_cpp.nms_padded(boxes, scores, 0.5)[0])
        torch.cuda.synchronize()
        assert all(torch.equal(got, want) for got in results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "scores", "threshold"),
    [
        (torch.float32, torch.float32, 1 / 3),
        (torch.float16, torch.int64, 0.0),
        (torch.float32, torch.float64, torch.inf),
    ],
)
def test_onnx(tmp_path, dtype, scores, threshold):
    """NonMaxSuppression in onnxruntime keeps the same boxes, of any kind, in the same order."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

    class Model(torch.nn.Module):
        def forward(self, boxes, scores, idxs):
            one = extension_cpp.nms(boxes, scores, threshold), extension_cpp.batched_nms(boxes, scores, idxs, threshold)
            padded = extension_cpp.nms_padded(boxes, scores, threshold)
            return *one, *padded, *extension_cpp.nms_padded(boxes, scores, threshold, idxs)

    generator = torch.Generator().manual_seed(0)

    def arguments(n: int) -> tuple[Tensor, ...]:
        boxes = torch.randint(0, 10, (n, 4), generator=generator).double()  # Some inverted, many that touch.
        upright = torch.rand(n, generator=generator) < 0.7
        boxes[upright, 2:] = boxes[upright, :2] + torch.randint(1, 4, (int(upright.sum()), 2), generator=generator)
        values = torch.randint(0, 5, (n,), generator=generator).double()
        if n % 2:
            for special in (torch.nan, torch.inf, -torch.inf):
                boxes[torch.rand(n, 4, generator=generator) < 0.03] = special
                if scores.is_floating_point:
                    values[torch.rand(n, generator=generator) < 0.1] = special
        return boxes.to(dtype), values.to(scores), torch.randint(-1, 3, (n,), generator=generator)

    n = torch.export.Dim("n", min=0, max=2**30)
    program = torch.export.export(Model(), arguments(40), dynamic_shapes=({0: n},) * 3)
    program = program.run_decompositions(extension_cpp.decompositions())
    onnx = torch.onnx.export(program, custom_translation_table=extension_cpp.onnx_translations(), verbose=False)
    onnx.save(tmp_path / "nms.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "nms.onnx")
    names = [value.name for value in session.get_inputs()]
    for size in range(60):
        args = arguments(size)
        got = session.run(None, dict(zip(names, (t.numpy() for t in args))))
        for result, want in zip(got, Model()(*args), strict=True):
            assert torch.equal(torch.from_numpy(result), want), args


@pytest.mark.parametrize(
    ("boxes", "threshold", "message"),
    [
        (torch.rand(3, 4).double(), 0.5, "nms: boxes must be float16, bfloat16 or float32 in ONNX, .* got float64"),
        (torch.rand(3, 4), -0.5, "nms: iou_threshold must be a constant of at least 0 in ONNX, got -0.5"),
    ],
)
def test_what_onnx_has_not(boxes, threshold, message):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")

    class Model(torch.nn.Module):
        def forward(self, boxes):
            return extension_cpp.nms(boxes, boxes[:, 0], threshold)

    with pytest.raises(torch.onnx.errors.OnnxExporterError, match=message):
        torch.onnx.export(
            Model(), (boxes,), custom_translation_table=extension_cpp.onnx_translations(), verbose=False, dynamo=True
        )
