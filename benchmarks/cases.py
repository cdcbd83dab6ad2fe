"""The cases that benchmarks and parity tests share: torch's own operator samples, and large operators."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight
from torch.utils import _pytree as pytree

from fastgrad.problem.second_order import differentiable_outputs, random_grad_outputs

MAX_ENTRIES = 4_000_000
"""Samples with a larger Jacobian are listed and left out: torch slow mode holds it several times."""


@dataclass(frozen=True)
class Case:
    """One function with its differentiable inputs: func(*inputs), checkable by torch and by fastgrad.

    grad_outputs: if given, gradgradcheck checks the backward.
    """

    name: str
    func: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    nondet_tol: float = 0.0
    masked: bool = False
    grad_outputs: tuple[torch.Tensor, ...] | None = None


def entries(case: Case, second_order: bool = False) -> int:
    """Real entries of the Jacobian that a check of this case compares; 0 where func raises."""

    def coordinates(values: Any) -> int:
        return sum(value.numel() * (2 if value.is_complex() else 1) for value in values)

    try:
        m = coordinates(differentiable_outputs(case.func(*case.inputs)))
    except Exception:
        return 0
    n = coordinates(case.inputs)
    return (n + m) * n if second_order else n * m


def operators(dtype: torch.dtype, *supports: str) -> list[Any]:
    """The OpInfo entries of the installed torch with autograd for a dtype on the CPU, and with these flags set."""
    from torch.testing._internal.common_methods_invocations import op_db

    return _supporting(op_db, dtype, supports)


def custom_operators(dtype: torch.dtype, *supports: str) -> list[Any]:
    """The same for the custom Functions and operators with which torch tests custom code; most compute with NumPy."""
    from torch.testing._internal.autograd_function_db import autograd_function_db
    from torch.testing._internal.custom_op_db import custom_op_db

    return _supporting([*autograd_function_db, *custom_op_db], dtype, supports)


def _supporting(database: Sequence[Any], dtype: torch.dtype, supports: tuple[str, ...]) -> list[Any]:
    return [
        op
        for op in database
        if op.supports_autograd
        and dtype in op.supported_backward_dtypes("cpu")
        and all(getattr(op, flag) for flag in supports)
    ]


def operator_cases(
    op: Any, dtype: torch.dtype, limit: int, device: str = "cpu", *, all_tensors: bool = False
) -> Iterator[Case]:
    """Up to `limit` samples of an operator whose differentiable inputs are strided tensors.

    The function takes the tensors that require grad, or all of them, puts them back into the sample, and applies the
    operator's gradcheck wrapper and the sample's output processing, as torch's operator tests do. Samples are made on
    the CPU, and then moved: they are the same on every device.
    """
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(islice(op.sample_inputs("cpu", dtype, requires_grad=True), 4 * limit))
    found = 0
    for number, sample in enumerate(samples):
        leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
        leaves = leaves if device == "cpu" else [_on_device(leaf, device) for leaf in leaves]
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        differentiable = [i for i in tensors if leaves[i].requires_grad]
        positions = tensors if all_tensors else differentiable
        inputs = tuple(leaves[i] for i in positions)
        if not differentiable or any(value.layout is not torch.strided for value in inputs) or found == limit:
            continue
        found += 1
        name = f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}[{number}]"
        yield Case(name, _recomposed(op, leaves, sample, positions), inputs, op.gradcheck_nondet_tol)


def modules(dtype: torch.dtype) -> list[Any]:
    """The ModuleInfo entries of the installed torch that are not lazy and support a dtype."""
    from torch.testing._internal.common_modules import module_db

    return [info for info in module_db if not info.is_lazy and dtype in info.dtypes]


def module_cases(info: Any, dtype: torch.dtype, limit: int) -> Iterator[Case]:
    """Up to `limit` samples of a module of torch in training mode, with strided inputs.

    The function takes the tensors that require grad, and the parameters. It seeds the generators in each call.
    """
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = info.module_inputs_func(info, "cpu", dtype, requires_grad=True, training=True)
        samples = [sample for sample in samples if sample.forward_input is not None]
        for number, sample in enumerate(samples[:limit]):
            made, given = sample.constructor_input, (sample.forward_input.args, sample.forward_input.kwargs)
            module = info.module_cls(*made.args, **made.kwargs).to(dtype).train()
            leaves, spec = pytree.tree_flatten(given)
            positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
            inputs = (*(leaves[i] for i in positions), *module.parameters())
            if inputs and all(value.layout is torch.strided for value in inputs):
                func = partial(_called, module, leaves, spec, positions)
                yield Case(f"{info.name}[{number}]", func, inputs, info.gradcheck_nondet_tol)


def _called(
    module: torch.nn.Module, leaves: list[Any], spec: Any, positions: list[int], *inputs: Tensor
) -> tuple[Tensor, ...]:
    """The differentiable outputs of a module with some of its arguments, and its parameters, replaced."""
    values = leaves.copy()
    for position, value in zip(positions, inputs, strict=False):
        values[position] = value
    arguments, keywords = pytree.tree_unflatten(values, spec)
    names = [name for name, _ in module.named_parameters()]
    parameters = dict(zip(names, inputs[len(positions) :], strict=True))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = torch.func.functional_call(module, parameters, arguments, keywords)
    return differentiable_outputs(pytree.tree_leaves(found))


def _on_device(leaf: Any, device: str) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device(device)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().to(device).requires_grad_(leaf.requires_grad)


def _recomposed(op: Any, leaves: list[Any], sample: Any, positions: list[int]) -> Callable[..., Any]:
    # To take as little time per call as torch's tests, arguments that contain no input are made once.
    given: list[Any] = []
    replaced: list[tuple[int, Callable[[tuple[torch.Tensor, ...]], Any]]] = []
    first = 0
    for value in (sample.input, *sample.args, *sample.kwargs.values()):
        spec = pytree.tree_structure(value)
        end = first + spec.num_leaves
        taken = {position - first: index for index, position in enumerate(positions) if first <= position < end}
        if taken:
            take = itemgetter(*taken.values()) if spec.is_leaf() else partial(_filled, leaves[first:end], spec, taken)
            replaced.append((len(given), take))
        given.append(pytree.tree_unflatten(leaves[first:end], spec))
        first = end
    count, names, process = 1 + len(sample.args), list(sample.kwargs), sample.output_process_fn_grad

    def func(*inputs: torch.Tensor) -> Any:
        arguments = given.copy()
        for place, take in replaced:
            arguments[place] = take(inputs)
        keywords = dict(zip(names, arguments[count:], strict=True))
        output = op.gradcheck_wrapper(op.op, *arguments[:count], **keywords)
        return process(output) if process is not None else output

    return func


def _filled(leaves: list[Any], spec: Any, taken: dict[int, int], inputs: tuple[torch.Tensor, ...]) -> Any:
    """A list, tuple or dict of arguments, some of them inputs; taken: the input at each such leaf."""
    return pytree.tree_unflatten([inputs[taken[i]] if i in taken else leaf for i, leaf in enumerate(leaves)], spec)


Factory = Callable[[], Case]
"""Makes a case when it is wanted: importing this module allocates nothing."""


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Normal random numbers, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes)


def _on(func: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Factory:
    return lambda: Case("", func, leaves(*shapes, dtype=dtype))


def _twice(factory: Factory) -> Factory:
    def make() -> Case:
        case = factory()
        outputs = differentiable_outputs(case.func(*case.inputs))
        return replace(case, grad_outputs=random_grad_outputs(outputs, 0, False))

    return make


def _apart(func: Callable[..., Any], *shape: int) -> Factory:
    """A case with elements that are far apart, because a maximum has a kink at equal elements."""

    def make() -> Case:
        values = torch.randperm(torch.Size(shape).numel(), generator=torch.Generator().manual_seed(0))
        return Case("", func, ((values.double() / 1000).view(shape).requires_grad_(),))

    return make


def _indexed(func: Callable[..., Any], high: int, shape: tuple[int, ...], *shapes: tuple[int, ...]) -> Factory:
    """A case func(index, *inputs), with an index of the given shape and values below high."""

    def make() -> Case:
        index = torch.randint(high, shape, generator=torch.Generator().manual_seed(0))
        return Case("", lambda *inputs: func(index, *inputs), leaves(*shapes))

    return make


class Convolution(torch.autograd.Function):
    """A convolution as users write it, which cannot be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return (
            conv2d_input(x.shape, weight, grad),
            conv2d_weight(x, weight.shape, grad),
        )


