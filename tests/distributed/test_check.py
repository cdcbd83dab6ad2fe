"""What fastgrad.distributed.check rejects, in a group of one rank; arguments are unchanged afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import fastgrad
import fastgrad.distributed
from fastgrad.distributed import RankError
from fastgrad.distributed.check import _reject_what_does_not_fit
from fastgrad.distributed.placements import Space


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def leaf(*shape: int) -> Tensor:
    return torch.linspace(0.2, 0.9, torch.Size(shape).numel(), dtype=torch.float64).view(shape).requires_grad_()


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"outputs": Replicate()}, TypeError, "input 0 needs a placement"),
        ({"placements": [Replicate()]}, ValueError, "outputs must name"),
        ({"placements": [Replicate()] * 2, "outputs": Replicate()}, ValueError, "placements must have one entry"),
        ({"placements": [Shard(3)], "outputs": Replicate()}, ValueError, "input 0 is S.3., which needs at least 4 dim"),
        ({"placements": [Shard(0)], "outputs": Shard(2)}, ValueError, "result 0 is S.2., which needs at least 3 dim"),
        ({"placements": ["rows"], "outputs": Replicate()}, TypeError, "got 'rows'"),
        (
            {"placements": [Partial("max")], "outputs": Replicate()},
            NotImplementedError,
            "must be sums. For an average",
        ),
        ({"placements": [Replicate()], "outputs": [Replicate()] * 2}, ValueError, r"got \[Replicate"),
        (
            {"placements": [Shard(0)], "outputs": Shard(0), "gradients": [Replicate()]},
            ValueError,
            r"the gradient of input 0 must be Shard\(dim=0\), because input 0 is Shard\(dim=0\), got Replicate\(\)",
        ),
        (
            {"placements": [Partial()], "outputs": Partial(), "output_gradients": [Shard(1)]},
            ValueError,
            r"the gradient of result 0 must be Replicate\(\) or Partial\(\), because result 0 is Partial",
        ),
        (
            {"placements": [Shard(0)], "outputs": Shard(0), "gradients": ["rows"]},
            TypeError,
            "the gradient of input 0 needs a placement",
        ),
        ({"check_forward_ad": True}, NotImplementedError, "check_forward_ad: only reverse mode is checked"),
        ({"wrt": "parameters"}, NotImplementedError, "does not take wrt: pass what is to be checked as inputs"),
        (
            {"reference": torch.sin},
            NotImplementedError,
            "does not take reference: to check the formula, pass",
        ),
        ({"kwargs": {"out": leaf(2)}}, ValueError, r'kwargs\["out"\] requires grad, but only inputs are checked'),
        ({"kwargs": 3}, TypeError, "kwargs must be a mapping"),
    ],
)
def test_arguments_that_cannot_be(keywords: dict[str, Any], error: type[Exception], text: str) -> None:
    x = leaf(2, 3)
    before = x.detach().clone()
    with pytest.raises(error, match=text):
        fastgrad.distributed.check(torch.sin, (x,), **keywords)
    assert torch.equal(x, before)


@pytest.mark.parametrize("wrong", [False, True])
def test_keyword_arguments_are_passed(wrong: bool) -> None:
    def scaled(x: Tensor, *, scale: Tensor, power: int) -> Tensor:
        return (x * scale) ** power + (x.detach() if wrong else x)

    keywords = {"scale": torch.full((3,), 2.0, dtype=torch.float64), "power": 3}
    report = fastgrad.distributed.check(scaled, (leaf(2, 3),), placements=[Shard(0)], outputs=Shard(0), kwargs=keywords)
    assert report.passed is not wrong


def test_nothing_to_check() -> None:
    with pytest.raises(ValueError, match="needs an input with requires_grad"):
        fastgrad.distributed.check(torch.sin, (leaf(3).detach(),), placements=[None], outputs=Replicate())


def test_a_tensor_given_twice() -> None:
    x = leaf(3)
    with pytest.raises(ValueError, match="passed twice"):
        fastgrad.distributed.check(torch.mul, (x, x), placements=[Replicate()] * 2, outputs=Replicate())


def test_random_states_are_as_they_were() -> None:
    before = torch.get_rng_state()
    x = leaf(2, 3)
    fastgrad.distributed.check(lambda x: x + torch.rand(3), (x,), placements=[Shard(0)], outputs=Shard(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_one_rank_gives_the_report_of_the_usual_check() -> None:
    x = leaf(2, 3)
    report = fastgrad.distributed.check(torch.sin, (x,), placements=[Shard(0)], outputs=Shard(0))
    usual = fastgrad.check(torch.sin, (x,))
    assert report.verdict == usual.verdict == "passed"
    assert (report.n, report.m) == (usual.n, usual.m)


def test_fastgrad_distributed_is_found_without_an_import_of_its_own() -> None:
    assert fastgrad.distributed.RankError is not None


def sharded(dims: int = 1) -> Tensor:
    mesh = init_device_mesh("cpu", (1,) * dims)
    placements = [Shard(0), *[Replicate()] * (dims - 1)]
    return DTensor.from_local(leaf(2, 3).detach(), mesh, placements).requires_grad_()


@pytest.mark.parametrize("keywords", [{}, {"fast_mode": True}, {"order": 2}])
def test_dimensions_may_be_counted_from_the_last(keywords: dict[str, Any]) -> None:
    def check(func: Any) -> fastgrad.Report:
        return fastgrad.distributed.check(func, (leaf(2, 3),), placements=[Shard(-1)], outputs=Shard(-2), **keywords)

    assert check(torch.sin).verdict == "passed"
    wrong = check(lambda x: x * x.detach().sin())
    assert wrong.verdict == "failed"
    assert "order" in keywords or any("input 0, S(-1), is wrong on rank 0" in note for note in wrong.notes)


def test_a_result_without_dimensions_cannot_be_sharded() -> None:
    with pytest.raises(
        ValueError, match=r"^result 0 is S\(0\), which needs at least 1 dimension, but has 0 dimensions"
    ):
        fastgrad.distributed.check(torch.sum, (leaf(3),), placements=[Shard(0)], outputs=Shard(0))


@pytest.mark.parametrize("keywords", [{}, {"fast_mode": True}, {"order": 2}])
def test_lower_dtypes_are_compared_with_differences(keywords: dict[str, Any]) -> None:
    x = leaf(2, 3).detach().float().requires_grad_()

    def check(func: Any) -> fastgrad.Report:
        return fastgrad.distributed.check(func, (x,), placements=[Shard(0)], outputs=Shard(0), **keywords)

    report = check(torch.sin)
    assert report.verdict == "passed"
    text = "a distributed function runs only in the dtypes of its inputs: input 0 is float32"
    assert [text in note for note in report.notes] == [True]
    assert check(lambda x: x * x.detach().sin()).verdict == "failed"


@pytest.mark.parametrize("keywords", [{}, {"fast_mode": True}, {"order": 2}, {"placements": [Shard(0)]}])
def test_dtensors_bring_their_placements(keywords: dict[str, Any]) -> None:
    x = sharded()
    report = fastgrad.distributed.check(torch.sin, (x,), **keywords)
    assert report.verdict == "passed", str(report)
    assert (report.n, report.m) == ((12, 6) if "order" in keywords else (6, 6))
    assert torch.equal(x.detach().to_local(), leaf(2, 3).detach())  # type: ignore[attr-defined]


def test_a_wrong_second_derivative_of_dtensors_fails() -> None:
    report = fastgrad.distributed.check(lambda x: x * x.detach().sin(), (sharded(),), order=2)
    assert report.verdict == "failed"


@pytest.mark.parametrize(
    ("dims", "keywords", "error", "text"),
    [
        (2, {}, NotImplementedError, "is a DTensor of a mesh with 2 dimensions"),
        (1, {"placements": [Replicate()]}, ValueError, "pass no other placement"),
        (1, {"gradients": [Partial()]}, ValueError, "pass no other placement"),
    ],
)
def test_dtensors_that_cannot_be(dims: int, keywords: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"input 0 .*{text}"):
        fastgrad.distributed.check(torch.sin, (sharded(dims),), **keywords)


@pytest.mark.parametrize(
    ("func", "error", "text"),
    [
        (lambda x: x.mean(0), NotImplementedError, r"result 0 is Partial\(avg\), but partial tensors must be sums"),
        (
            lambda x: x.redistribute(placements=[Shard(1)]).reshape(-1),
            TypeError,
            r"result 0 needs a placement \(Shard\(dim\), Replicate\(\) or Partial\(\)\), got _StridedShard",
        ),
    ],
)
def test_results_whose_placements_are_not_supported(func: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        fastgrad.distributed.check(func, (sharded(),))


class Doubled(torch.autograd.Function):
    """2 x; its backward is wrong for grad_outputs with gaps or stride 0, or writes to its grad_output or result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.kind, result = kind, 2 * x
        ctx.memory = result.detach()
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        found = 2 * grad
        if ctx.kind == "written":
            grad.mul_(0.5)
        if ctx.kind == "result written":
            ctx.memory.mul_(0.5)
        is_expanded = 0 in grad.stride()
        is_wrong = {"with gaps": not is_expanded and not grad.is_contiguous(), "expanded": is_expanded}
        return found * (3 if is_wrong.get(ctx.kind) else 1), None


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
@pytest.mark.parametrize("kind", ["right", "with gaps", "expanded", "written", "result written"])
def test_backward_gets_the_layouts_of_grad_outputs_and_may_not_write_to_them(
    kind: str, placement: Any, fast_mode: bool
) -> None:
    report = fastgrad.distributed.check(
        lambda x: Doubled.apply(x, kind), (leaf(3, 2),), placements=[placement], outputs=placement, fast_mode=fast_mode
    )
    assert report.verdict == ("passed" if kind == "right" else "failed"), str(report)


