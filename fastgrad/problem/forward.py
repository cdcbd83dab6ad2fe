"""Analytical Jacobians by forward-mode AD: products with tangents, and columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastgrad.core import native, torch_private
from fastgrad.core.memory import raises_memory_error
from fastgrad.core.phases import phase
from fastgrad.problem.evaluation import Evaluation


class ForwardMode(Evaluation):
    """Jacobian-vector products."""

    @phase("analytical columns")
    def tangent_columns(self, first: int, count: int) -> tuple[Tensor, bool]:
        """Columns first, ..., first + count - 1 of the Jacobian by forward-mode AD, one evaluation each.

        Returns
        -------
        tuple
            float64, shape (count, m): one row per column of the Jacobian; and whether tangents were complex
            for complex outputs and real for real ones.
        """
        self._recorded = None
        self._require_forward_ad()
        columns = torch.empty(count, self.m, dtype=torch.float64, device=self.device)

        def evaluate() -> tuple[tuple[int, int, Any] | None, bool]:
            duals, tangents = self._duals([torch.zeros_like(block.tensor.detach()) for block in self.inputs])
            return self._evaluator.tangent_columns(first, columns, self._specs, duals, tangents)

        changed, domains_match = native.at_dual_level(evaluate)
        self.jvps += count
        if changed is not None:
            self.raise_changed(*changed, 0.0)
        return columns, domains_match

    @raises_memory_error
    def jvp(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Tangents of `outputs` for tangents of `inputs`, None being undefined; one evaluation."""
        self._recorded = None
        self._require_forward_ad()

        def evaluate() -> list[Tensor | None]:
            duals, _ = self._duals(tangents)
            results = self._selected(self._evaluator.evaluate_at(duals))
            self.jvps += 1
            return [torch_private.tangent_of(result) for result in results]

        return native.at_dual_level(evaluate)

    def jvp_coordinates(self, direction: Tensor) -> Tensor:
        """J u for a direction u (float64, shape (n,)) by forward-mode AD: float64, shape (m,); one evaluation."""
        tangents = []
        for block in self.inputs:
            tangents.append(torch.empty_like(block.tensor.detach()))
            native.ops.unflatten_(tangents[-1], direction[block.slice])
        product = torch.zeros(self.m, dtype=torch.float64, device=self.device)
        for output, tangent in zip(self.outputs, self.jvp(tangents), strict=True):
            if tangent is not None:
                within = product[output.slice]
                native.flatten_(within, tangent.to(output.tensor.dtype))
        return product

    def _require_forward_ad(self) -> None:
        for block in self.inputs:
            layout = block.tensor.layout
            if layout is torch_private.MKLDNN:
                raise ValueError("MKLDNN inputs are not support for forward AD gradcheck.")
            if layout is not torch.strided:
                raise NotImplementedError(
                    f"torch has no forward-mode AD for sparse inputs, and {self.name_of(block)} has layout {layout}: "
                    "do not pass check_forward_ad."
                )

    def _duals(self, tangents: Sequence[Tensor | None]) -> tuple[tuple[Any, ...], list[Tensor]]:
        """Arguments for func, the checked ones detached and with tangents; and the tangents inside them."""
        duals: dict[int, Tensor] = {}
        inside: list[Tensor] = []
        for block, tangent in zip(self.inputs, tangents, strict=True):
            dual = block.tensor.detach()
            if tangent is not None:
                dual = torch_private.make_dual(dual, tangent)
                # If the input is a view, make_dual may have copied the tangent.
                within = torch_private.tangent_of(dual)
                inside.append(tangent if within is None else within)
            duals[id(block.tensor)] = dual
        return tuple(duals.get(id(value), value) for value in self._arguments), inside
