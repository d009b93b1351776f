"""Operators on DTensors, on two processes or GPUs: the results and gradients of one, wherever the arguments are sharded."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import extension_cpp
from extension_cpp._features import TORCH
from extension_cpp.ops import _backends, _sharding
from extension_cpp.ops._operator import operator
from extension_cpp.testing import Args, Case, clone, compare, contracts, describe, map_tensors, ramp, run, tensors

HERE = Path(__file__).parent
LIBRARY = torch.library.Library("extension_cpp", "FRAGMENT")
SCHEMAS = {
    "sharded_product": "(Tensor a, Tensor b) -> Tensor",
    "sharded_rows": "(Tensor x, Tensor weight) -> Tensor",
    "sharded_sums": "(Tensor x) -> (Tensor, Tensor)",
    "sharded_add": "(Tensor a, Tensor b, Tensor(a!) out) -> ()",
    "sharded_none": "(Tensor x) -> Tensor",
    "sharded_windows": "(Tensor x) -> Tensor",
    "fault_cumsum": "(Tensor x) -> Tensor",
    "fault_max": "(Tensor x) -> Tensor",
}


def declare(signature: str, **declared: Any) -> Callable[[Callable], Callable]:
    """An operator of the function's name that is made of its reference alone."""

    def make(reference: Callable) -> Callable:
        name = reference.__name__
        LIBRARY.define(name + SCHEMAS[name])
        for key in ("CPU", "CUDA"):
            LIBRARY.impl(name, reference, key)
        return operator(signature=signature, **declared)(reference)

    return make


