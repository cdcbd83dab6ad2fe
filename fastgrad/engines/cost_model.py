"""What calls, patterns and trials cost: the figures by which an engine is chosen. No verdict depends on them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CostModel:
    """Costs in seconds, evaluations of func or bytes; shares; and how much a trial must gain.

    `python -m benchmarks.bench_costs` measures those that can be measured, beside the defaults, which are of one core
    of an AMD EPYC. Where the true costs differ, an engine may be chosen that is not the fastest; nothing else changes.

    Attributes
    ----------
    vjp_seconds
        Seconds that autograd takes for a VJP, however quick backward is.
    vjp_evaluations
        Evaluations of func that take as long as a VJP, that beside.
    vectorized_rows, vectorized_seconds
        Rows of one vectorized VJP, and seconds of an evaluation times rows, at most: beyond, memory may not suffice.
    sketch_seconds, sketch_calls
        A sketch: seconds that it takes beside its calls, and the evaluations that take as long as these.
    small_sketch_seconds, small_sketch_calls
        The same where functions are plain and small, beyond what the dense engine runs in addition to rows and columns:
        about 7 evaluations and 9 VJPs, against 2 and 6.
    guess_seconds
        Seconds for guessing a pattern and computing by it, beside the calls, and something to spare.
    probe_seconds
        Seconds for probing, beside the calls.
    certificate_evaluations
        Evaluations that take as long as all certificates of a pattern.
    linear_column_evaluations, linear_start_evaluations
        Analytical columns by differentiating the backward: evaluations that take as long as one of them, and as its
        proof and graph.
    single_calls_seconds
        Seconds that columns, or rows, may take one by one before the few dense ones among them are certified instead.
    entry_bytes
        Bytes of an entry of a compressed Jacobian with its indices and what coloring needs: six numbers of 8 bytes at a
        time, and some room.
    exploring_share, likely_share
        One in so many calls of the dense engine may be spent on looking for a structure; on one that is likely, because
        most entries are ruled out.
    paying_share, large_paying_share
        What the compressed engine may cost, relative to the dense one; and where its pattern takes more memory than two
        whole Jacobians.
    trial_columns, trial_seconds
        Columns, and seconds that they take one by one, from which vmapped batches, or CUDA graphs, are tried.
    trial_backward
        The factor of trial_seconds in second order, where a batch runs backward by torch.func.
    trial_share
        One in so many columns, or rows, is tried.
    trial_gain
        How many times as fast as one by one batches or replays must be.
    """

    vjp_seconds: float = 4.3e-6
    vjp_evaluations: float = 1.5
    vectorized_rows: int = 1024
    vectorized_seconds: float = 10e-3
    sketch_seconds: float = 0.18e-3
    sketch_calls: int = 24
    small_sketch_seconds: float = 0.05e-3
    small_sketch_calls: int = 9
    guess_seconds: float = 1.5e-3
    probe_seconds: float = 15e-3
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
    trial_backward: float = 3.0
    trial_share: int = 16
    trial_gain: float = 1.25


COSTS = CostModel()
"""Those of all checks."""
