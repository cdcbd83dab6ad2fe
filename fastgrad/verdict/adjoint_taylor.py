"""Tests for which no step size is chosen: forward against reverse mode, and the order of a Taylor remainder."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fastgrad.core.errors import raise_unless_of_func, warn
from fastgrad.core.precision import ROUNDING
from fastgrad.core.random import dense_pair
from fastgrad.problem.arguments import as_tuple
from fastgrad.problem.caller_state import restores_caller_state
from fastgrad.problem.coordinates import Block, restricted
from fastgrad.problem.problem import Problem
from fastgrad.problem.transforms import rejects_transforms
from fastgrad.problem.validation import as_float, as_seed, is_integer, raise_without_graph
from fastgrad.report.json_form import EqualByContent

FIRST_STEP = 2.0**-6
"""The largest step of a Taylor test, relative to max(|x|, 1)."""

HALVINGS = 18
"""Number of halvings of the step. The smallest step is FIRST_STEP 2^-18 = 6e-8. If curvatures are of order 1, the
remainder at this step is only rounding error."""

SMALLEST_REMAINDERS = 3
"""Number of remainders from which the rate is computed: of those larger than rounding, those at the smallest steps."""

MIN_RATE = 1.5
"""A test passes if the rate is larger. The rate of a wrong gradient is 1, that of a right gradient is 2 or more."""


MAX_HIDDEN = 0.1
"""The largest error that rounding may hide in a test that passes, relative to the sum of the moduli of the terms of
v^T J u."""

NEGLIGIBLE_REMAINDER = 1e-5
"""If all remainders are at most this large, relative to the largest step and to the sum of the moduli of v, v^T J u has
no error that matters: the default atol of `gradcheck`."""


NOISE_SHARE = 2.0**-4
"""Remainders are noise if, at the smaller half of the steps, the largest of them is at least this share of the largest
at all steps. With a wrong or a right gradient, it would be 2^-9 or less."""


@dataclass(frozen=True, eq=False)
class AdjointTest(EqualByContent):
    """``<v, J u>`` by forward and by reverse mode, for each trial, output and input; true if they agree.

    Outputs and inputs are the differentiable ones, as in the messages of `gradcheck`.

    Attributes
    ----------
    passed
        Whether the two agree everywhere: error <= rtol.
    error
        The largest ``|<v, J u> - <J^T v, u>|``, divided by the sum of the moduli of the terms of both sums plus 1e-6
        times the sum of the moduli of the components of u and v. In double precision, 1e-6 is 64 times the square root
        of one ulp; for a coarser dtype, the number is larger.
    rtol
        The allowed error.
    output
        Number of the output with the largest error.
    input
        Number of the input with the largest error.
    forward
        ``<v, J u>`` by forward mode: float64, shape (trials, outputs, inputs).
    reverse
        ``<J^T v, u>`` by reverse mode, of the same shape.
    """

    passed: bool
    error: float
    rtol: float
    output: int
    input: int
    forward: Tensor
    reverse: Tensor

    def __bool__(self) -> bool:
        """`passed`."""
        return self.passed

    def __repr__(self) -> str:
        """One line, without the products."""
        verdict = "passed" if self.passed else f"failed for output {self.output} and input {self.input}"
        return f"<AdjointTest: {verdict}, error {self.error:.2g}, allowed {self.rtol:.2g}>"


@dataclass(frozen=True, eq=False)
class TaylorTest(EqualByContent):
    """How fast ``|f(x + h u) - f(x) - h J u|`` shrinks with h; true if the test passed.

    Attributes
    ----------
    passed
        Whether the rate is more than 1.5: it is 2 or more where J is the derivative, and 1 where it is not.
    rate
        The slope of log remainder over log step, from the remainders at the smallest steps that are larger than
        rounding. It is infinite if all remainders are rounding, for example for a linear function with a right
        gradient. It is NaN if all remainders are rounding, are not tiny, and may hide an error of 10 % of the sum of
        the moduli of the terms of v^T J u.
    steps
        h, from large to small.
    remainders
        ``|v . (f(x + h u) - f(x)) - h v^T J u|`` for one random v and u.
    derivative
        v^T J u, as autograd computes it.
    left_out
        The larger steps, at which func raised. `steps` does not contain them.
    """

    passed: bool
    rate: float
    steps: tuple[float, ...]
    remainders: tuple[float, ...]
    derivative: float
    left_out: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        """`passed`."""
        return self.passed

    def __repr__(self) -> str:
        """One line, without the remainders."""
        verdict = "passed" if self.passed else "failed"
        left_out = f", func raised at {len(self.left_out)} larger ones" if self.left_out else ""
        return f"<TaylorTest: {verdict}, rate {self.rate:.3g}, {len(self.steps)} steps{left_out}>"


@restores_caller_state
@rejects_transforms
def adjoint_test(
    func: Callable[..., Any],
    inputs: Any,
    *,
    trials: int = 3,
    rtol: float | None = None,
    masked: bool = False,
    seed: int = 0,
) -> AdjointTest:
    """Whether forward and reverse mode compute the same Jacobian: ``<v, J u> = <J^T v, u>`` for random u and v.

    The test takes no differences, so there is no step to choose, and smaller errors are found than by differences. It
    tests only whether the two modes agree. If both have the same error, `taylor_test` and `gradcheck` find it.

    Parameters
    ----------
    func
        As in `gradcheck`; it must have derivatives in both modes.
    inputs
        As in `gradcheck`: a tensor, or a tuple or list; those that require grad are differentiated.
    trials
        Number of pairs of random u and v, with components of magnitude in [0.5, 1.5). Each pair costs a JVP per input
        and a VJP per output.
    rtol
        The largest difference allowed, in units of `AdjointTest.error`; by default the square root of one ulp of the
        coarsest dtype: 1.5e-8 in double precision.
    masked
        As in `gradcheck`.
    seed
        Seed of u and v.

    Returns
    -------
    AdjointTest
        `passed`, the largest error and where it is, and both sides of the equation.

    Raises
    ------
    ValueError, RuntimeError, TypeError
        As in `gradcheck`, for inputs and outputs that cannot be checked. ValueError also if no output requires grad.
    NotImplementedError
        An input is sparse, or func has no forward mode. In the latter case, func may raise another exception instead.

    Notes
    -----
    Source: the dot-product test of Claerbout, Earth Soundings Analysis (1992).

    Examples
    --------
    >>> import torch, fastgrad
    >>> x = torch.randn(100, dtype=torch.float64, requires_grad=True)
    >>> fastgrad.adjoint_test(torch.cumsum, (x, 0)).passed
    True
    """
    if not (is_integer(trials) and trials >= 1):
        raise ValueError(f"trials must be an integer of at least 1, got {trials!r}.")
    if rtol is not None:
        rtol = as_float("rtol", rtol)
    seed = as_seed(seed)
    # No warning about lower dtypes: it is about differences, which this test does not take.
    with Problem(func, as_tuple(inputs), masked, warn_of_precision=False, who="adjoint_test") as problem:
        if not problem.has_graph:
            raise_without_graph("adjoint_test")
        return adjoint(problem, trials, rtol, seed)


@restores_caller_state
@rejects_transforms
def taylor_test(
    func: Callable[..., Any],
    inputs: Any,
    *,
    mode: Literal["reverse", "forward"] = "reverse",
    masked: bool = False,
    seed: int = 0,
) -> TaylorTest:
    """The rate at which ``|f(x + h u) - f(x) - h J u|`` shrinks as h is halved: 2 where the gradient is right.

    The test needs no tolerance and no single eps: it takes 19 steps, from ``2^-6 max(|x|, 1)`` down to
    ``2^-24 max(|x|, 1)``. One random u moves all inputs, and one random v weights all outputs. An error of a gradient
    gives a rate of 1 if it is larger than the effect of the curvature along u. If curvatures are of order 1, the test
    finds errors of 1e-5.

    Parameters
    ----------
    func, inputs, masked
        As in `gradcheck`.
    mode
        The mode of AD that computes J u.
    seed
        Seed of u and v.

    Returns
    -------
    TaylorTest
        `passed`, the rate, and the steps with their remainders.

    Raises
    ------
    ValueError, RuntimeError, TypeError
        As in `gradcheck`, for inputs and outputs that cannot be checked. ValueError also if no output requires grad.
    Exception
        An exception of func, unless only the largest steps raise, and at least three steps remain. Such steps may leave
        func's domain: they are left out, with a warning, and `TaylorTest.left_out` lists them.

    Notes
    -----
    The inputs are perturbed in place and restored bit for bit, as by `gradcheck`. The rate is below 2, even with a
    right gradient, if there is a kink next to x, or if func rounds internally to a lower precision than its dtype. It
    may also be below 2 if terms of the remainder cancel at the steps that decide, as in 6 of 672 tests of x**3 in
    float32 at random x of about 1e-6; then use other seeds.
    If rounding may hide large errors at every step, the rate is NaN, and the test fails. This is usual in float16
    and bfloat16, and if the values of func are very large compared to J u. In float32, errors below about 0.1 % of the
    sum of the moduli of the terms of v^T J u may be hidden. If values and derivatives cancel to rounding, as in the sum
    of a softmax, the rate is infinite. Errors below 1e-5 (float32: 3.5e-4) times the sum of the moduli of v may then be
    hidden.
    Source: Farrell, Ham, Funke & Rognes, Automated derivation of the adjoint of high-level transient finite
    element programs (2013).

    Examples
    --------
    >>> import torch, fastgrad
    >>> x = torch.randn(100, dtype=torch.float64, requires_grad=True)
    >>> fastgrad.taylor_test(torch.exp, (x,)).passed
    True
    """
    if mode not in ("reverse", "forward"):
        raise ValueError(f"mode must be 'reverse' or 'forward', got {mode!r}.")
    seed = as_seed(seed)
    with Problem(func, as_tuple(inputs), masked, who="taylor_test") as problem:
        if not problem.has_graph:
            raise_without_graph("taylor_test")
        return taylor(problem, mode, seed)


def adjoint(problem: Problem, trials: int, rtol: float | None, seed: int) -> AdjointTest:
    """`adjoint_test` for a problem."""
    outputs, inputs = problem.outputs, problem.inputs
    allowed = math.sqrt(2 * problem.unit_roundoff) if rtol is None else rtol
    # Derivatives of at most 1e-6 may be rounding errors of numbers of order 1: their errors do not count.
    least = ROUNDING * math.sqrt(2 * problem.unit_roundoff)
    forward, reverse, size = torch.zeros(
        3, trials, len(outputs), len(inputs), dtype=torch.float64, device="cpu"
    ).unbind()
    for trial in range(trials):
        u, v = dense_pair(problem.n, problem.m, seed, trial, problem.device)
        size[trial] = least * (_sums(v.abs(), outputs)[:, None] + _sums(u.abs(), inputs))
        for b, block in enumerate(inputs):
            terms = problem.jvp_coordinates(restricted(u, block)).mul_(v)
            forward[trial, :, b] = _sums(terms, outputs)
            size[trial, :, b] += _sums(terms.abs(), outputs)
        for o, output in enumerate(outputs):
            terms = problem.vjp(v.unsqueeze(0), only=output)[0].mul_(u)
            reverse[trial, o] = _sums(terms, inputs)
            size[trial, o] += _sums(terms.abs(), inputs)
    # If both are zero, they agree. A NaN never agrees.
    errors = torch.where(size == 0, 0.0, (forward - reverse).abs() / size)
    worst = int(errors.nan_to_num(torch.inf).argmax()) if errors.numel() else 0
    error = float(errors.reshape(-1)[worst]) if errors.numel() else 0.0
    o, b = divmod(worst % (len(outputs) * len(inputs)), len(inputs))
    return AdjointTest(error <= allowed, error, allowed, outputs[o].index, inputs[b].index, forward, reverse)


def _sums(values: Tensor, blocks: Sequence[Block]) -> Tensor:
    """The sum of the values of each block's coordinates: float64, on the CPU, shape (blocks,)."""
    return torch.stack([values[block.slice].sum() for block in blocks]).cpu()


