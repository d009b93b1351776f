"""Triton's kernels that were compiled with the package: what the contract doesn't show of them. Most of it needs a GPU."""

import threading

import pytest
import torch
from processes import python

import extension_cpp
from extension_cpp import use_backend
from extension_cpp.ops import _backends
from extension_cpp.testing import FLOATING, same_bits

COMPILED = [operator for operator in _backends.operators.values() if _backends.is_compiled(operator, "cuda")]
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and COMPILED), reason="needs a GPU, and kernels that were compiled with the package"
)


def layouts(dtype: torch.dtype):
    """Ways to lie in memory that the launcher tells apart, and sizes around those of a block."""
    for n in (1, 2, 15, 16, 17, 1023, 1024, 1025, 4096, 2**20 - 1, 2**20, 2**20 + 3):
        whole = torch.randn(n + 3, device="cuda").to(dtype)
        yield from (whole[:n], whole[1 : n + 1], whole[3:])
        yield torch.randn(2 * n, device="cuda").to(dtype)[::2]
    cube = torch.randn(7, 6, 5, 4, 3, device="cuda").to(dtype)
    yield from (cube[0, 0, 0].t(), cube[0, 0].transpose(0, 2), cube[:, ::2, :, 1:, ::2], cube.permute(3, 1, 4, 0, 2))
    yield from (cube[..., 1], cube[:, :1].expand(7, 9, 5, 4, 3), cube[0, 0, 0, 0, 0].expand(300, 500))
    yield from (cube[0].to(memory_format=torch.channels_last), torch.empty(0, 3, device="cuda", dtype=dtype))


def test_it_is_used():
    assert all(_backends.shown(operator, "cuda") == _backends.COMPILED for operator in COMPILED)
    shown = extension_cpp.backends()
    assert all(shown[operator.name]["cuda"] == _backends.COMPILED for operator in COMPILED if operator.public)


@pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_the_bits_of_pytorch(dtype):
    """In every layout; and those of Triton just in time, if it is there."""
    for t in layouts(dtype):
        for got, want in ((extension_cpp.add_one(t), t + 1), (extension_cpp.my_op(t, -2.25), t * -2.25)):
            assert same_bits(got, want), (t.shape, t.stride())
            assert got.stride() == want.stride()
    if not _backends.why_no_triton():
        t = torch.randn(1000, device="cuda").to(dtype)
        with use_backend("triton"):
            want = extension_cpp.my_op(t, 1 / 3)
        assert same_bits(extension_cpp.my_op(t, 1 / 3), want)


def test_nothing_beyond_the_result_is_written():
    for n in (1, 17, 1000, 5000):
        for start in (0, 1, 4):
            around = torch.full((n + 4096,), 7.0, device="cuda")
            given = around[start : start + n]
            extension_cpp.add_one(given)
            assert (around == 7).all()
            got = extension_cpp.my_op(given, 2.0)
            assert (got == 14).all() and got.untyped_storage().nbytes() >= 4 * n


@pytest.mark.large
def test_offsets_past_32_bits():
    """In one dimension and along the outermost of two: several launches; where one step is too long for one: copied."""
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of free memory")
    for n, view in (
        (2**31 + 17, lambda t: t),
        (2**32, lambda t: t.view(2**20, -1)[:, 1:]),
        (6 * 2**30, lambda t: t.view(2, 3, -1)[..., ::2]),
    ):
        t = view(torch.empty(n, device="cuda", dtype=torch.float16).uniform_())
        got = extension_cpp.add_one(t)
        for part, expected in zip(got.view(-1).split(2**30), t.reshape(-1).split(2**30)):
            assert torch.equal(part, expected + 1)
        del t, got, part, expected
        torch.cuda.empty_cache()


@pytest.mark.slow
@pytest.mark.parametrize("triton", ["", "sys.modules['triton'] = None"], ids=["with_triton", "without_triton"])
def test_the_first_call_imports_and_compiles_nothing(triton):
    done = python(
        f"""
import torch
{triton}
import extension_cpp
x = torch.arange(1000.0, device="cuda", requires_grad=True)
y = extension_cpp.my_op(extension_cpp.add_one(x), 2.0)
y.sum().backward()
assert torch.equal(y, (x + 1) * 2) and torch.equal(x.grad, torch.full_like(x, 2))
print(sorted(name for name, module in sys.modules.items() if module and name.startswith(("triton", "torch._dynamo"))))
""",
        fresh=True,
    )
    assert done.stdout.split() == ["[]"], done.stdout + done.stderr


