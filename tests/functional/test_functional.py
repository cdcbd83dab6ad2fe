"""The functional API: compared with torch.autograd.functional and with its numerical counterparts; numbers of VJPs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import functional as torchs

import fastgrad
from fastgrad import functional
from fastgrad.functional import compressed, finite_differences
from fastgrad.functional.finite_differences import Differences
from fastgrad.structure import refinement, sparsity
from fastgrad.structure.sparsity import Pattern, from_entries
from tests import processes
from tests.properties.programs import generate

SPARSE = [False, True, "auto"]


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for each in value:
            yield from tensors(each)


def assert_same(found: Any, expected: Any, tolerance: float = 1e-11) -> None:
    """Asserts the same nesting, shapes and dtypes, and values up to a share of the largest; a layout may be sparse."""
    if not isinstance(expected, Tensor):
        assert isinstance(found, tuple)
        assert len(found) == len(expected)
        for each, other in zip(found, expected, strict=True):
            assert_same(each, other, tolerance)
        return
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert found.requires_grad == expected.requires_grad
    finite = expected.detach().abs().nan_to_num(0.0, 0.0)
    scale = max(1.0, float(finite.max()) if finite.numel() else 0.0)
    torch.testing.assert_close(
        found.detach().to_dense(), expected.detach(), rtol=tolerance, atol=tolerance * scale, equal_nan=True
    )


def exp_reducer(x: Tensor) -> Tensor:
    return x.exp().sum(dim=1)


def pow_reducer(x: Tensor) -> Tensor:
    return x.pow(3).sum()


def pow_adder_reducer(x: Tensor, y: Tensor) -> Tensor:
    return (2 * x.pow(2) + 3 * y.pow(2)).sum()


def linear_model(x: Tensor) -> Tensor:
    weight = torch.tensor([[2.0, -1.0], [0.0, 1.0]])
    return x @ weight.T + torch.tensor([1.0, 0.5])


PAIR = (torch.rand(2, generator=torch.Generator().manual_seed(1)), torch.rand(2))
SQUARE, WIDE = normal(2, 2, dtype=torch.float32), normal(4, 4, dtype=torch.float32)
EXAMPLES: list[tuple[str, Callable[..., Any], Any, tuple[Any, ...]]] = [
    ("jacobian", exp_reducer, SQUARE, ()),
    ("jacobian", lambda x, y: 2 * x.exp() + 3 * y, PAIR, ()),
    ("hessian", pow_reducer, SQUARE, ()),
    ("hessian", pow_adder_reducer, PAIR, ()),
    ("vjp", exp_reducer, WIDE, (torch.ones(4),)),
    ("vjp", lambda x, y: 2 * x + 3 * y, PAIR, (torch.ones(2),)),
    ("jvp", exp_reducer, WIDE, (torch.ones(4, 4),)),
    ("jvp", lambda x, y: 2 * x + 3 * y, PAIR, ((torch.ones(2), torch.ones(2)),)),
    ("vhp", pow_reducer, SQUARE, (torch.ones(2, 2),)),
    ("vhp", pow_adder_reducer, PAIR, ((torch.zeros(2), torch.ones(2)),)),
    ("hvp", pow_reducer, SQUARE, (torch.ones(2, 2),)),
    ("hvp", pow_adder_reducer, PAIR, ((torch.zeros(2), torch.ones(2)),)),
]


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(("name", "func", "inputs", "v"), EXAMPLES)
def test_documented_examples(
    name: str, func: Callable[..., Any], inputs: Any, v: tuple[Any, ...], create_graph: bool
) -> None:
    found = getattr(functional, name)(func, inputs, *v, create_graph=create_graph)
    assert_same(found, getattr(torchs, name)(func, inputs, *v, create_graph=create_graph), 1e-6)


def test_the_documented_linear_model() -> None:
    x = normal(4, 2, dtype=torch.float32).requires_grad_()
    found = functional.jacobian(linear_model, x, vectorize=True)
    assert found.shape == (4, 2, 4, 2)
    assert_same(found, torchs.jacobian(linear_model, x, vectorize=True), 1e-6)


def outcome(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    try:
        return call(*arguments, **keywords)
    except Exception as error:
        return error


# Errors of torch for empty outputs, complex outputs in forward mode, and operators without a batching rule.
FAULTS = (
    "stack expects",
    "index 0 is out of bounds",
    "INTERNAL ASSERT",
    "Batching rule not implemented",
    "unresolved conjugated",
)
PRODUCTS = ("vjp", "jvp", "vhp", "hvp")


def check_against_torch(name: str, arguments: tuple[Any, ...], keywords: dict[str, Any], **own: Any) -> int:
    """Asserts that both return the same or raise the same type; 1, or 0 where torch gives no answer to compare."""
    expected = outcome(getattr(torchs, name), *arguments, **keywords)
    found = outcome(getattr(functional, name), *arguments, **keywords, **own)
    if isinstance(expected, Exception):
        if any(words in str(expected) for words in FAULTS):
            return 0
        assert type(found) is type(expected), f"{name} {keywords}: {found!r} instead of {expected!r}"
        return 1
    again = outcome(getattr(torchs, name), *arguments, **keywords)
    try:
        assert_same(tuple(tensors(again)), tuple(tensors(expected)), 1e-9)
    except AssertionError:
        return 0  # func or its backward differs from call to call
    assert not isinstance(found, Exception), f"{name} {keywords}: {found!r}"
    # torch's forward mode returns lists, and results with a graph for a Hessian that has complex parts.
    results = [tuple(value.detach() for value in tensors(result)) for result in (found, expected)]
    assert_same(*results, 1e-9)
    return 1


def check_program(seed: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Compares all six functions on a generated program, by rows and by structure; returns how many were compared."""
    generator = random.Random(seed)
    program = generate(lambda options: options[generator.randrange(len(options))], ["reverse", "lazy", "forward"])
    func, given = program.make_func(), [value.detach() for value in program.make_inputs()]
    chosen = [i for i, value in enumerate(given) if value.is_floating_point() or value.is_complex()]
    if not chosen or program.error not in (None, "right"):
        return 0

    def outputs(*inputs: Tensor) -> Any:
        arguments = list(given)
        for i, value in zip(chosen, inputs, strict=True):
            arguments[i] = value
        result = func(*arguments)
        if isinstance(result, tuple):
            return tuple(v for v in result if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()))
        return result

    def loss(*inputs: Tensor) -> Tensor:
        result = outputs(*inputs)
        each = result if isinstance(result, tuple) else (result,)
        return torch.stack([(v.abs() if v.is_complex() else v).sin().sum() for v in each]).sum()

    inputs: Any = tuple(given[i] for i in chosen)
    value = outputs(*inputs)

    def vector(like: Any) -> Any:
        if isinstance(like, Tensor):
            return normal(*like.shape, dtype=like.dtype, seed=seed)
        return tuple(vector(each) for each in like)

    inputs = inputs if len(inputs) > 1 else inputs[0]
    compared = 0
    for forced in (False, True):
        if forced:
            for constant in ("WORTH_A_GUESS", "WORTH_PROBING"):
                monkeypatch.setattr(compressed, constant, 1)
            monkeypatch.setattr(compressed, "PROBING_SHARE", 0.01)
            monkeypatch.setattr(compressed, "MIN_SAVING", 0.01)
        for keywords in ({}, {"vectorize": True}):
            for sparse in (False, True):
                compared += check_against_torch("jacobian", (outputs, inputs), keywords, sparse=sparse)
                compared += check_against_torch("hessian", (loss, inputs), keywords, sparse=sparse)
        forward = {"vectorize": True, "strategy": "forward-mode"}
        compared += check_against_torch("jacobian", (outputs, inputs), forward)
        forward = {"vectorize": True, "outer_jacobian_strategy": "forward-mode"}
        compared += check_against_torch("hessian", (loss, inputs), forward)
    monkeypatch.undo()
    for create_graph in (False, True):
        for strict in (False, True):
            keywords = {"create_graph": create_graph, "strict": strict}
            compared += check_against_torch("jacobian", (outputs, inputs), keywords)
            compared += check_against_torch("hessian", (loss, inputs), keywords)
            for name in PRODUCTS:
                v = vector(value if name == "vjp" else inputs)
                of = outputs if name in ("vjp", "jvp") else loss
                compared += check_against_torch(name, (of, inputs, v), keywords)
    return compared


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [0, 2, 5, 7, 8, 17, 24, 32, 34, 35])
def test_random_functions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_program(seed, monkeypatch) > 20


