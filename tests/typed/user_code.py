"""Code as users write it, for type checkers: they must accept right code and report wrong code. It is not run."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import assert_type

import fastgrad
from fastgrad import AdjointTest, GradcheckError, ModelReport, Report, TaylorTest, VariantsReport


def scaled(x: Tensor, scale: float = 2.0) -> Tensor:
    return scale * x.sin()


x = torch.randn(3, dtype=torch.float64, requires_grad=True)

assert_type(fastgrad.gradcheck(scaled, (x,), eps=1e-6, engine="dense", fast_mode=False), bool)
assert_type(fastgrad.gradcheck(scaled, x, precision="strict", reference="float64"), bool)
assert_type(fastgrad.gradgradcheck(scaled, [x], grad_outputs="ones", check_fwd_over_rev=True), bool)

report = fastgrad.check(scaled, {"x": x}, order=2, wrt="inputs", kwargs={"scale": 1.0}, atol={"inputs[0]": 1e-4})
assert_type(report, Report)
assert_type(report.passed, bool)
if report.failure is not None and report.failure.comparison is not None:
    assert_type(report.failure.comparison.mismatches, int)
if report.plan is not None:
    assert_type(report.plan.reason, str)

assert_type(fastgrad.numerical_jacobian(scaled, x), tuple[tuple[Tensor, ...], ...])
assert_type(fastgrad.analytical_jacobian(scaled, x, layout=torch.sparse_csr), tuple[tuple[Tensor, ...], ...])
assert_type(fastgrad.check_variants(scaled, x), VariantsReport)
assert_type(fastgrad.adjoint_test(scaled, x), AdjointTest)
assert_type(fastgrad.taylor_test(scaled, x), TaylorTest)
assert_type(fastgrad.check_model(torch.nn.Linear(3, 3), x, Tensor.sum), ModelReport)

try:
    fastgrad.gradcheck(scaled, x)
except GradcheckError as error:
    assert_type(error.report, Report)

fastgrad.gradcheck(scaled, x, engine="fast")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
fastgrad.gradcheck(scaled, x, precision="auto", atoll=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
fastgrad.check(scaled, x, order=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
fastgrad.check(scaled, x, wrt="weights")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

fastgrad.functional.jacobian(scaled, x, strategy="forward-mode", vectorize=True, sparse="auto")
fastgrad.functional.hessian(scaled, x, outer_jacobian_strategy="both")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
