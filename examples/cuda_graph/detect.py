"""A whole detection head as one CUDA graph: convolution, decoding, suppression, and the best boxes.

A graph has no place for a result whose size depends on values, nor for a wait for the device. So nothing is filtered before
the suppression: boxes come out of `nms_padded` by descending score, and those below the least score are cut off at the end.
They can't suppress a box of a higher score. Without a GPU the head runs as it is.

    python detect.py
"""

import torch
from torch import Tensor, nn

import extension_cpp


class Head(nn.Module):
    """Features (channels, height, width) to at most `most` boxes."""

    def __init__(self, channels: int = 64, classes: int = 80, stride: float = 8.0, most: int = 300) -> None:
        super().__init__()
        self.predict = nn.Conv2d(channels, 4 + classes, 1)
        self.classes, self.stride, self.most = classes, stride, most
        self.least_score, self.iou_threshold = 0.25, 0.45

    def decode(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A box a cell: (N, 4), its score and its class."""
        height, width = features.shape[-2:]
        sides, scores = self.predict(features).flatten(1).T.split((4, self.classes), 1)
        y, x = torch.meshgrid(
            torch.arange(height, device=features.device), torch.arange(width, device=features.device), indexing="ij"
        )
        centres = (torch.stack([x, y], -1).flatten(0, 1) + 0.5) * self.stride
        low, high = (sides.exp() * self.stride).split((2, 2), 1)
        scores, classes = scores.sigmoid().max(1)
        return torch.cat([centres - low, centres + high], 1), scores, classes

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Boxes (most, 4), scores and classes (most,), by descending score; and how many of them are detections, ()."""
        boxes, scores, classes = self.decode(features)
        keep, _ = extension_cpp.nms_padded(boxes, scores, self.iou_threshold, classes)
        keep = nn.functional.pad(keep, (0, self.most), value=-1)[: self.most]
        place = keep.clamp(min=0)
        found = (keep >= 0) & (scores[place] > self.least_score)
        return boxes[place], scores[place], classes[place], found.sum()


class Graph:
    """A module's calls on inputs of one shape, captured once and replayed. A result holds until the next call."""

    @torch.no_grad()
    def __init__(self, module: nn.Module, example: Tensor) -> None:
        self.input = example.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # Libraries take their memory at the first call, which can't be captured.
            module(self.input)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = module(self.input)

    def __call__(self, input: Tensor) -> tuple[Tensor, ...]:
        self.input.copy_(input)
        self.graph.replay()
        return self.results


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    head = Head().eval().to(device)
    features = 3 * torch.randn(64, 80, 80, device=device)
    with torch.no_grad():
        expected = head(features)
    run = Graph(head, torch.zeros_like(features)) if device == "cuda" else None
    results = run(features) if run else expected
    assert all(map(torch.equal, results, expected))
    count = int(results[-1])  # The first wait for the device.
    print(f"{count} detections on {device}{', as one CUDA graph' if run else ''}; the best: {results[0][0].tolist()}")


if __name__ == "__main__":
    main()
