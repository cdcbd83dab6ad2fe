"""Choosing how the Jacobians are computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastgrad.core.errors import raise_if_transient
from fastgrad.core.memory import free_bytes
from fastgrad.core.native import SmallProblem
from fastgrad.engines import cost_model, executor
from fastgrad.engines.blocks import MAX_AT_ONCE
from fastgrad.problem.arguments import as_tuple
from fastgrad.problem.first_look import FirstLook, first_look, usual_seconds
from fastgrad.problem.problem import Problem
from fastgrad.report.data import Plan
from fastgrad.report.settings import Engine, Settings
from fastgrad.structure.sparsity import few

if TYPE_CHECKING:
    from fastgrad.structure.detection import Budget

BLOCK_BYTES = 1 << 20
"""Bytes of analytical rows that are held at a time: a few blocks of this size stay in the cache."""

MIN_COLUMNS_PER_PASS = 2
"""Least number of numerical columns at a time, because the two coordinates of a complex element are compared together.
"""

MAX_PASSES = 20
"""Largest number of passes over the columns, each of which runs all VJPs again: ten times the VJPs of torch's checker,
which runs each row twice."""

DEVICE_BLOCK_BYTES = 64 << 20
"""Bytes of analytical rows that replays of a CUDA graph, or several ranks, compute at a time."""

FREE_MEMORY_SHARE = 0.5
"""The default memory limit, as a share of the free memory; the rest is for func and its graph."""

SMALL_BYTES = 64 << 20
"""Bytes that Jacobians may take without asking the system how much memory is free."""

TINY = 24
"""Largest number of evaluations and VJPs for which the dense engine costs no more than a sketch."""

TINY_OF_CUSTOM = 5
"""The same for a small check of a custom backward: there, the dense engine runs most rows and products twice."""

EXACT_CALLS = 256
"""Largest number of evaluations and VJPs for which the dense engine decides what the first step size of a sketch leaves
undecided. The other step sizes, and entries that are measured separately, would take at least that many calls."""

MAX_UNDECIDED_CALLS, MAX_UNDECIDED_CALLS_OF_CUSTOM = 200, 65
"""Largest number of evaluations and VJPs for which all entries of a small check are compared if its sums decide
nothing; and the same for a custom backward, whose rows only the complete check compares. Sums at other steps take about
30 evaluations and 35 VJPs, and each call takes several times as long as in native code."""

AFFORDABLE_ENTRIES = 4_000_000
AFFORDABLE_CALLS = 20_000
"""Largest number of entries, and of evaluations and VJPs, for which the dense engine decides what fast mode, or a few
outputs that may hide entries, leave undecided."""

PAIR_RATIO = 4000.0
"""Errors that cancel in a row or a column are found if each is at least this many times the threshold."""

SMALL_CALLS = 1000
"""Largest number of evaluations and VJPs for which the dense engine runs instead of re-measuring entries, which takes
fifty calls per entry."""

MAX_DENSE_CALLS = 400_000
"""Largest number of evaluations and VJPs for which the dense engine runs if no pattern explains the results. If it
needs more, the check is undecided. If a call of the function takes a millisecond, this many calls take some minutes."""

MIN_COLUMNS_FOR_PROBING = 32
"""Least number of columns for which probing may pay off, and for which a guess that the first look did not test is
worth one more evaluation."""

MIN_COLUMNS_FOR_FIRST_LOOK = 12
"""Least number of columns for which it pays off to test, by two evaluations, whether differences need a graph. Without
a graph, the two evaluations per column are cheaper."""

MAX_VECTORIZED_ENTRIES = 1 << 16
"""Largest number of entries that a small check compares by vectorized columns rather than detecting structure. As
measured in second order on torch's operators, this takes 0.8 times as long on average for up to 2^14 entries, 0.9 times
for up to 2^16, and 1.3 times for up to 2^17."""

SUM_BYTES = 300
"""Bytes per coordinate of inputs and outputs that a small check holds to compare random sums, measured for 300,000 and
1,000,000 coordinates: 170 to 280, with those of func."""

MIN_PROBES = 14
"""Least number of calls for probing: with fewer, blocks are halved three times at most, and no pattern is found."""


def _memory_limit(settings: Settings, needed: int, device: torch.device | None = None) -> int:
    """Bytes for the Jacobians, on a device; the free memory is read only if `needed` is large enough to matter."""
    if settings.memory_limit is not None:
        return settings.memory_limit
    if needed <= SMALL_BYTES:
        return needed
    if device is not None and device.type == "cuda":
        # Memory that torch has reserved but does not use is also free.
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(FREE_MEMORY_SHARE * (torch.cuda.mem_get_info(device)[0] + held))
    return int(FREE_MEMORY_SHARE * free_bytes())


@lru_cache(16)
def sketch_size(confidence: float) -> int:
    """Number of directions, and of cotangents, that miss two canceling errors with probability at most 1 - confidence.

    Each error is multiplied by its own random component. Both errors are missed if their components differ by less than
    threshold / error in every direction: the probability of this is at most 2 (threshold / error)^count.
    """
    return max(2, math.ceil(math.log(2 / (1 - confidence)) / math.log(PAIR_RATIO)))


def sums_fit(problem: SmallProblem, settings: Settings) -> bool:
    """Whether a small check may compare random sums: all its vectors are held at once, on the CPU."""
    size = problem.n + problem.m
    needed = SUM_BYTES * size
    on_cpu = problem.tensor_device.type == "cpu"
    return size <= MAX_AT_ONCE or (on_cpu and needed <= _memory_limit(settings, needed))


def detection_limit(settings: Settings) -> float:
    """The size, at least atol, from which errors that cancel in a row or a column are found."""
    ratio = (2 / (1 - settings.confidence)) ** (1 / sketch_size(settings.confidence))
    return settings.atol * max(1.0, float(ratio) / 4)


def sketches(problem: Problem | SmallProblem, settings: Settings) -> bool:
    """Whether to use the sketch engine: not even in fast mode if the problem is so tiny that exact checks cost less."""
    if not settings.fast_mode or settings.engine != "auto":
        return settings.engine == "sketch"
    if not isinstance(problem, SmallProblem):
        return complete_sketch_pays(problem)
    if problem.is_custom:
        return 2 * problem.n + problem.m > TINY_OF_CUSTOM
    seconds, costs = usual_seconds(problem, problem.working_seconds), cost_model.COSTS
    return dense_seconds(problem, seconds) > costs.small_sketch_seconds + costs.small_sketch_calls * seconds


def complete_sketch_pays(problem: Problem | SmallProblem) -> bool:
    """Whether the sketch of a complete check costs less than the dense engine."""
    seconds, costs = usual_seconds(problem, problem.working_seconds), cost_model.COSTS
    is_tiny = 2 * problem.n + problem.m <= TINY
    return not is_tiny and dense_seconds(problem, seconds) > costs.sketch_seconds + costs.sketch_calls * seconds


def small_pattern_pays(problem: SmallProblem, column_groups: int, rows: int) -> bool:
    """Whether a small check of a pattern with this many column groups and rows costs less than the dense engine."""
    costs = cost_model.COSTS
    if 2 * problem.n + problem.m <= costs.small_pattern_calls:
        return False
    seconds = usual_seconds(problem, problem.working_seconds)
    calls = costs.small_pattern_calls + 2 * column_groups + costs.vjp_evaluations * rows
    return dense_seconds(problem, seconds) > costs.small_pattern_seconds + calls * seconds


def compares_undecided_entries(problem: Problem | SmallProblem, settings: Settings) -> bool:
    """Whether all entries, instead of sums at other steps, are compared if the sums of a small check decide nothing.

    In forward mode, the complete check may decide by few sums where those of a small check do not, because it
    extrapolates differences. So all entries are compared only where the complete check does so without sums.
    """
    if settings.engine != "auto" or (settings.check_forward_ad and settings.check_backward_ad):
        return False
    if settings.check_forward_ad:
        return not complete_sketch_pays(problem)
    most = MAX_UNDECIDED_CALLS_OF_CUSTOM if problem.is_custom else MAX_UNDECIDED_CALLS
    return 2 * problem.n + problem.m <= most


def is_affordable(problem: Problem) -> bool:
    """Whether the dense engine may run if a sketch is undecided, or if a few outputs may hide entries."""
    return problem.n * problem.m <= AFFORDABLE_ENTRIES and 2 * problem.n + problem.m <= AFFORDABLE_CALLS


def takes_first_look(problem: Problem | SmallProblem, settings: Settings) -> bool:
    """Whether the problem is large enough for `first_look` to pay off."""
    seconds = dense_seconds(problem, usual_seconds(problem, problem.working_seconds))
    if not problem.m or (problem.n < MIN_COLUMNS_FOR_FIRST_LOOK and seconds <= cost_model.COSTS.single_calls_seconds):
        return False
    return settings.engine == "compressed" or seconds >= cost_model.COSTS.guess_seconds


def vectorized_columns_pay(problem: SmallProblem) -> bool:
    """Whether a vectorized call and its tests take less time than single calls for all numerical columns."""
    costs, seconds = cost_model.COSTS, usual_seconds(problem, problem.working_seconds)
    return (2 * problem.n - costs.vectorized_columns_calls) * seconds > costs.vectorized_columns_seconds


def vectorization_pays(problem: SmallProblem, settings: Settings) -> bool:
    """Whether vectorized columns and vectorized rows probably cost less than detecting structure."""
    if problem.n * problem.m > MAX_VECTORIZED_ENTRIES or settings.engine == "compressed":
        return False
    return problem.m <= most_vectorized_rows(problem, usual_seconds(problem, problem.working_seconds))


def tries_structure(problem: Problem, settings: Settings, look: FirstLook) -> bool:
    """Whether a compressed Jacobian may be cheaper than a dense one."""
    if not problem.has_graph:
        return False
    if any(block.tensor.layout is not torch.strided for block in problem.inputs):
        return False
    costs = cost_model.COSTS
    least = costs.guess_seconds + costs.certificate_evaluations * look.seconds
    return settings.engine == "compressed" or (
        settings.engine == "auto" and dense_seconds(problem, look.seconds) >= least
    )


def dense_seconds(problem: Problem | SmallProblem, seconds: float) -> float:
    """Seconds that the dense engine would take; seconds: the time of one evaluation."""
    costs = cost_model.COSTS
    rows = costs.vjp_evaluations * seconds + costs.vjp_seconds
    if problem.m <= most_vectorized_rows(problem, seconds):  # all rows are computed in one call
        rows = costs.vjp_evaluations * max(0.0, seconds - costs.vjp_seconds)
    return 2 * seconds * problem.n + rows * problem.m


def estimated_seconds(func: Callable[..., Any], inputs: Any, settings: Settings) -> float:
    """Seconds that a check would take: the calls of its engine, times the measured time per call.

    For an exact check, the calls are those of the dense engine; with a sparsity pattern, there may be fewer.
    """
    with Problem(func, as_tuple(inputs), settings.masked) as problem:
        if not problem.m or not problem.n:
            return problem.seconds
        look = first_look(problem, settings)
        seconds = max(look.seconds, look.measured)  # the measured time may be used, because it chooses no engine
        if sketches(problem, settings):
            return problem.seconds + cost_model.COSTS.sketch_seconds + cost_model.COSTS.sketch_calls * seconds
        return problem.seconds + dense_seconds(problem, seconds)


def dense_is_small(problem: Problem, settings: Settings, most: int = SMALL_CALLS) -> bool:
    """Whether the dense engine takes so few calls that it costs less than examining what a certificate found."""
    return settings.engine != "compressed" and 2 * problem.n + problem.m <= most


def can_be_dense(problem: Problem, settings: Settings) -> bool:
    """Whether the dense engine may decide what a pattern does not explain."""
    return dense_is_small(problem, settings, MAX_DENSE_CALLS)


def detection_budget(problem: Problem, settings: Settings, look: FirstLook) -> Budget:
    """The budget of sparsity detection: its calls, and the size of the pattern."""
    from fastgrad.structure.detection import Budget  # imported here to keep `import fastgrad` fast

    costs, calls, is_requested = cost_model.COSTS, 2 * problem.n + problem.m, settings.engine == "compressed"
    looks = calls // costs.exploring_share
    if is_requested:
        looks = max(64, looks)
    elif problem.n < MIN_COLUMNS_FOR_PROBING:
        looks = 0
    aligns = is_requested or dense_seconds(problem, look.seconds) >= costs.align_seconds
    return Budget(
        *_probes(problem, settings, look),
        _paying_entries(problem, settings, look),
        admitted_entries(settings, problem.n * problem.m),
        looks,
        aligning_calls=min(costs.usual_probes, calls // costs.likely_share) if aligns else 0,
    )


def _probes(problem: Problem, settings: Settings, look: FirstLook) -> tuple[int, int]:
    """How many calls may find a pattern: at first, and after probes have made a sparse pattern likely."""
    calls = 2 * problem.n + problem.m
    if settings.engine == "compressed":
        return max(64, calls), max(64, calls)
    if problem.n < MIN_COLUMNS_FOR_PROBING or dense_seconds(problem, look.seconds) < cost_model.COSTS.probe_seconds:
        return 0, 0
    is_likely = look.reacted is not None and not look.reacted.all()
    budget = calls // (cost_model.COSTS.likely_share if is_likely else cost_model.COSTS.exploring_share)
    if budget < MIN_PROBES:
        return 0, 0
    # Three evaluations precede the probes. Two VJPs, on a graph that is recorded again, test them afterwards.
    return budget - 6, calls // cost_model.COSTS.likely_share - 6


def _paying_entries(problem: Problem, settings: Settings, look: FirstLook) -> int:
    """Largest number of entries with which a pattern may pay off; k entries in a row or column need k groups or more.

    A pattern that takes more memory than two whole Jacobians must save many calls. If the dense engine would take long,
    a few dense rows and columns may be left out of the groups.
    """
    n, m, costs = problem.n, problem.m, cost_model.COSTS
    if settings.engine == "compressed":
        return n * m
    dense_cost = 2 * n + costs.vjp_evaluations * m
    within_two_jacobians = max(SMALL_BYTES, 2 * 8 * n * m) // costs.entry_bytes
    paying = min(within_two_jacobians, _entries_worth(n, m, costs.paying_share * dense_cost))
    paying = max(paying, _entries_worth(n, m, costs.large_paying_share * dense_cost))
    return paying + (n * few(m) + m * few(n) if takes_long(column_evaluations(settings) * n + m, look) else 0)


def _entries_worth(n: int, m: int, cost: float) -> int:
    """Number of entries, evenly spread, for which column and row groups, or column groups alone, cost this much."""
    costs = cost_model.COSTS
    left = cost - costs.certificate_evaluations
    by_rows = left / (2 / m + costs.vjp_evaluations / n)
    by_columns = (left - costs.linear_start_evaluations) * m / (2 + costs.linear_column_evaluations)
    return int(max(0.0, by_rows, by_columns))


def admitted_entries(settings: Settings, most: int) -> int:
    """Number of entries of a sparse matrix, out of `most`, for which memory suffices."""
    return _memory_limit(settings, cost_model.COSTS.entry_bytes * most) // cost_model.COSTS.entry_bytes


def replays_groups(problem: Problem, settings: Settings, look: FirstLook, count: int) -> bool:
    """Whether replays of a CUDA graph pay off for this many column groups, and there is memory for them."""
    if problem.device.type != "cuda" or 2 * count * look.measured < cost_model.COSTS.trial_seconds:
        return False
    from fastgrad.engines import cuda_graph  # imported here to keep `import fastgrad` fast

    needed = 8 * count * problem.m
    return (
        count >= cuda_graph.MIN_COLUMNS
        and needed <= _memory_limit(settings, needed, problem.device)
        and executor.obstacle(problem) is None
        and cuda_graph.obstacle(problem) is None
    )


def _columns_cost(columns: int) -> float:
    """Number of evaluations that take as long as analytical columns, which differentiate the backward once more."""
    return cost_model.COSTS.linear_column_evaluations * columns + cost_model.COSTS.linear_start_evaluations


def prefers_columns(columns: int, rows: int) -> bool:
    """Whether analytical columns cost less than rows."""
    return _columns_cost(columns) < cost_model.COSTS.vjp_evaluations * rows


def column_evaluations(settings: Settings) -> float:
    """Number of evaluations that take as long as one column: its difference and, if it is checked, its JVP."""
    return 2 + cost_model.COSTS.jvp_evaluations * settings.check_forward_ad


def takes_long(evaluations: float, look: FirstLook) -> bool:
    """Whether this many evaluations take so long that certificates by random vectors replace them."""
    return evaluations * look.seconds > cost_model.COSTS.single_calls_seconds


def pays_to_compress(problem: Problem, settings: Settings, columns: int, rows: int | None) -> bool:
    """Whether this many column groups and row groups (None: none are needed) cost less than the dense engine."""
    if settings.engine == "compressed":
        return True
    costs = cost_model.COSTS
    analytical = _columns_cost(columns) if rows is None else costs.vjp_evaluations * rows
    dense = 2 * problem.n + costs.vjp_evaluations * problem.m * settings.check_backward_ad
    if settings.check_forward_ad:
        analytical += costs.jvp_evaluations * columns
        dense += costs.jvp_evaluations * problem.n
    return 2 * columns + analytical + costs.certificate_evaluations < costs.paying_share * dense


def is_one_block(problem: Problem | SmallProblem, settings: Settings) -> bool:
    """Whether the dense engine has one block of rows, and one pass over the columns."""
    size = 8 * max(1, problem.n) * max(1, problem.m)
    return size <= BLOCK_BYTES and size <= _memory_limit(settings, size)


def most_vectorized_rows(problem: Problem | SmallProblem, seconds: float) -> int:
    """Largest number of analytical rows of one vectorized VJP, by the time of one evaluation.

    The memory that func uses inside is not known, but writing it takes time. Therefore, this also bounds the memory.
    """
    costs = cost_model.COSTS
    most = int(min(costs.vectorized_rows, costs.vectorized_seconds / max(seconds, 1e-6)))
    return most if problem.vectorizes else 0


def _fewest_columns(problem: Problem, settings: Settings) -> int:
    """Least number of columns at a time: an even number, with which all VJPs run MAX_PASSES times at most."""
    if not (problem.has_graph and settings.check_backward_ad):
        return MIN_COLUMNS_PER_PASS
    return MIN_COLUMNS_PER_PASS * max(1, math.ceil(problem.n / (MIN_COLUMNS_PER_PASS * MAX_PASSES)))


def _check_memory(problem: Problem, settings: Settings, limit: int) -> None:
    """Raises MemoryError if neither the limit nor the memory of a block of rows holds the fewest columns at a time."""
    fewest = _fewest_columns(problem, settings)
    needed = 8 * problem.m * fewest
    if fewest == MIN_COLUMNS_PER_PASS or needed <= max(limit, BLOCK_BYTES, 8 * problem.n):
        return
    given = "half of the free memory" if settings.memory_limit is None else "memory_limit"
    raise MemoryError(
        f"{given} ({limit} bytes) holds {limit // (8 * problem.m)} of {problem.n} columns of the Jacobian at a time, "
        f"and all {problem.m} VJPs would run again for each set of columns. At most {MAX_PASSES} sets may run. "
        f"This needs at least {needed} bytes."
    )


def with_less_memory(problem: Problem, plan: Plan, settings: Settings) -> Plan | None:
    """A dense plan with a quarter of the columns at a time, after `plan` ran out of memory; None if it has too few."""
    columns = max(_fewest_columns(problem, settings), plan.columns_per_pass // 4)
    if columns >= min(plan.columns_per_pass, problem.n):
        return None
    return replace(
        plan,
        columns_per_pass=columns,
        memory=8 * (columns * problem.m + min(plan.rows_per_block, problem.m) * problem.n),
        reason=f"{plan.reason}; after running out of memory: {columns} of {problem.n} columns at a time, without "
        "batches or replays",
        batch=None,
        replayed=False,
        rows_replayed=False,
    )


def make_plan(problem: Problem, settings: Settings, look: FirstLook | None) -> Plan:
    """The plan of the dense engine for a problem whose outputs are known; look: the first look, if there was one.

    A few columns and rows may be computed, to time them.

    Raises
    ------
    MemoryError
        There would be more than MAX_PASSES passes.
    """
    column_bytes = 8 * max(1, problem.m)
    limit = _memory_limit(settings, column_bytes * problem.n, problem.device)
    _check_memory(problem, settings, limit)
    batch, replayed, remarks = _column_strategy(problem, settings, look) if look is not None else (None, False, "")
    held = 0
    if batch is not None:
        from fastgrad.engines import vmapped

        held = batch * vmapped.column_bytes(problem)
    room = limit - held if settings.memory_limit is not None else limit
    columns = max(_fewest_columns(problem, settings), min(problem.n, room // column_bytes))
    rows_replayed, row_remarks = _row_strategy(problem, settings, look) if look is not None else (False, "")
    # On a device, small blocks gain nothing from a cache. Several ranks wait for each other at each block.
    is_large = rows_replayed or problem.ranks > 1
    block_bytes = max(BLOCK_BYTES, min(DEVICE_BLOCK_BYTES, limit // 8)) if is_large else BLOCK_BYTES
    rows = max(1, block_bytes // (8 * max(1, problem.n)))
    reason = _reason(settings.engine)
    if look is not None and look.obstacles:
        reason = "; ".join(look.obstacles)
    if columns < problem.n:
        remarks += f"; memory for {columns} of {problem.n} columns at a time"
    return Plan(
        "dense",
        columns,
        rows,
        True if look is None else look.record_graph,
        reason + remarks + row_remarks,
        memory=columns * column_bytes + min(rows, problem.m) * 8 * problem.n + held,
        batch=batch,
        replayed=replayed,
        rows_replayed=rows_replayed,
    )


def _reason(engine: Engine) -> str:
    """Why the dense engine runs, if nothing else was tried."""
    return "engine='dense' was requested" if engine == "dense" else "no structure makes another engine cheaper"


@lru_cache(64)
def small_plan(n: int, m: int, engine: Engine, is_vectorized: bool) -> Plan:
    """The plan that `make_plan` makes for one block of rows and one pass over the columns.

    is_vectorized: whether all columns come from one vectorized call.
    """
    columns, rows = max(MIN_COLUMNS_PER_PASS, n), max(1, BLOCK_BYTES // (8 * max(1, n)))
    memory = 8 * (columns * max(1, m) + min(rows, m) * n)
    reason = "one vectorized call gives all columns" if is_vectorized and engine == "auto" else _reason(engine)
    return Plan("dense", columns, rows, True, reason, memory=memory, batch=n if is_vectorized else None)


def _column_strategy(problem: Problem, settings: Settings, look: FirstLook) -> tuple[int | None, bool, str]:
    """The size of vmapped batches, and whether columns come from replays, if either is faster than one call at a time.

    The last result is a text about this for the reason of the plan.
    """
    costs = cost_model.COSTS
    if problem.n < costs.trial_columns or 2 * problem.n * look.measured < costs.trial_seconds:
        return None, False, ""
    reason = executor.obstacle(problem)
    if reason is not None:
        return None, False, f"; no batches or replays: {reason}"
    from fastgrad.engines import cuda_graph, vmapped  # imported here to keep `import fastgrad` fast

    eps, record_graph = settings.eps, look.record_graph
    size = vmapped.most_columns(problem, settings.memory_limit)
    block = max(problem.inputs, key=lambda block: block.size)
    single = partial(problem.difference_columns, eps=eps, record_graph=record_graph)
    batch = partial(vmapped.difference_columns, problem, size=size, eps=eps)
    replay = partial(cuda_graph.difference_columns, problem, eps=eps, record_graph=record_graph)
    ways: list[tuple[int | None, bool, str, Callable[[int, int], Tensor], int, int]] = []
    remarks = ""
    if not record_graph and size >= vmapped.MIN_COLUMNS:
        reason = vmapped.obstacle(problem, eps)
        remarks += f"; no vmapped batches: {reason}" if reason is not None else ""
        if reason is None:
            ways.append((size, False, f"vmapped batches of {size}", batch, vmapped.TRIED, size))
    if problem.device.type == "cuda":
        reason = cuda_graph.obstacle(problem)
        remarks += f"; no CUDA graph: {reason}" if reason is not None else ""
        if reason is None:
            ways.append((None, True, "replays of a CUDA graph", replay, cuda_graph.MIN_COLUMNS, problem.n))
    found: tuple[int | None, bool] = None, False
    best = costs.trial_gain * problem.ranks  # only rank 0 uses batches and replays
    for columns_a_batch, replayed, name, columns, fewest, most in ways:
        count = _sample(block.size, fewest, most)
        trial = partial(executor.speedup, problem, settings.atol, block.first, count, single, columns)
        gain, text = _gain(problem, trial, name)
        remarks += text
        if gain >= best:
            found, best = (columns_a_batch, replayed), gain
    return *found, remarks


def _row_strategy(problem: Problem, settings: Settings, look: FirstLook) -> tuple[bool, str]:
    """Whether replays of a VJP are faster than one call at a time; and a text about this for the reason of the plan."""
    costs, are_run = cost_model.COSTS, problem.has_graph and settings.check_backward_ad
    seconds = costs.vjp_evaluations * look.measured * problem.m
    if problem.device.type != "cuda" or not are_run or seconds < costs.trial_seconds:
        return False, ""
    from fastgrad.engines import cuda_graph  # imported here to keep `import fastgrad` fast

    output = max(problem.outputs, key=lambda block: block.tensor.numel())
    count = _sample(output.tensor.numel(), cuda_graph.MIN_COLUMNS, output.tensor.numel())
    if count < cuda_graph.MIN_COLUMNS or executor.obstacle(problem) or cuda_graph.obstacle(problem):
        return False, ""

    def single(first: int, count: int) -> Tensor:
        return problem.analytical_rows(output, False, first, count)[0]

    def replay(first: int, count: int) -> Tensor:
        (rows,) = cuda_graph.analytical_rows(problem, output, False, first, [count], problem.inputs)
        return rows

    trial = partial(executor.speedup, problem, settings.atol, 0, count, single, replay)
    try:
        gain, remarks = _gain(problem, trial, "replays of a VJP")
    except Exception as error:  # backward raised it: the check itself will raise it
        raise_if_transient(error, trial)
        return False, ""
    return gain >= costs.trial_gain * problem.ranks, remarks


def _gain(problem: Problem, trial: Callable[[], float], name: str) -> tuple[float, str]:
    """The speedup that a trial measures, or -inf if the trial is refused; and a text about this."""
    try:
        gain = trial()
    except executor.RejectedError as error:
        executor.note_if_repeated(problem, error, trial, f"in {name}")
        return -math.inf, f"; {name}: {error}"
    return gain, f"; {name}: {gain:.2g} times as fast as single calls"


def _sample(size: int, fewest: int, most: int) -> int:
    """Number of columns of an input, or rows of an output, for a trial."""
    return min(size, max(fewest, min(most, size // cost_model.COSTS.trial_share)))


def make_sketch_plan(settings: Settings) -> Plan:
    """The plan of fast mode: a few directions and cotangents; func records graphs, as in the caller's own calls."""
    return Plan("sketch", 0, 0, True, "fast_mode=True", detection_limit(settings))
