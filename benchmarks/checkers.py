"""Common gradient checkers: each tool in its usual way, on one function of one vector.

Every tool has its own step, and all compare by |analytical - numerical| <= ATOL + RTOL |numerical|.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.functional import jacobian

import fastgrad

EPS, ATOL, RTOL = 1e-6, 1e-5, 1e-3


class Namespace(Protocol):
    """torch or jax.numpy: a function that is written with one of them is the same in both."""

    def __getattr__(self, name: str) -> Any: ...


Function = Callable[[Namespace, Any], Any]
"""func(xp, x), with xp the namespace that x is from."""


@dataclass(frozen=True)
class Problem:
    """A function of one vector, whose gradient is checked at x, and the information that a tool may get about it.

    func: with the backward that is checked. forward: the same values by operators of torch alone, for transforms
    that a custom Function has no rule for. jax: makes the function in jax, once; None if there is none.
    structure: makes the pattern of the Jacobian as a scipy.sparse array; None if none is known.
    """

    x: Tensor
    func: Callable[[Any], Any]
    forward: Callable[[Any], Any]
    jax: Callable[[], Callable[[Any], Any]] | None = None
    structure: Callable[[], Any] | None = None


def problem(func: Function, x: Tensor, structure: Callable[[], Any] | None = None) -> Problem:
    """A function with the gradient that torch or jax derives."""

    @cache
    def compiled() -> Callable[[Any], Any]:
        import jax

        return jax.jit(partial(func, jax.numpy))

    of_torch = partial(func, torch)
    return Problem(x.requires_grad_(), of_torch, of_torch, compiled, structure)


@dataclass
class Counts:
    """Numbers of calls of a function and of backward passes through it; a batch counts as one."""

    evaluations: int = 0
    backwards: int = 0

    def evaluated(self, func: Callable[[Any], Any], x: Tensor) -> Any:
        self.evaluations += 1
        y = func(x)
        if y.requires_grad:
            y.register_hook(self.passed)
        return y

    def passed(self, _: Any) -> None:
        self.backwards += 1


def counted(problem: Problem) -> tuple[Problem, Counts]:
    """The problem, with functions that count their calls. jax's function is not compiled, to count each call."""
    counts = Counts()

    def counting() -> Callable[[Any], Any]:
        import jax

        assert problem.jax is not None
        func = problem.jax()

        @jax.custom_vjp
        def identity(y: Any) -> Any:
            return y

        identity.defvjp(lambda y: (y, None), lambda _, grad: (counts.passed(grad) or grad,))

        def evaluated(x: Any) -> Any:
            counts.evaluations += 1
            return identity(func(x))

        return evaluated

    func, forward = (partial(counts.evaluated, of) for of in (problem.func, problem.forward))
    return replace(problem, func=func, forward=forward, jax=problem.jax and counting), counts