def taylor(problem: Problem, mode: Literal["reverse", "forward"], seed: int) -> TaylorTest:
    """`taylor_test` for a problem: 20 evaluations, and one VJP or JVP."""
    u, v = dense_pair(problem.n, problem.m, seed, 0, problem.device)
    # Inputs move by h times `unit`: by h |u|, relative to max(|x|, 1).
    x = problem.coordinates().abs().clamp(min=1.0)
    unit = u * x
    ulp = 2 * problem.unit_roundoff
    if mode == "reverse":
        gradient = problem.vjp(v.unsqueeze(0))[0]
        derivative, size = float(gradient @ unit), float(gradient.abs() @ x)
    else:
        tangent = problem.jvp_coordinates(unit)
        derivative, size = float(v @ tangent), float(v.abs() @ tangent.abs())
    base = problem.evaluate(True, torch.zeros_like(unit))
    rounding = ROUNDING * ulp * (size + float(v.abs() @ base.abs()))
    changes, left_out = _changes_along(problem, unit, v, base)
    steps, remainders = list(changes), [abs(change - h * derivative) for h, change in changes.items()]
    noise = max(NEGLIGIBLE_REMAINDER, math.sqrt(ulp)) if ulp <= torch.finfo(torch.float32).eps else 0.0
    rate = _rate(steps, remainders, rounding, (size, float(v.abs().sum())), noise)
    return TaylorTest(rate > MIN_RATE, rate, tuple(steps), tuple(remainders), derivative, tuple(left_out))


