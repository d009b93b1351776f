"""Which implementation is used, and that another is chosen where it was asked for: eager, compiled, in a whole process."""

import json
import os
import threading
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from functorch.compile import make_boxed_func
from processes import PACKAGE, python
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import extension_cpp
from extension_cpp import use_backend
from extension_cpp.ops import _backends
from extension_cpp.testing import TORCH

HERE = Path(__file__).parent
OPS = torch.ops.extension_cpp
CUDA = bool(torch.version.cuda)
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
needs_triton_here = pytest.mark.skipif(bool(_backends.why_no_triton()), reason=_backends.why_no_triton())


class Recorder(TorchDispatchMode):
    """The overloads of this package that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "extension_cpp":
            self.seen.append(f"{function._opname}.{function._overloadname}")
        return function(*args, **(kwargs or {}))


class Graphs:
    """A backend of torch.compile that keeps the operators of this package in the graphs that it is given."""

    def __init__(self, aot: bool = False) -> None:
        self.seen: list[list[str]] = []
        self.text = ""
        self.finish = make_boxed_func if aot else lambda function: function
        self.backend = aot_autograd(fw_compiler=self.keep, bw_compiler=self.keep) if aot else self.keep

    def keep(self, graph, inputs):
        self.text = str(graph.graph)
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        self.seen.append([name.removeprefix("extension_cpp.") for name in targets if name.startswith("extension_cpp.")])
        return self.finish(graph.forward)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def two() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5), torch.randn(5)


OWN = {
    *("add_one", "my_op", "mymuladd", "mymul", "myadd_out"),
    *("convrnn_forward", "matmul", "nms", "batched_nms", "nms_padded"),
}


class TestBackends:
    def test_every_operator_on_every_device(self):
        told = extension_cpp.backends("xpu")
        told = {
            name: by_type for name, by_type in told.items() if not name.startswith("fault_")
        }  # Those of other tests.
        assert list(told) == sorted(extension_cpp.ops.__all__)
        for name, by_type in told.items():
            assert by_type["cpu"] == "native" and by_type["xpu"] == "reference"
            if name not in OWN:  # Of which only its author knows what kernels it has.
                continue
            native = CUDA and (PACKAGE / "_C_cuda.so").exists()
            if native and name in ("add_one", "my_op"):
                native = f"extension_cpp::{name}" in _backends.compiled()[1]
            triton = name in ("add_one", "my_op", "mymul", "mymuladd") and CUDA and not _backends.why_no_triton()
            compiled = native and name in ("add_one", "my_op")
            wanted = _backends.COMPILED if compiled else "native" if native else "triton" if triton else "reference"
            assert by_type["cuda"] == wanted
        json.dumps(told)


class TestChoice:
    @pytest.mark.parametrize("call", [extension_cpp.mymul, OPS.mymul, OPS.mymul.default, OPS.mymul.kernel])
    def test_every_way_to_call(self, call):
        with use_backend("reference"), Recorder() as recorder:
            call(*two())
            call(a=two()[0], b=two()[1])
        assert recorder.seen == ["mymul.reference"] * 2

    def test_the_innermost_holds(self):
        with Recorder() as recorder, use_backend("reference"):
            with use_backend("native"):
                extension_cpp.mymul(*two())
            extension_cpp.mymul(*two())
        assert recorder.seen == ["mymul.native", "mymul.reference"]

    @pytest.mark.slow
    def test_first_used_by_several_threads_at_once(self):
        code = """
import threading, torch, extension_cpp
start, wrong = threading.Barrier(8), []
def use(backend):
    start.wait()
    try:
        with extension_cpp.use_backend(backend):
            assert extension_cpp.mymul(torch.ones(2), torch.ones(2)).tolist() == [1, 1]
    except Exception as error:
        wrong.append(error)
