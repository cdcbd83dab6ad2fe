"""Pure functions that turn a report into text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from fastgrad.core.precision import modulus
from fastgrad.report import rounding_text
from fastgrad.report.data import Certificate, Pair, ReportData
from fastgrad.report.failure import Comparison, Entry, Extent, Failure, FailureKind, RoundingFailure, Span, Subject
from fastgrad.report.number_text import count, digits_apart, seconds_text
from fastgrad.report.rounding_text import excess_texts, index_text
from fastgrad.report.settings import UNNAMED, Settings, Tolerances

if TYPE_CHECKING:
    from fastgrad.report.low_precision import LowPrecision

_UNDEFINED_NOTE = (
    "An undefined grad_output means zero. It is passed to backward as None, or as zeros with "
    "ctx.set_materialize_grads(True), the default."
)
_NONDET_NOTE = "If this is intended (for example, because of atomic additions), pass nondet_tol."

MAX_CAUSES = 3
"""Largest number of probable causes that are printed."""

BY_ROUNDING = get_args(RoundingFailure)
"""The kinds of failure of a check in a lower dtype, whose allowed differences come from measured rounding."""

HEADLINE_CONFIDENCE = 0.85
"""A cause is named in the first line if its confidence is at least this."""

MAX_PAIRS = 8
"""Largest number of pairs that a summary lists."""

MIN_EXCESS = 0.01
"""If the worst entry's error exceeds the largest error at eps by more than this share, a message adds "at eps"."""

UNIT_ROUNDOFF = 2.0**-53
"""Largest relative error of a number that is rounded to float64."""

MAX_LISTED_INDICES = 4
"""Largest number of indices along a dimension that a message lists one by one."""


def summary(report: ReportData) -> str:
    """The text of a report: the message of the error if the check failed, otherwise what was compared and certified."""
    if report.failure is not None:
        return failure_message(report)
    lines = [verdict_line(report)]
    lines += [f"  compared   {_pair_line(report, pair)}" for pair in report.pairs[:MAX_PAIRS]]
    if len(report.pairs) > MAX_PAIRS:
        rest = [pair.largest_absolute for pair in report.pairs[MAX_PAIRS:]]
        lines.append(f"             and {count(len(rest), 'more pair')}, largest absolute error {max(rest):.2g}")
    lines += [f"  certified  {certificate.claim}: {bound_text(certificate)}" for certificate in report.certificates]
    if report.precision is not None:
        lines += rounding_text.lines(report.precision)
    lines.append(f"  engine     {engine_line(report)}")
    lines.append(f"  settings   {settings_line(report)}")
    return "\n".join([*lines, *_notes(report)])


def short(report: ReportData) -> str:
    """A report on one line, in angle brackets."""
    verdict = report.verdict if report.failure is None else f"{report.verdict} ({report.failure.kind})"
    parts = [f"{report.m} x {report.n}", report.plan.engine if report.plan else "no engine"]
    parts += [count(report.evaluations, "evaluation"), count(report.vjps, "VJP")]
    if report.jvps:
        parts.append(count(report.jvps, "JVP"))
    return f"<Report: {', '.join([verdict, *parts])}>"


def undecided_text(bound: float) -> str:
    """The text for an undecided check that may hide errors up to `bound`."""
    if bound == math.inf:
        return "undecided: errors of any size may be hidden"
    return f"undecided below {bound:.2g}: errors up to this size may be hidden"


def bound_text(certificate: Certificate) -> str:
    """The size of the errors, or differences, that a certificate excludes."""
    size = f"at least {certificate.bound:.2g}" if certificate.bound else "any size"
    # An error within the tolerance of its entry is no failure, even if it is larger than the bound.
    excepted = " that exceed their tolerance" if certificate.of == "errors" and certificate.bound else ""
    return f"{certificate.of} of {size}{excepted} are detected"


def settings_line(report: ReportData) -> str:
    """The settings and versions that are needed to reproduce the numbers."""
    settings, environment = report.settings, report.environment
    numbers = f"eps {settings.eps:g}, atol {settings.atol:g}, rtol {settings.rtol:g}, seed {settings.seed}"
    if environment is None:
        return numbers
    return f"{numbers}; fastgrad {environment.fastgrad}, torch {environment.torch}, {environment.device}"


