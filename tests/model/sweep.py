"""100 networks with a planted mistake, and their right twins: how often the wrong operation is named first.

The exit code is 1 if fewer than 95 mistakes are named first, or if a right network fails.
"""

from __future__ import annotations

import sys
import time

import torch

from fastgrad.model.check import check_model
from fastgrad.report.model import ModelReport
from tests.planted.networks import Network, right_networks, wrong_networks


def names_culprit(network: Network, report: ModelReport) -> bool:
    """Whether the first finding is the planted mistake, in its module."""
    if not report.findings:
        return False
    first = report.findings[0]
    where = first.sites[0].module if first.sites else ""
    right_operator = not network.operator or first.operator == network.operator
    return first.kind == network.kind and right_operator and where == network.module


def checked(network: Network) -> ModelReport:
    """The report of a network."""
    model, inputs, loss = network.make()
    return check_model(model, inputs, loss)


def main() -> int:
    """Prints missed mistakes, right networks that fail, and the numbers."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    found = false = undecided = 0
    wrong, right = list(wrong_networks()), list(right_networks())
    for network in wrong:
        report = checked(network)
        if names_culprit(network, report):
            found += 1
        else:
            print(f"missed   {network.name}\n{report}\n")
    for network in right:
        report = checked(network)
        if not report.passed:
            false += 1
            print(f"accused  {network.name}\n{report}\n")
        elif report.verdict == "undecided":
            undecided += 1
            print(f"undecided {network.name}\n{report}\n")
    print(f"culprit first in {found} of {len(wrong)}")
    print(f"accused {false} of {len(right)} right networks, undecided {undecided}")
    print(f"{time.perf_counter() - start:.0f} s")
    return 0 if found >= 95 and not false else 1


if __name__ == "__main__":
    sys.exit(main())
