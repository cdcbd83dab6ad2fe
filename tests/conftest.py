"""The costs of all tests, and what is skipped on plain Python.

With FASTGRAD_NATIVE=0 the suite runs on plain Python. Tests of the compiled module are skipped by name.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NoReturn

import pytest

from tests.costs import set_costs

PLAIN = os.environ.get("FASTGRAD_NATIVE") == "0"

FILES_OF_THE_COMPILED_MODULE = ("test_native.py", "test_native_fuzz.py", "test_ops.py", "test_plain.py")

OF_THE_COMPILED_MODULE = {
    "test_vectorized_rows_are_those_of_single_vjps": "plain Python does not vectorize rows",
    "test_a_wrong_row_is_named_however_it_was_found": "plain Python does not vectorize rows",
    "test_the_fault_of_vectorizing_is_none_of_the_function": "plain Python does not vectorize rows",
    "test_a_slow_function_is_not_vectorized": "plain Python does not vectorize rows",
    "test_largest_errors_are_those_of_compare": "plain Python does not check its own arguments",
    "test_a_bad_pattern_is_refused": "plain Python does not check its own arguments",
    "test_other_tensors_are_refused": "plain Python does not check its own arguments",
    "test_memory_stays_near_the_vectors": "plain Python holds more vectors at a time",
    "test_a_memory_limit_holds_a_sparse_jacobian": "plain Python takes more memory for a pattern and its entries",
    "test_the_first_graph_has_other_gradients": "plain Python has no small check",
    "test_an_error_that_does_not_come_again_is_raised": "plain Python has no small check",
    "test_the_profiler_shows_the_phases_of_small_checks": "plain Python has no small check",
    "test_gradients_that_are_limited_on_the_way_are_no_race": "plain Python does not see hooks on nodes",
    "test_nodes_give_what_the_engine_gives": "plain Python runs all VJPs by the engine",
    "test_inputs_within_the_graph": "plain Python runs all VJPs by the engine",
    "test_a_node_that_raises_raises_in_the_engines_words": "plain Python runs all VJPs by the engine",
    "test_inputs_must_be_those_of_the_graph": "plain Python does not check its own arguments",
    "test_an_interrupt_leaves_no_level_of_forward_mode": "Python code can be interrupted as it enters the level",
}


@pytest.fixture(autouse=True)
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectorizes rows for any time of an evaluation, because the numbers of VJPs depend on it."""
    set_costs(monkeypatch, vectorized_seconds=math.inf)


class _Skipped(pytest.Module):
    """A file that is skipped without importing it, also if it is named on the command line."""

    def collect(self) -> NoReturn:
        pytest.skip("tests of the compiled module")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    is_skipped = PLAIN and module_path.name in FILES_OF_THE_COMPILED_MODULE
    return _Skipped.from_parent(parent, path=module_path) if is_skipped else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if PLAIN else ():
        reason = OF_THE_COMPILED_MODULE.get(getattr(item, "originalname", item.name))
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