def declare_all() -> dict[str, Callable]:
    @declare("a: M K; b: K N as a -> M N", independent="M N", summed="K")
    def sharded_product(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    @declare("x: ... H; weight: H as x -> ... H", independent="...")
    def sharded_rows(x: Tensor, weight: Tensor) -> Tensor:
        return x.softmax(-1) * weight

    @declare("x: N M -> N, M", independent="N M", summed="N M")
    def sharded_sums(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sum(1), x.sum(0)

    @declare("a: ...; b: ... as a; out: broadcast(a, b) as a ->")
    def sharded_add(a: Tensor, b: Tensor, out: Tensor) -> None:
        torch.add(a, b, out=out)

    @declare("x: N M -> N M")
    def sharded_none(x: Tensor) -> Tensor:
        return x.cumsum(0).cumsum(1)

    @declare("x: N M -> N M-1", independent="N M")
    def sharded_windows(x: Tensor) -> Tensor:
        return x.unfold(1, 2, 1).sum(2)  # DTensor has no rule for unfold, which the derivative needs.

    @declare("x: N M -> N M", independent="N M")
    def fault_cumsum(x: Tensor) -> Tensor:
        return x.cumsum(1)

    @declare("x: N M -> N", independent="N", summed="M")
    def fault_max(x: Tensor) -> Tensor:
        return x.amax(1)

    return locals()


def placements(t: Tensor, written: bool) -> list[Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    shards = [Shard(d) for d, size in enumerate(t.shape) if size > 1]
    return [Replicate(), *shards, *[Partial()] * (t.is_floating_point() and not written)]


def distribute(t: Tensor, mesh: Any, placement: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if placement.is_partial():
        return DTensor.from_local(t.clone() if dist.get_rank() == 0 else torch.zeros_like(t), mesh, [placement])
    return distribute_tensor(t.clone(), mesh, [placement])


def choices(op: Case, args: Args) -> Iterator[tuple[Any, ...]]:
    """A few of the placements that the tensors of a call may have, of each kind for each."""
    each = [placements(t, i in op.writes) for i, t in enumerate(args) if isinstance(t, Tensor)]
    every = [*product(*each)]
    step = max(1, len(every) // 6)
    yield from every[:: step if step % 2 or step == 1 else step + 1]


def check(op: Case, args: Args, mesh: Any) -> None:
    """As without DTensor, for results and gradients."""
    differentiable = op.differentiable and op.operator.public  # Derivatives of derivatives are the reference's.
    floating = [i for i in op.operator.differentiable_arguments if differentiable and i < len(args)]
    may = [i for i in floating if isinstance(args[i], Tensor)]
    plain = [t.detach().clone().requires_grad_(i in may) if isinstance(t, Tensor) else t for i, t in enumerate(args)]
    want = run(op, op.function, tuple(plain))
    seeds = [ramp(t) for t in want]
    wanted = torch.autograd.grad(want, [plain[i] for i in may], seeds, materialize_grads=True) if may else ()
    for chosen in choices(op, args):
        at = iter(chosen)
        given = tuple(distribute(t, mesh, next(at)) if isinstance(t, Tensor) else t for t in args)
        for i in may:
            given[i].requires_grad_()
        got = run(op, op.function, given)
        what = f"{op.name} with {chosen} on {describe(args)}"
        compare([t.full_tensor() for t in got], want, what)
        if may:
            from torch.distributed.tensor import Replicate

            dealt = [distribute(t, mesh, Replicate()) for t in seeds]
            found = torch.autograd.grad(got, [given[i] for i in may], dealt, materialize_grads=True)
            compare([t.full_tensor() for t in found], wanted, f"gradients of {what}")


def check_placements(ops: dict[str, Callable], mesh: Any) -> None:
    """What can be sharded stays sharded: nothing is gathered."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    a, b, sums = ramp(torch.empty(4, 6)), ramp(torch.empty(6, 2)), Partial()
    for function, args, given, wanted in [
        ("sharded_product", (a, b), (Shard(0), Replicate()), [Shard(0)]),
        ("sharded_product", (a, b), (Replicate(), Shard(1)), [Shard(1)]),
        ("sharded_product", (a, b), (Shard(1), Shard(0)), [sums]),
        ("sharded_rows", (torch.randn(3, 4, 6), a[0]), (Shard(1), Replicate()), [Shard(1)]),
        ("sharded_sums", (a,), (Shard(0),), [Shard(0), sums]),
        ("sharded_none", (a,), (Shard(0),), [Replicate()]),
    ]:
        results = ops[function](*(distribute(t, mesh, placement) for t, placement in zip(args, given)))
        got = [t.placements[0] for t in ([results] if isinstance(results, Tensor) else results)]
        assert got == wanted, f"{function} with {given}: {got}, not {wanted}"
    out = distribute(torch.zeros(4, 6), mesh, Partial())
    with pytest.raises(RuntimeError, match="sharded_add: out must be replicated, or sharded where each part"):
        ops["sharded_add"](distribute(a, mesh, Shard(0)), distribute(a[0], mesh, Replicate()), out)
    # Of two dimensions of a mesh, too, what is written stays where it is, though it is the cheaper one to move.
    if TORCH < (2, 11):
        return
    grid = init_device_mesh(mesh.device_type, (2, 1))
    out = distribute_tensor(torch.zeros(4, 6), grid, [Shard(1), Shard(0)])
    ops["sharded_add"](*(distribute_tensor(a, grid, [Shard(0), Shard(1)]) for _ in range(2)), out)
    compare([out.full_tensor()], [a + a], "written on a mesh of two dimensions")


def check_training(product: Callable, mesh: Any) -> None:
    """A step of two layers, by tensor parallel and by FSDP2, as on one process."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Parameter(ramp(torch.empty(6, 8, dtype=torch.float64)))
            self.down = torch.nn.Parameter(ramp(torch.empty(8, 6, dtype=torch.float64)))

        def forward(self, x: Tensor) -> Tensor:
            return product(product(x, self.up).relu(), self.down)

    def gradients(model: Layers, x: Tensor) -> list[Tensor]:
        loss = model(x).pow(2).mean()
        loss.backward()
        grads = [model.up.grad, model.down.grad]
        return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in grads]

    x = ramp(torch.empty(4, 6, dtype=torch.float64))
    want = gradients(Layers(), x)
    parallel = Layers()
    parallel.up = torch.nn.Parameter(distribute_tensor(parallel.up.data, mesh, [Shard(1)]))
    parallel.down = torch.nn.Parameter(distribute_tensor(parallel.down.data, mesh, [Shard(0)]))
    compare(gradients(parallel, distribute_tensor(x, mesh, [Replicate()])), want, "tensor parallel")
    sharded = Layers()
    fully_shard(sharded, mesh=mesh)
    compare(gradients(sharded, x.chunk(2)[dist.get_rank()]), want, "FSDP2")


def check_images(mesh: Any) -> None:
    """batched_nms on a batch of images that is sharded: each process keeps boxes of its own images, as one process does."""
    from torch.distributed.tensor import Shard, distribute_tensor

    def keep(boxes: Tensor, scores: Tensor) -> Tensor:
        images, n = scores.shape
        image = torch.arange(images, device=scores.device).repeat_interleave(n)
        return extension_cpp.batched_nms(boxes.flatten(0, 1), scores.flatten(), image, 0.5)

    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(4, 30, 2, generator=generator)
    boxes, scores = torch.cat([corners, corners + 0.3], 2), torch.rand(4, 30, generator=generator)
    sharded = [distribute_tensor(t.to(mesh.device_type), mesh, [Shard(0)]) for t in (boxes, scores)]
    parts: list[Any] = [None, None]
    dist.all_gather_object(parts, keep(*(t.to_local() for t in sharded)).cpu() + 60 * dist.get_rank())
    want = keep(boxes, scores)
    assert 4 < len(want) < 120
    assert torch.equal(torch.cat(parts).sort()[0], want.sort()[0])


def is_taken(op: Case) -> bool:
    """DTensor takes operators without results from torch 2.11 on."""
    return TORCH >= (2, 11) or not op.writes


def work(rank: int, store: str, device: str) -> None:
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    from torch.distributed.tensor import init_device_mesh

    mesh = init_device_mesh(device, (2,))
    ops = declare_all()
    with torch.device(device):
        check_placements(ops, mesh)
        check_training(ops["sharded_product"], mesh)
    check_images(mesh)
    for contract in contracts(HERE):
        args = contract.smallest(contract.small_samples(device))
        if contract.op.dynamic_size:
            with pytest.raises(
                RuntimeError, match=f"{contract.op.name}: the size of the result depends on values, .* DT"
            ):
                check(contract.op, args, mesh)
            continue
        if not is_taken(contract.op):
            continue
        samples = [args for args in contract.small_samples(device) if all(t.numel() > 1 for t in tensors(args))]
        for args in islice(samples, 2):
            check(contract.op, map_tensors(clone, args), mesh)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
    for name in ("sharded_rows", "sharded_sums", "sharded_none", "sharded_windows", "fault_cumsum", "fault_max"):
        op, args = Case(ops[name], lambda device, dtype: ()), (x, x[0]) if name == "sharded_rows" else (x,)
        if name.startswith("fault"):
            with pytest.raises(AssertionError, match=f"{name} with"):
                check(op, args, mesh)
        else:
            check(op, args, mesh)
    print("checked", *sorted(str(overload) for overload in _sharding._registered))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_two_processes(tmp_path, device):
    if not dist.is_available() or not (dist.is_gloo_available() if device == "cpu" else dist.is_nccl_available()):
        pytest.skip(f"torch has no {'gloo' if device == 'cpu' else 'nccl'}")
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("fewer than two GPUs")
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    # NCCL takes a switch's multicast where it thinks that there is one, which virtual machines may not have.
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
    both = []
    for rank in "01":
        with (tmp_path / rank).open("w") as said:
            command = [sys.executable, __file__, rank, str(tmp_path / "store"), device]
            both.append(subprocess.Popen(command, env=variables, stdout=said, stderr=subprocess.STDOUT))
    try:
        # One that failed leaves the other waiting for it.
        while any(process.poll() is None for process in both) and not any(process.poll() for process in both):
            time.sleep(0.05)
    finally:
        for process in both:
            process.kill()
            process.wait()
    said = "\n".join((tmp_path / rank).read_text() for rank in "01")
    assert [process.returncode for process in both] == [0, 0], said
    for contract in filter(lambda contract: is_taken(contract.op), contracts(HERE)):
        assert f"extension_cpp.{contract.op.name}.default" in said
        assert hasattr(test_two_processes, contract.op.name)


# `pytest -k <operator>` chooses it too: -k looks at a function's attributes.
test_two_processes.__dict__ |= dict.fromkeys(_backends.operators, True)

if __name__ == "__main__":
    work(int(sys.argv[1]), *sys.argv[2:])
