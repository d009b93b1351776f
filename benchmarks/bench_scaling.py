"""A training step on one GPU and on two: the processes of torchrun, with NCCL.

The batch is of a step, whatever the number of GPUs, so that twice the speed is the limit. What a process measures is the
median of steps after those that warm up; the case reports that of the first process.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import extension_cpp
from benchmarks.harness import OURS, Case, Unavailable, reported

STEPS, WARM_UP = 30, 8
TOKENS, WIDTH, INNER = 16_384, 4_096, 16_384
BATCH, TIME, STATE = 1_024, 256, 1_024
Step = Callable[[], object]


class Products(nn.Module):
    """The two products of a transformer's feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.up = nn.Parameter(torch.randn(WIDTH, INNER, **options) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(INNER, WIDTH, **options) / INNER**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return extension_cpp.matmul(extension_cpp.matmul(x, self.up).relu(), self.down)


class Recurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(STATE, STATE, device="cuda", dtype=torch.bfloat16)
        self.layer = extension_cpp.nn.ConvRNN(3, batch_first=True, device="cuda", dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.into(x))[0]


def step_of(model: nn.Module, loss: Callable[[Tensor], Tensor], x: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(model(x)).backward()
        optimizer.step()

    return step


def squares(y: Tensor) -> Tensor:
    return y.float().square().mean()


def part_of_batch(make: Callable[[], nn.Module], rank: int, gpus: int, *shape: int) -> Step:
    """DistributedDataParallel: each GPU has a part of the batch, and the gradients are averaged."""
    model = nn.parallel.DistributedDataParallel(make(), device_ids=[rank]) if gpus > 1 else make()
    x = torch.randn(shape[0] // gpus, *shape[1:], device="cuda", dtype=torch.bfloat16)
    return step_of(model, squares, x)


def part_of_weights(rank: int, gpus: int) -> Step:
    """DTensor: each GPU has columns of the first matrix and rows of the second, and the partial sums are added."""
    if gpus == 1:
        return part_of_batch(Products, rank, gpus, TOKENS, WIDTH)
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh, model = init_device_mesh("cuda", (gpus,)), Products()
    for name, dim in (("up", 1), ("down", 0)):
        weight = distribute_tensor(getattr(model, name).detach(), mesh, [Shard(dim)])
        setattr(model, name, nn.Parameter(weight))
    x = DTensor.from_local(torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16), mesh, [Replicate()])

    def loss(y: Any) -> Tensor:
        return squares(y.redistribute(placements=[Replicate()]).to_local())

    return step_of(model, loss, x)


PRODUCTS = f"{TOKENS:,} by {WIDTH:,} by {INNER:,}"
WORK: dict[str, tuple[str, str, str, Callable[[int, int], Step]]] = {
    "recurrence": (
        "ConvRNN",
        "DistributedDataParallel",
        f"({BATCH}, {TIME}, {STATE})",
        lambda rank, gpus: part_of_batch(Recurrence, rank, gpus, BATCH, TIME, STATE),
    ),
    "products": (
        "matmul",
        "DistributedDataParallel",
        PRODUCTS,
        lambda rank, gpus: part_of_batch(Products, rank, gpus, TOKENS, WIDTH),
    ),
    "weights": ("matmul", "weights sharded by DTensor", PRODUCTS, part_of_weights),
}


def seconds(work: str, gpus: int) -> float:
    """Of a step, as the first of so many processes says."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={gpus}",
        __file__,
        work,
    ]
    # NCCL takes a switch's multicast where it thinks that there is one, which virtual machines may not have.
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    variables = {**os.environ, "PYTHONPATH": path, "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    if done.returncode:
        raise Unavailable((done.stderr or done.stdout).strip()[-2000:])
    return float(done.stdout.split()[-1])


def cases(device: str) -> Iterator[Case]:
    if device != "cuda" or torch.cuda.device_count() < 2:
        return
    for work, (op, how, size, _) in WORK.items():
        contenders = {f"{OURS} on {gpus} GPU{'s' * (gpus > 1)}": partial(seconds, work, gpus) for gpus in (2, 1)}
        title = f"training, {how}"
        yield Case(op, device, contenders, workload=title, dtype=torch.bfloat16, size=size, timer=reported, rounds=1)


def main() -> None:
    rank, gpus = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    step = WORK[sys.argv[1]][3](rank, gpus)
    times = []
    for i in range(WARM_UP + STEPS):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        step()
        events[1].record()
        torch.cuda.synchronize()
        if i >= WARM_UP:
            times.append(events[0].elapsed_time(events[1]) / 1e3)
    if rank == 0:
        print(statistics.median(times))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
