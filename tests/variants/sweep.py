"""Results of check_variants for right functions: wrong derivatives of torch, or false failures.

    python -m tests.variants.sweep operators [every] [first]
    python -m tests.variants.sweep programs [count]

checks every `every`-th operator of torch's database, from `first` on, in double precision, at its first sample of 2 to
60 elements; or `count` generated programs. Some seconds each.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import torch

import fastgrad
from benchmarks.cases import Case, operator_cases, operators
from fastgrad.report.variants import VariantsReport
from tests.properties.programs import generate
from tests.properties.sweep import Choices

FEWEST, MOST = 2, 60
"""Elements of the inputs that require grad."""

RANDOM = {"bernoulli", "dropout", "rrelu", "multinomial", "normal", "uniform", "exponential", "cauchy", "geometric"}
"""Parts of the names of operators that draw numbers: they have no derivative that two calls share."""

CRASHING = {"pdist"}
"""Parts of the names of operators whose backward ends the process for an empty input."""

KINDS = ["reverse", "second order", "forward"]
"""Kinds of programs that are checked: those with strided inputs."""


def operator_samples(every: int, first: int) -> Iterator[Case]:
    for op in operators(torch.float64)[first::every]:
        if any(name in op.name for name in RANDOM | CRASHING):
            continue
        for case in operator_cases(op, torch.float64, 40, all_tensors=True):
            if FEWEST <= sum(x.numel() for x in case.inputs if x.requires_grad) <= MOST:
                yield case
                break


def programs(count: int) -> Iterator[Case]:
    generator = random.Random(0)
    made = (generate(Choices(generator=generator), KINDS) for _ in range(1000 * count))
    right = (program for program in made if program.error in (None, "right"))
    for number, program in enumerate(islice(right, count)):
        steps = " ".join(step.op for step in program.steps)
        yield Case(f"{number}: {steps}", program.make_func(), program.make_inputs())


def main() -> None:
    what, *numbers = sys.argv[1:] or ["operators"]
    counts = [int(number) for number in numbers]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases = programs(*(counts or [200])) if what == "programs" else operator_samples(*([*counts, 1, 0][:2]))
    verdicts: Counter[str] = Counter()
    count = 0
    for case in cases:
        try:
            report = fastgrad.check_variants(case.func, case.inputs, seconds=20.0, nondet_tol=case.nondet_tol)
        except (ValueError, RuntimeError) as error:  # for inputs that cannot be checked
            print(f"{case.name:40} {error}")
            continue
        if report.rows[0].verdict != "passed":
            print(f"{case.name:40} {report.rows[0].verdict} as given")
            continue
        count += 1
        verdicts.update(row.verdict for row in report.rows)
        _print(case.name, report)
    print(f"{count} functions that pass as given: {dict(verdicts)}")


def _print(name: str, report: VariantsReport) -> None:
    for row in report.rows:
        if row.verdict in ("failed", "undecided", "raised"):
            print(f"{name:40} {row.verdict:10} {row.path:40} {row.detail[:140]}", flush=True)


if __name__ == "__main__":
    main()
