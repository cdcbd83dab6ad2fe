"""Both checkers on many generated programs.

`python -m tests.properties.sweep --examples 2000 --seed 0` prints how many programs ran and how many verdicts differ,
by kind, and every program with a difference that docs/differences.md does not list, or with a wrong verdict. Such a
program fails the run.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tests.properties.operators import UNFIT
from tests.properties.oracle import Comparison, compare
from tests.properties.programs import KINDS, generate


class Choices:
    """The choices that make a program: those given, then random ones or, without a generator, the simplest."""

    def __init__(self, given: Sequence[int] = (), generator: random.Random | None = None) -> None:
        self.made: list[int] = []
        self._given = given
        self._generator = generator

    def __call__(self, options: Sequence[Any]) -> Any:
        number = len(self.made)
        if number < len(self._given):
            choice = min(self._given[number], len(options) - 1)
        else:
            choice = self._generator.randrange(len(options)) if self._generator else 0
        self.made.append(choice)
        return options[choice]


def shrunk(choices: list[int], kinds: Sequence[str] | None) -> Comparison:
    """The comparison for a simpler program that gives the same two verdicts: fewer choices, then simpler choices."""
    best = compare(generate(Choices(choices), kinds))
    words = best.torchs.word, best.own.word

    def accepted(candidate: list[int]) -> bool:
        nonlocal best, choices
        pick = Choices(candidate)
        try:
            program = generate(pick, kinds)
            if program == best.program or (len(pick.made), pick.made) >= (len(choices), choices):
                return False
            comparison = compare(program)
        except UNFIT:
            return False
        if not comparison.alarm or (comparison.torchs.word, comparison.own.word) != words:
            return False
        best, choices = comparison, pick.made
        return True

    before: list[int] = []
    while choices != before:
        before = choices
        for length in (16, 4, 1):
            for i in range(len(choices) - length, -1, -length):
                accepted(choices[:i] + choices[i + length :])
        for i in range(len(choices)):
            for smaller in range(choices[i] if i < len(choices) else 0):
                if accepted([*choices[:i], smaller, *choices[i + 1 :]]):
                    break
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), help="by default, all that fastgrad has")
    parser.add_argument("--shrink", type=int, default=0, metavar="N", help="print the first N of them smaller, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    generator = random.Random(options.seed)
    found = []
    for _ in range(options.examples):
        pick = Choices(generator=generator)
        comparison = compare(generate(pick, options.kinds))
        found.append(comparison)
        if comparison.alarm:
            print(comparison, flush=True)
            if sum(each.alarm for each in found) <= options.shrink:
                print(f"smaller: {shrunk(pick.made, options.kinds)}", flush=True)
    for kind in KINDS:
        own = [each for each in found if each.program.kind == kind]
        if own:
            print(
                f"{kind}: {len(own)} programs, torch says {_counts(each.torchs.word for each in own)}, "
                f"fastgrad {_counts(each.own.word for each in own)}"
            )
    for kind in KINDS:
        layouts = Counter(each.program.inputs[0].layout for each in found if each.program.kind == kind)
        if KINDS[kind].sparse and layouts:
            print(f"{kind}, first input: {', '.join(f'{name} {count}' for name, count in layouts.most_common())}")
    print(f"differences: {_counts(each.row or 'unlisted' for each in found if each.differ)}")
    wrong = [each for each in found if each.program.error not in (None, "right")]
    print(f"{len(wrong)} programs with planted errors, fastgrad says {_counts(each.own.word for each in wrong)}")
    for name in sorted({str(each.program.error) for each in wrong}):
        print(f"  {name}: {_counts(each.own.word for each in wrong if each.program.error == name)}")
    print(
        f"{len(found)} programs, {sum(each.flaws is None for each in found)} of unknown truth, "
        f"{sum(each.alarm for each in found)} alarms"
    )
    return int(any(each.alarm for each in found))


def _counts(words: Iterable[str]) -> str:
    return ", ".join(f"{word} {count}" for word, count in Counter(words).most_common()) or "none"


if __name__ == "__main__":
    sys.exit(main())