def _changes_along(problem: Problem, unit: Tensor, v: Tensor, base: Tensor) -> tuple[dict[float, float], list[float]]:
    """The changes v . (f(x + h unit) - f(x)) by step h, and the steps that were left out because func raised.

    A large step may leave func's domain, but a smaller one than a step without an exception does not. Therefore, func's
    exceptions are raised there, and at the last `SMALLEST_REMAINDERS` steps.
    """
    changes: dict[float, float] = {}
    left_out: list[float] = []
    raised: Exception | None = None
    for k in range(HALVINGS + 1):
        h = FIRST_STEP * 2.0**-k
        try:
            changes[h] = float(v @ (problem.evaluate(True, unit, h) - base))
        except Exception as error:
            raise_unless_of_func(error)
            if changes or k > HALVINGS - SMALLEST_REMAINDERS:
                raise
            left_out.append(h)
            raised = error
    if raised is not None:
        warn(f"func raised at the {len(left_out)} largest of {HALVINGS + 1} steps, which are left out: {raised!r}")
    return changes, left_out


def _rate(
    steps: list[float], remainders: list[float], rounding: float, sizes: tuple[float, float], noise: float
) -> float:
    """The slope of log remainder over log step.

    NaN if fewer than two remainders are finite. Infinite if these are negligible and do not shrink with the step. If
    fewer than two of them are larger than rounding, it is infinite, or NaN if a wrong gradient would not leave larger
    remainders.

    sizes: the sums of the moduli of the terms of v^T J u, and of the components of v. noise: like
    `NEGLIGIBLE_REMAINDER`, for remainders that do not shrink.
    """
    finite = [(h, remainder) for h, remainder in zip(steps, remainders, strict=True) if math.isfinite(remainder)]
    if len(finite) < 2:
        return math.nan
    usable = [(math.log2(h), math.log2(remainder)) for h, remainder in finite if remainder > rounding][
        -SMALLEST_REMAINDERS:
    ]
    terms, weight = sizes
    largest_step, largest = finite[0][0], max(remainder for _, remainder in finite)
    at_smaller_steps = max(remainder for _, remainder in finite[len(finite) // 2 :])
    if largest <= noise * weight * largest_step and at_smaller_steps >= NOISE_SHARE * largest:
        # Values and derivatives cancel, for example those of the sum of a layer norm: only their rounding remains.
        return math.inf
    if len(usable) < 2:
        hides_errors = rounding > MAX_HIDDEN * terms * largest_step
        is_small = largest <= NEGLIGIBLE_REMAINDER * weight * largest_step
        return math.nan if hides_errors and not is_small else math.inf
    mean_h, mean_r = (sum(values) / len(usable) for values in zip(*usable, strict=True))
    covariance = math.fsum((h - mean_h) * (r - mean_r) for h, r in usable)
    return covariance / math.fsum((h - mean_h) ** 2 for h, _ in usable)