def _lstm_cell(x: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
    return torch.lstm_cell(x, (h, c), *weights)


def _definite(x: Tensor) -> Tensor:
    return x @ x.mT + x.shape[-1] * torch.eye(x.shape[-1], dtype=x.dtype)


def _svd(x: Tensor) -> tuple[Tensor, ...]:
    """The SVD of a matrix whose singular values are far apart."""
    rows, columns = x.shape[-2:]
    apart = torch.diag(4.0 * torch.arange(1, columns + 1, dtype=x.dtype))
    return tuple(torch.linalg.svd(x + F.pad(apart, (0, 0, 0, rows - columns)), full_matrices=False))


def _with_loss(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.tanh()
    return y, y.pow(2).mean()


def _scatter() -> Case:
    # Each place once, because it is not defined which of several values is kept.
    index = leaves((128, 32))[0].argsort(0)[:64]
    return Case("", lambda x, y: x.scatter(0, index, y), leaves((128, 64), (64, 32)))


def _sparse_mm() -> Case:
    dense_shape = 60, 80
    values, weight = leaves((600,), (80, 20))
    places = torch.randperm(60 * 80, generator=torch.Generator().manual_seed(0))[:600].sort().values
    index = torch.stack([places // 80, places % 80])
    sparse = torch.sparse_coo_tensor(index, values.detach(), dense_shape).coalesce().requires_grad_()
    return Case("", torch.sparse.mm, (sparse, weight), masked=True)


def _grid_sample() -> Case:
    image, grid = leaves((2, 3, 16, 16), (2, 12, 12, 2))
    grid = (0.9 * grid.detach().tanh()).requires_grad_()
    return Case("", lambda x, g: F.grid_sample(x, g, align_corners=False), (image, grid))


_SECOND_ORDER: dict[str, Factory] = {
    "softmax": _on(lambda x: x.softmax(-1), (128, 16)),
    "tanh": _on(torch.tanh, (4096,)),
    "conv2d": _on(F.conv2d, (2, 4, 16, 16), (8, 4, 3, 3), (8,)),
    "repeat": _on(lambda x: x.repeat(5, 5, 5, 5), (5, 5, 5)),
}
_LARGE: dict[str, Factory] = {
    "sin, 1e4": _on(torch.sin, (10_000,)),
    "sin, 1e6": _on(torch.sin, (1_000_000,)),
    "mul, broadcast": _on(torch.mul, (64, 64), (8, 1, 64)),
    "softmax, 1024 x 64": _on(lambda x: x.softmax(-1), (1024, 64)),
    "layer_norm": _on(lambda x, w, b: F.layer_norm(x, (128,), w, b), (64, 128), (128,), (128,)),
    "conv1d": _on(F.conv1d, (4, 8, 128), (16, 8, 5), (16,)),
    "conv2d": _on(F.conv2d, (2, 4, 32, 32), (8, 4, 3, 3), (8,)),
    "conv3d": _on(F.conv3d, (1, 2, 12, 12, 12), (4, 2, 3, 3, 3), (4,)),
    "conv_transpose2d": _on(lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2), (2, 4, 16, 16), (4, 8, 3, 3), (8,)),
    "custom conv2d, once differentiable": _on(Convolution.apply, (2, 4, 24, 24), (8, 4, 3, 3)),
    "max_pool3d": _apart(lambda x: F.max_pool3d(x, 2), 2, 4, 16, 16, 16),
    "unfold": _on(lambda x: F.unfold(x, 3), (1, 4, 24, 24)),
    "linear": _on(F.linear, (64, 128), (32, 128), (32,)),
    "scaled_dot_product_attention": _on(F.scaled_dot_product_attention, *[(2, 4, 32, 16)] * 3),
    "sort": _apart(lambda x: x.sort(-1).values, 64, 64),
    "gather": _indexed(lambda i, x: x.gather(1, i), 32, (256, 16), (256, 32)),
    "index_select": _indexed(lambda i, x: x.index_select(0, i), 500, (300,), (500, 20)),
    "scatter": _scatter,
    "embedding_bag": _indexed(
        lambda i, w, s: F.embedding_bag(i, w, mode="sum", per_sample_weights=s), 500, (200, 5), (500, 16), (200, 5)
    ),
    "diag_embed, complex, 7040": _on(torch.diag_embed, (1408, 5), dtype=torch.complex128),
    "diff": _on(torch.diff, (100, 100)),
    "cumsum": _on(lambda x: x.cumsum(-1), (128, 64)),
    "LSTM cell": _on(_lstm_cell, (16, 16), (16, 24), (16, 24), (96, 16), (96, 24), (96,), (96,)),
    "cholesky, batched": _on(lambda x: torch.linalg.cholesky(_definite(x)), (128, 6, 6)),
    "solve, batched": _on(lambda x, b: torch.linalg.solve(_definite(x), b), (128, 6, 6), (128, 6, 2)),
    "svd, batched": _on(_svd, (64, 6, 4)),
    "exp, complex": _on(torch.exp, (2000,), dtype=torch.complex128),
    "matmul, complex": _on(torch.matmul, (32, 24), (24, 16), dtype=torch.complex128),
    "sparse mm": _sparse_mm,
    "grid_sample": _grid_sample,
    "interpolate": _on(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (2, 4, 16, 16)),
    "einsum": _on(lambda x, y: torch.einsum("bij,bjk->bik", x, y), (16, 12, 20), (16, 20, 10)),
    "tanh and its loss": _on(_with_loss, (4096,)),
    **{f"gradgrad of {name}": _twice(factory) for name, factory in _SECOND_ORDER.items()},
}
LARGE = tuple(_LARGE)
"""Names of the large cases."""


def large_case(name: str) -> Case:
    """One of the large cases: an operator of real size, Jacobians of 1e5 to 1e12 entries."""
    return replace(_LARGE[name](), name=name)