def verdict_line(report: ReportData) -> str:
    """The verdict in a sentence, for a headline."""
    name = "gradcheck" if report.settings.grad_outputs is None else "gradgradcheck"
    if report.precision is not None and report.precision.undecided:
        return f"{name} undecided: {report.precision.undecided}"
    if report.verdict == "undecided":
        size = "of any size" if report.undecided == math.inf else f"up to {report.undecided:.2g}"
        return f"{name} undecided: no error was found, but errors {size} may be hidden"
    if report.verdict == "not converged":
        return f"{name} not converged: an entry differs, and its numerical derivative does not converge"
    failure = report.failure
    if failure is not None and failure.comparison is not None:
        wrong = failure.comparison.mismatches - failure.comparison.unclear
        verb = "is" if wrong == 1 else "are"
        return f"{name} failed: {_wrong(failure.comparison)} of {jacobian_name(report, failure)} {verb} wrong"
    if failure is not None:
        return f"{name} failed: {failure.kind}"
    if report.precision is not None:
        return f"{name} passed: {rounding_text.passed(report.precision)}"
    entries = sum(pair.entries for pair in report.pairs)
    return f"{name} passed" + (f": {count(entries, 'entry')} compared" if entries else "")


def _pair_line(report: ReportData, pair: Pair) -> str:
    """What was compared for a pair of output and input, and the result."""
    excused = pair.mismatches if pair.agrees else 0
    again = "agrees only after it was" if excused == 1 else "agree only after they were"
    differing = f", {excused:,} of them {again} measured again" if excused else ""
    return (
        f"{jacobian_name(report, pair)}: {_entries(pair)}{differing}, largest absolute error "
        f"{pair.largest_absolute:.2g}, largest relative error {pair.largest_relative:.2g}"
    )


def jacobian_name(report: ReportData, found: Failure | Pair) -> str:
    """The name of a Jacobian: d out0 / d in1, with the part of a complex tensor and the mode."""
    output, input_ = names_of(report, found)
    part = "" if found.part == "all" else f"{found.part} part"
    mode = "forward mode" if found.mode == "forward" else ""
    which = ", ".join(filter(None, (part, mode)))
    return f"d {output} / d {input_}" + (f" ({which})" if which else "")


def names_of(report: ReportData, found: Failure | Pair) -> tuple[str, str]:
    """The names of an output and an input: paths or names if there are any, otherwise out0 and in1.

    In second order, an output is a gradient, and an input may be a grad_output.
    """
    subject, outputs, inputs = report.subject or Subject(), report.output_names, report.input_names
    output = _at(found.output_position, outputs or subject.results) or f"out{found.output}"
    return output, _at(found.input_position, inputs or subject.parameters) or f"in{found.input}"


def _at(position: int | None, texts: Sequence[str]) -> str:
    """The text at a position; empty if there is none."""
    return texts[position] if position is not None and position < len(texts) else ""


def extent_text(extent: Extent, names: tuple[str, str], entries: int) -> str:
    """The part of each tensor with all entries, for example "all in in1[5, :]"; empty if this is not informative."""
    if entries < 2:
        return ""  # the index of a single entry is printed already
    parts = []
    for name, spans in zip(names, (extent.output, extent.input), strict=True):
        places = [_index_of(span, entries) for span in spans]
        if any(place != ":" for place in places):
            parts.append(f"{name}[{', '.join(places)}]")
    return f"all in {' and '.join(parts)}" if parts else ""


def _index_of(span: Span, entries: int) -> str:
    """The index of a dimension in an extent; ":" if it is not informative."""
    if span.count == 1 and span.size > 1:
        return str(span.first)
    # More than two neighboring indices, or more than three with a constant step, are unlikely to result from chance.
    is_slice = span.step is not None and (span.count > 2 if span.step == 1 else span.count > 3)
    if span.count < span.size and (is_slice or (span.count <= MAX_LISTED_INDICES and 2 * span.count <= entries)):
        return places_text(span)
    return ":"


def places_text(span: Span) -> str:
    """The indices of a span as text: "all", 5, 2:7, 0:12:3, {1, 4, 7} or "within 2:9"."""
    if span.count == span.size:
        return "all"
    if span.count == 1:
        return str(span.first)
    if span.step is not None and (span.count > 2 or span.step == 1):
        return f"{span.first}:{span.last + 1}" + (f":{span.step}" if span.step > 1 else "")
    if span.places:
        return f"{{{', '.join(str(place) for place in span.places)}}}"
    return f"within {span.first}:{span.last + 1}"