def real(problem: Problem) -> Problem:
    """The problem in real coordinates, for tools that support no complex numbers."""
    if not problem.x.is_complex():
        return problem

    def coordinates(func: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda v: torch.view_as_real(func(torch.view_as_complex(v.view(-1, 2)))).flatten()

    x = torch.view_as_real(problem.x.detach()).flatten().requires_grad_()
    return replace(problem, x=x, func=coordinates(problem.func), forward=coordinates(problem.forward))


def of_arrays(problem: Problem) -> Callable[[Any], Any]:
    """The function from numpy arrays to numpy arrays."""

    def func(v: Any) -> Any:
        with torch.no_grad():
            return problem.func(torch.from_numpy(np.ascontiguousarray(v))).numpy()

    return func


def assert_close(analytical: Any, numerical: Any) -> None:
    np.testing.assert_allclose(np.asarray(analytical), np.atleast_2d(numerical), rtol=RTOL, atol=ATOL)


def own(problem: Problem, **keywords: Any) -> None:
    fastgrad.gradcheck(problem.func, (problem.x,), eps=EPS, atol=ATOL, rtol=RTOL, **keywords)


def torchs(problem: Problem, **keywords: Any) -> None:
    torch.autograd.gradcheck(problem.func, (problem.x,), eps=EPS, atol=ATOL, rtol=RTOL, **keywords)


def by_hand(problem: Problem, vectorize: bool) -> None:
    """The Jacobian of torch against differences of all columns at once."""
    problem = real(problem)
    x = problem.x.detach()

    def column(direction: Tensor) -> Any:
        return (problem.forward(x + EPS * direction) - problem.forward(x - EPS * direction)) / (2 * EPS)

    numerical = torch.func.vmap(column, out_dims=1)(torch.eye(x.numel(), dtype=x.dtype))
    analytical = jacobian(problem.func, x, vectorize=vectorize)
    torch.testing.assert_close(analytical, numerical, rtol=RTOL, atol=ATOL)


def scipys(problem: Problem) -> None:
    from scipy.optimize._numdiff import approx_derivative

    problem = real(problem)
    x = problem.x.detach()
    numerical = approx_derivative(of_arrays(problem), x.numpy(), method="3-point")
    assert_close(jacobian(problem.func, x), numerical)


def scipys_sparse(problem: Problem) -> None:
    """Differences per group of columns against VJPs per group of rows, in one known pattern."""
    from scipy.optimize._numdiff import approx_derivative, group_columns

    problem = real(problem)
    assert problem.structure is not None
    structure = problem.structure()
    numerical = approx_derivative(of_arrays(problem), problem.x.detach().numpy(), method="3-point", sparsity=structure)
    groups = group_columns(structure.T)
    y = problem.func(problem.x)
    products = []
    for group in range(groups.max() + 1):
        grad_output = torch.from_numpy((groups == group).astype(np.float64))
        products.append(torch.autograd.grad(y, problem.x, grad_output, retain_graph=True)[0].numpy())
    rows, columns = structure.nonzero()
    analytical, numerical = np.stack(products)[groups[rows], columns], numerical[rows, columns]
    errors = np.abs(analytical - numerical)
    wrong = ~(errors <= ATOL + RTOL * np.abs(numerical))
    if wrong.any():
        worst = np.where(wrong, errors, 0).argmax()
        raise AssertionError(f"{wrong.sum()} differ, most at index ({rows[worst]}, {columns[worst]})")


def numdifftools_(problem: Problem) -> None:
    import numdifftools

    problem = real(problem)
    x = problem.x.detach()
    assert_close(jacobian(problem.func, x), numdifftools.Jacobian(of_arrays(problem))(x.numpy()))


def jaxs(problem: Problem) -> None:
    import jax.test_util

    assert problem.jax is not None
    x = jax.numpy.asarray(problem.x.detach().numpy())
    jax.test_util.check_grads(problem.jax(), (x,), order=1, modes=("rev",), atol=ATOL, rtol=RTOL)


@dataclass(frozen=True)
class Checker:
    """A tool: check(problem) raises if it finds the gradient wrong.

    what: what is compared with what. module: the package that it needs. needs: the fields of the problem that it
    requires. every: whether it compares every entry, and not one number or a few for all of them.
    """

    name: str
    what: str
    check: Callable[[Problem], None]
    module: str = "torch"
    needs: tuple[str, ...] = ()
    every: bool = True

    def serves(self, problem: Problem) -> bool:
        """Whether this tool can check this problem."""
        return all(getattr(problem, name) is not None for name in self.needs)


CHECKERS = (
    Checker("fastgrad exact", "all entries of both Jacobians, as their structure allows", own),
    Checker("torch slow", "all entries of both Jacobians, column by column and row by row", torchs),
    Checker(
        "by hand, loop",
        "`torch.autograd.functional.jacobian` against differences of all columns in one `torch.func.vmap`, by "
        "`torch.testing.assert_close`",
        partial(by_hand, vectorize=False),
    ),
    Checker(
        "by hand, vectorize",
        "the same with `vectorize=True`: all backward passes in one",
        partial(by_hand, vectorize=True),
    ),
    Checker(
        "scipy",
        "`approx_derivative(method='3-point')`, the private function that scipy's solvers use, against "
        "torch's `jacobian`, by `numpy.testing.assert_allclose`",
        scipys,
        "scipy",
    ),
    Checker(
        "scipy, sparsity given",
        "the same with the sparsity pattern passed, one group of columns at a time, against one VJP of torch per group "
        "of rows; entries outside the pattern are not checked",
        scipys_sparse,
        "scipy",
        ("structure",),
    ),
    Checker(
        "numdifftools",
        "`numdifftools.Jacobian`, extrapolated over many steps, against torch's `jacobian`",
        numdifftools_,
        "numdifftools",
    ),
    Checker(
        "fastgrad fast",
        "random combinations of the entries; a wrong entry is located and confirmed",
        partial(own, fast_mode=True),
        every=False,
    ),
    Checker(
        "torch fast",
        "one combination of the entries; `atol` grows with the number of entries",
        partial(torchs, fast_mode=True),
        every=False,
    ),
    Checker(
        "jax check_grads",
        "`jax.test_util.check_grads(order=1, modes=('rev',))` on the same function written in jax, compiled: one "
        "random combination of the entries",
        jaxs,
        "jax",
        ("jax",),
        every=False,
    ),
)
