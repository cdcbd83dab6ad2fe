"""The surroundings of a check: grad modes, defaults, torch.compile and the profiler."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad
from fastgrad.core import torch_private
from tests import processes

each_check = pytest.mark.parametrize("check", [fastgrad.gradcheck, fastgrad.gradgradcheck], ids=lambda f: f.__name__)


def leaf(*shape: int) -> Tensor:
    values = torch.linspace(0.2, 0.9, torch.Size(shape).numel(), dtype=torch.float64, device="cpu")
    return values.view(shape).requires_grad_()


def square(x: Tensor) -> Tensor:
    return x * x.sin()


def half_wrong(x: Tensor) -> Tensor:
    return x * x.detach()


def outcome(check: Callable[..., bool], *arguments: Any, **keywords: Any) -> str:
    """The verdict, or the kind of exception."""
    try:
        return str(check(*arguments, **keywords))
    except Exception as error:
        return type(error).__name__


def both(name: str, *arguments: Any, **keywords: Any) -> str:
    """The outcome, which must be the same in torch."""
    own = outcome(getattr(fastgrad, name), *arguments, **keywords)
    assert outcome(getattr(torch.autograd, name), *arguments, **keywords) == own
    return own


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        (torch.no_grad, "torch.no_grad"),
        (lambda: torch.set_grad_enabled(False), "torch.set_grad_enabled"),
        (torch.inference_mode, "torch.inference_mode"),
    ],
    ids=["no_grad", "set_grad_enabled", "inference_mode"],
)
def test_the_grad_mode_that_is_off_is_named(mode: Callable[[], AbstractContextManager[None]], name: str) -> None:
    outside = leaf(3)
    with mode():
        for x in (outside, leaf(3)):
            for keywords in ({}, {"check_forward_ad": True}):
                assert both("gradcheck", square, (x,), **keywords) == "GradcheckError"
            with pytest.raises(fastgrad.GradcheckError, match=f"gradients are disabled here by .*{name}"):
                fastgrad.gradcheck(square, (x,))
            with pytest.raises(ValueError, match=f"gradients are disabled here by .*{name}"):
                fastgrad.gradgradcheck(square, (x,))
            # If no output depends on x, nothing is recorded.
            assert fastgrad.gradcheck(lambda v: torch.ones(2, dtype=torch.float64), (x,))
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert torch.equal(outside, leaf(3))


def test_func_may_leave_the_grad_mode_that_is_off() -> None:
    x = leaf(3)
    with torch.no_grad():
        assert both("gradcheck", torch.enable_grad()(square), (x,)) == "True"
    with torch.inference_mode():
        assert both("gradcheck", torch.inference_mode(False)(square), (x,)) == "True"


def test_inputs_made_in_inference_mode_are_refused_outside() -> None:
    with torch.inference_mode():
        x = leaf(3)
    assert both("gradcheck", square, (x,)) == "RuntimeError"
    with pytest.raises(RuntimeError, match=r"1th input was created under torch.inference_mode"):
        fastgrad.gradcheck(torch.mul, (leaf(3), x))


def test_a_check_that_may_not_warn_does_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fastgrad.gradcheck(square, (leaf(2),))
        assert fastgrad.gradgradcheck(square, (leaf(2),))


@each_check
@pytest.mark.parametrize("fast_mode", [False, True])
def test_warnings_point_at_the_line_of_the_caller(check: Any, fast_mode: bool) -> None:
    def undefined_raises(v: Tensor) -> Tensor:
        return NeedsGradOutput.apply(v * v)

    single = torch.ones(2).requires_grad_()
    calls = {
        "not a double precision": lambda: check(
            square, (single,), raise_exception=False, fast_mode=fast_mode, precision="strict"
        ),
        "check_sparse_nnz": lambda: check(square, (leaf(2),), check_sparse_nnz=False, fast_mode=fast_mode),
        "undefined grad_outputs": lambda: check(
            undefined_raises, (leaf(2),), raise_exception=False, fast_mode=fast_mode
        ),
    }
    for phrase, call in calls.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        ours = [each for each in caught if phrase in str(each.message)]
        assert {each.filename for each in ours} == {__file__}, phrase
        lines = range(call.__code__.co_firstlineno, call.__code__.co_firstlineno + 3)
        assert ours[0].lineno in lines, phrase


class NeedsGradOutput(torch.autograd.Function):
    """The identity; none of its derivatives accepts an undefined grad_output."""

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return v.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> Tensor:
        if grad_output is None:
            raise RuntimeError("no grad_output")
        return NeedsGradOutput.apply(grad_output)


@each_check
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_default_dtype_and_device_do_not_matter_and_stay(check: Any, dtype: torch.dtype) -> None:
    x = leaf(3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):  # a tensor that is made without a device would have no values
            assert check(square, (x,))
            assert check(torch.mul, (x, x.detach().clone().requires_grad_()))
            with pytest.raises(fastgrad.GradcheckError):
                fastgrad.gradcheck(half_wrong, (x,))
            with pytest.raises(RuntimeError, match="overlap in memory"):
                check(lambda v, w: v[::2] * w, (x, x[::2]))
            assert torch.get_default_device().type == "meta"
        assert torch.get_default_dtype() is dtype
    finally:
        torch.set_default_dtype(before)
    assert torch.get_default_device().type == "cpu"


class AllRolled(torch.autograd.Function):
    """Sin, whose backward gives each element the gradient of another element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return (grad_output * ctx.saved_tensors[0].cos()).roll(1)