def failure_message(report: ReportData) -> str:
    """The text of the GradcheckError for a report with a failure.

    The first line names the function, the failure and, if it is almost certain, the cause: the summary of a test suite
    shows only this line. The line with torch's key phrase is second, or first for kinds of failure that have no such
    line. Matrices come last.
    """
    failure = report.failure
    if failure is None:
        raise ValueError("failure_message needs a report with a failure, but this check did not fail.")
    lines = [key_phrase(report, failure)]
    if failure.kind in _HEADLINES:
        lines = [_headline(report, failure), *lines]
    if failure.comparison is not None:
        lines = [_first_line(report, failure, failure.comparison), *lines]
        lines += _details(report, failure, failure.comparison)
        states_property = failure.numerical_issue or failure.func_varies
        if failure.detail and not (states_property and report.causes):  # otherwise a cause states the detail
            lines.append(f"  because    {failure.detail}")
    elif failure.kind in BY_ROUNDING and report.precision is not None and report.precision.worst is not None:
        names = names_of(report, failure)
        lines = [_rounded_line(report, failure, report.precision), *lines]
        lines += rounding_text.details(report.precision, report.precision.worst, names, failure.detail)
    lines += _causes(report) + _positions(report, failure)
    lines.append(f"  engine     {engine_line(report)}")
    lines += _notes(report)
    if failure.comparison is not None or report.precision is not None:
        lines.append(f"  reproduce  {call(report)}")
    if failure.comparison is not None:
        lines += _matrices(failure.comparison)
    return "\n".join(lines)


def _first_line(report: ReportData, failure: Failure, comparison: Comparison) -> str:
    """The function, the wrong gradient, the number of wrong entries, and the cause if it is almost certain."""
    output, input_ = names_of(report, failure)
    subject = report.subject or Subject()
    what = "gradient of" if failure.mode == "reverse" else "forward-mode derivative with respect to"
    through = f" through {output}" if len(subject.outputs) > 1 else ""
    tensor = _at(failure.input_position, subject.inputs)
    side = "inputs" if failure.mode == "forward" else "outputs"
    part = "" if failure.part == "all" else f"{failure.part} part of {side}"
    details = ", ".join(filter(None, (tensor, part)))
    kind = f" ({details})" if details else ""
    verdict = f"is wrong in {_wrong(comparison)} of the Jacobian"
    if failure.numerical_issue == "not converged" or failure.func_varies:
        noun = "gradient" if failure.mode == "reverse" else "derivative"
        what = "numerical gradient of" if failure.mode == "reverse" else "numerical derivative with respect to"
        verdict = "varies from call to call" if failure.func_varies else "does not converge"
        verdict += f"; it differs from the analytical {noun} in {_extent(comparison)} of the Jacobian"
    return _with_cause(report, f"{_function(report)}: {what} {input_}{kind}{through} {verdict}")


def _with_cause(report: ReportData, line: str) -> str:
    """A first line, with the most probable cause if it is almost certain."""
    cause = _sure_cause(report)
    return f"{line}; probable cause: {cause}" if cause else line


def _sure_cause(report: ReportData) -> str:
    """The most probable cause if it is almost certain; otherwise empty."""
    is_sure = bool(report.causes) and report.causes[0].confidence >= HEADLINE_CONFIDENCE
    return report.causes[0].text if is_sure else ""


