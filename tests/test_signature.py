"""Signatures: C++ and Python read the same line, accept the same arguments, and refuse others in the same words."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import extension_cpp
from extension_cpp.ops import _backends, _signature
from extension_cpp.ops._signature import Pattern, Signature, empty_elementwise, value

OPERATORS = {
    name: operator
    for name, operator in _backends.operators.items()
    if operator.reference.__module__.startswith("extension_cpp.ops.")
}
COMPILED = sorted(name for name, operator in OPERATORS.items() if "cpu" in operator.native)


def said_by_kernel(name: str, args: tuple) -> tuple[str, list[Tensor]]:
    """The error of the compiled kernel, or its results."""
    packet = getattr(torch.ops.extension_cpp, name)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    try:
        results = packet.kernel.redispatch(keys, *args)
    except RuntimeError as error:
        return str(error).splitlines()[0], []
    return "", [results] if isinstance(results, Tensor) else list(results or ())


def said_by_python(name: str, args: tuple) -> tuple[str, list[Tensor] | None]:
    """The error of the checks in Python, or results of the right shape; None where those depend on values."""
    operator = OPERATORS[name]
    signature = operator.signature
    args = operator.all_arguments(args)
    try:
        sizes = signature.check(args)
    except RuntimeError as error:
        return str(error), []
    if signature.dynamic_size:
        return "", None
    results = signature.empty(args, sizes)
    return "", [results] if isinstance(results, Tensor) else list(results or ())


def agree(name: str, args: tuple) -> str:
    """Raises where the languages don't; returns what both refuse the arguments with."""
    given = tuple(
        arg.clone() if isinstance(arg, Tensor) and i in OPERATORS[name].written and 0 not in arg.stride() else arg
        for i, arg in enumerate(args)
    )
    (kernel, results), (python, expected) = said_by_kernel(name, given), said_by_python(name, args)
    assert kernel == python
    if not kernel and expected is not None:
        assert [(t.shape, t.dtype) for t in results] == [(t.shape, t.dtype) for t in expected]
        assert [t.stride() for t in results] == [t.stride() for t in expected]
    return kernel


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


FLOATING = "float16, bfloat16, float32 or float64"
REAL = "float16, bfloat16, float32, float64, uint8, int8, int16, int32 or int64"
WORDS = [
    ("mymuladd", (t(2, 3), t(3), 1.0), ""),
    ("mymuladd", (t(2), t(3), 1.0), "a and b must have shapes that broadcast, got (2,) and (3,)"),
    ("mymuladd", (t(2, dtype=torch.int8), t(2), 1.0), f"a must have dtype {FLOATING}, got int8"),
    ("mymuladd", (t(2), t(2).half(), 1.0), "b must have the dtype of a, float32, got float16"),
    ("mymuladd", (t(*[1] * 65), t(2), 1.0), "a must have at most 64 dimensions, got 65"),
    ("mymul_backward", (t(2), t(2), t(1)), "b must have the shape of grad, (2,), got (1,)"),
    ("mymul_backward", (t(), t(1), t(1)), "a must have the shape of grad, (), got (1,)"),
    ("myadd_out", (t(2, 1), t(3), t(2, 3)), ""),
    ("myadd_out", (t(2, 1), t(3), t(3, 2)), "out must have the shape that a and b broadcast to, (2, 3), got (3, 2)"),
    ("myadd_out", (t(2), t(3), t(3)), "a and b must have shapes that broadcast, got (2,) and (3,)"),
    ("myadd_out", (t(2), t(2), t(1).expand(2)), "out must not overlap itself, got shape (2,) with strides (0,)"),
    ("matmul", (t(2, 3), t(3, 4)), ""),
    ("matmul", (t(2), t(3, 4)), "a must have shape (M, K), got (2,)"),
    ("matmul", (t(2, 3), t(4, 3)), "b must have shape (K, N) with K = 3, got (4, 3)"),
    ("matmul", (t(2), t(3, 4).double()), "a must have shape (M, K), got (2,)"),  # The first argument's fault first.
    ("convrnn_forward", (t(2, 3, 4), t(1, 1, 3), t(2, 1, 4)), ""),
    (
        "convrnn_forward",
        (t(2, 3, 4), t(1, 1, 5), t(2, 4)),
        "kernel must have shape (1, 1, K) with 1 <= K <= H and H = 4, got (1, 1, 5)",
    ),
    (
        "convrnn_forward",
        (t(2, 3, 4), t(1, 1, 3), t(4, 2)),
        "hidden must have shape (B, H) or (B, 1, H) with B = 2 and H = 4, got (4, 2)",
    ),
    ("convrnn_backward", (t(2, 3, 4), t(2, 3, 4), t(1, 1, 3), False), ""),
    ("convrnn_backward", (t(2, 3, 4), t(2, 3, 4), t(1, 1, 3)), ""),
    (
        "convrnn_backward",
        (t(2, 0, 4), t(2, 0, 4), t(1, 1, 3)),
        "grad must have shape (B, S, H) with 1 <= S, got (2, 0, 4)",
    ),
    (
        "convrnn_backward",
        (t(2, 3, 4), t(2, 1, 4), t(1, 1, 3)),
        "y must have shape (B, S, H) with B = 2 and S = 3 and H = 4, got (2, 1, 4)",
    ),
    ("nms", (t(3, 5), t(3), 0.5), "boxes must have shape (N, 4), got (3, 5)"),
    ("nms", (t(3, 4), t(2), 0.5), "scores must have shape (N,) with N = 3, got (2,)"),
    ("nms", (t(3, 4), t(3).bool(), 0.5), f"scores must have dtype {REAL}, got bool"),
    ("nms_padded", (t(3, 4), t(3), 0.5), ""),
    ("nms_padded", (t(0, 4), t(0), 0.5, t(0).long()), ""),
    ("nms_padded", (t(3, 4), t(3), 0.5, t(2).long()), "idxs must have shape (N,) with N = 3, got (2,)"),
    (
        "nms_padded",
        (t(3, 4), t(3), 0.5, t(3)),
        "idxs must have dtype uint8, int8, int16, int32 or int64, got float32",
    ),
]


