"""Pages and figures are complete and escaped for any report, and never as large as the Jacobian."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from typing import get_args

import numpy as np
import pytest
import torch

from fastgrad.report import figures
from fastgrad.report.evidence import Sample
from fastgrad.report.failure import FailureKind
from fastgrad.report.report import Report
from fastgrad.report.settings import Tolerances
from tests import processes
from tests.report.test_report import run, scaled, synthetic, uniform


class Page(HTMLParser):
    """Asserts that tags are closed in order; keeps texts and attributes."""

    VOID = frozenset({"meta", "br", "path", "use", "rect", "image", "stop", "circle"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


@pytest.fixture(scope="module")
def failed() -> Report:
    """A failure with a sample: a gradient that is wrong in one row."""
    report = run(scaled(2), uniform(4, 5), engine="compressed")
    x = uniform(4, 5).detach().reshape(-1)
    elements = torch.arange(20)
    factors = torch.where(elements // 5 == 2, 1.5, 1.0)
    return replace(
        report, sample=Sample((4, 5), (4, 5), elements, elements, 2 * x * factors, 2 * x, elements // 5 == 2)
    )


@pytest.fixture(scope="module")
def text_of_failed(failed: Report) -> str:
    return failed.to_html()


def test_the_page_of_a_failure(text_of_failed: str) -> None:
    page = Page(text_of_failed)
    assert page.tags.count("svg") == page.tags.count("figure") == 5
    text = page.text
    assert "gradcheck failed: 5 of 20 nonzero entries of d out0 / d x are wrong" in text
    assert "all in out0[2, :] and x[2, :]" in text
    assert "d out0[2, 0] / d x[2, 0]" in text
    assert "fastgrad.gradcheck(..., eps=1e-06, atol=1e-05, rtol=0.001, engine='compressed', seed=0)" in text
    assert "x, dimension 0" in text
    for title in (
        "Failure",
        "Checked function",
        "Worst entries",
        "Figures",
        "Comparison",
        "Cost",
    ):
        assert title in text


def test_the_page_of_a_passed_check() -> None:
    page = Page(run(torch.sin, uniform(3)).to_html())
    assert ("class", "passed") in page.attributes
    assert "figure" not in page.tags
    assert "backward is linear in grad_output" in page.text
    assert "Failure" not in page.text
    assert "JVPs" not in page.text
    assert "JVPs" in Page(run(torch.sin, uniform(3), check_forward_ad=True).to_html()).text


@pytest.mark.parametrize(("fast", "said"), [(False, "50"), (True, "at least 1")])
def test_entries_that_were_not_examined_are_not_counted_as_right(fast: bool, said: str) -> None:
    report = run(scaled(0), uniform(50), fast_mode=fast)
    (pair,) = report.pairs
    assert pair.exhaustive != fast
    assert f'<td class="number">{said}</td>' in report.to_html()


def test_a_page_needs_nothing_else(text_of_failed: str) -> None:
    text = text_of_failed
    page = Page(text)
    assert not {"script", "link", "iframe", "img"} & set(page.tags)
    for name, value in page.attributes:
        if name in ("href", "xlink:href", "src"):
            assert value.startswith(("#", "data:image/png;base64,"))
    outside = set(re.findall(r'https?://[^\s"<]+', text))
    assert outside <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names, not addresses
    assert "@import" not in text
    assert "url(" not in text.replace("url(#", "")


def test_names_within_a_page_are_unique(text_of_failed: str) -> None:
    page = Page(text_of_failed)
    names = [value for name, value in page.attributes if name == "id"]
    assert len(names) == len(set(names)) > 0
    used = {value[1:] for name, value in page.attributes if name in ("href", "xlink:href") and value.startswith("#")}
    used |= set(re.findall(r"url\(#([^)]+)\)", text_of_failed))
    assert used <= set(names)


def test_figures_take_the_color_of_the_text(text_of_failed: str) -> None:
    assert "currentColor" in text_of_failed
    assert "#010203" not in text_of_failed
    for svg in re.findall(r"<svg.*?</svg>", text_of_failed, re.DOTALL):
        fills = re.findall(r"<text[^>]*style=\"([^\"]*)", svg)
        assert fills or "<title>" in svg
        assert all("fill: currentColor" in fill for fill in fills)


def test_everything_is_escaped() -> None:
    report = synthetic()
    page = Page(report.to_html())
    assert "script" not in page.tags
    assert "b" not in page.tags
    for text in (
        "a <note>",
        "the sign is < wrong".capitalize(),
        "all & sundry",
        "cuda:0 <A>",
        "a < b",
        "by > 2 vectors",
    ):
        assert text in page.text


@pytest.mark.parametrize("kind", get_args(FailureKind))
def test_every_kind_of_failure_has_a_page(kind: FailureKind) -> None:
    report = synthetic()
    assert report.failure is not None
    failure = replace(report.failure, kind=kind, comparison=None, convergence=(), detail="<script>alert(1)</script>")
    page = Page(replace(report, failure=failure, sample=None).to_html())
    assert "script" not in page.tags
    assert f"gradcheck failed: {kind}" in page.text.replace("gradgrad", "grad")


def test_a_notebook_shows_the_same_page(failed: Report, text_of_failed: str) -> None:
    fragment = failed._repr_html_()
    assert fragment in text_of_failed  # the same report gives the same page
    assert "<html" not in fragment


def test_the_three_panels(failed: Report) -> None:
    figure = failed.plot()
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["Errors by position", "Errors and tolerances", "The worst entry by step", ""]
    assert figure.get_suptitle() == "Jacobian mismatch for output 0 with respect to input 0"


def test_the_map_shows_the_largest_error_of_each_cell(failed: Report) -> None:
    (image,) = failed.plot().axes[0].get_images()
    shades = image.get_array()
    assert shades is not None
    assert shades.shape == (20, 20)
    shown = np.argwhere(~np.ma.getmaskarray(shades))
    np.testing.assert_array_equal(shown, [[k, k] for k in range(20)])
    wrong = np.argwhere(np.ma.filled(shades, -1) > 0)
    np.testing.assert_array_equal(wrong, [[k, k] for k in range(10, 15)])
    value = 2 * uniform(4, 5).detach().reshape(-1)[10].item()
    assert shades[10, 10] == pytest.approx(np.log10(value / 2 / (1e-5 + 1e-3 * value)))


def test_errors_are_drawn_against_their_tolerance(failed: Report) -> None:
    axes = failed.plot().axes[1]
    right, wrong = (np.asarray(points.get_offsets()) for points in axes.collections)
    assert (len(right), len(wrong)) == (15, 5)
    value = 2 * uniform(4, 5).detach().reshape(-1)[10:15].numpy()
    np.testing.assert_allclose(wrong, np.stack([1e-5 + 1e-3 * value, value / 2], 1))
    (line,) = axes.get_lines()
    np.testing.assert_array_equal(*line.get_data())


def test_an_input_may_have_tolerances_of_its_own(failed: Report) -> None:
    settings = replace(failed.settings, inputs=(Tolerances(1e-4, 1e-2, 0.0),))
    figure = replace(failed, settings=settings).plot()
    for points in figure.axes[1].collections:
        assert set(np.asarray(points.get_offsets())[:, 0]) == {1e-2}
    assert figure.axes[2].get_lines()[-1].get_xdata()[0] == 1e-4


def test_convergence_is_drawn(failed: Report) -> None:
    axes = failed.plot().axes[2]
    assert failed.failure is not None
    assert failed.failure.comparison is not None
    curve, analytical, allowed, eps = axes.get_lines()
    np.testing.assert_array_equal(curve.get_xdata(), [difference.step for difference in failed.failure.convergence])
    worst = failed.failure.comparison.worst
    assert worst is not None
    assert analytical.get_ydata()[0] == pytest.approx(worst.difference)
    assert allowed.get_ydata()[0] == pytest.approx(worst.allowed)
    assert eps.get_xdata()[0] == 1e-6


def test_what_did_not_converge_is_drawn_as_it_is() -> None:
    generator = torch.Generator().manual_seed(0)
    report = run(lambda x: x + 1e-3 * torch.rand(x.shape, dtype=x.dtype, generator=generator), uniform(3))
    axes = report.plot().axes[2]
    assert axes.get_ylabel() == "derivative"
    assert report.failure is not None
    estimates = [difference.estimate for difference in report.failure.convergence]
    np.testing.assert_array_equal(axes.get_lines()[0].get_ydata(), estimates)


@pytest.mark.parametrize("size", [1, 4096])
def test_a_map_is_never_as_large_as_the_jacobian(failed: Report, size: int) -> None:
    n = 10**9
    places = torch.linspace(0, n - 1, size, dtype=torch.float64).long()
    values = torch.linspace(1, 2, size, dtype=torch.float64)
    failing = torch.arange(size) == size // 2
    sample = Sample((n,), (n // 1000, 1000), places, places, torch.where(failing, 2 * values, values), values, failing)
    report = replace(failed, sample=sample)
    (image,) = report.plot().axes[0].get_images()
    shades = image.get_array()
    assert shades is not None
    assert shades.shape == (figures.BINS, figures.BINS)
    assert (np.ma.filled(shades, -9) > 0).sum() == 1
    assert len(report.to_html()) < 1_000_000


def test_small_jacobians_are_drawn_whole_without_a_sample() -> None:
    report = replace(run(scaled(1, 1), uniform(3, 2), engine="dense"), sample=None)
    (image,) = report.plot().axes[0].get_images()
    shades = image.get_array()
    assert shades is not None
    np.testing.assert_array_equal(np.argwhere(np.ma.filled(shades, -9) > 0), [[3, 3]])
    assert "All entries are shown." in report.to_html()


def test_otherwise_the_worst_entries_are() -> None:
    report = replace(run(scaled(2), uniform(30, 3), engine="compressed"), sample=None)
    (image,) = report.plot().axes[0].get_images()
    assert np.argwhere(~np.ma.getmaskarray(image.get_array())).tolist() == [[6, 6], [7, 7], [8, 8]]


def test_values_that_are_not_finite() -> None:
    report = synthetic()
    assert report.sample is not None
    values = torch.tensor([1.0, torch.nan, torch.inf, 0.0], dtype=torch.float64)
    some = torch.arange(4)
    sample = replace(
        report.sample, outputs=some, inputs=some, analytical=values, numerical=values.flip(0) * 0, failing=some > 0
    )
    figure = replace(report, sample=sample).plot()
    assert figure.axes[1].get_title() == "Errors and tolerances"
    assert "not finite and not shown: 2 entries" in replace(report, sample=sample).to_html()
    figure.canvas.draw()


def test_complex_entries_by_their_modulus() -> None:
    report = run(scaled(..., factor=1j), uniform(3, dtype=torch.complex128), engine="dense")
    wrong = np.asarray(report.plot().axes[1].collections[-1].get_offsets())
    assert report.failure is not None
    assert report.failure.comparison is not None
    assert wrong[:, 1].max() == pytest.approx(report.failure.comparison.largest_absolute, rel=1e-6)


def test_nothing_to_plot() -> None:
    with pytest.raises(ValueError, match=r"no entries to plot: the check passed\."):
        run(torch.sin, uniform(3)).plot()
    report = synthetic()
    assert report.failure is not None
    with pytest.raises(ValueError, match="not a mismatch of entries"):
        replace(report, failure=replace(report.failure, comparison=None)).plot()


def test_without_matplotlib(failed: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = Page(failed.to_html())
    assert page.tags.count("svg") == 2  # the figures that are drawn without matplotlib
    assert "plots need matplotlib: pip install matplotlib." in page.text
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        failed.plot()


def test_pictures_cost_nothing_until_they_are_asked_for() -> None:
    code = (
        "import sys, torch, fastgrad; x = torch.ones(3, dtype=torch.float64, requires_grad=True)\n"
        "fastgrad.gradcheck(torch.sin, x)\n"
        "print([name for name in ('matplotlib', 'fastgrad.report.html', 'html') if name in sys.modules])"
    )
    found = processes.run(code)
    assert found.stdout == "[]\n", found.stderr
