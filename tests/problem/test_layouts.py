"""Sparse and MKLDNN inputs: torch's verdict in every layout, masked or not; the entry named, the caller's bits kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

import fastgrad
from fastgrad.checks.order import check
from fastgrad.problem.coordinates import memory_of
from fastgrad.report.settings import Settings

LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")


def dense_values(dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (4, 6)) -> Tensor:
    """Numbers with an empty block, an empty row and a zero, so that patterns are not full."""
    values = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(3))
    values[:2, :3] = 0
    values[2] = 0
    values[3, 4] = 0
    return values


def sparse(layout: torch.layout, dtype: torch.dtype = torch.float64) -> Tensor:
    blocksize = (2, 3) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    return dense_values(dtype).to_sparse(layout=layout, blocksize=blocksize).requires_grad_()


def hybrid() -> Tensor:
    return dense_values(shape=(4, 6, 2)).to_sparse(2).requires_grad_()


def batched() -> Tensor:
    values = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    ends, columns = torch.tensor([[0, 1, 3], [0, 0, 3]]), torch.tensor([[2, 0, 1], [0, 1, 3]])
    return torch.sparse_csr_tensor(ends, columns, values, (2, 2, 4)).requires_grad_()


def batched_blocks() -> Tensor:
    values = torch.randn(2, 3, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    rows, ends = torch.tensor([[1, 0, 1], [0, 1, 0]]), torch.tensor([[0, 1, 3], [0, 2, 3]])
    return torch.sparse_bsc_tensor(ends, rows, values, (2, 4, 6)).requires_grad_()


def dense_dimension() -> Tensor:
    values = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    return torch.sparse_csc_tensor([0, 1, 2, 4], [1, 0, 0, 1], values, (2, 3, 3)).requires_grad_()


def uncoalesced() -> Tensor:
    values = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    return torch.sparse_coo_tensor([[0, 0, 2], [1, 1, 0]], values, (3, 2)).requires_grad_()


def empty() -> Tensor:
    return torch.zeros(2, 3, dtype=torch.float64).to_sparse().requires_grad_()


INPUTS = {
    **{str(layout).removeprefix("torch."): (lambda layout=layout: sparse(layout)) for layout in LAYOUTS},
    **{f"complex {layout}": (lambda layout=layout: sparse(layout, torch.complex128)) for layout in LAYOUTS},
    "hybrid COO": hybrid,
    "batched CSR": batched,
    "batched BSC": batched_blocks,
    "CSC with a dense dimension": dense_dimension,
    "uncoalesced COO": uncoalesced,
    "nothing specified": empty,
}


BATCHED = {"batched CSR", "batched BSC"}
"""Torch's checker raises for these: it goes through COO, which knows no batches."""