@pytest.mark.parametrize(("name", "args", "message"), WORDS, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(WORDS)])
def test_words(name, args, message):
    if name not in COMPILED:
        pytest.skip(f"{name} has no compiled kernel here")
    assert agree(name, args) == (f"{name}: {message}" if message else "")


SIZES = st.sampled_from([0, 1, 1, 2, 3, 4, 5])


@st.composite
def shapes(draw, signature: Signature) -> list[tuple[int, ...]]:
    """A shape for each tensor of a signature, as it says, or with one or two of them changed."""
    sizes = {name: draw(SIZES) for a in signature.arguments for p in a.patterns for name in p.names}
    pack = tuple(draw(st.lists(SIZES, max_size=3)))
    found: dict[str, tuple[int, ...]] = {}
    for argument in signature.arguments:
        pattern = draw(st.sampled_from(argument.patterns))
        if pattern.broadcast:
            try:
                shape = tuple(torch.broadcast_shapes(*(found[name] for name in pattern.broadcast)))
            except RuntimeError:
                shape = pack
        else:
            shape = tuple(value(size, sizes) for size in pattern.sizes)
            if pattern.pack and signature.broadcasts:
                shape = (
                    tuple(draw(st.sampled_from([size, size, 1])) for size in pack)[draw(st.integers(0, 1)) :] + shape
                )
            elif pattern.pack:
                shape = pack + shape
        found[argument.name] = shape
    result = list(found.values())
    for at in draw(st.lists(st.integers(0, len(result) - 1), max_size=2)):
        shape = list(result[at])
        where = draw(st.integers(0, len(shape)))
        change = draw(st.sampled_from(["more", "fewer", "other"]))
        if change == "more":
            shape.insert(where, draw(SIZES))
        elif where < len(shape):
            shape[where : where + 1] = [] if change == "fewer" else [draw(SIZES)]
        result[at] = tuple(shape)
    return result


