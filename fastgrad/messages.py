"""Numbers -> text: pure functions that turn a Report into what a person reads."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fastgrad.report import Comparison, Failure, Report, Settings

MOST_CAUSES = 3
"""Of the probable causes, how many are printed."""

_PLACES = {"region", "slice", "boundary", "last tile", "modes disagree", "both modes wrong"}
_VALUES = {"constant factor", "sign", "zero gradient", "missing conjugate", "complex factor"}

_UNDEFINED_NOTE = (
    "An undefined grad_output reaches backward as None, or as zeros where ctx.set_materialize_grads(True) is in force, "
    "and stands for zero."
)
_NONDET_NOTE = (
    "If the operator is nondeterministic by design (atomic additions, say), pass nondet_tol; otherwise look for state "
    "or uninitialized memory in backward."
)


def failure_message(report: Report) -> str:
    """The text of the GradcheckError for a report with a failure: torch's key phrases come first."""
    failure = report.failure
    if failure is None:
        raise ValueError("failure_message needs a report with a failure, and this one passed.")
    lines = [_headline(failure, report)]
    if failure.comparison is not None:
        lines += _matrices(failure.comparison) + _details(
            failure, failure.comparison, report.settings.atol, report.settings.rtol
        )
        if failure.detail and not (failure.trouble and report.causes):  # or one of these says it
            lines.append(f"  because    {failure.detail}")
    lines += _causes(report) + _positions(failure)
    lines.append(f"  engine     {engine_line(report)}")
    lines += [f"  note       {note}" for note in report.notes]
    if failure.comparison is not None:
        lines.append(f"  reproduce  {_call(report.settings)}")
    return "\n".join(lines)


def _call(settings: Settings) -> str:
    """The call that measures the same entries again, all but func and tensors."""
    second_order = settings.grad_outputs is not None
    name, forward, reverse = "gradcheck", "check_forward_ad", "check_backward_ad"
    if second_order:
        name, forward, reverse = "gradgradcheck", "check_fwd_over_rev", "check_rev_over_rev"
    keywords = {
        "given": ["grad_outputs=..."],
        "ones": ['grad_outputs="ones"'],
        "non-contiguous": ["gen_non_contig_grad_outputs=True"],
    }.get(settings.grad_outputs or "", [])
    keywords += [f"eps={settings.eps:g}", f"atol={settings.atol:g}", f"rtol={settings.rtol:g}"]
    keywords += [f"{forward}=True"] * settings.check_forward_ad
    # Without reverse mode gradgradcheck demands that its other keyword is off, too.
    keywords += [f"{reverse}=False"] * (not settings.check_backward_ad)
    keywords += ["check_undefined_grad=False"] * (second_order and not settings.check_backward_ad)
    keywords += ["fast_mode=True"] * settings.fast_mode + ["masked=True"] * settings.masked
    keywords += [f"engine={settings.engine!r}"] * (settings.engine != "auto")
    return f"fastgrad.{name}(..., {', '.join(keywords)}, seed={settings.seed})"


def engine_line(report: Report) -> str:
    """Which engine ran, and what it cost."""
    name = report.plan.engine if report.plan else "none"
    groups = ""
    if report.plan and report.plan.column_groups is not None:
        groups = f"{_count(report.plan.column_groups, 'column group')}, "
        if report.plan.row_groups is not None:
            groups += f"{_count(report.plan.row_groups, 'row group')}, "
    return (
        f"{name}: {groups}{_count(report.n, 'input coordinate')}, {_count(report.m, 'output coordinate')}, "
        f"{_count(report.evaluations, 'evaluation')}, {_count(report.vjps, 'VJP')}, "
        f"{_count(report.jvps, 'JVP') + ', ' if report.jvps else ''}{_seconds(report.seconds)}"
    )