class Scale(torch.autograd.Function):
    """3 s, dense; its gradient is `factor` times grad_output, wrong at one flat index, in the requested layout."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, masked: bool, factor: float, wrong_at: int | None) -> Tensor:
        ctx.save_for_backward(s)
        ctx.rest = masked, factor, wrong_at
        return 3 * s.to_dense()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (s,) = ctx.saved_tensors
        masked, factor, wrong_at = ctx.rest
        gradient = factor * grad
        if wrong_at is not None:
            gradient.view(-1)[wrong_at] *= 1.5
        if masked:
            # Wrong entries are kept, specified or not.
            specified = torch.zeros(s.shape).reshape(-1)
            specified[elements(s)] = 1
            if wrong_at is not None:
                specified[wrong_at] = 1
            gradient = gradient * specified.reshape(s.shape)
        return gradient, None, None, None


def elements(s: Tensor) -> Tensor:
    memory = memory_of(s, masked=True)
    assert memory is not None
    assert memory.elements is not None
    return memory.elements


def verdict(checker: Any, *arguments: Any, **keywords: Any) -> bool:
    return checker(*arguments, raise_exception=False, check_undefined_grad=False, **keywords)


@pytest.mark.parametrize("name", INPUTS)
def test_stand_in_has_the_values_in_logical_order(name: str) -> None:
    tensor = INPUTS[name]()
    memory = memory_of(tensor, masked=False)
    assert memory is not None
    assert memory.elements is None
    assert memory.stand_in is not None
    stand_in = memory.stand_in.detach()
    assert stand_in.layout is tensor.layout
    assert torch.equal(stand_in.to_dense(), tensor.detach().to_dense())
    memory.values.copy_(torch.arange(tensor.numel()).reshape(memory.values.shape))
    assert torch.equal(stand_in.to_dense(), torch.arange(tensor.numel()).reshape(tensor.shape).to(tensor.dtype))


@pytest.mark.parametrize("name", INPUTS)
def test_specified_elements_are_where_the_values_are(name: str) -> None:
    tensor = INPUTS[name]().detach()
    memory = memory_of(tensor, masked=True)
    assert memory is not None
    assert memory.stand_in is None
    assert memory.elements is not None
    rebuilt = torch.zeros(tensor.numel(), dtype=tensor.dtype)
    rebuilt.index_add_(0, memory.elements, memory.values.reshape(-1))
    assert torch.equal(rebuilt.reshape(tensor.shape), tensor.to_dense())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", INPUTS)
def test_verdicts_are_torchs(name: str, masked: bool) -> None:
    make = INPUTS[name]
    bits = memory_of(make(), masked=True).values.clone()  # type: ignore[union-attr]
    specified = set(elements(make()).tolist())
    for factor, wrong_at in [(3.0, None), (3.3, None), (3.0, 0), (3.0, make().numel() - 2)]:
        func = lambda s, f=factor, w=wrong_at: Scale.apply(s, masked, f, w)  # noqa: E731
        tensor = make()
        own = verdict(fastgrad.gradcheck, func, tensor, masked=masked)
        if name in BATCHED:
            with pytest.raises((RuntimeError, IndexError)):
                verdict(torch.autograd.gradcheck, func, make(), masked=masked)
        else:
            assert own == verdict(torch.autograd.gradcheck, func, make(), masked=masked), (factor, wrong_at)
        assert own == (wrong_at is None and (factor == 3 or (masked and not specified)))
        assert torch.equal(memory_of(tensor, masked=True).values, bits)  # type: ignore[union-attr]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_wrong_entry_is_named(layout: torch.layout, masked: bool) -> None:
    for wrong_at in (10, 3):  # the second element is specified only in the blocked layouts
        func = lambda s, w=wrong_at: Scale.apply(s, masked, 3.0, w)  # noqa: E731
        with pytest.raises(
            fastgrad.GradcheckError, match="Jacobian mismatch for output 0 with respect to input 0"
        ) as e:
            fastgrad.gradcheck(func, sparse(layout), masked=masked)
        worst = e.value.report.failure.comparison.worst
        assert worst.input_index == worst.output_index == divmod(wrong_at, 6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_products_with_dense_tensors(layout: torch.layout, masked: bool) -> None:
    weight = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    func = lambda s, w: torch.sparse.mm(s, w)  # noqa: E731
    results = [
        verdict(checker, func, (sparse(layout), weight), masked=masked)
        for checker in (fastgrad.gradcheck, torch.autograd.gradcheck)
    ]
    assert results[0] == results[1]
    assert fastgrad.gradgradcheck(func, (sparse(layout).detach(), weight))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_undefined_and_zero_gradients(layout: torch.layout) -> None:
    assert fastgrad.gradcheck(lambda s: 3 * s.to_dense(masked_grad=False), sparse(layout))
    assert fastgrad.gradcheck(lambda s: 3 * s.to_dense(masked_grad=True), sparse(layout), masked=True)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_restored_whatever_func_does(layout: torch.layout, masked: bool) -> None:
    tensor = sparse(layout)
    values = memory_of(tensor, masked=True).values  # type: ignore[union-attr]
    bits = values.clone()

    def changes_its_input(s: Tensor) -> Tensor:
        result = 3 * s.to_dense(masked_grad=masked)
        memory_of(s.data, masked=True).values.mul_(2)  # type: ignore[union-attr]
        return result

    assert fastgrad.gradcheck(changes_its_input, tensor, masked=masked)
    assert torch.equal(values, bits)
    for k in range(1, 12, 3):
        calls = 0

        def raises(s: Tensor, k: int = k) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == k:
                raise KeyboardInterrupt
            return changes_its_input(s)

        with pytest.raises(KeyboardInterrupt):
            fastgrad.gradcheck(raises, tensor, masked=masked)
        assert torch.equal(values, bits)


def test_no_differentiable_output_counts_unspecified_elements_unless_masked() -> None:
    func = lambda s: s.detach().to_dense()[0, 0] * 2  # noqa: E731  ([0, 0] is not specified)
    for checker in (fastgrad.gradcheck, torch.autograd.gradcheck):
        assert verdict(checker, func, sparse(torch.sparse_coo), masked=True)
    assert not verdict(fastgrad.gradcheck, func, sparse(torch.sparse_coo))
    # torch does not make the input dense here, and misses a derivative of 2.
    assert verdict(torch.autograd.gradcheck, func, sparse(torch.sparse_coo))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_the_same_sparse_tensor_twice_is_one_input(layout: torch.layout) -> None:
    def product(s: Tensor, t: Tensor, masked: bool, factor: float = 1.0) -> Tensor:
        return s.to_dense(masked_grad=masked) * (t * factor).to_dense(masked_grad=masked)

    for masked in (False, True):
        s = sparse(layout)
        func = lambda s, t, m=masked: product(s, t, m)  # noqa: E731
        wrong = lambda s, t, m=masked: product(s, t.detach(), m)  # noqa: E731
        assert fastgrad.gradcheck(func, (s, s), masked=masked)
        assert not fastgrad.gradcheck(wrong, (s, s), masked=masked, raise_exception=False)
        # torch makes a dense copy for each position, and perturbs one of them.
        assert verdict(torch.autograd.gradcheck, func, (s, s), masked=masked) == masked


def test_sparse_inputs_without_gradients_are_passed_through() -> None:
    s = sparse(torch.sparse_coo).detach()
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(6, 2).requires_grad_()
    seen = []

    def softmax_times(s: Tensor, x: Tensor) -> Tensor:
        seen.append(s)
        return torch.sparse.softmax(s, 1).to_dense() @ x

    assert fastgrad.gradcheck(softmax_times, (s, x))
    assert all(each is s for each in seen)
    wrong = lambda s, x: softmax_times(s, x.detach()) + 0 * x.sum()  # noqa: E731
    assert not fastgrad.gradcheck(wrong, (s, x), raise_exception=False)
    # Torch specifies all elements of s for the differences.
    assert not verdict(torch.autograd.gradcheck, softmax_times, (s, x))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_values_that_depend_on_what_is_specified(layout: torch.layout) -> None:
    """Differences, and the values at x, use a copy with all elements specified."""
    func = lambda s: s.to_dense(masked_grad=False) * 3 + 1e3 * s._nnz()  # noqa: E731
    wrong = lambda s: func(s).detach() + 0 * func(s)  # noqa: E731
    for settings in (Settings(), Settings(fast_mode=True, engine="sketch")):
        report = check(func, sparse(layout), settings)
        assert report.passed
        assert not report.notes
        assert not check(wrong, sparse(layout), settings).passed


def test_a_lost_gradient_of_what_is_specified_nowhere() -> None:
    softmax = lambda s: torch.sparse.softmax(s, 1).to_dense()  # noqa: E731
    lost = lambda s: softmax(s).detach() + 0 * s.to_dense(masked_grad=False)  # noqa: E731
    for own in ({}, {"fast_mode": True, "engine": "sketch"}):
        assert not verdict(fastgrad.gradcheck, lost, empty(), **own)
    assert not verdict(torch.autograd.gradcheck, lost, empty())


class KeepsGradients(torch.autograd.Function):
    """3 s, dense; returns a sparse gradient if grad_output is undefined."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, invented: float) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(s)
        ctx.invented = invented
        return 3 * s.to_dense()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        (s,) = ctx.saved_tensors
        return s.detach() * ctx.invented if grad is None else 3 * grad.sparse_mask(s.detach()), None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_gradients_of_undefined_grad_outputs(layout: torch.layout) -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match=r"aten::eq|unsupported tensor layout"):
        torch.autograd.gradcheck(lambda s: KeepsGradients.apply(s, 0.0), sparse(layout), masked=True)
    assert fastgrad.gradcheck(lambda s: KeepsGradients.apply(s, 0.0), sparse(layout), masked=True)
    with (
        pytest.warns(UserWarning, match="Backwards compatibility"),
        pytest.raises(fastgrad.GradcheckError, match="undefined or zero"),
    ):
        fastgrad.gradcheck(lambda s: KeepsGradients.apply(s, 0.5), sparse(layout), masked=True)


