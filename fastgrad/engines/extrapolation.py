"""Richardson extrapolation of differences at many steps, with an error estimate.

Sources: Ridders, "Accurate computation of F'(x) and F'(x) F''(x)", Advances in Engineering Software
(1982); Richardson extrapolation.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgrad.core.tensors import without_subclass

Array = NDArray[np.float64]

ORDER = 4
"""The largest order of an estimate: besides its own step, it uses this many larger ones."""

FINEST_STEPS = 4
"""The scatter of the differences at this many smallest steps measures the noise of func."""

AGREEMENT = 4.0
"""Largest distance of a measured change from an estimate that agrees with it, in units of noise, besides the error of
the estimate. Rounding of the two values alone makes a distance of at most 1."""

TOGETHER = 1 << 11
"""Number of entries whose estimates, about 200 each, are compared at a time."""


def extrapolate(
    slopes: Tensor,
    widths: Tensor,
    rounding: Tensor,
    ratio: float,
    most_noise: Tensor | float = math.inf,
) -> tuple[Tensor, Tensor]:
    """The best estimate of each entry and its error: shape (entries,) each; NaN and infinity if there is none.

    Parameters
    ----------
    slopes, widths
        Plain differences and their divisors: shape (steps, entries), large steps first. Steps that an entry did not
        take come last and have width zero.
    ratio
        The ratio of a step to the next smaller one.
    most_noise
        The largest noise of func: shape (entries,), or one number. If func scatters more at the finest steps, these
        steps are not fine enough for func, and estimates that disagree with them do not count.
    """
    if not widths.numel():
        return torch.full_like(rounding, torch.nan), torch.full_like(rounding, torch.inf)
    # These are few numbers: NumPy takes a quarter of the time that torch's operators take.
    most = torch.as_tensor(most_noise, dtype=rounding.dtype, device=rounding.device).expand_as(rounding)
    slope, width, least, limit = (
        without_subclass(one).detach().cpu().numpy() for one in (slopes, widths, rounding, most)
    )
    found = []
    for first in range(0, rounding.numel(), TOGETHER):
        some = slice(first, first + TOGETHER)
        with np.errstate(all="ignore"):
            own = slope[:, some], width[:, some]
            found.append(_extrapolated(*own, _noise(*own, least[some], limit[some]), ratio))
    values, errors = (torch.from_numpy(np.concatenate(part)).to(rounding.device) for part in zip(*found, strict=True))
    return values, errors


def _noise(slopes: Array, widths: Array, rounding: Array, most_noise: Array) -> Array:
    """Rounding or, if larger, the scatter of func at the smallest steps, at most `most_noise`: shape (entries,).

    The scatter is how far changes are from a fitted line through zero, in units of func's values.
    """
    taken = widths != 0
    finest = taken & (taken.sum(0) - taken.cumsum(0) < FINEST_STEPS)
    width = np.where(finest, widths, 0.0)
    line = (slopes * width**2).sum(0) / (width**2).sum(0)
    scatter = np.nan_to_num(np.abs((slopes - line) * width)).max(0)
    noise: Array = np.maximum(rounding, np.minimum(scatter, most_noise))
    return noise


def _extrapolated(slopes: Array, widths: Array, noise: Array, ratio: float) -> tuple[Array, Array]:
    values = np.full_like(noise, np.nan)
    errors_of_values = np.full_like(noise, np.inf)
    taken = widths != 0
    # By step and order: shape (steps, ORDER + 1, entries). An estimate of order k also uses the k next larger steps.
    estimates = np.full((len(widths), ORDER + 1, noise.size), np.nan)
    differences = np.full_like(estimates, np.nan)
    estimates[:, 0] = slopes
    # Slopes that are zero from one step on do not scatter: any kink lies beyond these steps.
    still = np.logical_and.accumulate((slopes == 0)[::-1], 0)[::-1]
    differences[1:, 0] = np.where(still[1:], 0.0, np.abs(np.diff(slopes, axis=0)))
    for k in range(1, min(len(widths) - 1, ORDER) + 1):
        coarse, fine = estimates[k - 1 : -1, k - 1], estimates[k:, k - 1]
        estimates[k:, k] = fine + (fine - coarse) / (ratio ** (2 * k) - 1)
        differences[k:, k] = np.maximum(np.abs(estimates[k:, k] - fine), np.abs(estimates[k:, k] - coarse))
    errors = differences + (noise / widths)[:, None]
    score = np.where(taken[:, None] & np.isfinite(errors), errors, np.inf).reshape(-1, noise.size)
    # The best estimate with which all smaller steps agree; usually, this is the best estimate of all.
    open_, place = np.arange(noise.size), np.arange(len(widths))[:, None]
    while open_.size:
        best = score[:, open_].argmin(0)
        possible = np.isfinite(score[best, open_])
        open_, best = open_[possible], best[possible]
        step, order = np.divmod(best, ORDER + 1)
        estimate, error, width = estimates[step, order, open_], errors[step, order, open_], widths[:, open_]
        off = np.abs((slopes[:, open_] - estimate) * width)
        # The error of a slope does not grow at smaller steps. Therefore, its effect on values shrinks with the step.
        near = off <= AGREEMENT * noise[open_] + error * width
        agrees = (near | (place < step) | (width == 0)).all(0)
        values[open_[agrees]], errors_of_values[open_[agrees]] = estimate[agrees], error[agrees]
        score[best[~agrees], open_[~agrees]] = np.inf
        open_ = open_[~agrees]
    return values, errors_of_values
