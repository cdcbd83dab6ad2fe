"""Makes docs/images: a failure and a pass as pages, a session's index, the documentation, and a notebook in Jupyter.

    python -m docs.make_screenshots

needs `pip install playwright jupyterlab`, Chromium (Debian: chromium) and the site of `make docs`. Pages that are wider
than the screen are an error.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastgrad

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs/images"
SITE = ROOT / "build/docs"
NOTEBOOK = "first-check.ipynb"

WIDE, PHONE, HEIGHT = 1400, 390, 900
"""Widths of the window, on a desktop and a phone, and its height, in pixels."""

PORT, SECONDS = 8899, 60
"""The port of Jupyter, and the seconds that it may take to start and to run a notebook."""

SUITE = """
import pytest
import torch
from torch.autograd import gradcheck

from docs.make_screenshots import Convolution


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_convolution():
    assert gradcheck(Convolution.apply, (leaf(2, 3, 6, 7), leaf(4, 3, 3, 3)))


def test_gate():
    def gated(x):
        return x * x.detach().sigmoid()

    assert gradcheck(gated, leaf(4, 3))


@pytest.mark.parametrize("func", [torch.sin, torch.tanh, torch.exp])
def test_right(func):
    assert gradcheck(func, leaf(9))
"""


class Convolution(torch.autograd.Function):
    """A convolution, with half of the right gradient at the left border."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(image, weight)
        return torch.nn.functional.conv2d(image, weight, padding=1)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        image, weight = ctx.saved_tensors
        of_image = torch.nn.grad.conv2d_input(image.shape, weight, grad_output, padding=1)
        of_image[..., 0] *= 0.5
        return of_image, torch.nn.grad.conv2d_weight(image, weight.shape, grad_output, padding=1)


README = 1000, 1010
"""Width and height of the picture in the README: the top of a failure's page."""


def pages(folder: Path) -> dict[str, str]:
    """The pages to be shown, by name, as addresses."""
    torch.manual_seed(0)
    image, weight, x = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 6, 7), (4, 3, 3, 3), (6, 8))
    )
    (folder / "failure.html").write_text(fastgrad.check(Convolution.apply, (image, weight)).to_html())
    (folder / "pass.html").write_text(fastgrad.check(torch.softmax, x, kwargs={"dim": -1}).to_html())
    (folder / "test_operators.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--fastgrad"]
    subprocess.run(
        [*command, "--fastgrad-report=reports", "test_operators.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        check=False,  # two tests fail
    )
    found = {name: folder / f"{name}.html" for name in ("failure", "pass")}
    found |= {"index": folder / "reports/index.html", "site": SITE / "reading-a-failure.html"}
    return {name: path.as_uri() for name, path in found.items()}


@contextmanager
def jupyter(folder: Path) -> Iterator[str]:
    """A JupyterLab of its own: yields the address of the notebook."""
    shutil.copy(ROOT / "docs" / NOTEBOOK, folder)
    token = secrets.token_hex()
    options = [f"--ServerApp.port={PORT}", f"--IdentityProvider.token={token}", "--no-browser", "--allow-root"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JUPYTER_CONFIG_DIR": str(folder / ".jupyter")}
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *options], cwd=folder, env=environment, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(SECONDS):
            time.sleep(1)
            try:
                urllib.request.urlopen(f"http://localhost:{PORT}/api?token={token}").close()
                break
            except OSError:
                continue
        yield f"http://localhost:{PORT}/lab/tree/{NOTEBOOK}?token={token}"
    finally:
        server.terminate()
        server.wait()


def shoot(browser: Any, address: str, name: str, width: int, scheme: str, most: int | None = None) -> None:
    """A picture of a page: all of it, or as high as `most` pixels."""
    page = browser.new_page(viewport={"width": width, "height": most or HEIGHT}, color_scheme=scheme)
    page.goto(address)
    page.wait_for_timeout(500)
    over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    if over > 0:
        raise SystemExit(f"{name}: the page is {over} pixels wider than {width}")
    page.screenshot(path=IMAGES / f"{name}.png", full_page=most is None)
    page.close()


def shoot_notebook(browser: Any, address: str) -> None:
    """The executed notebook, at the place where it shows the report of a failure."""
    page = browser.new_page(viewport={"width": WIDE, "height": 1300})
    page.goto(address)
    page.wait_for_selector(".jp-Notebook", timeout=SECONDS * 1000)
    page.wait_for_timeout(3000)
    page.get_by_role("button", name="No", exact=True).click()  # whether to show news
    page.keyboard.press("Escape")
    page.get_by_text("Run", exact=True).first.click()
    page.get_by_text("Run All Cells", exact=True).click()
    shown = ".jp-OutputArea-output .fastgrad header"
    page.wait_for_selector(f"{shown}.failed", timeout=SECONDS * 1000)
    for kind in ("passed", "failed"):
        page.locator(f"{shown}.{kind}").first.scroll_into_view_if_needed()
        page.wait_for_timeout(1000)
        page.screenshot(path=IMAGES / f"jupyter-{kind}.png")
    page.close()


def main() -> None:
    """Makes all pictures."""
    from playwright.sync_api import sync_playwright

    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        options: Any = {"executable_path": shutil.which("chromium"), "args": ["--no-sandbox"]}
        browser = playwright.chromium.launch(**options)
        for page, address in pages(folder).items():
            most = HEIGHT if page == "site" else None
            shoot(browser, address, page, WIDE, "light", most)
            shoot(browser, address, f"{page}-dark", WIDE, "dark", most)
            shoot(browser, address, f"{page}-phone", PHONE, "light", most)
        shoot(browser, pages(folder)["failure"], "readme", README[0], "light", README[1])
        with jupyter(folder) as address:
            shoot_notebook(browser, address)
        browser.close()


if __name__ == "__main__":
    main()