def _headline(failure: Failure, report: Report) -> str:
    output, input_ = f"output {failure.output}", f"input {failure.input}"
    match failure.kind:
        case "mismatch":
            forward = failure.mode == "forward"
            side = "inputs" if forward else "outputs"
            part = (
                "" if failure.part == "all" else f"While considering the {failure.part} part of complex {side} only, "
            )
            mode = "computed with forward mode " if forward else ""
            return f"{part}Jacobian {mode}mismatch for {output} with respect to {input_},"
        case "nonzero numerical gradient":
            return (
                "Numerical gradient for function expected to be zero, because no output requires grad, but for "
                f"{output} with respect to {input_} it is {failure.detail}."
            )
        case "dtype":
            return f"Gradient has dtype mismatch: backward of {output} returned another dtype than its input's."
        case "size":
            return f"Analytical gradient has incorrect size for {output}."
        case "nondeterministic":
            return (
                "Backward is not reentrant, i.e., two runs with the same inputs and grad_output give different values. "
                f"The tolerance for nondeterminism was {report.settings.nondet_tol}.\n{_NONDET_NOTE}"
            )
        case "nonlinear":
            if failure.mode == "forward":
                return f"jvp is not linear in its tangent: {failure.detail}."
            return f"backward is not linear in grad_output: {failure.detail}."
        case "not multiplied by grad_output":
            return (
                f"backward not multiplied by grad_output: with a zero grad_output the gradient of {input_} is not zero."
            )
        case "incorrect gradient":
            return f"{failure.detail} for {input_}."
        case "undefined grad raises":
            return (
                "Expected backward function to handle undefined output grads, but it raised an error. "
                f"{_UNDEFINED_NOTE}"
            )
        case "undefined grad not zero":
            return (
                "Expected all input grads to be undefined or zero when all output grads are undefined or zero, but the "
                f"gradient of {input_} is not. {_UNDEFINED_NOTE}"
            )
        case "tangent dtype":
            return "Forward AD gradient has dtype mismatch: a tangent is complex for a real output, or the reverse."
        case "undefined tangent":
            return (
                f"Mismatch in tangent values for {output} when the tangent of {input_} is undefined, which stands for "
                f"zero: {failure.detail}."
            )
        case "batched raises":
            return f"While computing batched gradients, got: {failure.detail}\n\n{_batched_note(failure)}"
        case "batched differs":
            return f"For {output} and {input_}:\n\n{_batched_note(failure)}\n\n{failure.detail}"


def _batched_note(failure: Failure) -> str:
    if failure.mode == "forward":
        who, keyword, what = "gradcheck", "check_batched_forward_grad", "jvp"
        suffix = " with forward-mode AD"
    else:
        who, keyword, what, suffix = "gradcheck or gradgradcheck", "check_batched_grad", "backward", ""
    return (
        f"{who} failed while testing batched gradient computation{suffix}: the {what} under vmap, over two vectors at "
        f"once, against the {what} of each. A {what} that calls .item(), branches on values, writes in place or looks "
        f"at sizes is the usual cause. {keyword}=False leaves the test out."
    )


def _matrices(comparison: Comparison) -> list[str]:
    if comparison.analytical is None or comparison.numerical is None:
        return []
    return [f"numerical:{comparison.numerical}", f"analytical:{comparison.analytical}"]


def _details(failure: Failure, comparison: Comparison, atol: float, rtol: float) -> list[str]:
    lines = []
    worst = comparison.worst
    if worst is not None:
        entry = f"d out{failure.output}{_index(worst.output_index)} / d in{failure.input}{_index(worst.input_index)}"
        lines += [
            f"  worst      {entry}   analytical {worst.analytical:.6g}   numerical {worst.numerical:.6g}"
            f"{'' if worst.error is None else f' +- {worst.error:.0e}'}",
            f"             |difference| {worst.difference:.3g}, allowed {worst.allowed:.2g} "
            f"= atol {atol:g} + rtol {rtol:g} * |numerical|",
        ]
    lines.append(
        f"  extent     {'' if comparison.exhaustive else 'at least '}{comparison.mismatches} of {comparison.entries} "
        f"entries, largest absolute error {comparison.largest_absolute:.3g}, largest relative error "
        f"{comparison.largest_relative:.3g}"
    )
    return lines


def _causes(report: Report) -> list[str]:
    """The most probable causes; what wrong entries are is no alternative to where they are."""
    lines: list[str] = []
    for cause in report.causes[:MOST_CAUSES]:
        head = "looks like" if not lines else "or like   "
        if lines and report.causes[0].name in _PLACES and cause.name in _VALUES:
            head = "and there "
        lines.append(f"  {head} {cause.text} ({cause.measure})")
    return lines


def _positions(failure: Failure) -> list[str]:
    """Where torch's numbers, which count differentiable tensors only, are not the positions in the call."""
    places = []
    if failure.output is not None and failure.output != failure.output_position:
        places.append(f"output {failure.output} is element {failure.output_position} of func's result")
    if failure.input is not None and failure.input != failure.input_position:
        places.append(f"input {failure.input} is argument {failure.input_position} of func")
    return [f"  where      {'; '.join(places)} (tensors without gradients are not counted)"] if places else []


def _index(index: Sequence[int]) -> str:
    return f"[{', '.join(str(i) for i in index)}]" if index else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _seconds(seconds: float) -> str:
    if not math.isfinite(seconds) or seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms"