def whole_row(x: Tensor) -> Tensor:
    return torch.stack([(x * x).sum(), x[0] * x[1]])


ENGINES: list[dict[str, Any]] = [
    {},
    {"engine": "dense"},
    {"engine": "compressed"},
    {"fast_mode": True},
    {"fast_mode": True, "engine": "sketch"},
]


def verdicts(engine: dict[str, Any]) -> list[str]:
    """Verdicts with their causes for right and wrong functions of both orders, in both modes."""
    sparse = torch.eye(4, dtype=torch.float64, device="cpu").to_sparse().requires_grad_()
    found = []
    for func, inputs in (
        (square, (leaf(40),)),
        (whole_row, (leaf(40),)),
        (lambda x, y: (x @ y).exp(), (leaf(4, 4), leaf(4, 3))),
        (lambda x: torch.view_as_complex(x) ** 2, (leaf(20, 2),)),
        (AllRolled.apply, (leaf(40),)),
        (half_wrong, (leaf(40),)),
        (half_wrong, (leaf(3),)),
        (lambda s: torch.sparse.mm(s, s.to_dense()), (sparse,)),
    ):
        for order in (1, 2):
            for forward in ({}, {"check_forward_ad" if order == 1 else "check_fwd_over_rev": True}):
                try:
                    report = fastgrad.check(func, inputs, order=order, **forward, **engine)
                    causes = [cause.name for cause in report.causes]
                    # A default device is a mode. Then there are no small checks, which may use another engine.
                    rests_on = [certificate.claim for certificate in report.certificates if engine]
                    found.append(f"{report.passed} {report.failure and report.failure.kind} {causes} {rests_on}")
                except Exception as error:
                    found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize(
    ("engine", "dtype"),
    [*zip(ENGINES, [torch.float16, torch.float32] * 2 + [torch.float16], strict=True), (ENGINES[0], torch.float32)],
    ids=str,
)
def test_verdicts_and_causes_are_those_without_defaults(engine: dict[str, Any], dtype: torch.dtype) -> None:
    expected = verdicts(engine)
    assert sum(verdict.startswith("True") for verdict in expected) > 10
    assert sum(verdict.startswith("False") for verdict in expected) > 3
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            assert verdicts(engine) == expected
    finally:
        torch.set_default_dtype(before)


def derivatives() -> list[Tensor]:
    """Results of the functional API and of the numerical Jacobians: dense and sparse, by rows and by structure."""
    x, y = leaf(40), leaf(3, 4)
    ones = torch.ones(40, dtype=torch.float64, device="cpu")
    functional = fastgrad.functional
    found: list[Any] = [
        functional.jacobian(square, x),
        functional.jacobian(whole_row, x),
        functional.jacobian(lambda v: v.diff(), leaf(200)),
        functional.jacobian(square, x, sparse=True),
        functional.jacobian(square, x, numerical=True),
        functional.hessian(lambda v: (v.diff() ** 3).sum(), x, numerical=True),
        functional.vhp(lambda v: (v**3).sum(), x, ones, numerical=True)[1],
        fastgrad.numerical_jacobian(square, (x,), layout=torch.sparse_coo),
        functional.hessian(lambda v: (v.diff() ** 3).sum(), x),
        functional.jvp(square, x, ones)[1],
        functional.vjp(square, x, ones)[1],
        functional.hvp(lambda v: (v**3).sum(), x, ones)[1],
        functional.vhp(lambda v: (v**3).sum(), x, ones)[1],
        fastgrad.numerical_jacobian(square, (x,)),
        fastgrad.analytical_jacobian(square, (x,)),
        fastgrad.analytical_jacobian(square, (x,), mode="forward"),
        fastgrad.analytical_jacobian(lambda v: torch.ones(2, dtype=torch.float64, device="cpu"), (x,)),
        fastgrad.numerical_jacobian(lambda v: v @ v.t(), (y,)),
    ]
    return [part.to_dense() for part in torch_private.tensors_in(found)]