threads = [threading.Thread(target=use, args=(backend,)) for backend in ("native", "reference") * 4]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(wrong)
"""
        done = python(code)
        assert done.stdout.strip() == "[]", done.stdout + done.stderr

    def test_ends_with_an_error_and_in_other_threads(self):
        seen = []

        def elsewhere():
            with Recorder() as recorder:
                extension_cpp.mymul(*two())
            seen.extend(recorder.seen)

        with pytest.raises(ZeroDivisionError), use_backend("reference"):
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            raise ZeroDivisionError
        elsewhere()
        assert seen == ["mymul.default"] * 2

    def test_derivatives_are_of_the_same_backend(self):
        """Also where backward is called after the block."""
        a, b = (t.requires_grad_() for t in two())
        with use_backend("reference"):
            y = extension_cpp.mymuladd(a, b, 0.5)
        with Recorder() as recorder:
            y.sum().backward()
        assert recorder.seen == ["mymul_backward.reference"]
        assert torch.equal(a.grad, b) and torch.equal(b.grad, a)

    def test_vmap_and_forward_mode(self):
        a, b = torch.randn(2, 4, 5)
        with use_backend("reference"), Recorder() as recorder:
            torch.testing.assert_close(torch.vmap(lambda x, y: extension_cpp.mymuladd(x, y, 1.0))(a, b), a * b + 1)
        assert set(recorder.seen) == {"mymuladd.reference"}

    def test_meta(self):
        """Neither CPU nor CUDA, nor a device: the fake kernel."""
        for backend in ("native", "reference"):
            with use_backend(backend):
                assert extension_cpp.mymul(*(t.to("meta") for t in two())).shape == (5,)


class TestWhatIsNotThere:
    def test_no_such_backend(self):
        with pytest.raises(RuntimeError, match="use_backend: backend must be native, triton or reference, got 'fast'"):
            use_backend("fast")

    @pytest.mark.slow
    def test_no_triton(self):
        done = python("""
sys.modules["triton"] = None
import torch, extension_cpp
try:
    extension_cpp.use_backend("triton")
except RuntimeError as error:
    print(error)
print(extension_cpp.add_one(torch.ones(2)).tolist(), extension_cpp.backends()["add_one"]["cuda"])
""")
        wanted = "use_backend: backend must be native or reference, got 'triton': Triton is not installed: pip install triton"
        used = "triton (compiled)" if _backends.compiled()[1] else "reference"
        assert done.stdout.splitlines() == [wanted, f"[2.0, 2.0] {used}"], done.stderr

    @pytest.mark.slow
    @pytest.mark.skipif(bool(_backends.compiled()[1]), reason="its kernels were compiled with the package")
    def test_an_operator_without_it(self):
        """On CUDA without kernels for it; fake tensors go where real ones would."""
        done = python("""
sys.modules["triton"] = None
import torch, extension_cpp
from torch._subclasses.fake_tensor import FakeTensorMode
torch.cuda.is_initialized = lambda: False
with FakeTensorMode(), extension_cpp.use_backend("native"):
    try:
        extension_cpp.add_one(torch.empty(3, device="cuda"))
    except RuntimeError as error:
        print(error)
""")
        reason = extension_cpp.load_errors.get("_C_cuda")  # As of a CPU package next to a torch with CUDA.
        wanted = f"add_one: backend must be reference on cuda, got native{f': {reason}' if reason else ''}"
        assert done.stdout.strip() == wanted, done.stderr

    @needs_triton_here
    def test_an_operator_without_triton(self):
        message = "nms: backend must be native or reference on cpu, got triton"
        with use_backend("triton"), pytest.raises(RuntimeError, match=message):
            extension_cpp.nms(torch.ones(3, 4), torch.ones(3), 0.5)

    def test_said_while_compiling(self):
        """The error of a choice in a compiled function has the same words."""

        def chooses(a, b):
            with use_backend("fast"):
                return extension_cpp.mymul(a, b)

        with pytest.raises(Exception, match="backend must be native, triton or reference, got 'fast'"):
            torch.compile(chooses, fullgraph=True, backend="eager")(*two())


class TestCompiled:
    def test_chosen_outside(self):
        """A change after compiling is honoured, and going back compiles nothing again."""
        graphs = Graphs()
        compiled = torch.compile(
            lambda a, b: extension_cpp.mymuladd(a, b, 1.0).relu(), fullgraph=True, backend=graphs.keep
        )
        a, b = two()
        expected = (a * b + 1).relu()
        torch.testing.assert_close(compiled(a, b), expected)
        for _ in range(2):
            with use_backend("reference"):
                torch.testing.assert_close(compiled(a, b), expected)
            torch.testing.assert_close(compiled(a, b), expected)
        assert graphs.seen == [["mymuladd.default"], ["mymuladd.reference"]]

    @pytest.mark.parametrize(
        "call", [extension_cpp.mymul, lambda a, b: OPS.mymul(a, b), lambda a, b: OPS.mymul.default(a, b)]
    )
    def test_chosen_inside(self, call):
        def chooses(a, b):
            first = call(a, b)
            with use_backend("reference"):
                second = call(a, b)
                with use_backend("native"):
                    third = call(a, b)
            return first + second + third

        graphs = Graphs()
        a, b = two()
        got = torch.compile(chooses, fullgraph=True, backend=graphs.keep)(a, b)
        torch.testing.assert_close(got, 3 * a * b)
        assert [name.removesuffix(".default") for name in graphs.seen[0]] == [
            "mymul",
            "mymul.reference",
            "mymul.native",
        ]

    @pytest.mark.slow
    def test_every_overload_is_removed_at_exit(self):
        """PyTorch terminates the process if overloads go in the wrong order."""
        done = python("""
