"""A model that calls every operator, compiled into a file that a program without Python runs.

    python export.py model.pt2 cpu

Prints what that program must print.
"""

import sys

import torch
from torch import Tensor

import extension_cpp


class Model(torch.nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # (8, 4)
        corners, scores = x.sin() * 10, x[:, 0]
        boxes = torch.cat([corners, corners[:, :2] + 8], 1)[:, 2:]
        classes = torch.arange(8, device=x.device) % 2
        out = torch.empty_like(x)
        extension_cpp.myadd_out(x, scores[:, None], out)
        return (
            out,
            extension_cpp.mymuladd(x, x[0], 0.5),
            extension_cpp.mymul(x, x),
            extension_cpp.add_one(x),
            extension_cpp.my_op(x, 3.0),
            extension_cpp.matmul(x, x.t()),
            extension_cpp.convrnn_forward(x.view(2, 4, 4), x[:1, :3].unsqueeze(0), x[:2]),
            extension_cpp.nms(boxes, scores, 0.2),
            extension_cpp.batched_nms(boxes, scores, classes, 0.2),
            *extension_cpp.nms_padded(boxes, scores, 0.2, classes),
        )


def main(file: str, device: str) -> None:
    model, x = Model(), torch.linspace(-1, 1, 32, device=device).view(8, 4)
    torch._inductor.aoti_compile_and_package(torch.export.export(model, (x,)), package_path=file)
    for result in model(x):
        print(list(result.shape), f"{result.double().mean().item():.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