@st.composite
def calls(draw, name: str) -> tuple:
    """Arguments of an operator, right or not in shape, dtype and strides."""
    operator = OPERATORS[name]
    described = dict(zip((a.name for a in operator.signature.arguments), draw(shapes(operator.signature))))
    every = {a.name: a for a in operator.signature.arguments}
    args: list = []
    chosen: dict[str, torch.dtype] = {}
    for argument in operator.schema.arguments:
        if argument.name not in described:
            args.append(draw(st.booleans()) if str(argument.type) == "bool" else 0.5)
            continue
        known, shape = every[argument.name], described[argument.name]
        if known.optional and draw(st.booleans()):
            args.append(None)
            continue
        dtype = chosen.get(known.like) or draw(st.sampled_from(known.dtypes))
        if draw(st.integers(0, 9)) == 0:
            dtype = draw(st.sampled_from([torch.bool, torch.int32, torch.float64, torch.complex64]))
        chosen[argument.name] = dtype
        made = torch.ones(shape, dtype=dtype)
        layout = draw(st.sampled_from(["contiguous", "contiguous", "reversed", "steps", "expanded"]))
        if layout == "reversed":
            made = torch.ones(shape[::-1], dtype=dtype).permute([*range(len(shape) - 1, -1, -1)])
        elif layout == "steps" and shape:
            made = torch.ones((*shape, 2), dtype=dtype)[..., 0]
        elif layout == "expanded" and shape:
            made = torch.ones((1, *shape[1:]), dtype=dtype).expand(shape)
        args.append(made)
    return tuple(args)


@pytest.mark.parametrize("name", COMPILED)
@given(data=st.data())
def test_both_languages_agree(name, data):
    agree(name, data.draw(calls(name)))


@pytest.mark.parametrize("name", COMPILED)
def test_calls_are_right_and_wrong(name):
    """What hypothesis draws from reaches both: else the test above would say nothing."""
    said = set()

    @settings(max_examples=20, derandomize=False)
    @given(data=st.data())
    def draw(data):
        said.add(bool(agree(name, data.draw(calls(name)))))

    for _ in range(20):  # Which it does at random, mostly at once.
        if len(said) < 2:
            draw()
    assert said == {True, False}