import torch, extension_cpp
for backend in ("reference", "native"):
    extension_cpp.use_backend(backend)
compiled = torch.compile(extension_cpp.my_op, fullgraph=True, backend="eager")
print([compiled(torch.ones(1), number).item() for number in (0.5, 1.5, 2.5)])
print(sorted(torch.ops.extension_cpp.my_op.overloads()))
""")
        made = ["default", "kernel", "native", "reference", *["symbolic", "tensor"] * (TORCH >= (2, 13))]
        assert done.stdout.splitlines() == ["[0.5, 1.5, 2.5]", str(made)] and done.returncode == 0, done.stderr

    @pytest.mark.slow
    @needs_triton
    def test_triton_chosen_inside(self):
        """Also in a process that hasn't imported Triton before."""
        code = """
import torch, extension_cpp
def chooses(a):
    with extension_cpp.use_backend("triton"):
        return extension_cpp.add_one(a)
seen = []
def keep(graph, inputs):
    seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    return graph.forward
assert "triton" not in sys.modules
assert torch.compile(chooses, fullgraph=True, backend=keep)(torch.ones(3)).tolist() == [2.0] * 3
assert seen == ["extension_cpp.add_one.triton"], seen
"""
        done = python(code, TRITON_INTERPRET="1")
        assert done.returncode == 0, done.stderr

    def test_derivatives_are_of_the_same_backend(self):
        graphs = Graphs(aot=True)
        compiled = torch.compile(lambda a, b: extension_cpp.mymuladd(a, b, 1.0), fullgraph=True, backend=graphs.backend)
        a, b = (t.requires_grad_() for t in two())
        with use_backend("reference"):
            y = compiled(a, b)
        y.sum().backward()
        assert graphs.seen == [["mymuladd.reference"], ["mymul_backward.reference"]]
        assert torch.equal(a.grad, b) and torch.equal(b.grad, a)

    @needs_triton
    def test_a_formula_whose_name_its_kernel_needs(self):
        import triton

        from extension_cpp.triton.elementwise import Kernel

        def x(x):
            return x

        with pytest.raises(RuntimeError, match="x: its kernel has another use for that name"):
            Kernel(triton.jit(x), ["x"], [], 1)

    @needs_triton
    def test_a_formula_of_other_arguments(self):
        import triton

        from extension_cpp.triton.elementwise import elementwise

        def x(y):
            return y

        message = "my_op: its Triton formula must take arguments of its schema, input, scalar_arg; got y"
        with pytest.raises(RuntimeError, match=message):
            elementwise(triton.jit(x)).prepare(extension_cpp.my_op.operator)

    @pytest.mark.slow
    def test_inductor_and_export(self, tmp_path):
        a, b = two()
        with use_backend("reference"):
            compiled = torch.compile(lambda a, b: extension_cpp.mymuladd(a, b, 1.0).relu(), fullgraph=True)
            torch.testing.assert_close(compiled(a, b), (a * b + 1).relu())

            class Module(torch.nn.Module):
                def forward(self, a, b):
                    return extension_cpp.mymul(a, b)

            program = torch.export.export(Module(), (a, b))
        assert "mymul.reference" in str(program.graph)
        torch.testing.assert_close(program.module()(a, b), a * b)
        torch.export.save(program, tmp_path / "program.pt2")
        code = f"""
import torch, extension_cpp
extension_cpp.use_backend("reference")
print(torch.export.load({str(tmp_path / "program.pt2")!r}).module()(torch.full((5,), 2.0), torch.full((5,), 3.0)).tolist())
"""
        done = python(code)
        assert done.stdout.strip() == str([6.0] * 5), done.stderr


