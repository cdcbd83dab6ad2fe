"""The HTML page of a report, with figures if matplotlib is installed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

from fastgrad.core.tensors import element_index
from fastgrad.report import element_map, messages
from fastgrad.report.data import Pair, ReportData
from fastgrad.report.figures import NO_FIGURES, Entries, entries_of, panels_of, svg_of
from fastgrad.report.number_text import digits_apart, seconds_text
from fastgrad.report.rounding_text import excess_texts

_GAUGE_DECADES = 8
"""Number of powers of ten that the gauges on the page of a passed check cover."""

STYLE = Path(__file__).with_name("style.css").read_text().replace(".fastgrad", ".fastgrad.fastgrad")
"""Style of a page. Selectors name the class twice to take precedence over the styles of a surrounding notebook."""


def document(title: str, body: str) -> str:
    """A complete page with a given body."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Prevents text from exceptions from loading or running anything.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">'
        f"<title>{escape(title)}</title>"
        "<style>html { color-scheme: light dark; } body { margin: 0; } "
        "@media (prefers-color-scheme: dark) { body { background: #15191d; } }</style></head>\n"
        f"<body>{body}</body></html>\n"
    )


def fragment(report: ReportData) -> str:
    """The body of a page with its style, for notebooks and other pages."""
    sections = [
        _failure_section(report),
        _subject_section(report),
        _worst_section(report),
        _causes_section(report),
        _figures_section(report),
        _compared_section(report),
        _cost_section(report),
        _reproduction_section(report),
    ]
    kind = report.verdict.replace(" ", "-")
    return article(kind, messages.verdict_line(report), sections, _cause_line(report))


def article(kind: str, headline: str, sections: Sequence[str], below: str = "") -> str:
    """A page's content with its style: a headline in the color of the verdict, HTML below it, and sections."""
    banner = f'<header class="{kind}"><h1>{escape(headline)}</h1>{below}</header>'
    return f'<style>{STYLE}</style>\n<article class="fastgrad">\n{banner}\n{"".join(sections)}</article>\n'


def section(title: str, *parts: str) -> str:
    """A section of a page; parts are HTML."""
    return f"<section><h2>{escape(title)}</h2>\n{''.join(parts)}</section>\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table of texts; the columns whose numbers are in `numbers` are right-aligned."""

    def line(cells: Sequence[str], tag: str) -> str:
        marks = (' class="number"' if i in numbers else "" for i in range(len(cells)))
        return "".join(f"<{tag}{mark}>{escape(cell)}</{tag}>" for cell, mark in zip(cells, marks, strict=True))

    top = f"<thead><tr>{line(head, 'th')}</tr></thead>" if head else ""
    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table>{top}<tbody>{body}</tbody></table></div>\n'


def _sentence(clause: str) -> str:
    return f"{clause[:1].upper()}{clause[1:]}."


def _cause_line(report: ReportData) -> str:
    if not report.causes:
        return ""
    first = report.causes[0]
    return f"<p>Probable cause: {escape(first.name)}. {escape(_sentence(first.text))}</p>"


def _failure_section(report: ReportData) -> str:
    failure = report.failure
    if failure is None:
        return ""
    message = messages.failure_message(report)
    if failure.comparison is None:
        return section("Failure", f"<pre>{escape(message)}</pre>")
    comparison, names = failure.comparison, messages.names_of(report, failure)
    lines = [f"{message.partition(chr(10))[0].rstrip(',')}."]
    where, rows = "", []
    if comparison.extent is not None:
        where = messages.extent_text(comparison.extent, names, comparison.mismatches)
        sides = zip(names, (comparison.extent.output, comparison.extent.input), strict=True)
        rows = [
            (f"{name}, dimension {dimension}", f"{span.count:,} of {span.size:,}", messages.places_text(span))
            for name, spans in sides
            for dimension, span in enumerate(spans)
        ]
    lines += [_sentence(clause) for clause in (where, failure.detail) if clause]
    extent = table(("wrong entries along", "places", "which"), rows, (1,)) if rows else ""
    return section("Failure", "".join(f"<p>{escape(line)}</p>" for line in lines), extent)