_HEADLINES: dict[FailureKind, str] = {
    "nonzero numerical gradient": "{output} does not require grad, but depends on {input}",
    "dtype": "the dtype of a gradient differs from that of its input",
    "size": "the size of a gradient differs from that of its input",
    "nondeterministic": "two runs of {the}{derivative} with the same {vector} differ",
    "nondeterministic func": "{varying} gives different values for the same inputs",
    "nonlinear": "{the}{derivative} is not linear",
    "raises": "{the}{derivative} raises for some {vector}s, but not for all",
    "not multiplied by grad_output": "the gradient of {input} is not zero for a zero grad_output",
    "incorrect gradient": "gradient of {input}: {detail}",
    "undefined grad raises": "backward raises for an undefined grad_output",
    "undefined grad not zero": "the gradient of {input} is not zero for an undefined grad_output",
    "tangent dtype": "the jvp returns a complex tangent for a real output, or a real tangent for a complex output",
    "modified grad_output": "backward modifies the grad_output of {output} in place",
    "modified output": "backward modifies {output} in place",
    "modified tangent": "the jvp modifies the tangent of {input} in place",
    "undefined tangent": "the jvp does not treat an undefined tangent of {input} as zero",
    "recorded gradient": "the gradients differ between create_graph=True and create_graph=False",
    "kept gradient": "the gradients differ between two grad_outputs with the same values",
    "batched raises": "{the}{derivative} raises under vmap",
    "batched differs": "{the}{derivative} gives different values under vmap",
}
"""First lines of failures without compared entries, without the name of the function."""


def _headline(report: ReportData, failure: Failure) -> str:
    """The first line of a failure without compared entries: function, failure, and the cause if almost certain."""
    function = _function(report)
    if _states_only_cause(report, failure):
        return f"{function}: {_sure_cause(report)}"
    output, input_ = names_of(report, failure)
    text = _HEADLINES[failure.kind].format(output=output, input=input_, **_terms(report, failure))
    return _with_cause(report, f"{function}: {text}")


def _terms(report: ReportData, failure: Failure) -> dict[str, str]:
    """What stands for the placeholders of texts: the terms of a mode of AD, the checked function, and the detail."""
    terms = {"the": "", "derivative": "backward", "its": "", "vector": "grad_output"}
    if failure.mode == "forward":
        terms = {"the": "the ", "derivative": "jvp", "its": "its ", "vector": "tangent"}
    return {**terms, "varying": varying(report.settings), "detail": failure.detail}


def _states_only_cause(report: ReportData, failure: Failure) -> bool:
    """Whether the first line states the cause instead of a text for the kind of failure, which is less specific."""
    return bool(_sure_cause(report)) and failure.kind in ("nonlinear", "raises", "nondeterministic")


def _named(report: ReportData, failure: Failure) -> tuple[bool, bool]:
    """Whether the first line names the output and the input of a failure."""
    if failure.comparison is not None:
        return len((report.subject or Subject()).outputs) > 1, True
    if failure.kind in BY_ROUNDING:
        return False, True
    text = "" if _states_only_cause(report, failure) else _HEADLINES.get(failure.kind, "")
    return "{output}" in text, "{input}" in text


def varying(settings: Settings) -> str:
    """The checked function, in messages that it is not deterministic; for second derivatives, with a backward."""
    return "func" if settings.order == 1 else "func or its backward"


_OF_ORDER = {1: "", 2: "backward of ", 3: "second backward of ", 4: "third backward of "}


def _function(report: ReportData) -> str:
    """The function whose gradient was checked."""
    name = report.subject.function if report.subject else ""
    return f"{_OF_ORDER[report.settings.order]}{name or 'func'}"


def _rounded_line(report: ReportData, failure: Failure, precision: LowPrecision) -> str:
    """The first line of a failure in a lower dtype."""
    kind = _at(failure.input_position, (report.subject or Subject()).inputs)
    tensor = f" ({kind})" if kind else ""
    what = rounding_text.verdict(failure.kind, precision)
    return _with_cause(report, f"{_function(report)}: gradient of {names_of(report, failure)[1]}{tensor} {what}")


def _notes(report: ReportData) -> list[str]:
    return [f"  note       {note}" for note in report.notes]