def test_derivatives_are_those_without_a_default_device() -> None:
    expected = derivatives()
    with torch.device("meta"):
        found = derivatives()
    assert len(found) == len(expected)
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions(backend: str) -> None:
    x = leaf(3)
    right, wrong = torch.compile(square, backend=backend), torch.compile(half_wrong, backend=backend)
    for keywords in ({}, {"check_forward_ad": True}):
        assert both("gradcheck", right, (x,), **keywords) == "True"
        assert both("gradcheck", wrong, (x,), **keywords) == "GradcheckError"
    if backend == "eager":
        assert both("gradgradcheck", right, (x,)) == "True"
    else:
        assert both("gradgradcheck", right, (x,)) == "RuntimeError"
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            fastgrad.gradgradcheck(right, (x,))


@pytest.mark.usefixtures("fresh_compiler")
@each_check
def test_a_check_inside_a_compiled_function_is_not_compiled(check: Any) -> None:
    graphs: list[list[str]] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([node.target.__name__ for node in module.graph.nodes if node.op == "call_function"])
        return module

    def func(x: Tensor) -> tuple[Tensor, bool]:
        y = x * 2
        passed = check(square, (x,))
        return y + 1, passed

    x = leaf(3)
    y, passed = torch.compile(func, backend=backend)(x)
    assert passed
    assert torch.equal(y, x * 2 + 1)
    assert graphs == [["mul"], ["add"]]
    graphs.clear()
    assert torch.compile(check, backend=backend)(square, (x,))
    assert not graphs
    torch.compiler.reset()
    with pytest.raises(Exception, match="a gradient check needs values"):
        torch.compile(func, backend=backend, fullgraph=True)(x)


@pytest.mark.parametrize(
    "used",
    [
        "fastgrad.gradcheck(torch.sin, (x,)) and fastgrad.gradgradcheck(torch.sin, (x,))",
        "fastgrad.gradgradcheck(lambda x: x.cumsum(0) * x, (torch.linspace(0, 1, 300).double().requires_grad_(),))",
        "watch(lambda: x.sin())",
        "fastgrad.lowprecision.rounding.Arithmetic(torch.bfloat16, 0).__enter__() and x.sin() is not None",
    ],
)
def test_the_compiler_is_not_imported(used: str) -> None:
    code = f"""
        import sys, torch, fastgrad, fastgrad.lowprecision.rounding
        from fastgrad.engines import cuda_graph
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        cuda_graph.cuda.current_stream = lambda device: None
        def watch(call):
            {"    "}with cuda_graph._Watch(x.device, "func"): return call() is not None
        assert {used}
        print("torch._dynamo" in sys.modules)
    """
    lines = "\n".join(line[8:] for line in code.splitlines())
    found = processes.run(lines)
    assert found.stdout == "False\n", found.stderr


def test_the_profiler_shows_the_phases() -> None:
    x = leaf(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert fastgrad.gradcheck(
            lambda x, _: square(x),
            (x, [torch.ones(1)]),  # a list of tensors is left to the complete check
            check_forward_ad=True,
            check_batched_grad=True,
            check_batched_forward_grad=True,
        )
    names = _phases(profile)
    assert names == {
        f"fastgrad: {phase}"
        for phase in (
            "first evaluation",
            "numerical columns",
            "analytical rows",
            "comparison",
            "linearity of backward",
            "repeated calls",
            "analytical columns",
            "linearity of jvp",
            "forward against reverse mode",
            "undefined tangents",
            "batched tangents",
            "batched gradients",
            "zero grad_output",
            "undefined grad_outputs",
        )
    }
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["fastgrad: numerical columns"] == 1  # a range per phase, not one per column


def test_the_profiler_shows_the_phases_of_small_checks() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert fastgrad.gradcheck(
            square, (leaf(3),), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
        )
    parts = ("backward", "numerical columns", "comparison", "repeated calls", "analytical columns")
    assert _phases(profile) == {f"fastgrad: {phase}" for phase in (*parts, "batched tangents", "batched gradients")}


def _phases(profile: torch.profiler.profile) -> set[str]:
    return {event.key for event in profile.key_averages() if event.key.startswith("fastgrad: ")}