def _subject_section(report: ReportData) -> str:
    subject = report.subject
    if subject is None:
        return ""
    rows = [("function", subject.function), ("source", subject.source), ("test", subject.test)]
    names = report.input_names or subject.parameters
    inputs = [f"{names[i] if i < len(names) else f'input {i}'} {kind}" for i, kind in enumerate(subject.inputs) if kind]
    rows += [("input" if len(inputs) == 1 else "inputs", ", ".join(inputs))]
    rows += [("output" if len(subject.outputs) == 1 else "outputs", ", ".join(subject.outputs))]
    return section("Checked function", table((), [row for row in rows if row[1]]))


def _worst_section(report: ReportData) -> str:
    failure = report.failure
    comparison = failure.comparison if failure else None
    if failure is None or comparison is None or comparison.worst is None:
        return ""
    rows = [
        (
            messages.entry_name(messages.names_of(report, failure), entry),
            *messages.values_text(entry),
            *excess_texts(entry.difference, entry.allowed),
            f"{entry.difference / entry.allowed:.3g}" if entry.allowed else "inf",
        )
        for entry in comparison.worst_entries or (comparison.worst,)
    ]
    head = ("entry", "analytical", "numerical", "|difference|", "allowed", "times allowed")
    note = ""
    if any(entry.error is None for entry in comparison.worst_entries):
        note = '<p class="soft">Values without an error estimate were measured at eps only.</p>'
    return section("Worst entries", table(head, rows, (1, 2, 3, 4, 5)), note)


def _causes_section(report: ReportData) -> str:
    if not report.causes:
        return ""
    items = "".join(
        f"<li><strong>{escape(cause.name)}</strong> "
        f'<span class="gauge"><i style="width: {cause.confidence:.0%}"></i></span>'
        f'<span class="soft">{cause.confidence:.0%}</span><br>{escape(_sentence(cause.text))}'
        f'<br><span class="soft">{escape(cause.measure)}</span></li>'
        for cause in report.causes
    )
    return section("Probable causes", f'<ol class="causes">{items}</ol>')


def _figures_section(report: ReportData) -> str:
    panels = panels_of(report)
    if not panels:
        return ""
    maps = f'<div class="maps">{_maps(report)}</div>'
    try:
        drawn = [(panel, svg_of(panel)) for panel in panels]
    except ImportError:
        return section("Figures", maps, f'<p class="soft">Other figures are missing: {escape(NO_FIGURES)}.</p>')
    figures = "".join(_figure(panel.title, svg, panel.caption) for panel, svg in drawn)
    return section("Figures", maps, f'<div class="figures">{figures}</div>')