def test_what_func_raises_is_a_rank_error() -> None:
    x = leaf(2, 3)
    with pytest.raises(fastgrad.distributed.RankError, match="rank 0 raised ZeroDivisionError"):
        fastgrad.distributed.check(lambda x: x / (1 // 0), (x,), placements=[Shard(0)], outputs=Shard(0))
    assert torch.equal(x, leaf(2, 3))


@pytest.mark.parametrize("shared", [False, True])
def test_a_check_that_raises_keeps_its_connections(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(func: Any) -> fastgrad.Report:
        if shared:
            return fastgrad.check(func, leaf(3), group=dist.group.WORLD)
        return fastgrad.distributed.check(func, (leaf(3),), placements=[Shard(0)], outputs=Shard(0))

    check(torch.sin)
    monkeypatch.setattr("fastgrad.core.torch_private.store_of", None)  # a new connection would call it
    for func, error in ((3, TypeError), (lambda x: x / (1 // 0), (RankError, ZeroDivisionError))):
        with pytest.raises(error):
            check(func)
    assert check(torch.sin).verdict == "passed"


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_a_wrong_complex_gradient_has_a_place(placement: Any) -> None:
    x = torch.complex(leaf(3).detach(), leaf(3).detach()).requires_grad_()
    report = fastgrad.distributed.check(
        lambda x: x * x.conj().detach(), (x,), placements=[placement], outputs=[placement]
    )
    assert report.failure is not None
    where = "is wrong on rank 0" if isinstance(placement, Shard) else "is held by all ranks"
    assert any("input 0, " in note and where in note for note in report.notes)


def test_inputs_without_elements_and_results_without_derivatives() -> None:
    x = leaf(0, 3)
    assert fastgrad.distributed.check(torch.sin, (x,), placements=[Shard(0)], outputs=[Shard(0)]).verdict == "passed"
    report = fastgrad.distributed.check(
        lambda x, y: (x * y, x.detach() > 0), (leaf(3), leaf(3)), placements=[Shard(0)] * 2, outputs=[Shard(0)] * 2
    )
    assert report.verdict == "passed"


def test_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group first"):
        fastgrad.distributed.check(torch.sin, (leaf(3),), placements=[Shard(0)], outputs=Shard(0))


def about(x: Tensor, placement: Any = Replicate(), **values: Any) -> tuple[dict[str, Any], tuple[Tensor]]:  # noqa: B008
    call = {"function": "sin", "spaces": (Space(placement, placement),), "results": None, "keywords": "[]", **values}
    return call, (x.detach(),)


def reject_what_does_not_fit(ranks: list[tuple[dict[str, Any], tuple[Tensor]]], checked: list[int]) -> None:
    _reject_what_does_not_fit([call for call, _ in ranks], [parts for _, parts in ranks], checked)


@pytest.mark.parametrize(
    ("others", "error", "text"),
    [
        ([about(leaf(3)), about(leaf(3), function="cos")], RankError, "function is sin on rank 0, and cos on rank 2"),
        ([about(leaf(3), keywords="[1]")], RankError, r"keywords is \[\] on rank 0, and \[1\] on rank 1"),
        (
            [about(leaf(3).float())],
            ValueError,
            "input 4 has different dtypes on the ranks: torch.float64, torch.float32",
        ),
        ([about(leaf(2, 3))], ValueError, "input 4 is .*its shapes differ"),
        ([about(leaf(3)), about(leaf(3) + 1)], ValueError, r"at \[\d\] it is .* on rank 0 and .* on rank 2"),
    ],
)
def test_calls_and_parts_that_differ_are_named(others: list[Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        reject_what_does_not_fit([about(leaf(3)), *others], [4])


def test_parts_that_fit_are_accepted() -> None:
    reject_what_does_not_fit([about(leaf(3)), about(leaf(3))], [0])
    reject_what_does_not_fit([about(leaf(3), Shard(0)), about(leaf(5), Shard(0))], [0])


@pytest.mark.parametrize("other", [lambda x: 2 * x.detach(), lambda x: (x > 0).double(), lambda x: x > 0])
def test_a_result_without_derivatives_has_no_part_in_second_derivatives(other: Any) -> None:
    def func(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin() * y, other(x)

    keywords: dict[str, Any] = {"placements": [Shard(0)] * 2, "outputs": [Shard(0)] * 2, "order": 2}
    assert fastgrad.distributed.check(func, (leaf(3), leaf(3)), **keywords).verdict == "passed"
    assert fastgrad.check(func, (leaf(3), leaf(3)), order=2).verdict == "passed"