def test_gradients_that_lose_their_dense_dimension_are_named() -> None:
    """The sum that autograd makes of two gradients in CSR with a dense dimension, in torch 2.13."""
    values = torch.ones(2, 3, 2, dtype=torch.float64)
    func = lambda s: ((s * 1.5).to_dense(), s.to_dense())  # noqa: E731
    for checker in (torch.autograd.gradcheck, fastgrad.gradcheck):
        s = values.to_sparse_csr(dense_dim=1).requires_grad_()
        with pytest.raises(
            GradcheckError, match="grad is sparse_csr tensor, but has incorrect dense_dim 0, expected 1"
        ):
            checker(func, s, masked=True)


@pytest.mark.filterwarnings("ignore:Input #0 requires gradient")
def test_forward_mode_takes_no_sparse_and_no_mkldnn_inputs() -> None:
    with pytest.raises(NotImplementedError, match=r"forward-mode AD for sparse inputs.*sparse_coo"):
        fastgrad.gradcheck(lambda s: s.to_dense(masked_grad=False), sparse(torch.sparse_coo), check_forward_ad=True)
    with pytest.raises(ValueError, match="MKLDNN inputs are not support for forward AD"):
        fastgrad.gradcheck(lambda v: v.to_dense(), mkldnn(), check_forward_ad=True, **LOOSE)