def _figure(title: str, svg: str, caption: str) -> str:
    return (
        f'<figure role="img" aria-label="{escape(title)}"><h3>{escape(title)}</h3>{svg}'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _maps(report: ReportData) -> str:
    """Maps of the largest error of each element, in the shapes of the output and the input."""
    entries, failure = entries_of(report), report.failure
    if entries is None or failure is None or not entries.error.size:
        return ""
    names = messages.names_of(report, failure)
    figures = []
    for name, shape, numbers in (
        (names[1], entries.input_shape, entries.inputs),
        (names[0], entries.output_shape, entries.outputs),
    ):
        drawn, note = element_map.svg(shape, numbers, entries.excess, lambda entry: _entry_words(entries, names, entry))
        caption = f"The elements of {name}, colored by their largest errors; the values are shown on hover. {note}"
        figures.append(_figure(f"Errors by element of {name}", drawn, caption.rstrip()))
    return "".join(figures)


def _entry_words(entries: Entries, names: tuple[str, str], entry: int) -> str:
    output = f"{names[0]}{[*element_index(int(entries.outputs[entry]), entries.output_shape)]}"
    block = f"{names[1]}{[*element_index(int(entries.inputs[entry]), entries.input_shape)]}"
    analytical, numerical = entries.analytical[entry], entries.numerical[entry]
    digits = digits_apart(analytical, numerical) if entries.excess[entry] > 1 else 6
    values = f"analytical {analytical:.{digits}g}, numerical {numerical:.{digits}g}"
    return f"d {output} / d {block}: {values}, {entries.excess[entry]:.3g} times the allowed difference"


def _compared_section(report: ReportData) -> str:
    parts = []
    if report.pairs:
        rows = [_pair_row(report, pair) for pair in report.pairs]
        head = ("Jacobian", "entries", "differ at eps", "largest absolute error", "largest relative error", "verdict")
        parts.append(table(head, rows, (1, 2, 3, 4)))
        parts.append(_shares(report) if report.passed else "")
    if report.certificates:
        rows = [(one.claim, one.method, f"{one.bound:.2g}" if one.bound else "any size") for one in report.certificates]
        parts.append("<p>Certified by random vectors:</p>")
        parts.append(table(("claim", "how", "smallest size detected"), rows, (2,)))
    return section("Comparison", *parts) if parts else ""


def _shares(report: ReportData) -> str:
    """An upper bound of the largest ratio of error to tolerance, as a gauge per Jacobian."""
    items = []
    for pair in report.pairs:
        own = report.settings.of(pair.input)
        errors = (pair.largest_absolute, own.atol), (pair.largest_relative, own.rtol)
        share = min([1.0, *(found / allowed for found, allowed in errors if allowed)])
        width = max(0.0, 1 + math.log10(share) / _GAUGE_DECADES) if share else 0.0
        items.append(
            f'<li>{escape(messages.jacobian_name(report, pair))} <span class="gauge"><i style="width: {width:.0%}">'
            f'</i></span><span class="soft">{share:.1e}</span></li>'
        )
    caption = f"The largest errors, relative to the tolerance. The bars are logarithmic, from 1e-{_GAUGE_DECADES} to 1."
    return f'<ul class="shares">{"".join(items)}</ul><p class="soft">{caption}</p>'


def _pair_row(report: ReportData, pair: Pair) -> tuple[str, ...]:
    verdict = "wrong" if not pair.agrees else "agrees when re-measured" if pair.mismatches else "agrees"
    counts = f"{pair.entries:,}", messages.mismatches_text(pair)
    errors = f"{pair.largest_absolute:.3g}", f"{pair.largest_relative:.3g}"
    return messages.jacobian_name(report, pair), *counts, *errors, verdict


def _cost_section(report: ReportData) -> str:
    rows = [("time", seconds_text(report.seconds)), ("evaluations of func", f"{report.evaluations:,}")]
    rows.append(("VJPs", f"{report.vjps:,}"))
    if report.jvps:
        rows.append(("JVPs", f"{report.jvps:,}"))
    rows += [("input coordinates", f"{report.n:,}"), ("output coordinates", f"{report.m:,}")]
    plan = report.plan
    if plan is not None:
        rows.append(("engine", f"{plan.engine}: {plan.reason}" if plan.reason else plan.engine))
        groups = (("column groups", plan.column_groups), ("row groups", plan.row_groups))
        rows += [(name, f"{count:,}") for name, count in groups if count is not None]
        if plan.detection_limit is not None:
            rows.append(("detection limit", f"{plan.detection_limit:.2g}, for errors that cancel each other"))
        if plan.memory is not None:
            rows.append(("memory, estimated", messages.size_text(plan.memory)))
    phases = sorted(report.phases.items(), key=lambda item: -item[1])
    rest = report.seconds - sum(report.phases.values())
    if phases and rest > 0:
        phases.append(("everything else", rest))
    times = [(name, seconds_text(seconds)) for name, seconds in phases]
    parts = [table((), rows)] + ([table(("phase", "time"), times, (1,))] if times else [])
    return section("Cost", f'<div class="columns">{"".join(f"<div>{part}</div>" for part in parts)}</div>')


def _reproduction_section(report: ReportData) -> str:
    rows = [(name, str(value)) for name, value in asdict(report.settings).items() if value is not None]
    environment = report.environment
    where = ""
    if environment is not None:
        where = (
            f'<p class="soft">fastgrad {escape(environment.fastgrad)}, torch {escape(environment.torch)}, Python '
            f"{escape(environment.python)}, {escape(environment.device)}</p>"
        )
    notes = "".join(f"<p>{escape(note)}</p>" for note in report.notes)
    return (
        (section("Notes", notes) if notes else "")
        + section("Reproduce", f"<pre>{escape(messages.call(report))}</pre>", where)
        + f"<details><summary>All settings</summary>{table((), rows)}</details>\n"
        + f"<details><summary>As text</summary><pre>{escape(messages.summary(report))}</pre></details>\n"
    )
