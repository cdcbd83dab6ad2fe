"""Results of a check as frozen dataclasses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fastgrad.report.failure import Failure, Mode, Part, Subject
from fastgrad.report.json_form import SCHEMA, EqualByContent, plain
from fastgrad.report.settings import Settings

if TYPE_CHECKING:  # a check that passes does not need these modules
    from fastgrad.report.evidence import Cause, Evidence, Sample
    from fastgrad.report.low_precision import LowPrecision

Verdict = Literal["passed", "failed", "not converged", "undecided"]
"""The outcome of a check. It is "undecided" if no error was found but errors below a bound may be hidden, and "not
converged" if an entry differs and its numerical derivative does not converge."""


@dataclass(frozen=True)
class Plan:
    """How the Jacobians are computed; the plan does not affect the verdict.

    Attributes
    ----------
    engine
        "dense", "compressed" or "sketch".
    columns_per_pass
        Number of numerical columns that the dense engine holds at a time. Each pass repeats the VJPs.
    rows_per_block
        Number of analytical rows that the dense engine computes and compares at a time.
    record_graph
        Whether func must record gradients while it is evaluated for differences.
    reason
        Why this engine was chosen, or how the pattern was found.
    detection_limit
        Fast mode finds errors that cancel each other in a row or a column if they are at least this large, with the
        probability ``Settings.confidence``. It finds a single error if it exceeds the tolerance of its entry.
    column_groups
        Number of column groups of a compressed Jacobian. One difference gives the columns of a group.
    row_groups
        Number of row groups of a compressed Jacobian. One VJP gives the rows of a group. If there are only column
        groups, analytical columns are computed by differentiating the backward once more.
    memory
        Estimated bytes that parts of the Jacobians occupy at one time; None in fast mode, which holds only vectors.
    batch
        Number of columns that the dense engine computes in one vmapped call of func; None: every evaluation is
        one call.
    replayed
        Whether evaluations for numerical columns, or groups of them, are replays of a CUDA graph.
    rows_replayed
        Whether VJPs for the rows of the dense engine are replays of a CUDA graph.
    """

    engine: str
    columns_per_pass: int
    rows_per_block: int
    record_graph: bool
    reason: str
    detection_limit: float | None = None
    column_groups: int | None = None
    row_groups: int | None = None
    memory: int | None = None
    batch: int | None = None
    replayed: bool = False
    rows_replayed: bool = False


class Pair(NamedTuple):
    """An output and an input whose Jacobian was compared.

    The positions, part and mode are as in ``Failure``, and the numbers are as in ``Comparison``. agrees: no entry is
    wrong; entries that differ at eps agreed when they were re-measured. exhaustive: as in ``Comparison``.
    """

    # Not a dataclass: every passed check makes Pairs, and making a frozen dataclass with as many fields takes ten times
    # as long.
    output: int
    input: int
    output_position: int
    input_position: int
    part: Part
    mode: Mode
    entries: int
    mismatches: int
    agrees: bool
    largest_absolute: float
    largest_relative: float
    on_pattern: bool
    exhaustive: bool = True


@dataclass(frozen=True)
class Certificate:
    """A statement that random vectors certify, instead of comparing every entry.

    Attributes
    ----------
    claim
        A sentence without its period.
    method
        The random vectors, and the quantity with which their products were compared.
    bound
        The smallest size that is detected, apart from rounding; 0: any size. Errors within the tolerance of their entry
        do not count.
    of
        What the bound limits: errors of one entry, or differences between repeated gradients.
    """

    claim: str
    method: str
    bound: float
    of: Literal["errors", "differences"] = "errors"


@dataclass(frozen=True)
class Environment:
    """Versions, and the device on which the check ran."""

    fastgrad: str
    torch: str
    python: str
    device: str


_COMPARED_FIELDS = "failure", "settings", "n", "m", "input_names", "output_names", "pairs", "undecided"
"""The fields of a report that `==` compares."""


@dataclass(frozen=True, eq=False)
class ReportData(EqualByContent):
    """The fields of `fastgrad.Report`, which documents them; text and pages use only these."""

    failure: Failure | None
    settings: Settings
    plan: Plan | None
    n: int
    m: int
    evaluations: int
    vjps: int
    seconds: float
    jvps: int = 0
    notes: tuple[str, ...] = ()
    sample: Sample | None = None
    evidence: Evidence | None = None
    causes: tuple[Cause, ...] = ()
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    pairs: tuple[Pair, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    undecided: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    environment: Environment | None = None
    subject: Subject | None = None
    precision: LowPrecision | None = None

    @property
    def passed(self) -> bool:
        """Whether no failure was found."""
        return self.failure is None

    @property
    def verdict(self) -> Verdict:
        """The outcome; see `Verdict` for "undecided" and "not converged"."""
        if self.failure is not None:
            return "not converged" if self.failure.numerical_issue == "not converged" else "failed"
        return "passed" if self.undecided is None else "undecided"

    def to_dict(self) -> dict[str, Any]:
        """The report as numbers, strings, lists and dicts, as docs/report.md describes them.

        Complex numbers become ``{"re", "im"}``; NaN and infinities become "nan", "inf" and "-inf"; tensors
        become ``{"shape", "dtype", "values"}``; values is None for more than 4096 elements.
        """
        return {"schema": SCHEMA, "verdict": self.verdict, "passed": self.passed, **plain(self)}

    def _content(self) -> str:
        return json.dumps([plain(getattr(self, name)) for name in _COMPARED_FIELDS], allow_nan=False)
