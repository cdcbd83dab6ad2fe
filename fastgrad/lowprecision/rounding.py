"""Unit roundoffs of the lower dtypes, and Monte Carlo arithmetic, which measures the effect of rounding."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastgrad.core import torch_private
from fastgrad.problem.validation import is_differentiable

DOUBLE = {
    **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64),
    **dict.fromkeys((torch.complex64, torch.complex32), torch.complex128),
}
"""The dtype in which a reference computes what a function of a lower dtype computes."""

POOL = 1 << 20
"""Number of random factors in a pool that is drawn once: 8 MiB."""

# fmt: off
_EXACT = frozenset({
    "_to_copy", "abs", "alias", "amax", "amin", "aminmax", "argsort", "as_strided", "as_strided_copy",
    "broadcast_in_dim", "cat", "ceil", "clamp", "clamp_max", "clamp_min", "clone", "collapse_view", "complex",
    "conj_physical", "constant_pad_nd", "convert_element_type", "copy", "copy_", "cummax", "cummin", "detach",
    "diagonal_scatter", "empty_like", "fill_", "flip", "floor", "fmax", "fmin", "full_like", "gather", "hardtanh",
    "index", "index_copy", "index_put", "index_put_", "index_select", "isnan", "kthvalue", "masked_fill",
    "masked_fill_", "masked_select", "max", "max_pool2d_with_indices", "max_pool3d_with_indices", "maximum",
    "median", "min", "minimum", "mode", "nan_to_num", "nanmedian", "neg", "new_empty", "new_full", "new_ones",
    "new_zeros", "ones_like", "reflection_pad1d", "reflection_pad2d", "relu", "repeat", "roll", "round", "scatter",
    "select_backward", "select_scatter", "sgn", "sign", "slice_backward", "slice_scatter", "sort", "stack", "take",
    "threshold", "topk", "trunc", "tril", "triu", "where", "zero_", "zeros_like",
})
# fmt: on
"""Operators that select, copy or compare: the dtype represents their results exactly."""


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


class Arithmetic(torch_private.DispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which ATen operators on wider dtypes are about as accurate as in a lower dtype.

    Forward and backward of a float64 function, and the tensors that autograd saves, are perturbed in the same way.
    Operators on tensors that are already in the lower dtype, and those that only move values, are not perturbed.

    Attributes
    ----------
    failures
        Operators whose results could not be perturbed and stayed exact.
    """

    failures: set[str]

    def __init__(self, dtype: torch.dtype, seed: int | None, decomposes: bool = False) -> None:
        """With a seed, results are multiplied by 1 + u or 1 - u at random; without, they are rounded to the dtype.

        decomposes: composite operators, such as GELU and layer norm, are computed by the elementary operators of
        torch's decompositions, each of which is perturbed.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype
        self._unit = unit_roundoff(dtype)
        self._tiny = torch.finfo(dtype).smallest_normal
        self._seed = seed
        self._generator: torch.Generator | None = None  # a generator of this object, not a global one of torch
        self._places = random.Random(seed)
        self._decompositions = torch_private.decompositions() if decomposes else {}
        self.failures = set()

    @torch_private.hidden_from_dynamo
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        if space not in ("aten", "prims") or name in _EXACT or not _computes(args):
            return result
        try:
            return self._perturbed_results(func, result)
        except Exception:  # an unusual operator: its result stays exact
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
        return (
            is_differentiable(value)
            and value.layout is torch.strided
            and value.numel() > 0
            and torch_private.has_memory(value)
            and 2 * unit_roundoff(value.dtype) < self._unit
        )

    def perturbed(self, value: Tensor, scale: Tensor | None = None) -> Tensor:
        """Every element perturbed by one unit, its own or that of scale, or rounded; complex elements part by part."""
        if value.is_complex():
            parts = torch.view_as_real(value.resolve_conj().resolve_neg())
            made = self._perturbed_parts(parts, (value.abs() if scale is None else scale).unsqueeze(-1))
            return torch.view_as_complex(made.contiguous())
        return self._perturbed_parts(value, scale)

    def _perturbed_parts(self, value: Tensor, scale: Tensor | None) -> Tensor:
        if self._seed is None:
            return value.to(self._dtype).to(value.dtype)
        factors = self._factors(value)
        if scale is not None:
            return (factors - 1).mul_(scale).add_(value)
        made = factors * value
        if self._dtype is torch.float16:
            # Below the smallest normal number, the spacing of numbers is constant. Signs and zeros are kept.
            size = value.abs()
            small = size < self._tiny
            if bool(small.any()):
                step = torch.minimum(size, size.new_tensor(self._tiny * self._unit))
                made = torch.where(small, (factors - 1).div_(self._unit).mul_(step).add_(value), made)
        return made

    def _factors(self, like: Tensor) -> Tensor:
        """1 + u or 1 - u at random for each element of `like`, in its dtype and shape."""
        count = like.numel()
        if count > POOL // 2 or like.dtype is not torch.float64:
            if self._generator is None or self._generator.device != like.device:
                self._generator = torch.Generator(like.device).manual_seed(self._seed or 0)
            signs = torch.empty_like(like, memory_format=torch.contiguous_format)
            return signs.bernoulli_(0.5, generator=self._generator).mul_(2 * self._unit).add_(1 - self._unit)
        first = self._places.randrange(POOL - count + 1)
        return _pool(self._unit, like.device)[first : first + count].view(like.shape)


SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal
"""The smallest normal number of float32 and of bfloat16, 2^-126 (IEEE 754). Many kernels replace smaller results by
zero. The reciprocal of a number that overflows is smaller, too."""


class Underflow(Arithmetic):  # type: ignore[no-untyped-call]
    """A mode in which every result below `SMALLEST_NORMAL` in modulus is zero, and all others are exact.

    Composite operators are decomposed, because the small numbers are often intermediate results.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype, seed=None, decomposes=True)

    def _perturbed_parts(self, value: Tensor, scale: Tensor | None) -> Tensor:
        return torch.where(value.abs() < SMALLEST_NORMAL, 0.0 * value, value)


def _computes(args: tuple[Any, ...]) -> bool:
    """Whether an operator with these arguments computes with tensors, instead of creating or selecting elements."""
    selecting = "amax", "amin", math.inf, -math.inf
    if any(value in selecting for value in args if isinstance(value, (str, float))):
        return False
    return bool(torch_private.tensors_in(args))


@functools.lru_cache(8)
def _pool(unit: float, device: torch.device) -> Tensor:
    """`POOL` random factors, each 1 - unit or 1 + unit: float64, shape (POOL,).

    Callers take slices at random offsets, because drawing new factors takes several times as long.
    """
    signs = torch.empty(POOL, dtype=torch.float64, device=device)
    generator = torch.Generator(device).manual_seed(POOL)
    return signs.bernoulli_(0.5, generator=generator).mul_(2 * unit).add_(1 - unit)