def call(report: ReportData) -> str:
    """The call that repeats the measurement, without func and tensors."""
    settings, named = report.settings, bool(report.input_names)
    second_order = settings.grad_outputs is not None
    name, forward, reverse = "gradcheck", "check_forward_ad", "check_backward_ad"
    if second_order:
        name, forward, reverse = "gradgradcheck", "check_fwd_over_rev", "check_rev_over_rev"
    keywords = {
        "given": ["grad_outputs=..."],
        "ones": ['grad_outputs="ones"'],
        "non-contiguous": ["gen_non_contig_grad_outputs=True"],
    }.get(settings.grad_outputs or "", [])
    if named:
        name, keywords = "check", [f"order={settings.order}", *keywords] if second_order else keywords
    if report.precision is None:
        keywords += [f"{number}={_numbers(settings, number)}" for number in ("eps", "atol", "rtol")]
    reference = {"float64": '"float64"', UNNAMED: "..."}.get(settings.reference or "", settings.reference)
    not_default = {
        f"{forward}=True": settings.check_forward_ad,
        f"{reverse}=False": not settings.check_backward_ad,
        # Without reverse mode, gradgradcheck also requires check_undefined_grad=False.
        "check_undefined_grad=False": second_order and not settings.check_backward_ad,
        "fast_mode=True": settings.fast_mode,
        "masked=True": settings.masked,
        f"engine={settings.engine!r}": settings.engine != "auto",
        f"reference={reference}": settings.reference is not None,
        f"reference_device={settings.reference_device!r}": settings.reference_device is not None,
        'precision="strict"': settings.precision == "strict",
    }
    keywords += [keyword for keyword, is_given in not_default.items() if is_given]
    return f"fastgrad.{name}({', '.join(['...', *keywords, f'seed={settings.seed}'])})"


def _numbers(settings: Settings, name: str) -> str:
    """The text of eps, atol or rtol, which may differ between inputs."""
    own = [f"{getattr(tolerances, name):g}" for tolerances in settings.inputs or (settings,)]
    return own[0] if len(set(own)) == 1 else f"({', '.join(own)})"


def engine_line(report: ReportData) -> str:
    """The engine and the cost of a check."""
    plan = report.plan
    name = plan.engine if plan else "none"
    numbers = ((plan.column_groups, "column group"), (plan.row_groups, "row group")) if plan else ()
    groups = "".join(f"{count(number, noun)}, " for number, noun in numbers if number is not None)
    return (
        f"{name}: {groups}{count(report.n, 'input coordinate')}, {count(report.m, 'output coordinate')}, "
        f"{count(report.evaluations, 'evaluation')}, {count(report.vjps, 'VJP')}, "
        f"{count(report.jvps, 'JVP') + ', ' if report.jvps else ''}{seconds_text(report.seconds)}"
    )


_PHRASES: dict[FailureKind, str] = {
    "mismatch": "{part}Jacobian {mode}mismatch for {output} with respect to {input}:",
    "nonzero numerical gradient": "Numerical gradient for function expected to be zero, because no output requires "
    "grad, but it is {detail} for {output} with respect to {input}.",
    "dtype": "Gradient has dtype mismatch: a gradient of {output} does not have the dtype of its input.",
    "size": "Analytical gradient has incorrect size for {output}.",
    "nondeterministic func": "{varying} is not deterministic: {detail}.",
    "nonlinear": "{derivative} is not linear in {its}{vector}: {detail}.",
    "raises": "{derivative} raises for some {vector}s, but not for all: {detail}.",
    "not multiplied by grad_output": "backward not multiplied by grad_output: with a zero grad_output the gradient of "
    "{input} is not zero.",
    "incorrect gradient": "{detail} for {input}.",
    "undefined grad raises": "Expected backward function to handle undefined output grads, but it raised an error. "
    + _UNDEFINED_NOTE,
    "undefined grad not zero": "Expected all input grads to be undefined or zero when all output grads are undefined "
    "or zero, but the gradient of {input} is not. " + _UNDEFINED_NOTE,
    "tangent dtype": "Forward AD gradient has dtype mismatch: only one of the output and its tangent is complex.",
    "modified grad_output": "Mismatch in grad_output values of {output} before and after a call of backward. Other "
    "nodes that use this grad_output get wrong values.",
    "modified output": "Mismatch in values of {output} before and after a call of backward. Functions that use it "
    "later get wrong values.",
    "modified tangent": "Mismatch in tangent values of {input} before and after a call of the jvp. Other operators "
    "that use this tangent get wrong values.",
    "undefined tangent": "Mismatch in tangent values for output with index: {number} when the tangent of {input} is "
    "undefined, which means zero: {detail}.",
    "ranks differ": "The ranks have different values of the same tensor: {detail}.",
    "recorded gradient": "Backward gives different gradients with and without create_graph=True: {detail}.",
    "kept gradient": "Two grad_outputs with the same values give different gradients: {detail}. Backward may cache "
    "gradients by the address or identity of grad_output.",
    "batched raises": "While computing batched gradients, got: {detail}\n\n{batched}",
    "batched differs": "For {output} and {input}:\n\n{batched}\n\n{detail}",
}
"""The phrases of most kinds of failure; `key_phrase` writes the phrases of the other kinds itself."""


