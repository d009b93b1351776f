"""What csrc/common/signature.cpp makes of signatures that no operator of the package has; the same as Python."""

import ctypes
from pathlib import Path

import pytest
import torch
from clones import environment
from test_signature import WRONG

from extension_cpp import jit
from extension_cpp.ops._signature import Signature

SOURCE = """
#define EXTENSION_CPP_NAMESPACE signatures
#include "common/elementwise.h"
#include "common/rowwise.h"

namespace extension_cpp::signatures {

const Tensor* pointer(const std::optional<Tensor>& t) {
  return t ? &*t : nullptr;
}

const Operator kCount("count(Tensor x, Tensor(a!)? running=None) -> ()", "x: N of float32; running: N as x ->");
void count(const Tensor& x, const std::optional<Tensor>& running) {
  const Call<2> call(kCount, {&x, pointer(running)});
  if (running) static_cast<float*>(running->mutable_data_ptr())[0] += 1;
}

const Operator kTwice("twice(Tensor x) -> Tensor", "x: N of float32 | float64 -> N*2");
const Operator kLarger("larger(Tensor x, int k, bool flag) -> Tensor", "x: N M -> 2*N 1+M N+M k*flag 3*2");
const Operator kSized("sized(Tensor x, Tensor y) -> ()", "x: N M; y: 2*N N+M where 2*M <= 8 ->");
const Operator kForgotten("forgotten(Tensor x, int k) -> Tensor", "x: N -> N k");
const Operator kChoice("choice(Tensor x, Tensor? y=None) -> Tensor", "x: B N | N; y: ... K -> B");
const Operator kOptional("optional(Tensor x, Tensor? y=None) -> Tensor", "x: N; y: ... K -> ... N");
const Operator kNone("none(Tensor x) -> Tensor", "x: N -> N");
Tensor twice(const Tensor& x) {
  return Call<1>(kTwice, {&x}).empty();
}
Tensor larger(const Tensor& x, int64_t k, bool flag) {
  return Call<1>(kLarger, {&x}, {{"k", k}, {"flag", flag}}).empty();
}
void sized(const Tensor& x, const Tensor& y) {
  const Call<2> call(kSized, {&x, &y});
}
Tensor forgotten(const Tensor& x, int64_t) {
  return Call<1>(kForgotten, {&x}).empty();
}
Tensor choice(const Tensor& x, const std::optional<Tensor>& y) {
  return Call<2>(kChoice, {&x, pointer(y)}).empty();
}
Tensor optional(const Tensor& x, const std::optional<Tensor>& y) {
  return Call<2>(kOptional, {&x, pointer(y)}).empty();
}
Tensor none(const Tensor& x) {
  const Call<1> call(kNone, {&x});
  call["M"];
  return call.empty();
}
struct Positive {
  template <class V>
  EXTENSION_CPP_INLINE V operator()(V x) const {
    return x > 0;
  }
};
const Operator kPositive("positive(Tensor x) -> Tensor", "x: ... -> ... of bool");
const Operator kSingle("single(Tensor x) -> Tensor", "x: ... -> ... of float32");
Tensor positive(const Tensor& x) {
  return elementwise(kPositive, Positive{}, x);
}
Tensor single(const Tensor& x) {
  return elementwise(kSingle, Positive{}, x);
}
struct MeanSquare {
  using Arguments = Roles<kRows>;
  using Results = Roles<kValues>;
  template <class V>
  struct State {
    V sum = 0;
  };
  template <class V>
  EXTENSION_CPP_INLINE void accumulate(State<V>& state, V x) const {
    state.sum += x * x;
  }
  template <class V>
  EXTENSION_CPP_INLINE void combine(State<V>& state, const State<V>& other) const {
    state.sum += other.sum;
  }
  template <class V, class Row>
  EXTENSION_CPP_INLINE V finish(const State<V>& state, const Row& row) const {
    return state.sum / row.size;
  }
};
const Operator kNarrow("narrow(Tensor x) -> Tensor", "x: ... N -> ... of float16");
Tensor narrow(const Tensor& x) {
  return rowwise(kNarrow, MeanSquare{}, x);
}
// Tensors that are None, first and after `as`; and results of the dtype of another than the first.
const Operator kFirst("first(Tensor? w, Tensor x, Tensor? y=None) -> Tensor", "w: N; x: N; y: N as x -> N");
const Operator kLike(
    "like(Tensor x, Tensor? w=None, Tensor? b=None, Tensor? c=None) -> Tensor",
    "x: N; w: N of float32|int64; b: N as w; c: N as b -> N as w");
const Operator kOut(
    "out(Tensor? a, Tensor? b, Tensor c, Tensor(a!) out) -> ()", "a: ...; b: ...; c: ...; out: broadcast(a, b, c) as c ->");
Tensor first(const std::optional<Tensor>& w, const Tensor& x, const std::optional<Tensor>& y) {
  return Call<3>(kFirst, {pointer(w), &x, pointer(y)}).empty();
}
Tensor like(
    const Tensor& x, const std::optional<Tensor>& w, const std::optional<Tensor>& b, const std::optional<Tensor>& c) {
  return Call<4>(kLike, {&x, pointer(w), pointer(b), pointer(c)}).empty();
}
void out(const std::optional<Tensor>& a, const std::optional<Tensor>& b, const Tensor& c, const Tensor& out) {
  const Call<4> call(kOut, {pointer(a), pointer(b), &c, &out});
}

EXTENSION_CPP_REGISTER(m) {
  m.add<&first>(kFirst);
  m.add<&like>(kLike);
  m.add<&out>(kOut);
  m.add<&count>(kCount);
  m.add<&twice>(kTwice);
  m.add<&larger>(kLarger);
  m.add<&sized>(kSized);
  m.add<&forgotten>(kForgotten);
  m.add<&choice>(kChoice);
  m.add<&optional>(kOptional);
  m.add<&none>(kNone);
  m.add<&positive>(kPositive);
  m.add<&single>(kSingle);
  m.add<&narrow>(kNarrow);
}

}  // namespace extension_cpp::signatures

extern "C" __attribute__((visibility("default"))) const char* refusal(const char* schema, const char* line) {
  static std::string error;
  error = extension_cpp::Operator(schema, line).error;
  return error.c_str();
}
"""


