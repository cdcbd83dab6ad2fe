"""Forward mode on a sparsity pattern that is certified for func: compares its entries, and certifies their JVPs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from fastgrad.core.errors import unless_rejected
from fastgrad.engines import compressed
from fastgrad.engines.compressed import Compression
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Plan
from fastgrad.report.failure import Failure
from fastgrad.report.settings import Settings
from fastgrad.verdict.comparison import Findings, PairComparison
from fastgrad.verdict.confirm import mismatch_failure
from fastgrad.verdict.tangent_certificate import TangentCertificate


@dataclass(frozen=True)
class ForwardVerdict:
    """Whether the pattern decides on forward mode; if so, the failure, or the entries: float64, shape (nnz,)."""

    is_decided: bool
    failure: Failure | None = None
    entries: Tensor | None = None


def forward_verdict(
    problem: Problem,
    settings: Settings,
    plan: Plan,
    compression: Compression,
    numerical: Tensor,
    wanted: float,
    findings: Findings,
) -> ForwardVerdict:
    """Compares the entries by JVPs of column groups with the numerical ones: float64, shape (nnz,).

    wanted: the size from which entries outside the pattern must be detected. findings: receives what was compared.
    """
    if compression.leaves_out:
        return ForwardVerdict(False)
    certified = partial(_certified_entries, problem, settings, compression, wanted)
    entries = unless_rejected(certified)  # jvp may raise for tangents that are not one-hot
    if entries is None:
        return ForwardVerdict(False)
    values, certificate = entries
    if certificate is None:
        # If the same JVPs are right when they are run again, one of them was wrong once.
        again = unless_rejected(certified)
        findings.jvp_varies |= again is not None and again[1] is not None
        return ForwardVerdict(False)
    for output, block in itertools.product(problem.outputs, problem.inputs):
        within = compression.entries_of(output)
        rows, columns = compression.rows[within] - output.first, compression.columns[within] - block.first
        own = (columns >= 0) & (columns < block.size)
        pair = PairComparison(output, block, settings.of(block.index), "forward")
        pair.add_entries(values[within][own], numerical[within][own], columns[own], rows[own])
        group_of = compression.column_groups_of
        failure = mismatch_failure(problem, plan, pair, "all", settings, findings, group_of)
        if failure is not None:
            return ForwardVerdict(True, failure)
    findings.certificates.append(certificate.certificate())
    return ForwardVerdict(True, entries=values)


def _certified_entries(
    problem: Problem, settings: Settings, compression: Compression, wanted: float
) -> tuple[Tensor, TangentCertificate | None]:
    """The entries by forward mode, and their certificate, if it holds."""
    values = compressed.tangent_entries(problem, compression)
    certificate = TangentCertificate(problem, settings, compression, values)
    return values, certificate if certificate.certify(wanted) else None