X, Z = normal(3), normal(3, dtype=torch.complex128)
REFUSED: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = [
    ("must be either a Tensor or a tuple of Tensors", "jacobian", (torch.sin, [X]), {}),
    ("must be either a Tensor or a tuple of Tensors", "jacobian", (lambda x: [x], X), {}),
    ("value at index 1 has type", "jvp", (lambda x: (x, 3), X, X), {}),
    ("grad can be implicitly created only for real scalar outputs", "jacobian", (torch.sin, Z), {}),
    ("grad can be implicitly created only for real scalar outputs", "hessian", (lambda z: z.abs().sum(), Z), {}),
    ("must be floating point or complex, but the given input has dtype", "jacobian", (torch.sin, torch.arange(3)), {}),
    ("index 1 has dtype torch.int64", "vjp", (torch.mul, (X, torch.arange(3)), X), {}),
    ("func must be callable, got NoneType", "hessian", (None, X), {}),
    ("func must be callable, got str", "jvp", ("sin", X, X), {}),
    ('Expected strategy to be either "forward-mode" or "reverse-mode"', "jacobian", (torch.sin, X), {"strategy": "up"}),
    ("not supported together", "jacobian", (torch.sin, X), {"strict": True, "vectorize": True}),
    ("not supported together", "hessian", (pow_reducer, X), {"strict": True, "vectorize": True}),
    ("not supported together", "jacobian", (torch.sin, X), {"strict": True, "strategy": "forward-mode"}),
    ("not supported together", "jacobian", (torch.sin, X), {"create_graph": True, "strategy": "forward-mode"}),
    ("only implemented for `vectorize=True`: set it", "jacobian", (torch.sin, X), {"strategy": "forward-mode"}),
    ("only implemented for `vectorize=True`", "hessian", (pow_reducer, X), {"outer_jacobian_strategy": "forward-mode"}),
    ("should return a single Tensor", "hessian", (lambda x: (x.sum(),), X), {}),
    ("should contain a single element", "hvp", (torch.sin, X, X), {}),
    ("The vector v can only be None if", "vjp", (torch.sin, X), {}),
    ("The vector v can only be None if", "vhp", (pow_reducer, X), {}),
    ("v is a tuple of invalid length: should be 2 but got 1", "jvp", (torch.add, (X, X), X), {}),
    ("The given v should contain a single Tensor", "jvp", (torch.sin, X, (X, X)), {}),
    ("v has invalid size: should be torch.Size([3]) but got", "jvp", (torch.sin, X, X[:2]), {}),
    ("Entry 1 in v has invalid size", "jvp", (torch.add, (X, X), (X, X[:2])), {}),
    (
        "Output 0 of the user-provided function does not require gradients",
        "vjp",
        (torch.detach, X, X),
        {"strict": True},
    ),
    ("independent of input 1", "vjp", (lambda x, y: x * 2, (X, X), X), {"strict": True}),
    (
        "Output 0 of the user-provided function is independent of input 1",
        "jacobian",
        (lambda x, y: x * 2, (X, X)),
        {"strict": True},
    ),
    ("independent of input 0", "jacobian", (lambda x: x * 2, X), {"strict": True, "create_graph": True}),
    ("independent of input 1", "jvp", (lambda x, y: x * 2, (X, X), (X, X)), {"strict": True}),
    (
        "jacobian of the user-provided function is independent of input 0",
        "vjp",
        (lambda x: x * 2, X, X),
        {"strict": True, "create_graph": True},
    ),
    ("function with respect to input 0 is independent of the input", "vhp", (torch.sum, X, X), {"strict": True}),
    ("function with respect to input 0 is independent of the input", "hessian", (torch.sum, X), {"strict": True}),
    (
        "hessian of the user-provided function is independent of input 0",
        "vhp",
        (lambda x: (x * x).sum(), X, X),
        {"strict": True, "create_graph": True},
    ),
    ("is independent of input 1", "hessian", (pow_adder_reducer, (X, X)), {"strict": True}),
]


