"""The costs of calls, patterns and trials, by which an engine is chosen.

The engines agree about errors of at least the bounds that their certificates state; docs/limits.md describes what the
compressed engine and random vectors may miss.
"""

from __future__ import annotations

from typing import NamedTuple


class CostModel(NamedTuple):
    """The constants that decide between the engines: costs of their parts, and limits for trials.

    Costs are in seconds, in bytes, or in the number of evaluations of func that take the same time.

    `python -m benchmarks.bench_costs` measures the costs that can be measured and prints them next to the defaults,
    which were measured on one core of an AMD EPYC. If the true costs differ, the chosen engine may not be the fastest,
    and dense rows or columns may be certified that could be compared in 10 seconds, or the reverse.

    Attributes
    ----------
    vjp_seconds
        Seconds that autograd takes for a VJP in addition to backward itself.
    vjp_evaluations
        Number of evaluations of func that take as long as the rest of a VJP.
    jvp_evaluations
        Number of evaluations of func that take as long as a JVP by forward mode.
    vectorized_rows, vectorized_seconds
        Upper limits for one vectorized VJP: its rows, and the seconds of an evaluation times its rows. Beyond them,
        memory may not suffice.
    vectorized_columns_seconds, vectorized_columns_calls
        Seconds that a small check takes for the numerical columns from a vectorized call in addition to the evaluations
        of its tests, and the number of these evaluations. As measured, they take as long as columns from single calls
        for acos of 64 elements, for a chain of four operators on 30 elements, and in second order for softmax of 18
        elements. An evaluation counts with its estimated time (`usual_seconds`), which is up to twice the true one.
    sketch_seconds, sketch_calls
        Seconds that a sketch takes in addition to its calls, and the evaluations that take as long as its calls.
    small_sketch_seconds, small_sketch_calls
        The same for a small check of plain functions. The calls that the dense engine makes in addition to rows and
        columns are subtracted: a small sketch makes about 6 evaluations and 7 VJPs, the dense engine 2 and 6.
    small_pattern_seconds, small_pattern_calls
        The same for a small check that computes the entries of a pattern; calls for column groups and rows are added.
        The seconds are twice those of such a check, because some guesses are refuted.
    guess_seconds
        Seconds for guessing a pattern and using it, in addition to the calls, plus a margin.
    align_seconds
        The same as guess_seconds for a pattern by aligned dimensions, which has more groups and entries.
    probe_seconds, usual_probes
        Seconds for probing, in addition to the calls, and the number of calls that it usually takes.
    certificate_evaluations
        Evaluations that take as long as all certificates of a pattern.
    linear_column_evaluations, linear_start_evaluations
        Analytical columns by differentiating the backward: evaluations that take as long as one column, and evaluations
        that take as long as recording and verifying the graph for all columns.
    single_calls_seconds
        If computing columns, or rows, one call at a time would take more seconds than this, the few dense columns, or
        rows, are certified instead. The time of a call is measured only for slow functions (`usual_seconds`).
    entry_bytes
        Bytes per entry of a compressed Jacobian, with its indices and the memory of coloring: six numbers of 8 bytes at
        a time, plus a margin.
    exploring_share, likely_share
        Sparsity detection may take one call for each exploring_share calls of the dense engine, or for each
        likely_share calls if a sparse pattern is likely, because most entries are ruled out.
    paying_share, large_paying_share
        Largest cost of the compressed engine, relative to the dense one; large_paying_share applies if its pattern
        takes more memory than two whole Jacobians.
    trial_columns, trial_seconds
        Vmapped batches and CUDA graphs are tried if there are at least this many columns, and if the evaluations take
        at least this many seconds one call at a time.
    trial_share
        A trial computes one in this many columns or rows.
    trial_gain
        Batches or replays must be this many times as fast as one call at a time.
    """

    vjp_seconds: float = 4.3e-6
    vjp_evaluations: float = 1.5
    jvp_evaluations: float = 3.0
    vectorized_rows: int = 1024
    vectorized_seconds: float = 10e-3
    vectorized_columns_seconds: float = 0.55e-3
    vectorized_columns_calls: int = 14
    sketch_seconds: float = 0.18e-3
    sketch_calls: int = 24
    small_sketch_seconds: float = 0.05e-3
    small_sketch_calls: int = 6
    small_pattern_seconds: float = 0.6e-3
    small_pattern_calls: int = 14
    guess_seconds: float = 1.5e-3
    align_seconds: float = 4.5e-3
    probe_seconds: float = 15e-3
    usual_probes: int = 160
    certificate_evaluations: int = 14
    linear_column_evaluations: float = 2.0
    linear_start_evaluations: int = 16
    single_calls_seconds: float = 10.0
    entry_bytes: int = 56
    exploring_share: int = 10
    likely_share: int = 4
    paying_share: float = 0.8
    large_paying_share: float = 1 / 8
    trial_columns: int = 64
    trial_seconds: float = 10e-3
    trial_share: int = 16
    trial_gain: float = 1.25


COSTS = CostModel()
"""The costs that all checks use."""
