"""The figures of a report, with matplotlib: errors by position, errors and tolerances, the worst entry by step."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastgrad.core.tensors import element_index, element_number
from fastgrad.report import element_map, messages
from fastgrad.report.data import ReportData
from fastgrad.report.failure import Entry, Failure
from fastgrad.report.number_text import count
from fastgrad.report.settings import Tolerances

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

NO_FIGURES = "plots need matplotlib: pip install matplotlib"

BINS = 96
"""Largest number of cells along a side of the error map; in larger maps, a cell stands for several elements."""

MAX_MARKED = 24
"""Largest number of wrong entries that the error map marks with circles."""

MAX_POINTS = 2000
"""Largest number of points that a figure draws as vector graphics; more points are drawn as a bitmap."""

WRONG, RIGHT = "#d1495b", "#3f88b5"

_SENTINEL = "#010203"
"""An otherwise unused color that pages replace with the current text color."""


@dataclass(frozen=True)
class Entries:
    """Entries of the failing Jacobian, to be drawn: element numbers in C order and values, shape (entries,)."""

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
        """Ratios of error to tolerance, shape (entries,); infinite where the ratio is not a number."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.nan_to_num(self.error / self.allowed, nan=np.inf, posinf=np.inf)


def entries_of(report: ReportData) -> Entries | None:
    """The entries of the sample; without one, all entries of a small Jacobian, or else its worst entries.

    None if the failure has no entries.
    """
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
            analytical = comparison.analytical.cpu().numpy().reshape(-1)
            numerical = comparison.numerical.cpu().numpy().reshape(-1)
            # In torch's layout: one row per element of the input.
            inputs, outputs = np.divmod(np.arange(analytical.size), math.prod(shapes[0]))
        else:
            analytical = np.array([entry.analytical for entry in worst])
            numerical = np.array([entry.numerical for entry in worst])
            outputs = np.array([element_number(entry.output_index, shapes[0]) for entry in worst])
            inputs = np.array([element_number(entry.input_index, shapes[1]) for entry in worst])
        failing = None
    else:
        return None
    error, allowed = np.abs(analytical - numerical), own.atol + own.rtol * np.abs(numerical)
    if failing is None:
        failing = ~(error <= allowed)
    return Entries(*shapes, outputs, inputs, analytical, numerical, error, allowed, failing)


@dataclass(frozen=True)
class Panel:
    """One figure: title, caption and drawing function."""

    title: str
    caption: str
    size: tuple[float, float]
    draw: Callable[[Axes], None]


def panels_of(report: ReportData) -> list[Panel]:
    """The figures that the report has data for."""
    panels = []
    entries, failure = entries_of(report), report.failure
    if failure is not None and entries is not None and entries.error.size:
        panels.append(
            Panel(
                "Errors by position",
                "Entries of the Jacobian by output element and input element, both in C order. A cell shows the "
                f"largest ratio of error to tolerance of its entries. {_sampled(report, entries)}",
                (6.4, 5.9),
                lambda axes: _draw_map(axes, entries, messages.names_of(report, failure)),
            )
        )
        panels.append(
            Panel(
                "Errors and tolerances",
                "The error of each entry against its tolerance, atol + rtol |numerical|. Entries above the line "
                "fail. Errors of zero are on the lower edge.",
                (5.6, 3.6),
                lambda axes: _draw_errors(axes, entries),
            )
        )
    if failure is not None and failure.convergence and failure.comparison and failure.comparison.worst:
        worst = failure.comparison.worst
        panels.append(
            Panel(
                "The worst entry by step",
                "Central differences of the worst entry for large to small steps. Where they are constant, they give "
                "the derivative. The dashed line is the analytical value.",
                (5.6, 3.6),
                lambda axes: _draw_convergence(axes, failure, worst, report.settings.of(failure.input or 0)),
            )
        )
    return panels


def _sampled(report: ReportData, entries: Entries) -> str:
    comparison = report.failure.comparison if report.failure else None
    if comparison is None or entries.error.size >= comparison.entries:
        return "All entries are shown."
    return (
        f"{entries.error.size} of {comparison.entries} entries are shown, {int(entries.failing.sum())} of them wrong."
    )


def figure(report: ReportData) -> Figure:
    """All figures side by side; see `Report.plot`."""
    figures = _matplotlib_figures()
    panels = panels_of(report)
    if not panels or report.failure is None:
        why = "the check passed" if report.failure is None else "the failure is not a mismatch of entries"
        raise ValueError(f"the report has no entries to plot: {why}.")
    drawn: Figure = figures.Figure(figsize=(5.2 * len(panels), 4.4), layout="constrained")
    for axes, panel in zip(drawn.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel.draw(axes)
        axes.set_title(panel.title, pad=38)  # the title is above the legend
    drawn.suptitle(messages.key_phrase(report, report.failure).partition("\n")[0].rstrip(":"))
    return drawn


def _matplotlib_figures() -> Any:
    try:
        # Not pyplot, which keeps figures in memory and chooses a GUI backend.
        from matplotlib import figure as figures
    except ImportError:
        raise ImportError(f"{NO_FIGURES}.") from None
    return figures


def svg_of(panel: Panel) -> str:
    """A figure as an SVG element that takes the color of the text around it."""
    import matplotlib

    figures = _matplotlib_figures()
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "fastgrad", "font.family": "sans-serif", "font.size": 11}
    settings |= dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _SENTINEL
    )
    settings |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none")
    with matplotlib.rc_context(settings):
        drawn = figures.Figure(figsize=panel.size, layout="constrained")
        panel.draw(drawn.subplots())
        text = io.StringIO()
        drawn.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(_SENTINEL, "currentColor")
    # The ids in every figure are numbered from one. A prefix makes them unique on a page with several figures.
    name = re.sub(r"\W", "", panel.title)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)