@pytest.mark.parametrize(("words", "name", "arguments", "keywords"), REFUSED)
def test_errors_are_torchs(words: str, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    expected = outcome(getattr(torchs, name), *arguments, **keywords)
    found = outcome(getattr(functional, name), *arguments, **keywords)
    assert isinstance(expected, Exception)
    assert type(found) is type(expected), repr(found)
    assert words in str(found)


@pytest.mark.parametrize(
    ("words", "name", "arguments"),
    [
        ("The vector v can only be None if the user-provided function returns", "vjp", (torch.sin, X)),
        ("The vector v can only be None if the input to the user-provided function is", "vhp", (pow_reducer, X)),
        ("v is a tuple of invalid length: should be 2 but got 1", "jvp", (torch.add, (X, X), X)),
        ("v is a tuple of invalid length: should be 2 but got 3", "hvp", (pow_adder_reducer, (X, X), (X, X, X))),
        ("The given v should contain a single Tensor, but is a tuple of 2 Tensors", "jvp", (torch.sin, X, (X, X))),
        ("v has invalid size: should be torch.Size([3]) but got", "vjp", (torch.sin, X, X[:2])),
        ("Entry 1 in v has invalid size", "jvp", (torch.add, (X, X), (X, X[:2]))),
        ("should contain a single element, but its shape is (3,)", "hvp", (torch.sin, X, X)),
        ("should return a single Tensor, but it returned a tuple", "vhp", (lambda x: (x.sum(),), X, X)),
    ],
)
def test_numerical_products_refuse_the_same(words: str, name: str, arguments: tuple[Any, ...]) -> None:
    expected = outcome(getattr(torchs, name), *arguments)
    found = outcome(getattr(functional, name), *arguments, numerical=True)
    assert isinstance(expected, Exception)
    assert type(found) is type(expected), repr(found)
    assert words in str(found)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"sparse": "yes"}, "sparse must be True, False or 'auto', got 'yes'"),
        ({"sparse": True, "create_graph": True}, "sparse=True and create_graph=True cannot be combined"),
        ({"numerical": True, "create_graph": True}, "numerical=True and create_graph=True cannot be combined"),
        ({"numerical": True, "strict": True}, "numerical=True and strict=True cannot be combined"),
        ({"return_error": True}, "return_error=True needs numerical=True"),
    ],
)
def test_keywords_that_exclude_each_other(keywords: dict[str, Any], words: str) -> None:
    for call, func in ((functional.jacobian, torch.sin), (functional.hessian, pow_reducer)):
        with pytest.raises(ValueError, match=words):
            call(func, X, **keywords)
    if "sparse" not in keywords:
        for name in PRODUCTS:
            with pytest.raises(ValueError, match=words):
                getattr(functional, name)(pow_reducer, X, X, **keywords)
    with pytest.raises(ValueError, match="The inputs given to jacobian must hold at least one Tensor"):
        functional.jacobian(lambda: X, ())


