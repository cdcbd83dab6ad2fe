"""Analytical Jacobians by forward-mode AD: products with tangents, and columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastgrad.core import native, torch_private
from fastgrad.core.memory import Result, repeats_if_memory_lacks
from fastgrad.core.phases import phase
from fastgrad.problem.coordinates import Block, restricted
from fastgrad.problem.evaluation import Evaluation, derivative_error_kept
from fastgrad.problem.validation import changed_message


def dual_arguments(
    arguments: tuple[Any, ...], inputs: Sequence[Tensor], tangents: Iterable[Tensor | None]
) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Arguments for func, in which the inputs are detached and have tangents; and the tangents that they hold."""
    duals: dict[int, Tensor] = {}
    inside: list[Tensor] = []
    for input_, tangent in zip(inputs, tangents, strict=True):
        dual = input_.detach()
        if tangent is not None:
            dual = torch_private.make_dual(dual, tangent)
            # If the input is a view, make_dual may have copied the tangent.
            within = torch_private.tangent_of(dual)
            inside.append(tangent if within is None else within)
        duals[id(input_)] = dual
    return tuple(duals.get(id(value), value) for value in arguments), inside


class _CustomCalls(TorchFunctionMode):
    """Notes whether func runs a `torch.autograd.Function`, or makes or reads dual tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of torch; notes whether it makes or reads dual tensors."""
        self.found |= func in torch_private.DUAL_TENSOR_FUNCTIONS
        return func(*args, **(kwargs or {}))

    def apply(self, cls: type, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self.found = True
        return call(*args)


class SummedJvps:
    """Runs JVPs, and adds up their tangents and their products, with unequal weights of 0.5 to 1.

    By linearity, the summed product is the JVP of the summed tangent, unless one of the products is wrong.

    Attributes
    ----------
    tangent, product
        The sums: float64, shapes (n,) and (m,).
    """

    def __init__(self, problem: ForwardMode) -> None:
        self._problem = problem
        self._count = 0
        self.tangent = torch.zeros(problem.n, dtype=torch.float64, device=problem.device)
        self.product = torch.zeros(problem.m, dtype=torch.float64, device=problem.device)

    def jvps_of(self, tangents: Tensor) -> Tensor:
        """Like `ForwardMode.jvps_of`."""
        products = self._problem.jvps_of(tangents)
        for tangent, product in zip(tangents, products, strict=True):
            self._count += 1
            weight = 1.0 - 0.5 / self._count
            self.tangent.add_(tangent, alpha=weight)
            self.product.add_(product, alpha=weight)
        return products


class ForwardMode(Evaluation):
    """Jacobian-vector products by forward-mode AD.

    Attributes
    ----------
    domains_match
        Whether all tangents of `jvps_of` so far were complex for complex outputs and real for real outputs.
    unexplained_jvps
        The sum of JVPs that no sparsity pattern explained. The Jacobian that is compared must explain it.
    """

    domains_match = True
    unexplained_jvps: SummedJvps | None = None

    @phase("analytical columns")
    @repeats_if_memory_lacks
    def tangent_columns(self, first: int, count: int) -> tuple[Tensor, bool]:
        """Columns first, ..., first + count - 1 of the Jacobian by forward-mode AD, one evaluation each.

        Returns
        -------
        tuple
            float64, shape (count, m): one row per column of the Jacobian; and whether tangents were complex
            for complex outputs and real for real ones.
        """
        columns = torch.empty(count, self.m, dtype=torch.float64, device=self.device)
        zeros = (torch.zeros_like(input_.detach()) for input_ in self._input_tensors)
        run = partial(self._evaluator.tangent_columns, first, columns, self._specs)
        changed, domains_match = self._at_duals(zeros, run)
        self.jvps += count
        if changed is not None:
            self.raise_changed(*changed, 0.0)
        return columns, domains_match

    @repeats_if_memory_lacks
    def jvp(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Tangents of `outputs` for tangents of `inputs`; None means undefined. This takes one evaluation."""
        self.jvps += 1

        def evaluate(duals: tuple[Any, ...], _: list[Tensor]) -> list[Tensor | None]:
            return [torch_private.tangent_of(output) for output in self._selected(self._evaluator.evaluate_at(duals))]

        return self._at_duals(tangents, evaluate)

    @repeats_if_memory_lacks
    def jvps_of(self, directions: Tensor, undefined: Sequence[int] = ()) -> Tensor:
        """J u for directions u (float64, shape (count, n)) by forward-mode AD: float64, shape (count, m).

        This takes one evaluation per direction. undefined: for each direction, the index of an input that gets no
        tangent; the number of inputs + the index of the only input that gets one; or -1. Empty: all inputs get one.
        """
        self._recorded = None
        self._require_forward_ad()
        torch_private.load_decompositions()
        products = torch.empty(directions.shape[0], self.m, dtype=torch.float64, device=self.device)
        run = partial(self._evaluator.jvps, directions, undefined, products, self._specs)
        with derivative_error_kept(self):
            changed, match = native.at_dual_level(run)
        self.jvps += directions.shape[0]
        self.domains_match = self.domains_match and match
        if changed is not None:
            _, output, found = changed
            raise AssertionError(changed_message(self.outputs[output], found, "evaluated again"))
        return products

    def runs_custom_jvp(self, run: Callable[[], object]) -> bool:
        """Whether func runs a `torch.autograd.Function` in forward mode, or makes or reads dual tensors itself.

        Such code need not be in the graph of the backward. If the backward has custom code, `run` is not called.
        run: evaluates a JVP.
        """
        if self.is_custom:
            return True
        calls = _CustomCalls()
        with calls, torch_private.functions_through(calls.apply):
            run()
        return calls.found

    def _at_duals(
        self, tangents: Iterable[Tensor | None], run: Callable[[tuple[Any, ...], list[Tensor]], Result]
    ) -> Result:
        """The result of `run`, a function of the results of `dual_arguments`, within a level of forward-mode AD."""
        self._recorded = None
        self._require_forward_ad()
        return native.at_dual_level(lambda: run(*dual_arguments(self._arguments, self._input_tensors, tangents)))

    @property
    def modified_tangent(self) -> Block | None:
        """The first input whose tangent a call of `jvps_of` changed."""
        number = self._evaluator.modified_tangent
        return self.inputs[number] if number >= 0 else None

    def separate_jvps(self, direction: Tensor, undefined: bool) -> Tensor:
        """The sum of the JVPs of the tangent of one input at a time, which is J u: float64, shape (2, m).

        The first row is the sum of the positive components, and the second row that of the others. undefined: whether
        the tangents of the other inputs are undefined, or zero.
        """
        sums = direction.new_zeros(2, self.m)
        for k, block in enumerate(self.inputs):
            (product,) = self.jvps_of(restricted(direction, block)[None], [len(self.inputs) + k] if undefined else [])
            positive = product > 0
            sums += torch.stack([product.masked_fill(~positive, 0.0), product.masked_fill(positive, 0.0)])
        return sums

    def jvp_coordinates(self, direction: Tensor) -> Tensor:
        """J u for one direction u, shape (n,): float64, shape (m,)."""
        return self.jvps_of(direction[None])[0]

    def _require_forward_ad(self) -> None:
        for block in self.inputs:
            layout = block.tensor.layout
            if layout is torch_private.MKLDNN:
                raise ValueError("MKLDNN inputs are not support for forward AD gradcheck.")
            if layout is not torch.strided:
                raise NotImplementedError(
                    f"torch has no forward-mode AD for sparse inputs, and {self.name_of(block)} has layout {layout}."
                )