def _ink() -> str:
    """The color of text."""
    import matplotlib

    return str(matplotlib.rcParams["text.color"])


def _draw_map(axes: Axes, entries: Entries, names: tuple[str, str]) -> None:
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
    # Two color scales with a jump between them: within the tolerance, and beyond it.
    stops = np.divide([*element_map.WITHIN, *element_map.BEYOND], 255)
    colors = LinearSegmentedColormap.from_list("errors", list(zip((0.0, 0.5, 0.5, 1.0), stops, strict=True)))
    image = axes.imshow(
        shades, cmap=colors, vmin=-4, vmax=4, aspect="auto", interpolation="nearest", extent=(0, width, height, 0)
    )
    wrong = np.unique(np.stack([rows[entries.failing], columns[entries.failing]], 1), axis=0)
    if 0 < len(wrong) <= MAX_MARKED and height * width > 400:
        ring: Any = {"s": 90, "facecolors": "none", "edgecolors": WRONG, "linewidths": 1.4}
        axes.scatter(wrong[:, 1] + 0.5, wrong[:, 0] + 0.5, **ring)
    for axis, (_, bins, size, shape) in zip((axes.yaxis, axes.xaxis), sides, strict=True):
        most = 6 if axis is axes.yaxis else 4
        marked = sorted({round(i * (size - 1) / max(1, most - 1)) for i in range(most)})
        labels = [str([*element_index(number, shape)]) for number in marked]
        axis.set_ticks([(number + 0.5) * bins / size for number in marked], labels)
    axes.tick_params(labelsize="small")
    axes.set(ylabel=f"element of {names[0]}", xlabel=f"element of {names[1]}")
    bar = axes.figure.colorbar(image, ax=axes, ticks=[-4, -2, 0, 2, 4], shrink=0.9)
    bar.ax.set_yticklabels(["≤ 1e-4", "0.01", "1", "100", "≥ 1e4"], fontsize="small")
    bar.set_label("error / tolerance")


def _draw_errors(axes: Axes, entries: Entries) -> None:
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
                rasterized=bool(chosen.sum() > MAX_POINTS),
                clip_on=False,
                zorder=3,
            )
    axes.set(xscale="log", yscale="log")
    tolerances = allowed[allowed > 0]
    if tolerances.size:
        ends = np.array([tolerances.min() / 1.5, tolerances.max() * 1.5])
        axes.plot(ends, ends, color=_ink(), linewidth=1.2, label="error = tolerance")
        axes.set_xlim(*ends)
    axes.set(ylim=(floor, high * 3), ylabel="error, |analytical - numerical|")
    axes.set_xlabel("tolerance, atol + rtol |numerical|")
    if not finite.all():
        axes.set_title(f"not finite and not shown: {count(int((~finite).sum()), 'entry')}", fontsize="small")
    _finish(axes)


def _draw_convergence(axes: Axes, failure: Failure, worst: Entry, own: Tolerances) -> None:
    steps = np.array([difference.step for difference in failure.convergence])
    estimates = np.array([complex(difference.estimate) for difference in failure.convergence])
    analytical, numerical = complex(worst.analytical), complex(worst.numerical)
    axes.set_xlim(min(*steps, own.eps) / 3, max(*steps, own.eps) * 3)
    axes.set_xscale("log")
    if failure.numerical_issue != "not converged" and math.isfinite(worst.difference) and worst.difference > 0:
        distance = np.abs(estimates - numerical)
        floor = max(1e-18 * worst.difference, 1e-3 * min([worst.allowed, *distance[distance > 0]]))
        axes.plot(steps, np.maximum(distance, floor), "o-", color=RIGHT, markersize=4, label="difference at one step")
        axes.axhline(worst.difference, color=WRONG, linestyle="--", label="analytical value")
        axes.axhline(worst.allowed, color=_ink(), linewidth=1.2, label="tolerance")
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
    axes.axvline(own.eps, color=_ink(), linestyle=":", linewidth=1.2, label=f"eps = {own.eps:g}")
    axes.set_xlabel("step")
    _finish(axes)


def _plain_ticks(axis: Axis) -> None:
    """Labels ticks like 1e-06, as in messages; minor ticks too if the axis spans less than two decades."""
    low, high = axis.get_view_interval()
    narrow = 0 < low < high < 100 * low
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(lambda value, _: f"{value:g}" if narrow and f"{value:e}"[0] in "25" else "")


def _finish(axes: Axes) -> None:
    """Sets plain tick labels, and a legend above the data."""
    _plain_ticks(axes.xaxis)
    _plain_ticks(axes.yaxis)
    if lines := axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=2 if len(lines) == 4 else 3,
            frameon=False,
            fontsize="small",
            handletextpad=0.4,
            columnspacing=1.2,
        )