class Counted(torch.autograd.Function):
    """The identity; counts its backward passes of both orders."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Counted.calls += 1
        return Counted.apply(grad)


def rosenbrock(x: Tensor) -> Tensor:
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def arrow(x: Tensor) -> Tensor:
    return (x[0].sin() * x[1:] ** 2).sum()


def band(x: Tensor) -> Tensor:
    return x[2:].sin() * x[:-2] + x[1:-1]


def shared_bias(x: Tensor, b: Tensor) -> Tensor:
    return x.view(-1, 4) * b.sin() + b


STRUCTURED: list[tuple[str, Callable[..., Any], tuple[Tensor, ...], int]] = [
    ("jacobian", torch.sin, (normal(1000),), 4),
    ("jacobian", band, (normal(1000),), 8),
    ("jacobian", lambda x: x.t().sin(), (normal(40, 25),), 9),
    ("jacobian", lambda x: x.view(-1, 5).softmax(-1), (normal(1000),), 16),
    ("jacobian", lambda x: (x.cos(), x.sum()), (normal(1000),), 60),
    ("jacobian", shared_bias, (normal(1200), normal(4, seed=1)), 100),
    ("jacobian", lambda x: x.softmax(-1), (normal(20, 10),), 16),
    ("jacobian", torch.mm, (normal(10, 20), normal(20, 10, seed=1)), 21),
    ("hessian", lambda x: (x**4).sum(), (normal(1000),), 10),
    ("hessian", lambda x: x.logsumexp(1).sum(), (normal(20, 10),), 34),
    ("hessian", rosenbrock, (normal(1000),), 18),
    ("hessian", arrow, (normal(1000),), 200),
    ("hessian", lambda x, y: (x[1:] * x[:-1] * y).sum(), (normal(400), normal(399, seed=1)), 170),
]


@pytest.mark.parametrize("sparse", SPARSE)
@pytest.mark.parametrize(("name", "func", "inputs", "most"), STRUCTURED)
def test_structure_saves_products(
    name: str, func: Callable[..., Any], inputs: tuple[Tensor, ...], most: int, sparse: Any
) -> None:
    evaluations = 0

    def counted(*values: Tensor) -> Any:
        nonlocal evaluations
        evaluations += 1
        return func(Counted.apply(values[0]), *values[1:])

    Counted.calls = 0
    found = getattr(functional, name)(counted, inputs, sparse=sparse)
    assert evaluations == 1
    assert Counted.calls <= most + 3  # two rows of a custom backward run separately, one of them with multiples
    assert all(part.layout is (torch.sparse_coo if sparse else torch.strided) for part in tensors(found))
    assert all(part.is_coalesced() for part in tensors(found) if sparse)
    if sparse is True:
        assert_same(found, getattr(torchs, name)(func, inputs))


def test_a_star_coloring_serves_the_hessian() -> None:
    # Every row of the arrow meets the first column: coloring one side takes 1,000 groups.
    Counted.calls = 0
    found = functional.hessian(lambda x: arrow(Counted.apply(x)), normal(1000), sparse="auto")
    assert found.layout is torch.sparse_coo
    assert Counted.calls < 200
    assert_same(found, torchs.hessian(arrow, normal(1000)))


@pytest.mark.parametrize(("name", "func"), [("jacobian", band), ("hessian", rosenbrock)])
def test_a_wrong_pattern_is_noticed(name: str, func: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(300)
    calls = 0

    def without_an_entry(*arguments: Any) -> Pattern | None:
        nonlocal calls
        calls += 1
        pattern = refined(*arguments)
        assert pattern is not None
        rows = pattern.rows()
        pairs = [k for k in range(pattern.nnz) if {rows[k], pattern.columns[k]} != {150, 151}]
        assert len(pairs) < pattern.nnz
        return from_entries(rows[pairs], pattern.columns[pairs], pattern.m, pattern.n, "")

    monkeypatch.setattr(sparsity, "guess_band", lambda *arguments: None)
    refined = refinement.refined
    monkeypatch.setattr(refinement, "refined", without_an_entry)
    assert_same(getattr(functional, name)(func, x), getattr(torchs, name)(func, x))
    assert calls == 1
    assert_same(getattr(functional, name)(func, x, sparse=True), getattr(torchs, name)(func, x))
    assert getattr(functional, name)(func, x, sparse="auto").layout is torch.strided


@pytest.mark.parametrize(("share", "kept"), [(1e-13, True), (1e-15, False)])
def test_an_entry_that_is_small_in_its_column(share: float, kept: bool) -> None:
    corner = torch.zeros(400, dtype=torch.float64)
    corner[300] = share

    def func(x: Tensor) -> Tensor:
        return x + corner * x[7]

    for jacobian in (
        functional.jacobian(func, normal(400)),
        *fastgrad.analytical_jacobian(func, normal(400).requires_grad_())[0],
    ):
        assert jacobian[300, 7] == (share if kept else 0.0)


def test_an_entry_outside_of_a_guessed_band_is_found() -> None:
    def func(x: Tensor) -> Tensor:
        return rosenbrock(x) + x[3] * x[290]

    x = normal(600)
    assert_same(functional.hessian(func, x), torchs.hessian(func, x))
    assert functional.hessian(func, x, sparse="auto").to_dense()[3, 290] == 1


class Sign(torch.autograd.Function):
    """A backward that is not linear: VJPs are not the sums of the rows from one-hot grad_outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.sign()


class OneHotOnly(torch.autograd.Function):
    """A backward that accepts only one-hot grad_outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if grad.count_nonzero() > 1:
            raise ValueError("one at a time")
        return 2 * grad


class Lopsided(torch.autograd.Function):
    """A double backward that is not symmetric: x[0] x[k] with second derivatives 1 and 2, mixed by star coloring."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x[0] * x[1:]).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.cat([x[1:].sum().reshape(1), 2 * x[0].expand(x.numel() - 1)])