@pytest.fixture(scope="module")
def ops(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signatures")
    source = folder / "signatures.cpp"
    source.write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "cache"))
        patch.setenv("PATH", environment(folder)["PATH"])
        patch.setenv("DEBUG", "1")
        jit.load(source)
    return torch.ops.signatures


def said_by_cpp(schema: str, line: str) -> str:
    """Of an operator that is declared so."""
    (library,) = (path for path in torch.ops.loaded_libraries if Path(path).stem == "signatures")
    function = ctypes.CDLL(library).refusal
    function.restype = ctypes.c_char_p
    return function(schema.encode(), line.encode()).decode()


def said_by_python(op, *args):
    """The error of a call, or the sizes of its result, and its dtype if that isn't float32."""
    line = ctypes.CDLL(next(path for path in torch.ops.loaded_libraries if Path(path).stem == "signatures"))
    line.extension_cpp_signature.restype = ctypes.c_char_p
    schema = op.default._schema
    signature = Signature.read(line.extension_cpp_signature(schema.name.encode()).decode(), schema)
    try:
        result = signature.empty(args, signature.check(args))
    except RuntimeError as error:
        return str(error)
    return None if result is None else (*result.shape, *[result.dtype] * (result.dtype != torch.float32))


def said_by_kernel(op, *args):
    try:
        result = op(*args)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None if result is None else (*result.shape, *[result.dtype] * (result.dtype != torch.float32))


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_a_signature_that_is_wrong(ops, wrong, message):
    assert said_by_cpp("mymul(Tensor a, Tensor b) -> Tensor", wrong) == f"mymul: {message}"