@needs_triton
@pytest.mark.skipif(not CUDA, reason="this torch was built without CUDA")
@pytest.mark.skipif(_backends.interpreted, reason="the interpreter's kernels can't be taken apart")
class TestTheCompilerSeesInside:
    """On CUDA, or, where there is none, on fake tensors. In a dtype in which Inductor doesn't fuse the operators itself."""

    def graph(self, function) -> str:
        if not torch.cuda.is_available() and VERSION < (2, 14):
            pytest.skip("no CUDA device, and up to torch 2.14 AOTAutograd takes no inputs that are fake already")
        graphs = Graphs(aot=True)
        with nullcontext() if torch.cuda.is_available() else FakeTensorMode(static_shapes=True):
            torch.compile(function, fullgraph=True, backend=graphs.backend)(torch.empty(4, 6, device="cuda").half())
        return graphs.text

    def test_what_triton_is_used_for(self):
        for function in (extension_cpp.add_one, lambda t: extension_cpp.my_op(t, 2.0)):
            graph = self.graph(function)
            assert "triton_kernel_wrapper_functional" in graph and "extension_cpp" not in graph

    def test_what_is_chosen(self):
        with use_backend("triton"):
            graph = self.graph(lambda t: extension_cpp.mymuladd(t, t[:1], 2.0))
        assert "triton_kernel_wrapper_functional" in graph and "extension_cpp" not in graph

    def test_export_keeps_the_operator(self):
        class Module(torch.nn.Module):
            def forward(self, t):
                return extension_cpp.add_one(t)

        with nullcontext() if torch.cuda.is_available() else FakeTensorMode(static_shapes=True):
            program = torch.export.export(Module(), (torch.empty(3, device="cuda"),))
        assert "extension_cpp.add_one.default" in str(program.graph)


@pytest.mark.slow
class TestWholeProcess:
    """EXTENSION_CPP_BACKEND."""

    CALLS = """
import torch, extension_cpp
from torch.utils._python_dispatch import TorchDispatchMode
a = torch.ones(2)
assert extension_cpp.mymuladd(a, a, 0.5).tolist() == [1.5, 1.5]
assert torch.ops.extension_cpp.mymul(a, a).tolist() == [1.0, 1.0]
x = torch.ones(2, requires_grad=True)
extension_cpp.mymuladd(x, a, 0.5).sum().backward()
fused = torch.full((1,), 1 + 2.0**-12)
print("once" if extension_cpp.mymuladd(fused, fused, -1.0).item() == (1 + 2.0**-12) ** 2 - 1 else "twice")
with extension_cpp.use_backend("native"):
    print("once" if extension_cpp.mymuladd(fused, fused, -1.0).item() == (1 + 2.0**-12) ** 2 - 1 else "twice")
print(extension_cpp.backends()["mymuladd"]["cpu"], extension_cpp.backends()["nms"].get("cpu"))
"""

    @pytest.mark.parametrize(
        "backend, said",
        [("", "native native once"), ("native", "native native once"), ("reference", "reference reference twice")],
    )
    def test_chosen(self, backend, said):
        """Told apart by rounding: kernels round a multiply-add once, plain PyTorch rounds the product too."""
        done = python(self.CALLS, EXTENSION_CPP_BACKEND=backend)
        first, native, served = done.stdout.splitlines()
        assert f"{served} {first}" == said and native == "once" and "Warning" not in done.stderr, done.stderr

    @needs_triton
    def test_triton(self):
        """It is used where it can be; the others say what there is."""
        calls = (
            self.CALLS.partition("fused =")[0]
            + """
print(extension_cpp.backends()["mymul"]["cpu"], extension_cpp.backends()["nms"].get("cpu"))
try:
    extension_cpp.nms(torch.ones(3, 4), torch.ones(3), 0.5)
except RuntimeError as error:
    print(error)
"""
        )
        done = python(calls, EXTENSION_CPP_BACKEND="triton", TRITON_INTERPRET="1")
        wanted = ["triton None", "nms: backend must be native or reference on cpu, got triton"]
        assert done.stdout.splitlines() == wanted, done.stderr


@needs_triton
@pytest.mark.skipif(
    torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ,
    reason="a GPU runs the kernels, or the environment chose",
)
def test_the_interpreter_is_used_by_default():
    """Where no GPU is, so that a wrong formula fails the operator's own tests; other processes have nothing of it."""
    assert _backends.implementations(extension_cpp.add_one.operator, "cpu") == ["native", "triton", "reference"]
    with use_backend("triton"), Recorder() as recorder:
        assert extension_cpp.add_one(torch.ones(3)).tolist() == [2.0] * 3
    assert recorder.seen == ["add_one.triton"]
    assert "TRITON_INTERPRET" not in os.environ