@pytest.mark.parametrize(
    ("name", "func", "x"),
    [
        pytest.param("jacobian", Sign.apply, normal(300), id="not linear"),
        pytest.param("jacobian", OneHotOnly.apply, normal(300), id="one-hot only"),
        pytest.param("hessian", Lopsided.apply, normal(300), id="not symmetric"),
        pytest.param("jacobian", torch.sqrt, torch.arange(300.0), id="infinite"),
        pytest.param("jacobian", lambda x: x.cumsum(0).sin(), normal(300), id="dense"),
        pytest.param("jacobian", lambda x: x.float().sin().double(), normal(300), id="low precision inside"),
        pytest.param("jacobian", lambda x: x * 1e8 - (x - 1e-9) * 1e8 + x, normal(300), id="cancelling"),
        pytest.param("jacobian", torch.sin, normal(300, dtype=torch.float32), id="float32"),
        pytest.param("jacobian", torch.sin, normal(300, dtype=torch.bfloat16), id="bfloat16"),
        pytest.param("jacobian", lambda z: (z * z).abs(), normal(300, dtype=torch.complex128), id="complex"),
        pytest.param("jacobian", lambda x: x.sin(), normal(300)[:1].expand(300), id="expanded"),
        pytest.param("jacobian", lambda x: x.detach(), normal(300), id="no graph"),
    ],
)
def test_what_no_structure_serves_is_torchs_all_the_same(name: str, func: Callable[..., Any], x: Tensor) -> None:
    expected = getattr(torchs, name)(func, x)
    for sparse in SPARSE:
        found = getattr(functional, name)(func, x, sparse=sparse)
        assert_same(found, expected, 1e-6 if x.dtype is torch.float32 else 1e-10)