def test_sizes(ops):
    """Of results and of arguments: each operation, with names and numbers on either side of it."""
    t = torch.ones
    no_value = "has no value: no tensor of this call has it"
    for op, args, want in (
        (ops.twice, (t(3),), (6,)),
        (ops.twice, (t(3).half(),), "twice: x must have dtype float32 or float64, got float16"),
        (ops.larger, (t(2, 3), 5, True), (4, 4, 5, 5, 6)),
        (ops.larger, (t(2, 3), 5, False), (4, 4, 5, 0, 6)),
        (ops.sized, (t(2, 3), t(4, 5)), None),
        (ops.sized, (t(2, 3), t(4, 4)), "sized: y must have shape (2*N, N+M) with N = 2 and M = 3, got (4, 4)"),
        (
            ops.sized,
            (t(2, 5), t(4, 7)),
            "sized: y must have shape (2*N, N+M) with 2*M <= 8 and N = 2 and M = 5, got (4, 7)",
        ),
        (ops.choice, (t(2, 3),), (2,)),
        (ops.choice, (t(3),), f"choice: its size B {no_value}"),
        (ops.optional, (t(3), t(4, 2)), (4, 3)),
        (ops.optional, (t(3), None), f"optional: its size ... {no_value}"),
    ):
        assert said_by_kernel(op, *args) == said_by_python(op, *args) == want


def test_sizes_that_a_function_forgets_or_makes_up(ops):
    for op, args, message in (
        (ops.forgotten, (torch.ones(3), 2), "its size k has no value: its function must give that number to Call"),
        (ops.none, (torch.ones(3),), "its signature must say 'M' of an argument"),
    ):
        assert said_by_kernel(op, *args) == f"{op.default._schema.name.partition('::')[2]}: {message}"


def test_an_optional_tensor_that_is_written(ops):
    """Autograd learns of the write, and what overlaps is refused; no write if it is None."""
    x, w, running = torch.ones(3), torch.ones(3, requires_grad=True), torch.ones(3)
    product = (w * running).sum()
    ops.count(x, running)
    assert running.tolist() == [2, 1, 1] and running._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    ops.count(x)
    assert x._version == 0
    buffer = torch.ones(4)
    with pytest.raises(
        RuntimeError, match=r"^count: running must be x itself or not overlap it, got a partial overlap"
    ):
        ops.count(buffer[:3], buffer[1:])
    with pytest.raises(
        RuntimeError, match=r"^count: running must not overlap itself, got shape \(3,\) with strides \(0,\)"
    ):
        ops.count(x, torch.ones(1).expand(3))


def test_a_result_of_another_dtype(ops):
    """A formula has one type for its inputs and its results."""
    x = torch.tensor([-1.0, 2.0])
    wanted = "its signature must give the result of an elementwise formula the dtype of its inputs"
    assert said_by_kernel(ops.positive, x) == f"positive: {wanted}, float32, got bool"
    assert said_by_kernel(ops.single, x.double()) == f"single: {wanted}, float64, got float32"
    assert ops.single(x).tolist() == [0, 1] and ops.single(x).dtype == torch.float32
    wanted = "narrow: its signature must give result 0 of this formula dtype float32, got float16"
    assert said_by_kernel(ops.narrow, torch.ones(2, 3)) == wanted
    assert ops.narrow(torch.full((2, 3), 2.0).half()).tolist() == [4, 4]


def test_optional_tensors_that_are_none(ops):
    """The device and the dtypes are those of the tensors that are given, or that an argument which is None may have."""
    x, double, number = torch.ones(3), torch.ones(3).double(), torch.ones(3, dtype=torch.int64)
    for op, args, want in (
        (ops.first, (None, x, None), (3,)),
        (ops.first, (None, double, double), (3, torch.float64)),
        (ops.first, (double, x, x), (3, torch.float64)),
        (ops.first, (None, x, double), "first: y must have the dtype of x, float32, got float64"),
        (ops.first, (None, x, torch.ones(2)), "first: y must have shape (N,) with N = 3, got (2,)"),
        (ops.like, (x, number, number), (3, torch.int64)),
        (ops.like, (x, number, None, number), (3, torch.int64)),
        (ops.like, (x, number, None, x), "like: c must have the dtype of w, int64, got float32"),
        (ops.like, (x, None, double), "like: b must have dtype float32 or int64, got float64"),
        (ops.like, (x, None, None, double), "like: c must have dtype float32 or int64, got float64"),
        (ops.like, (x, None, number), "like: w must be a tensor, as a result has its dtype, got None"),
        (ops.out, (None, None, x, torch.ones(3)), None),
        (ops.out, (None, torch.ones(2), x, x), "out: b and c must have shapes that broadcast, got (2,) and (3,)"),
    ):
        assert said_by_kernel(op, *args) == said_by_python(op, *args) == want
