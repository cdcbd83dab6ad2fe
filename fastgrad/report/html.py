"""The HTML page of a report, with figures if matplotlib is installed."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastgrad.core.tensors import element_index, element_number
from fastgrad.report import element_map, messages
from fastgrad.report.data import Pair, ReportData
from fastgrad.report.failure import Entry, Failure
from fastgrad.report.settings import Tolerances

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

NO_FIGURES = "plots need matplotlib: pip install matplotlib"

BINS = 96
"""Cells along a side of the error map; larger tensors are binned."""

MOST_MARKED = 24
"""Largest number of wrong entries that the error map marks with circles."""

MOST_POINTS = 2000
"""Figures with at least this many points contain them as a bitmap."""

WRONG, RIGHT = "#d1495b", "#3f88b5"
_GAUGE_DECADES = 8
"""Powers of ten that the gauges of a check that passed span."""

_SENTINEL = "#010203"
"""An otherwise unused color that pages replace with the current text color."""


@dataclass(frozen=True)
class _Entries:
    """Entries of the failing Jacobian, to be drawn: element numbers and values of shape (entries,)."""

    output_shape: tuple[int, ...]
    input_shape: tuple[int, ...]
    outputs: NDArray[np.int64]
    inputs: NDArray[np.int64]
    analytical: NDArray[Any]
    numerical: NDArray[Any]
    error: NDArray[np.float64]
    allowed: NDArray[np.float64]
    failing: NDArray[np.bool_]

    @property
    def excess(self) -> NDArray[np.float64]:
        """Ratios of error to tolerance; infinite if not finite."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.nan_to_num(self.error / self.allowed, nan=np.inf, posinf=np.inf)


def _entries(report: ReportData) -> _Entries | None:
    """The sample or, without one, a small Jacobian, or its worst entries."""
    failure = report.failure
    comparison = failure.comparison if failure else None
    if failure is None or comparison is None:
        return None
    own = report.settings.of(failure.input or 0)
    sample = report.sample
    if sample is not None:
        analytical, numerical = sample.analytical.cpu().numpy(), sample.numerical.cpu().numpy()
        outputs, inputs = sample.outputs.cpu().numpy(), sample.inputs.cpu().numpy()
        shapes = sample.output_shape, sample.input_shape
        failing = sample.failing.cpu().numpy()
    elif comparison.extent is not None and comparison.worst_entries:
        extent, worst = comparison.extent, comparison.worst_entries
        shapes = tuple(span.size for span in extent.output), tuple(span.size for span in extent.input)
        if comparison.analytical is not None and comparison.numerical is not None:
            analytical, numerical = (
                matrix.cpu().numpy().reshape(-1) for matrix in (comparison.analytical, comparison.numerical)
            )
            # In torch's layout: one row per element of the input.
            inputs, outputs = np.divmod(np.arange(analytical.size), math.prod(shapes[0]))
        else:
            analytical, numerical = (
                np.array([getattr(entry, name) for entry in worst]) for name in ("analytical", "numerical")
            )
            outputs = np.array([element_number(entry.output_index, shapes[0]) for entry in worst])
            inputs = np.array([element_number(entry.input_index, shapes[1]) for entry in worst])
        failing = None
    else:
        return None
    error, allowed = np.abs(analytical - numerical), own.atol + own.rtol * np.abs(numerical)
    if failing is None:
        failing = ~(error <= allowed)
    return _Entries(*shapes, outputs, inputs, analytical, numerical, error, allowed, failing)


@dataclass(frozen=True)
class _Panel:
    """One figure: title, caption and drawing function."""

    title: str
    caption: str
    size: tuple[float, float]
    draw: Callable[[Axes, str], None]