def test_mixed_dtypes_and_shapes() -> None:
    inputs = (normal(40, 3, dtype=torch.float32), normal(3), normal(40, 1, dtype=torch.complex128))

    def func(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return (x * y).sin(), (y * z).abs(), y.sum() * x[0, 0], x[:0]

    expected = torchs.jacobian(lambda *values: func(*values)[:3], inputs)
    for sparse in SPARSE:
        found = functional.jacobian(func, inputs, sparse=sparse)
        assert_same(found[:3], expected, 1e-6)
        assert [part.shape for part in found[3]] == [(0, 3, *value.shape) for value in inputs]
    vectorized = functional.jacobian(
        lambda z: z.exp() * normal(5), normal(60, 1, dtype=torch.complex128), vectorize=True
    )
    assert_same(
        vectorized,
        torchs.jacobian(lambda z: z.exp() * normal(5), normal(60, 1, dtype=torch.complex128), vectorize=True),
    )


def test_a_result_with_a_graph_keeps_entries_that_are_zero_here() -> None:
    x = normal(40)
    x[1::2] = 0
    x.requires_grad_()

    def func(v: Tensor) -> Tensor:
        return v[1:] ** 2 * v[:-1]

    gradients = []
    for module in (torchs, functional):
        jacobian: Tensor = module.jacobian(func, x, create_graph=True)  # type: ignore[attr-defined]
        gradients.append(torch.autograd.grad(jacobian.square().sum() + jacobian.sum(), x)[0])
    assert_same(*gradients)
    assert functional.jacobian(func, x, create_graph=True, sparse="auto").layout is torch.strided


@pytest.mark.parametrize("sparse", SPARSE)
def test_forward_mode(sparse: Any) -> None:
    keywords: dict[str, Any] = {"vectorize": True, "sparse": sparse}
    for func, inputs in ((band, normal(300)), (lambda x, y: (x.outer(y), y.double()), (normal(5), normal(40)))):
        found = functional.jacobian(func, inputs, strategy="forward-mode", **keywords)
        assert_same(found, torchs.jacobian(func, inputs))
    found = functional.hessian(rosenbrock, normal(300), outer_jacobian_strategy="forward-mode", **keywords)
    assert found.layout is (torch.sparse_coo if sparse else torch.strided)
    assert_same(found, torchs.hessian(rosenbrock, normal(300)))
    evaluations = 0

    def counted(x: Tensor) -> Tensor:
        nonlocal evaluations
        evaluations += 1
        return band(x)

    functional.jacobian(counted, normal(1000), strategy="forward-mode", **keywords)
    assert evaluations < 80
    assert functional.jacobian(lambda x: x.float(), X, vectorize=True, strategy="forward-mode").dtype is torch.float32


def test_the_callers_state_stays_as_it_was() -> None:
    x = normal(300).requires_grad_()
    before, version, state = x.detach().clone(), x._version, torch.get_rng_state()
    with torch.no_grad():
        for numerical in (False, True):
            result = functional.jacobian(band, x, numerical=numerical)
            assert not result.requires_grad
            functional.hvp(pow_reducer, x[:4], x[:4], numerical=numerical)
        assert not torch.is_grad_enabled()
    assert torch.equal(x, before)
    assert (x._version, x.grad, x.requires_grad) == (version, None, True)
    assert torch.equal(torch.get_rng_state(), state)


def twins(name: str, *arguments: Any, **keywords: Any) -> None:
    """The numerical counterpart is as accurate as its error estimate, which is small."""
    expected = getattr(torchs, name)(*arguments, **keywords)
    *output, found, error = getattr(functional, name)(*arguments, **keywords, numerical=True, return_error=True)
    if output:
        assert_same(output[0], expected[0])
        expected = expected[1]
    second_order = name not in ("jacobian", "vjp", "jvp")
    assert_same(found, expected, 1e-6 if second_order else 1e-9)
    for value, off, wanted in zip(tensors(found), tensors(error), tensors(expected), strict=True):
        assert off.dtype == wanted.dtype.to_real()
        assert bool(((value - wanted).abs() <= off).all())
        assert bool((off <= (1e-6 if second_order else 1e-8)).all())
    alone = getattr(functional, name)(*arguments, **keywords, numerical=True)
    assert_same(alone, (*output, found) if output else found, 1e-6)


def several(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.exp().cumsum(0), x.sin().prod()


def test_numerical_first_derivatives() -> None:
    x, y, z = normal(5), normal(2, 2, seed=1), normal(3, dtype=torch.complex128)
    twins("jacobian", several, x)
    twins("jacobian", lambda x, y: (x.sum() * y).sin(), (x, y))
    twins("jacobian", lambda z: (z * z).abs(), z)
    twins("jacobian", torch.exp, z, vectorize=True)
    twins("jacobian", lambda x: torch.complex(x, x * x), x, vectorize=True)
    twins("vjp", several, x, (normal(5, seed=2), normal(seed=3)))
    twins("vjp", torch.square, z, z.conj().resolve_conj())
    twins("vjp", lambda x, y: x.sum() * y.sum(), (x, y))
    twins("jvp", several, x, normal(5, seed=2))
    twins("jvp", lambda x, y: (x.sum() * y).sin(), (x, y), (normal(5, seed=2), normal(2, 2, seed=3)))
    twins("jvp", torch.square, z, z.flip(0))
    twins("jvp", torch.sin, normal(1)[0])


def test_numerical_second_derivatives() -> None:
    x, y = normal(5), normal(2, 2, seed=1)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return (x[1:] * x[:-1]).sin().sum() + (x.sum() * y).cos().prod()

    twins("hessian", pow_reducer, x)
    twins("hessian", loss, (x, y))
    for name in ("vhp", "hvp"):
        twins(name, loss, (x, y), (normal(5, seed=2), normal(2, 2, seed=3)))
    with pytest.raises(NotImplementedError, match=r"needs real inputs and a real output: pass torch\.view"):
        functional.hvp(lambda z: z.abs().sum(), Z, Z, numerical=True)


def test_second_differences_of_nothing() -> None:
    nothing = normal(0)
    twins("vhp", pow_reducer, nothing, nothing)
    twins("hvp", pow_reducer, nothing, nothing)
    assert functional.hessian(pow_reducer, nothing, numerical=True).shape == (0, 0)


@pytest.mark.parametrize("size", [3, 40])
@pytest.mark.parametrize("keywords", [{}, {"vectorize": True}, {"create_graph": True}])
def test_integers_have_a_jacobian_of_zeros(size: int, keywords: dict[str, Any]) -> None:
    x = normal(size)
    for func in (lambda x: x > 0, lambda x: (x.sin(), x.round().long())):
        found = functional.jacobian(func, x, **keywords)
        assert_same(found, torchs.jacobian(func, x, **keywords))


def test_numerical_structure_and_layouts() -> None:
    x = normal(400)
    evaluations = 0

    def counted(v: Tensor) -> Tensor:
        nonlocal evaluations
        evaluations += 1
        return band(v.detach())

    functional.jacobian(counted, x, numerical=True)
    assert evaluations < 310
    found, error = functional.jacobian(band, x, numerical=True, return_error=True, sparse="auto")
    assert found.layout is error.layout is torch.sparse_coo
    assert_same(found, torchs.jacobian(band, x), 1e-9)
    assert functional.jacobian(torch.sin, X, numerical=True, sparse="auto").layout is torch.strided
    assert functional.jacobian(torch.sin, X, numerical=True, sparse=True).layout is torch.sparse_coo
    assert functional.hessian(pow_reducer, X, numerical=True, sparse=True).layout is torch.sparse_coo
    with pytest.raises(ValueError, match=r"jacobian with numerical=True needs strided inputs; input 0 has layout"):
        functional.jacobian(lambda s: s.to_dense(), torch.eye(3).to_sparse(), numerical=True)


@pytest.mark.parametrize("scale", [1.0, 1e-9])
@pytest.mark.parametrize("share", [1.0, 1e-3, 1e-9, 1e-12])
def test_numerical_errors_cover_entries_outside_the_pattern(scale: float, share: float) -> None:
    """An entry that no difference shows is zero in the result, or part of another entry."""

    def func(x: Tensor) -> Tensor:
        return scale * (x.sin() + share * x.roll(7) * x[250])

    x = normal(300)
    found, error = functional.jacobian(func, x, numerical=True, return_error=True)
    assert bool(((found - torchs.jacobian(func, x)).abs() <= error).all())
    assert float(error.max()) < 2e-5 * scale


def test_numerical_errors_if_a_certificate_is_wrong() -> None:
    """The pattern lacks a diagonal of 1e-3, although its certificate excludes entries above 1e-9."""

    def func(x: Tensor) -> tuple[Tensor]:
        return (x.sin() + 1e-3 * x.roll(1),)

    x, diagonal = normal(300), torch.arange(300)
    with finite_differences._problem(func, [x]) as problem:
        blocks = problem.inputs, problem.outputs
    known = Differences(*blocks, True, diagonal, diagonal, x.cos(), torch.zeros_like(x), 1e-9)
    found = finite_differences._with_error_elsewhere(func, [x], known)
    assert found.error_elsewhere > 1e-3
    assert float(found.errors.min()) > 1e-3


def test_numerical_results_where_differences_are_poor() -> None:
    x = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    found, error = functional.jacobian(torch.relu, x, numerical=True, return_error=True)
    assert found.diag().tolist() == pytest.approx([0.5, 1.0, 0.0])
    assert error[0, 0] == pytest.approx(0.5)  # the one-sided derivatives are 0 and 1
    assert error[1:].max() < 1e-10
    single = normal(4, dtype=torch.float32)
    found, error = functional.jacobian(torch.sin, single, numerical=True, return_error=True)
    assert found.dtype is error.dtype is torch.float32
    assert bool(((found - single.cos().diag()).abs() <= error).all())
    assert error.max() < 1e-3
    values, whole = functional.jacobian(lambda v: (v * 2, v.long()), x, numerical=True)
    assert_same((values, whole), (2 * torch.eye(3, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)), 1e-9)
    with torch.no_grad():  # a func that differentiates inside may do so
        _, product = functional.jvp(
            lambda v: torch.autograd.grad(v.pow(3).sum(), v, create_graph=True)[0], x, x, numerical=True
        )
    assert_same(product, 6 * x * x, 1e-9)


@pytest.mark.parametrize(
    ("func", "x", "derivative"),
    [
        (lambda x: x + 1e10, torch.linspace(-2, 2, 300, dtype=torch.float64), lambda x: torch.eye(300)),
        (lambda x: x + 1e4, torch.linspace(-2, 2, 300), lambda x: torch.eye(300)),
        (lambda x: x.sum(), torch.ones(300, dtype=torch.float16), torch.ones_like),
        (lambda x: x.logsumexp(0), normal(300, dtype=torch.float32, seed=4), lambda x: x.softmax(0)),
    ],
)
def test_no_numerical_entry_is_lost_in_rounding(
    func: Callable[[Tensor], Tensor], x: Tensor, derivative: Callable[[Tensor], Tensor]
) -> None:
    found, error = functional.jacobian(func, x, numerical=True, return_error=True)
    difference = (found.double() - derivative(x.double())).abs()
    assert bool((difference <= 2 * error.double() + 1e-9).all())


def test_steps_that_are_lost_in_the_rounding_of_a_sum_decide_nothing() -> None:
    weight, x = normal(40, 300, dtype=torch.float32, seed=1), normal(300, dtype=torch.float32)
    found = functional.jacobian(lambda x: weight @ x, x, numerical=True)
    assert float((found - weight).abs().max()) < 0.03


def test_rows_of_a_backward_that_is_not_linear_are_those_of_single_products() -> None:
    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * (2 if int((g != 0).sum()) > 1 else 1)

    x = normal(400).requires_grad_()
    assert torch.equal(functional.jacobian(Counting.apply, x), torch.eye(400, dtype=torch.float64))
    assert torch.equal(fastgrad.analytical_jacobian(Counting.apply, x)[0][0], torch.eye(400, dtype=torch.float64))


def test_an_infinite_component_of_v_concerns_its_own_entries_only() -> None:
    v = torch.ones(300, dtype=torch.float64)
    v[0] = torch.inf
    _, _, error = functional.vjp(torch.sin, normal(300), v, numerical=True, return_error=True)
    assert float(error[1:].max()) < 1e-6


@pytest.mark.parametrize("product", [functional.hvp, functional.vhp])
def test_exceptions_of_func_are_not_hidden(product: Any) -> None:
    calls = 0

    def func(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ArithmeticError("planted")
        return x.pow(3).sum()

    with pytest.raises(ArithmeticError, match="planted"):
        product(func, X, X, numerical=True)


def test_it_is_an_attribute_imported_when_asked_for() -> None:
    assert fastgrad.functional is functional
    with pytest.raises(AttributeError, match="has no attribute 'functions'"):
        _ = fastgrad.functions
    code = (
        "import sys, fastgrad; assert 'fastgrad.functional' not in sys.modules; "
        "assert 'fastgrad.functional.compressed' not in sys.modules; fastgrad.functional.jacobian"
    )
    found = processes.run(code)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("func", "x", "second"),
    [
        (lambda x: (1e-3 / x).sum(), 1e-6, 2e15),
        (lambda x: (1e-3 / x).sum(), 1e-5, 2e12),
        (lambda x: (1e6 * x).sin().sum(), 0.7, -2.4768975e11),
        (lambda x: (1e5 * x).sin().sum(), 0.7, 8.2347398e9),
    ],
)
def test_the_error_of_a_second_difference_is_true_where_large_steps_cross_a_pole_or_a_period(
    func: Any, x: float, second: float
) -> None:
    value, error = functional.hessian(func, torch.tensor([x], dtype=torch.float64), numerical=True, return_error=True)
    assert abs(value.item() - second) <= error.item() + 1e-7 * abs(second)


def test_the_error_of_a_difference_is_true_where_func_computes_in_single_precision() -> None:
    for seed in range(4):
        x = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        x = x[x.cos().abs() > 0.05]  # within a single stair, a smaller derivative is not visible
        value, error = functional.jacobian(lambda x: x.float().sin().double(), x, numerical=True, return_error=True)
        assert bool(((value.diagonal() - x.cos()).abs() <= 10 * error.diagonal() + 1e-2).all())


def test_results_without_elements_or_gradients_are_torchs() -> None:
    def constant(x: Tensor) -> Tensor:
        return x.detach().sum()

    def with_empty(x: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, x[:0]

    assert_same(functional.hessian(constant, X), torchs.hessian(constant, X), 0.0)
    doubled, empty = functional.jacobian(with_empty, X, strict=True)
    assert_same(doubled, 2 * torch.eye(3, dtype=X.dtype), 0.0)
    assert empty.shape == (0, 3)
    for func, x in ((lambda x: x[:0], X), (torch.sum, X[:0])):
        found, error = functional.jacobian(func, x, numerical=True, return_error=True)
        assert found.shape == error.shape == (*func(x).shape, *x.shape)
    found, error = functional.jacobian(torch.sin, torch.zeros_like(X), numerical=True, return_error=True)
    assert bool(((found - torch.eye(3)).abs() <= error).all())


def test_forward_mode_makes_sparse_results() -> None:
    keywords: dict[str, Any] = {"vectorize": True, "strategy": "forward-mode"}
    found = functional.jacobian(torch.sin, X, sparse=True, **keywords)
    assert found.layout is torch.sparse_coo
    assert_same(found.to_dense(), torchs.jacobian(torch.sin, X, **keywords), 1e-15)


def gradients_of_two(func: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def mapped(x: Tensor) -> Tensor:
        found: Tensor = torch.func.vmap(torch.func.grad(func))(torch.stack([x, 2 * x]))
        return found

    return mapped


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.hessian, gradients_of_two])
@pytest.mark.parametrize("vectorize", [False, True])
def test_within_a_transform_of_torch_func(transform: Any, vectorize: bool) -> None:
    def of_jacobian(module: Any, vectorize: bool = False) -> Callable[[Tensor], Tensor]:
        return lambda x: module.jacobian(lambda x: x.sin() * x[0], x, create_graph=True, vectorize=vectorize).sum()

    def of_hessian(module: Any, vectorize: bool = False) -> Callable[[Tensor], Tensor]:
        return lambda x: module.hessian(pow_reducer, x, create_graph=True, vectorize=vectorize).sum()

    for of in (of_jacobian, of_hessian):
        # torch's own results with vectorize=True are unusable within a transform
        assert_same(transform(of(functional, vectorize))(X), transform(of(torchs))(X))


def test_forward_mode_within_a_transform_of_torch_func() -> None:
    def forward(x: Tensor) -> Tensor:
        found: Tensor = functional.jacobian(torch.sin, x, vectorize=True, strategy="forward-mode")
        return found.sum()

    with pytest.raises(NotImplementedError, match=r"forward mode is not supported within a transform of torch\.func"):
        torch.func.grad(forward)(X)


def test_a_tensor_of_a_transform_is_restored() -> None:
    def changing(x: Tensor) -> Tensor:
        alias, before = x.detach(), x.detach().clone()
        jacobian: Tensor = functional.jacobian(lambda y: y * alias.mul_(2), x, create_graph=True)
        assert torch.equal(x, before)
        return jacobian.sum()

    x = X.clone()
    torch.func.grad(changing)(x)
    assert torch.equal(x, X)


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_in_a_sparse_layout(create_graph: bool) -> None:
    def derivatives(sparse: bool) -> tuple[Tensor, ...]:
        def func(weight: Tensor) -> Tensor:
            return torch.nn.functional.embedding(torch.tensor([2, 0]), weight, sparse=sparse).pow(3) * scale

        weight, scale = normal(3, 2), normal(2).requires_grad_()
        jacobian: Tensor = functional.jacobian(func, weight, create_graph=create_graph)
        hessian: Tensor = functional.hessian(lambda v: func(v).sum(), weight, create_graph=create_graph)
        if not create_graph:
            return jacobian, hessian
        return jacobian, hessian, *torch.autograd.grad(jacobian.square().sum() + hessian.square().sum(), scale)

    assert_same(derivatives(sparse=True), derivatives(sparse=False))


def test_errors_include_derivatives_that_rounding_hides_at_small_steps() -> None:
    """Small steps do not change 1 + x^4 and 1 + x^6 here."""
    x = torch.tensor([1e-3, 0.01, 0.03, 0.1, 0.5, 1.5], dtype=torch.float64)
    for power in (4, 6):
        truth = power * x ** (power - 1) / (1 + x**power)
        found, error = functional.jacobian(
            lambda x, power=power: (x**power + 1).log(), x, numerical=True, return_error=True
        )
        assert bool(((found.diagonal() - truth).abs() <= error.diagonal() + 1e-14).all())


def test_errors_include_terms_in_lower_precision() -> None:
    """Small steps see only the sine."""
    x = normal(60)
    found, error = functional.jacobian(
        lambda x: x.float().double() + 1e5 + x.sin(), x, numerical=True, return_error=True
    )
    assert bool(((found.diagonal() - (1 + x.cos())).abs() <= 20 * error.diagonal()).all())


@pytest.mark.parametrize("distance", [1e-5, 1e-4, 1e-3])
def test_a_kink_nearby_is_no_hidden_derivative(distance: float) -> None:
    x = torch.tensor([-distance, distance], dtype=torch.float64)
    found, error = functional.jacobian(torch.relu, x, numerical=True, return_error=True)
    assert torch.allclose(found.diagonal(), torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert float(error.abs().max()) < 1e-8
