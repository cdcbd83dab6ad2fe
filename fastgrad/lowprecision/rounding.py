"""Rounding of the lower dtypes: their units, and Monte Carlo arithmetic that measures what rounding does to a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastgrad.core import torch_private

LOWER = (torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex32)
"""The dtypes that are checked here."""

DOUBLE = {
    **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64),
    **dict.fromkeys((torch.complex64, torch.complex32), torch.complex128),
}
"""The dtype in which a reference computes what a function of a lower dtype computes."""

_EXACT = frozenset(
    """
    abs alias amax amin argsort as_strided as_strided_copy cat ceil clamp clamp_max clamp_min clone complex
    conj_physical constant_pad_nd copy copy_ cummax cummin detach diagonal_scatter empty_like fill_ flip floor fmax
    fmin full_like gather hardtanh index index_copy index_put index_put_ index_select isnan kthvalue masked_fill
    masked_fill_ masked_select max maximum median min minimum mode nan_to_num nanmedian neg new_empty new_full new_ones
    new_zeros ones_like reflection_pad1d relu repeat roll round scatter select_backward select_scatter sgn sign
    slice_backward slice_scatter sort stack take threshold topk trunc tril triu where zero_ zeros_like
    """.split()
) | {"_to_copy"}
"""ATen operators that select, copy or compare: their results are numbers of the dtype already."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next larger number: 2^-24, 2^-11 and 2^-8 for float32, float16 and bfloat16."""
    return torch.finfo(dtype.to_real()).eps / 2


def smallest_subnormal(dtype: torch.dtype) -> float:
    """The smallest positive number of a floating or complex dtype."""
    info = torch.finfo(dtype.to_real())
    return info.smallest_normal * info.eps


def largest_number(dtype: torch.dtype) -> float:
    """The largest finite number of a floating or complex dtype."""
    return torch.finfo(dtype.to_real()).max


def coarsest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The real dtype with the largest unit."""
    return max((dtype.to_real() for dtype in dtypes), key=unit_roundoff)


class Arithmetic(torch_private.DispatchMode):
    """Within it, every ATen operator of a finer dtype computes about as accurately as in a lower dtype.

    Forward and backward of a float64 function are perturbed alike, so what autograd saves is, too. The operators on
    tensors that are in the lower dtype already, and those that only move values, are left alone.

    Attributes
    ----------
    failures
        Operators whose results could not be perturbed, and were left as they are.
    """

    failures: set[str]

    def __init__(self, dtype: torch.dtype, seed: int | None, decomposes: bool = False) -> None:
        """With a seed, results are multiplied by 1 + u or 1 - u, by random signs; without, rounded to the dtype.

        decomposes: opaque operators (GELU, layer norm) are computed by the elementary operators that torch's
        decompositions name, each perturbed.
        """
        super().__init__()
        self._dtype = dtype
        self._unit = unit_roundoff(dtype)
        self._tiny = torch.finfo(dtype).smallest_normal
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._decompositions = torch_private.decompositions() if decomposes else {}
        self.failures = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        decomposition = self._decompositions.get(func)
        if decomposition is not None:
            try:
                with self:
                    made = decomposition(*args, **kwargs)
            except Exception:
                self.failures.add(str(func))
            else:
                if made is not NotImplemented:
                    return made
        result = func(*args, **kwargs)
        space, name = func._schema.name.split("::")
        if space != "aten" or name in _EXACT or not any(isinstance(value, (Tensor, list, tuple)) for value in args):
            return result
        try:
            return self._perturbed_results(func, result)
        except Exception:  # of an operator that is not as others: its result is exact then
            self.failures.add(name)
            return result

    def _perturbed_results(self, func: Any, result: Any) -> Any:
        if isinstance(result, Tensor):
            return self._perturbed_result(func._schema.returns[0].alias_info, result)
        if not isinstance(result, (tuple, list)):
            return result
        returns = func._schema.returns
        made = [
            self._perturbed_result(returns[min(i, len(returns) - 1)].alias_info, value)
            for i, value in enumerate(result)
        ]
        return list(made) if isinstance(result, list) else tuple(made)

    def _perturbed_result(self, alias: Any, value: Any) -> Any:
        if not self._is_finer(value) or (alias is not None and not alias.is_write):
            return value
        if alias is None:
            made = self.perturbed(value)
            return made if made.stride() == value.stride() else torch.empty_like(value).copy_(made)
        with torch_private.preserved_version(value):
            value.copy_(self.perturbed(value.clone()))
        return value

    def _is_finer(self, value: Any) -> bool:
        is_float = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        return (
            is_float
            and value.layout is torch.strided
            and value.numel() > 0
            and 2 * unit_roundoff(value.dtype) < self._unit
        )

    def perturbed(self, value: Tensor, scale: Tensor | None = None) -> Tensor:
        """A tensor with every element off by one unit, of itself or of a scale, or rounded; complex ones by parts."""
        if value.is_complex():
            parts = torch.view_as_real(value.resolve_conj().resolve_neg())
            made = self._perturbed_parts(parts, (value.abs() if scale is None else scale).unsqueeze(-1))
            return torch.view_as_complex(made.contiguous())
        return self._perturbed_parts(value, scale)

    def _perturbed_parts(self, value: Tensor, scale: Tensor | None) -> Tensor:
        if self._seed is None:
            return value.to(self._dtype).to(value.dtype)
        unit = self._unit
        signs = torch.empty_like(value).bernoulli_(0.5, generator=self._generator(value.device))
        if scale is None and self._dtype is not torch.float16:
            return signs.mul_(2 * unit).add_(1 - unit).mul_(value)
        # Below the smallest normal number the distance between numbers stays; a sign or a zero is not lost to it.
        size = value.abs()
        step = (size if scale is None else scale).clamp(min=self._tiny).mul(unit)
        step = torch.minimum(step, size) if scale is None else step
        return signs.mul_(2).sub_(1).mul_(step).add_(value)

    def _generator(self, device: torch.device) -> torch.Generator:
        """Of random signs; not one of torch's global ones."""
        found = self._generators.get(device)
        if found is None:
            found = self._generators[device] = torch.Generator(device).manual_seed(self._seed or 0)
        return found
