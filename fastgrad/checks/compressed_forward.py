"""Forward mode on a sparsity pattern that is certified for func: compares its entries, and certifies their JVPs."""

from __future__ import annotations

import itertools
from functools import partial

from torch import Tensor

from fastgrad.core.errors import unless_rejected
from fastgrad.engines.compressed import Compression
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Plan
from fastgrad.report.failure import Failure
from fastgrad.report.settings import Settings
from fastgrad.verdict.comparison import Findings, PairComparison
from fastgrad.verdict.confirm import mismatch_failure
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
    for output, block in itertools.product(problem.outputs, problem.inputs):
        within = compression.entries_of(output)
        rows, columns = compression.rows[within] - output.first, compression.columns[within] - block.first
        own = (columns >= 0) & (columns < block.size)
        pair = PairComparison(output, block, settings.of(block.index), "forward")
        pair.add_entries(values[within][own], numerical[within][own], columns[own], rows[own])
        group_of = compression.column_groups_of
        failure = mismatch_failure(problem, plan, pair, "all", settings, findings, group_of)
        if failure is not None:
            return failure
    findings.certificates.append(certificate.certificate())
    return values