def _panels(report: ReportData) -> list[_Panel]:
    """The figures that the report has data for."""
    panels = []
    entries, failure = _entries(report), report.failure
    if failure is not None and entries is not None and entries.error.size:
        panels.append(
            _Panel(
                "Errors by position",
                "Entries of the Jacobian by output element and input element, both in C order. Each cell shows its "
                f"largest ratio of error to tolerance. {_sampled(report, entries)}",
                (6.4, 5.9),
                lambda axes, ink: _draw_map(axes, ink, entries, messages.names_of(report, failure)),
            )
        )
        panels.append(
            _Panel(
                "Errors and tolerances",
                "The error of each entry against its tolerance, atol + rtol |numerical|. Entries above the line "
                "fail. Errors of zero are on the lower edge.",
                (5.6, 3.6),
                lambda axes, ink: _draw_errors(axes, ink, entries),
            )
        )
    if failure is not None and failure.convergence and failure.comparison and failure.comparison.worst:
        worst = failure.comparison.worst
        panels.append(
            _Panel(
                "The worst entry by step",
                "Central differences of the worst entry for large to small steps. Where they are constant, they give "
                "the derivative. The dashed line is the analytical value.",
                (5.6, 3.6),
                lambda axes, ink: _draw_convergence(axes, ink, failure, worst, report.settings.of(failure.input or 0)),
            )
        )
    return panels


def _sampled(report: ReportData, entries: _Entries) -> str:
    comparison = report.failure.comparison if report.failure else None
    if comparison is None or entries.error.size >= comparison.entries:
        return "All entries are shown."
    return (
        f"{entries.error.size} of {comparison.entries} entries are shown, {int(entries.failing.sum())} of them wrong."
    )


def figure(report: ReportData) -> Figure:
    """All figures side by side; see `Report.plot`."""
    figures = _matplotlib_figures()
    panels = _panels(report)
    if not panels or report.failure is None:
        why = "the check passed" if report.failure is None else "the failure is not a mismatch of entries"
        raise ValueError(f"the report has no entries to plot: {why}.")
    drawn: Figure = figures.Figure(figsize=(5.2 * len(panels), 4.4), layout="constrained")
    for axes, panel in zip(drawn.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel.draw(axes, "black")
        axes.set_title(panel.title, pad=38)  # above its legend
    drawn.suptitle(messages.key_phrase(report, report.failure).partition("\n")[0].rstrip(":"))
    return drawn


def _matplotlib_figures() -> Any:
    try:
        # Not pyplot: it keeps figures, and picks a window system.
        from matplotlib import figure as figures
    except ImportError:
        raise ImportError(f"{NO_FIGURES}.") from None
    return figures


def _svg(panel: _Panel) -> str:
    """A figure as an SVG element that takes the color of the text around it."""
    import matplotlib

    figures = _matplotlib_figures()
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "fastgrad", "font.family": "sans-serif", "font.size": 11}
    with matplotlib.rc_context(settings):
        drawn = figures.Figure(figsize=panel.size, layout="constrained", facecolor="none")
        panel.draw(drawn.subplots(), _SENTINEL)
        text = io.StringIO()
        drawn.savefig(text, format="svg", facecolor="none", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(_SENTINEL, "currentColor")
    # Every figure of a page counts its parts from one: their names must differ.
    name = re.sub(r"\W", "", panel.title)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)


def _ink(axes: Axes, ink: str) -> None:
    """Colors axes and labels, and makes the background transparent."""
    axes.set_facecolor("none")
    axes.tick_params(which="both", colors=ink)
    axes.xaxis.label.set_color(ink)
    axes.yaxis.label.set_color(ink)
    axes.title.set_color(ink)
    for spine in axes.spines.values():
        spine.set_color(ink)