LOOSE = {"eps": 1e-2, "atol": 1e-2}


def mkldnn() -> Tensor:
    return torch.linspace(-1, 2, 6).reshape(2, 3).to_mkldnn().requires_grad_()


needs_mkldnn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without MKLDNN")


@needs_mkldnn
@pytest.mark.filterwarnings("ignore:Input #0 requires gradient")
def test_mkldnn() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, v: Tensor) -> Tensor:
            return v.to_dense() * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return (grad * 2.5).to_mkldnn()

    tensor = mkldnn()
    funcs = (lambda v: v.to_dense() * 2, lambda v: v.to_dense().exp(), Wrong.apply)
    for func, right in zip(funcs, (True, True, False), strict=True):
        own = verdict(fastgrad.gradcheck, func, tensor, **LOOSE)
        assert own == verdict(torch.autograd.gradcheck, func, mkldnn(), **LOOSE) == right
        assert torch.equal(tensor.detach().to_dense(), mkldnn().detach().to_dense())


@needs_mkldnn
@pytest.mark.filterwarnings("ignore:Input #0 requires gradient")
def test_a_func_that_changes_an_mkldnn_input() -> None:
    tensor = mkldnn()

    def changes(v: Tensor) -> Tensor:
        result = v.to_dense() * 2
        v.data.relu_()
        return result

    assert fastgrad.gradcheck(changes, tensor, **LOOSE)
    assert torch.equal(tensor.detach().to_dense(), mkldnn().detach().to_dense())
