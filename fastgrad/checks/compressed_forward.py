"""Forward mode on a sparsity pattern that is certified for func: compares its entries, and certifies their JVPs."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from fastgrad.core.errors import unless_rejected
from fastgrad.engines.compressed import Compression
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Plan
from fastgrad.report.failure import Failure
from fastgrad.report.settings import Settings
from fastgrad.verdict.comparison import Findings
from fastgrad.verdict.confirm import pattern_mismatch
from fastgrad.verdict.tangent_certificate import TangentCertificate


def forward_verdict(
    problem: Problem,
    settings: Settings,
    plan: Plan,
    compression: Compression,
    numerical: Tensor,
    wanted: float,
    findings: Findings,
) -> Failure | Tensor | None:
    """Compares the entries by JVPs of column groups with the numerical ones: float64, shape (nnz,).

    Returns a failure or, if there is none, the entries by JVPs. None: this pattern cannot decide on forward mode.

    wanted: the size from which entries outside the pattern must be detected. findings: receives what was compared.
    """
    if compression.leaves_out:
        return None
    made = partial(TangentCertificate, problem, settings, compression)
    certificate = unless_rejected(made)  # jvp may raise for tangents that are not one-hot
    if certificate is None or not unless_rejected(partial(certificate.certify, wanted)):
        return None
    values = certificate.values
    failure = pattern_mismatch(problem, plan, compression, values, numerical, settings, findings, "forward")
    if failure is not None:
        return failure
    findings.certificates.append(certificate.certificate())
    return values