def key_phrase(report: ReportData, failure: Failure) -> str:
    """The phrase that tests search for: torch's own phrase if torch makes the same check."""
    output, input_ = f"output {failure.output}", f"input {failure.input}"
    forward = failure.mode == "forward"
    if failure.kind in BY_ROUNDING:
        place = input_ if failure.output is None else f"{output} with respect to {input_}"
        return f"Jacobian mismatch for {place}: {rounding_text.key_phrase(failure.kind, report.precision)}."
    if failure.kind == "nondeterministic":
        if forward:
            return f"The jvp is not deterministic: {failure.detail}."
        otherwise = "" if report.causes else " Otherwise look for state or uninitialized memory in backward."
        return (
            "Backward is not reentrant, i.e., two runs with the same inputs and grad_output give different values. "
            f"The tolerance for nondeterminism was {report.settings.nondet_tol}.\n{_NONDET_NOTE}{otherwise}"
        )
    side = "inputs" if forward else "outputs"
    part = "" if failure.part == "all" else f"While considering the {failure.part} part of complex {side} only, "
    mode, terms = "computed with forward mode " if forward else "", _terms(report, failure)
    batched = _batched_note(failure, terms["derivative"], terms["vector"])
    own = {"number": str(failure.output), "part": part, "mode": mode, "batched": batched}
    return _PHRASES[failure.kind].format(output=output, input=input_, **own, **terms)


def _batched_note(failure: Failure, what: str, vector: str) -> str:
    who, keyword, suffix = "gradcheck or gradgradcheck", "check_batched_grad", ""
    if failure.mode == "forward":
        who, keyword, suffix = "gradcheck", "check_batched_forward_grad", " with forward-mode AD"
    ending = "and raised" if failure.kind == "batched raises" else f"and compared with the {what} of each of them"
    return (
        f"{who} failed while testing batched gradient computation{suffix}: the {what} was run under vmap with two "
        f"{vector}s, {ending}. The usual cause is a {what} that calls .item(), "
        f"branches on values, writes in place or depends on sizes. {keyword}=False disables this test."
    )


def _matrices(comparison: Comparison) -> list[str]:
    if comparison.analytical is None or comparison.numerical is None:
        return []
    return [f"numerical:{comparison.numerical}", f"analytical:{comparison.analytical}"]


def _details(report: ReportData, failure: Failure, comparison: Comparison) -> list[str]:
    lines = []
    names, own = names_of(report, failure), report.settings.of(failure.input or 0)
    worst = comparison.worst
    if worst is not None:
        analytical, numerical = values_text(worst)
        lines += [
            f"  worst      {entry_name(names, worst)}   analytical {analytical}   numerical {numerical}",
            f"             |difference| {_difference(worst, own)}",
        ]
    found = "" if comparison.exhaustive else " found"
    at_eps, which, finite = "", "", ""
    if worst is not None and not math.isfinite(worst.difference):
        finite = "finite "
    elif worst is not None and worst.difference > (1 + MIN_EXCESS) * comparison.largest_absolute:
        # The worst entry was re-measured with other steps, so its error may be larger.
        at_eps, which = "at eps: ", " (the worst entry was measured again with other steps)"
    elif worst is not None and not worst.numerical:
        which = " (where the numerical entry is not zero)"
    lines.append(f"  extent     {extent_line(names, comparison)}")
    # An error of zero is that of no wrong entry: all of them are not finite, or all their numerical values are zero.
    if comparison.largest_absolute:
        line = f"             {at_eps}largest {finite}absolute error{found} {comparison.largest_absolute:.3g}"
        if comparison.largest_relative:
            line += f", largest {finite}relative error{found} {comparison.largest_relative:.3g}{which}"
        lines.append(line)
    return lines


def _difference(worst: Entry, own: Tolerances) -> str:
    """The difference of an entry, and the allowed difference as a sum of tolerances."""
    if not math.isfinite(worst.allowed):
        return f"{worst.difference:.3g}, and no difference is allowed, because the numerical value is not finite"
    difference, allowed = excess_texts(worst.difference, worst.allowed)
    return f"{difference}, allowed {allowed} = atol {own.atol:g} + rtol {own.rtol:g} * |numerical|"