@pytest.mark.slow
def test_the_first_call_is_in_a_graph():
    """Machine code is loaded while the graph is captured."""
    done = python(
        """
import torch, extension_cpp
x = torch.ones(5000, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = extension_cpp.my_op(extension_cpp.add_one(x), 3.0)
for value in (2.0, -1.0):
    x.fill_(value)
    graph.replay()
    assert torch.equal(y, (x + 1) * 3), y
print("replayed")
""",
        fresh=True,
    )
    assert done.stdout.split() == ["replayed"], done.stdout + done.stderr


@pytest.mark.slow
def test_first_used_by_several_threads_at_once():
    done = python(
        """
import threading, torch, extension_cpp
x = torch.arange(3000.0, device="cuda")
torch.cuda.synchronize()
start, wrong = threading.Barrier(8), []
def use(i):
    stream = torch.cuda.Stream()
    start.wait()
    try:
        with torch.cuda.stream(stream):
            for t in (x, x.double(), x.half(), x[1:], x.view(1000, 3).t()):
                assert torch.equal(extension_cpp.my_op(t, 2.0), t * 2)
    except Exception as error:
        wrong.append(repr(error))
threads = [threading.Thread(target=use, args=(i,)) for i in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
print(wrong)
""",
        fresh=True,
    )
    assert done.stdout.split() == ["[]"], done.stdout + done.stderr


@pytest.mark.slow
def test_a_fork_after_the_import():
    """The process has not initialised CUDA: its children can."""
    done = python(
        """
import os, torch, extension_cpp
for i in range(2):
    pid = os.fork()
    if not pid:
        x = torch.arange(1000.0, device=f"cuda:{i % torch.cuda.device_count()}")
        os._exit(not torch.equal(extension_cpp.my_op(x, 2.0), x * 2))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
        fresh=True,
    )
    assert done.stdout.split() == ["0", "0"], done.stdout + done.stderr


def test_side_stream():
    """The launch is on the current stream: it waits for what that has to do before."""
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 22, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(5.0)
        y = extension_cpp.add_one(x)
    stream.synchronize()
    assert (y == 6).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_gpu():
    """While the first is current; from a thread that has used none."""
    results = []

    def use() -> None:
        for device in ("cuda:1", "cuda:0"):
            x = torch.arange(3000.0, device=device)
            results.append(torch.equal(extension_cpp.my_op(x, 2.0), x * 2))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert results == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("triton", [True, False], ids=["with_triton", "without_triton"])
def test_a_gpu_that_runs_none_of_it(triton):
    """Triton just in time is used if it is there, else the reference; what is registered by then is no user's kernel."""
    if triton and _backends.why_no_triton():
        pytest.skip(_backends.why_no_triton())
    done = python(
        f"""
import warnings, torch
{"" if triton else "sys.modules['triton'] = None"}
import extension_cpp
from extension_cpp import _build
_build.runs_on = lambda architectures, gpu: (False, False)
warnings.simplefilter("ignore")
before = extension_cpp.backends()["add_one"]["cuda"]
x = torch.arange(1000.0, device="cuda", requires_grad=True)
for call in (extension_cpp.my_op, torch.ops.extension_cpp.my_op, torch.ops.extension_cpp.my_op.kernel):
    with torch.no_grad():
        assert torch.equal(call(x, 2.0), x * 2)
extension_cpp.my_op(x, 3.0).sum().backward()
assert torch.equal(x.grad, torch.full_like(x, 3))
print(before, extension_cpp.backends()["add_one"]["cuda"], extension_cpp.my_op.operator.uses_only_ours())
""",
        fresh=True,
    )
    wanted = f"triton (compiled) {'triton' if triton else 'reference'} True"
    assert done.stdout.strip() == wanted, done.stdout + done.stderr