def _draw_map(axes: Axes, ink: str, entries: _Entries, names: tuple[str, str]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    sides = []
    for numbers, shape in ((entries.outputs, entries.output_shape), (entries.inputs, entries.input_shape)):
        size = max(1, math.prod(shape))
        bins = min(size, BINS)
        sides.append((numbers * bins // size, bins, size, shape))
    (rows, height, *_), (columns, width, *_) = sides
    largest = np.full((height, width), -np.inf)
    with np.errstate(divide="ignore"):
        np.maximum.at(largest, (rows, columns), np.log10(entries.excess))
    seen = np.zeros((height, width), dtype=bool)
    seen[rows, columns] = True
    shades = np.ma.masked_array(np.clip(largest, -4, 4), mask=~seen)
    # Two scales that do not meet: within the tolerance, and beyond it.
    stops = np.divide([*element_map.WITHIN, *element_map.BEYOND], 255)
    colors = LinearSegmentedColormap.from_list("errors", list(zip((0.0, 0.5, 0.5, 1.0), stops, strict=True)))
    image = axes.imshow(
        shades, cmap=colors, vmin=-4, vmax=4, aspect="auto", interpolation="nearest", extent=(0, width, height, 0)
    )
    wrong = np.unique(np.stack([rows[entries.failing], columns[entries.failing]], 1), axis=0)
    if 0 < len(wrong) <= MOST_MARKED and height * width > 400:
        ring: Any = {"s": 90, "facecolors": "none", "edgecolors": WRONG, "linewidths": 1.4}
        axes.scatter(wrong[:, 1] + 0.5, wrong[:, 0] + 0.5, **ring)
    for axis, (_, bins, size, shape) in zip((axes.yaxis, axes.xaxis), sides, strict=True):
        most = 6 if axis is axes.yaxis else 4
        marked = sorted({round(i * (size - 1) / max(1, most - 1)) for i in range(most)})
        axis.set_ticks(
            [(number + 0.5) * bins / size for number in marked], [str([*element_index(n, shape)]) for n in marked]
        )
    axes.tick_params(labelsize="small")
    axes.set_ylabel(f"element of {names[0]}")
    axes.set_xlabel(f"element of {names[1]}")
    bar = axes.figure.colorbar(image, ax=axes, ticks=[-4, -2, 0, 2, 4], shrink=0.9)
    bar.ax.set_yticklabels(["≤ 1e-4", "0.01", "1", "100", "≥ 1e4"], fontsize="small")
    bar.set_label("error / tolerance", color=ink)
    bar.ax.tick_params(colors=ink)
    bar.outline.set_edgecolor(ink)
    _ink(axes, ink)


def _draw_errors(axes: Axes, ink: str, entries: _Entries) -> None:
    finite = np.isfinite(entries.error) & np.isfinite(entries.allowed)
    error, allowed, failing = entries.error[finite], entries.allowed[finite], entries.failing[finite]
    positive = np.concatenate([error[error > 0], allowed[allowed > 0]])
    low, high = (positive.min(), positive.max()) if positive.size else (1e-6, 1.0)
    floor = max(low / 10, high * 1e-18)
    for chosen, color, label in ((~failing, RIGHT, "right"), (failing, WRONG, "wrong")):
        if chosen.any():
            axes.scatter(
                np.maximum(allowed[chosen], floor),
                np.maximum(error[chosen], floor),
                s=16,
                color=color,
                alpha=0.75,
                linewidths=0,
                label=f"{label} ({int(chosen.sum())})",
                rasterized=bool(chosen.sum() > MOST_POINTS),
                clip_on=False,
                zorder=3,
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    tolerances = allowed[allowed > 0]
    if tolerances.size:
        ends = np.array([tolerances.min() / 1.5, tolerances.max() * 1.5])
        axes.plot(ends, ends, color=ink, linewidth=1.2, label="error = tolerance")
        axes.set_xlim(*ends)
    axes.set_ylim(floor, high * 3)
    axes.set_xlabel("tolerance, atol + rtol |numerical|")
    axes.set_ylabel("error, |analytical - numerical|")
    if not finite.all():
        axes.set_title(f"without {int((~finite).sum())} entries that are not finite", fontsize="small")
    _finish(axes, ink)


def _draw_convergence(axes: Axes, ink: str, failure: Failure, worst: Entry, own: Tolerances) -> None:
    steps = np.array([difference.step for difference in failure.convergence])
    estimates = np.array([complex(difference.estimate) for difference in failure.convergence])
    analytical, numerical = complex(worst.analytical), complex(worst.numerical)
    axes.set_xlim(min(*steps, own.eps) / 3, max(*steps, own.eps) * 3)
    axes.set_xscale("log")
    if failure.trouble != "not converged" and math.isfinite(worst.difference) and worst.difference > 0:
        distance = np.abs(estimates - numerical)
        floor = max(1e-18 * worst.difference, 1e-3 * min([worst.allowed, *distance[distance > 0]]))
        axes.plot(steps, np.maximum(distance, floor), "o-", color=RIGHT, markersize=4, label="difference at one step")
        axes.axhline(worst.difference, color=WRONG, linestyle="--", label="analytical value")
        axes.axhline(worst.allowed, color=ink, linewidth=1.2, label="tolerance")
        axes.set_yscale("log")
        axes.set_ylabel("distance from the derivative")
    else:
        complex_valued = bool(np.any(estimates.imag)) or analytical.imag != 0
        size = np.abs if complex_valued else np.real
        axes.plot(steps, size(estimates), "o-", color=RIGHT, markersize=4, label="difference at one step")
        if math.isfinite(worst.difference) or math.isfinite(abs(analytical)):
            axes.axhline(float(size(analytical)), color=WRONG, linestyle="--", label="analytical value")
        axes.set_ylabel("derivative" + (", modulus" if complex_valued else ""))
        axes.set_yscale("symlog", linthresh=max(own.atol, 1e-12))
    axes.axvline(own.eps, color=ink, linestyle=":", linewidth=1.2, label=f"eps = {own.eps:g}")
    axes.set_xlabel("step")
    _finish(axes, ink)


def _plain_ticks(axis: Axis) -> None:
    """Labels like 1e-06, as in messages; with minor labels if the axis spans less than two decades."""
    low, high = axis.get_view_interval()
    narrow = 0 < low < high < 100 * low
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(lambda value, _: f"{value:g}" if narrow and f"{value:e}"[0] in "25" else "")


def _finish(axes: Axes, ink: str) -> None:
    """Plain ticks, a legend above the data, and the colors."""
    for axis in (axes.xaxis, axes.yaxis):
        _plain_ticks(axis)
    if lines := axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=2 if len(lines) == 4 else 3,
            frameon=False,
            labelcolor=ink,
            fontsize="small",
            handletextpad=0.4,
            columnspacing=1.2,
        )
    _ink(axes, ink)


STYLE = Path(__file__).with_name("style.css").read_text().replace(".fastgrad", ".fastgrad.fastgrad")
"""Style of a page. Selectors name the class twice, so that the styles of a surrounding notebook do not win."""


def page(report: ReportData) -> str:
    """The report as a complete page; see `Report.to_html`."""
    return document(messages.verdict_line(report), fragment(report))


def document(title: str, body: str) -> str:
    """A complete page with a given body."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Nothing is loaded and nothing runs, whatever text an exception brought along.
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
    """A table of texts; the columns in `numbers` are flush right."""

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
    where = messages.extent_line(names, comparison).partition(", ")[2]
    if where:
        lines.append(_sentence(where))
    if failure.detail:
        lines.append(_sentence(failure.detail))
    rows = []
    if comparison.extent is not None:
        sides = zip(names, (comparison.extent.output, comparison.extent.input), strict=True)
        rows = [
            (f"{name}, dimension {dimension}", f"{span.count:,} of {span.size:,}", messages.places_text(span))
            for name, spans in sides
            for dimension, span in enumerate(spans)
        ]
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
            f"{entry.analytical:.6g}",
            messages.numerical_text(entry),
            f"{entry.difference:.3g}",
            f"{entry.allowed:.2g}",
            f"{entry.difference / entry.allowed:.3g}" if entry.allowed else "inf",
        )
        for entry in comparison.worst_entries or (comparison.worst,)
    ]
    head = ("entry", "analytical", "numerical", "|difference|", "allowed", "times allowed")
    note = ""
    if any(entry.error is None for entry in comparison.worst_entries):
        note = '<p class="soft">Values without an error estimate are those at eps, which were not re-measured.</p>'
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
    panels = _panels(report)
    if not panels:
        return ""
    maps = f'<div class="maps">{_maps(report)}</div>'
    try:
        drawn = [(panel, _svg(panel)) for panel in panels]
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
    entries, failure = _entries(report), report.failure
    if entries is None or failure is None or not entries.error.size:
        return ""
    names = messages.names_of(report, failure)
    figures = []
    for name, shape, numbers in (
        (names[1], entries.input_shape, entries.inputs),
        (names[0], entries.output_shape, entries.outputs),
    ):
        drawn, note = element_map.svg(shape, numbers, entries.excess, lambda entry: _entry_words(entries, names, entry))
        caption = f"The largest error of each element, in the shape of {name}; the values are shown on hover. {note}"
        figures.append(_figure(f"Errors by element of {name}", drawn, caption.rstrip()))
    return "".join(figures)


def _entry_words(entries: _Entries, names: tuple[str, str], entry: int) -> str:
    output = f"{names[0]}{[*element_index(int(entries.outputs[entry]), entries.output_shape)]}"
    block = f"{names[1]}{[*element_index(int(entries.inputs[entry]), entries.input_shape)]}"
    values = f"analytical {entries.analytical[entry]:.6g}, numerical {entries.numerical[entry]:.6g}"
    return f"d {output} / d {block}: {values}, {entries.excess[entry]:.3g} times the allowed difference"


def _compared_section(report: ReportData) -> str:
    parts = []
    if report.pairs:
        rows = [_pair_row(report, pair) for pair in report.pairs]
        head = ("Jacobian", "entries", "differ at eps", "largest absolute error", "largest relative error", "verdict")
        parts.append(table(head, rows, (1, 2, 3, 4)))
        parts.append(_shares(report) if report.passed else "")
    if report.certificates:
        bounds = [f"{one.bound:.2g}" if one.bound else "any size" for one in report.certificates]
        rows = [(one.claim, one.method, bound) for one, bound in zip(report.certificates, bounds, strict=True)]
        parts.append("<p>Certified by random vectors:</p>")
        parts.append(table(("claim", "how", "smallest detected error"), rows, (2,)))
    return section("Comparison", *parts) if parts else ""


def _shares(report: ReportData) -> str:
    """The largest ratio of error to tolerance, as a gauge per Jacobian."""
    items = []
    for pair in report.pairs:
        own = report.settings.of(pair.input)
        shares = [
            found / allowed
            for found, allowed in ((pair.largest_absolute, own.atol), (pair.largest_relative, own.rtol))
            if allowed
        ]
        share = min(1.0, *shares) if shares else 1.0
        width = max(0.0, 1 + math.log10(share) / _GAUGE_DECADES) if share else 0.0
        items.append(
            f'<li>{escape(messages.jacobian_name(report, pair))} <span class="gauge"><i style="width: {width:.0%}">'
            f'</i></span><span class="soft">{share:.1e}</span></li>'
        )
    caption = f"The largest errors, relative to the tolerance. The bars are logarithmic, from 1e-{_GAUGE_DECADES} to 1."
    return f'<ul class="shares">{"".join(items)}</ul><p class="soft">{caption}</p>'


def _pair_row(report: ReportData, pair: Pair) -> tuple[str, ...]:
    verdict = "wrong" if not pair.agrees else "agrees when re-measured" if pair.mismatches else "agrees"
    return (
        messages.jacobian_name(report, pair),
        f"{pair.entries:,}",
        f"{pair.mismatches:,}",
        f"{pair.largest_absolute:.3g}",
        f"{pair.largest_relative:.3g}",
        verdict,
    )


def _cost_section(report: ReportData) -> str:
    rows = [("time", messages.seconds_text(report.seconds)), ("evaluations of func", f"{report.evaluations:,}")]
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
    times = [(name, messages.seconds_text(seconds)) for name, seconds in phases]
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