def entry_name(names: tuple[str, str], entry: Entry) -> str:
    """An entry as a derivative, for example d out0[3, 17] / d in1[5, 2]; names as from `names_of`."""
    return f"d {names[0]}{index_text(entry.output_index)} / d {names[1]}{index_text(entry.input_index)}"


def values_text(entry: Entry) -> tuple[str, str]:
    """An entry's analytical value, and its numerical value with its error estimate if there is one."""
    both = entry.analytical, entry.numerical
    digits = digits_apart(*both)
    # -0 is written as 0.
    analytical, numerical = (f"{v if isinstance(v, complex) else v + 0.0:.{digits}g}" for v in both)
    if entry.error is not None:
        # All differences may be equal, as at a kink. The rounding of the value itself is an error nevertheless.
        numerical += f" +- {max(entry.error, UNIT_ROUNDOFF * modulus(entry.numerical)):.0e}"
    return analytical, numerical


def extent_line(names: tuple[str, str], comparison: Comparison) -> str:
    """The number and the positions of the entries that differ."""
    extent = comparison.extent
    where = "" if extent is None else extent_text(extent, names, comparison.mismatches)
    where = f", {where}" if where else ""
    if not comparison.unclear:
        return f"{_extent(comparison)}{where}"
    verb = "differs" if comparison.mismatches == 1 else "differ"
    unclear = f"{comparison.unclear:,} perhaps because of rounding or the size of eps"
    return f"{_extent(comparison)} {verb} at eps ({unclear}){where}"


def _wrong(comparison: Comparison) -> str:
    """The number of wrong entries, as text, without those whose difference rounding or the size of eps may explain."""
    if not comparison.unclear:
        return _extent(comparison)
    return f"at least {comparison.mismatches - comparison.unclear:,} of {_entries(comparison)}"


def _extent(comparison: Comparison) -> str:
    return f"{mismatches_text(comparison)} of {_entries(comparison)}"


def mismatches_text(comparison: Comparison | Pair) -> str:
    """The number of entries that differ at eps."""
    return f"{'' if comparison.exhaustive else 'at least '}{comparison.mismatches:,}"


def _entries(comparison: Comparison | Pair) -> str:
    return count(comparison.entries, "nonzero entry" if comparison.on_pattern else "entry")


def _causes(report: ReportData) -> list[str]:
    """The most probable causes. A cause about values is added to one about positions or modes, not an alternative."""
    from fastgrad.report.evidence import ModeCause, PositionCause, ValueCause  # a check that passes does not need them

    lines: list[str] = []
    for cause in report.causes[:MAX_CAUSES]:
        head = "or" if lines else "probably"
        if lines and cause.name in get_args(ValueCause):
            first = report.causes[0].name
            head = "and there" if first in get_args(PositionCause) else "and" if first in get_args(ModeCause) else "or"
        lines.append(f"  {head} {cause.text} ({cause.measure})")
    return lines


def _positions(report: ReportData, failure: Failure) -> list[str]:
    """A line that says which tensors the numbers in torch's phrases mean; they count only differentiable tensors.

    Names that the first line states already are left out, and the name "result" of an only output.
    """
    places = []
    if report.input_names or (report.subject is not None and report.subject.results):
        output, input_ = names_of(report, failure)
        has_output, has_input = _named(report, failure)
        if failure.output is not None and output != "result" and not has_output:
            places.append(f"output {failure.output} is {output}")
        if failure.input is not None and input_ != f"in{failure.input}" and not has_input:
            places.append(f"input {failure.input} is {input_}")
        return [f"  where      {'; '.join(places)}"] if places else []
    if failure.output is not None and failure.output != failure.output_position:
        places.append(f"output {failure.output} is element {failure.output_position} of func's result")
    if failure.input is not None and failure.input != failure.input_position:
        places.append(f"input {failure.input} is argument {failure.input_position} of func")
    return [f"  where      {'; '.join(places)} (only tensors that require grad are numbered)"] if places else []


def size_text(size: int) -> str:
    """Bytes, in a unit that leaves one to four digits."""
    number, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.3g} {unit}" if number < 1000 else f"{number:.0f} {unit}"