SIZE = "its signature must have sizes such as N, 4, N+1 or 2*N, got"
NAMES = " ".join(f"N{i}" for i in range(17))
# Of mymul(Tensor a, Tensor b) -> Tensor. tests/checkout/test_signature_in_cpp.py has the same of C++.
WRONG = [
    ("a ...; b: ... -> ...", "its signature must describe its tensors, got 'a ...'"),
    ("a: ...; z: ... -> ...", "its signature must describe its tensors, got 'z: ...'"),
    ("a: ...; b: ... as z -> ...", "its signature names no argument 'z'"),
    ("a: ... as b; b: ... -> ...", "its signature names no argument 'b'"),
    ("a: ...; b: ... -> broadcast(a, z)", "its signature names no argument 'z'"),
    ("a: ...; b: ... -> ... as z", "its signature names no argument 'z'"),
    ("a: ... of float31; b: ... -> ...", "its signature has no dtype 'float31'"),
    ("a: ... of float32 as a; b: ... -> ...", "its signature has no dtype 'float32 as a'"),
    (
        "a: ...; b: ... as a of float32 -> ...",
        "its signature must have 'as' or 'of' for an argument, not both, got 'b: ... as a of float32'",
    ),
    ("a: ...; b: ... -> ... of float31", "its signature has no dtype 'float31'"),
    ("a: ...; b: ... -> ... of floating", "its signature has no dtype 'floating'"),
    ("a: ...; b: ... -> ... of float32|float64", "its signature has no dtype 'float32|float64'"),
    ("a: M+; b: ... -> ...", f"{SIZE} 'M+'"),
    ("a: 2M; b: ... -> ...", f"{SIZE} '2M'"),
    ("a: M; b: M -> M*M*M", f"{SIZE} 'M*M*M'"),
    ("a: M; b: M -> M/2", f"{SIZE} 'M/2'"),
    ("a: M; b: M -> 1000000000000000000", f"{SIZE} '1000000000000000000'"),
    ("a: M as; b: M -> M", f"{SIZE} 'as'"),
    ("a: M; b: M -> M where 1 <= M", f"{SIZE} 'where'"),
    ("a: M; b: M -> K", "its signature must say 'K' of an argument"),
    ("a: M; b: M -> M*K", "its signature must say 'K' of an argument before 'M*K'"),
    ("a: M+1; b: M -> M", "its signature must say 'M' of an argument before 'M+1'"),
    ("a: M N | M+1; b: M -> M", "its signature must say 'M' of an argument before 'M+1'"),
    *(
        (
            f"a: M N; b: {shapes} -> M",
            f"its signature must have alternatives of different numbers of dimensions, got '{shapes}'",
        )
        for shapes in ("M N | N M", "3 | M 4 | M", "... M | M", "M | ...", "M N | broadcast(a)", "broadcast(a) | M")
    ),
    ("a: M; b: M -> ... M", "its signature must say '...' of an argument"),
    ("a: M where 1 <= K; b: M -> M", "its signature must say 'K' of an argument"),
    *(
        (
            f"a: M where {condition}; b: M -> M",
            f"its signature must have conditions such as 1 <= K <= N, got '{condition}'",
        )
        for condition in ("1 < M", "M >= 1", "M == 4", "M", "1 <= M < 4", "1 <= M >= 4", "M != 1")
    ),
    ("a: M where 1 <= M, M <= 4; b: M -> M", f"{SIZE} 'M, M'"),
    ("a: M ...; b: M as a -> M", "its signature must have '...' first in a shape, got 'M ...'"),
    ("a: ... ...; b: ... -> ...", "its signature must have '...' first in a shape, got '... ...'"),
    ("a: M ?; b: M -> M", "its signature must have '?' in a result only, got 'M ?'"),
    (
        "a: ...; b: ... -> broadcast(a, b) 2",
        "its signature must have nothing next to broadcast(...) in a shape, got 'broadcast(a, b) 2'",
    ),
    (f"a: {NAMES}; b: ... -> ...", "its signature must have at most 16 names"),
    ("a: ...; b: ...", "its signature must say its results, got no '->'"),
    ("a: ... -> ...", "its signature must describe its tensors, got none of b"),
    ("a: ...; b: ... -> ..., ...", "its signature must have as many results as its schema, 1, got 2"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_a_signature_that_is_wrong(wrong, message):
    schema = torch.ops.extension_cpp.mymul.default._schema
    with pytest.raises(RuntimeError) as error:
        Signature.read(wrong, schema)
    assert str(error.value) == f"mymul: {message}"


def test_what_a_line_says():
    schema = torch.ops.extension_cpp.mymul.default._schema
    signature = Signature.read("a: B B+1 H | B H where 1 <= B <= H; b: ... K of integer | bool -> B*2 4 as b", schema)
    a, b = signature.arguments
    assert a.patterns == (Pattern(("B", "B+1", "H")), Pattern(("B", "H"))) and a.condition == "1 <= B <= H"
    assert b.patterns == (Pattern(("K",), pack=True),) and b.dtypes == (*_signature.INTEGER, torch.bool)
    (result,) = signature.results
    assert (result.pattern.sizes, result.like, result.dtype) == (("B*2", "4"), "b", None)


SHAPES = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@given(sizes=SHAPES, strides=st.lists(st.integers(0, 8), min_size=8, max_size=8))
def test_elementwise_strides(sizes, strides):
    """Of every dimension, those of size 1 too: a program may read them."""
    dims = len(sizes)
    a, b = (torch.zeros(99).as_strided(sizes, each) for each in (strides[:dims], strides[4 : 4 + dims]))
    for x, y in ((a, a), (a, b)):
        want = (x * y).stride()
        assert empty_elementwise(x, y, dtype=torch.float32).stride() == want
        assert extension_cpp.mymul(x, y).stride() == want


@pytest.mark.parametrize(
    "a, b",
    [
        (t(2, 3).t(), t(3, 2)),
        (t(3).expand(2, 3), t(2, 1)),
        (t(2, 3, 4, 5).mT, t(5, 1)),
        (t(2, 2), t(2, 1, 1).permute(2, 1, 0)),
        (t(2, 1, 4, 1).to(memory_format=torch.channels_last),) * 2,
        (t(2, 1, 3, 1).as_strided((2, 1, 3, 1), (3, 7, 1, 5)),) * 2,
    ],
)
def test_strides_as_of_pytorch(a, b):
    assert empty_elementwise(a, b, dtype=torch.float32).stride() == (a * b).stride()
    assert extension_cpp.mymul(a, b).stride() == (a * b).stride()


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_in_our_words(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of a prototype.
        nested = torch.nested.nested_tensor([t(3, 4), t(2, 4)], layout=layout)
    with pytest.raises(RuntimeError, match=r"^matmul: a must be a strided tensor, got a nested one$"):
        extension_cpp.matmul(nested, t(4, 4))
