"""Entry of the pytest plugin, options and fixtures; it imports fastgrad and torch only when they are needed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Declares --fastgrad, --fastgrad=compare, --fastgrad=estimate and --fastgrad-report."""
    # For another value, argparse's own message does not name the valid ones.
    config: Any = pluginmanager.get_plugin("pytestconfig")
    for argument in map(str, config.invocation_params.args):
        if argument.startswith("--fastgrad=") and argument not in ("--fastgrad=compare", "--fastgrad=estimate"):
            raise pytest.UsageError(f"pass --fastgrad, --fastgrad=compare or --fastgrad=estimate, got {argument}")
    group = parser.getgroup("fastgrad", "gradient checks by fastgrad")
    group.addoption(
        "--fastgrad",
        action="store_const",
        const="replace",
        help="run fastgrad's gradcheck and gradgradcheck instead of torch's, and print a summary",
    )
    # An option of its own: with an optional value, `--fastgrad tests` would take tests for the value.
    group.addoption(
        "--fastgrad=compare",
        action="store_const",
        const="compare",
        dest="fastgrad",
        help="also run torch's checkers, time both, and fail a test if the verdicts differ",
    )
    group.addoption(
        "--fastgrad=estimate",
        action="store_const",
        const="estimate",
        dest="fastgrad",
        help="skip tests with checks, and write their estimated durations to DIR/durations.json",
    )
    group.addoption(
        "--fastgrad-report",
        metavar="DIR",
        help="with --fastgrad: write each failing check to DIR, as HTML and as JSON, and summary.json",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Starts the plugin if --fastgrad is given."""
    directory = config.option.fastgrad_report
    if config.option.fastgrad is None:
        if directory is not None:
            raise pytest.UsageError("--fastgrad-report needs --fastgrad.")
        return
    if directory == "":
        raise pytest.UsageError("--fastgrad-report must be the name of a directory, got an empty name.")
    try:
        from fastgrad.testing.pytest_plugin import Estimates, Session
    except ImportError as error:
        raise pytest.UsageError(f"--fastgrad: {error}") from error
    report = None if directory is None else config.invocation_params.dir / directory
    if report is not None:
        _make_directory(report)
    if config.option.fastgrad == "estimate":
        if report is None:
            raise pytest.UsageError(
                "--fastgrad=estimate needs --fastgrad-report=DIR, to which it writes durations.json."
            )
        config.pluginmanager.register(Estimates(config, report), "fastgrad-session")
        return
    config.pluginmanager.register(Session(config, config.option.fastgrad == "compare", report), "fastgrad-session")


def _make_directory(report: Path) -> None:
    """Fails before the tests run, not after them."""
    try:
        report.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise pytest.UsageError(f"--fastgrad-report must be a directory that can be made: {error}") from error
    if not os.access(report, os.W_OK):
        raise pytest.UsageError(f"--fastgrad-report must be a directory that can be written, got {report}")


@pytest.fixture(scope="session")
def gradcheck(pytestconfig: pytest.Config) -> Callable[..., bool]:
    """`fastgrad.gradcheck`; with --fastgrad counted, and with --fastgrad=compare compared, like torch's."""
    return _checker(pytestconfig, "gradcheck")


@pytest.fixture(scope="session")
def gradgradcheck(pytestconfig: pytest.Config) -> Callable[..., bool]:
    """`fastgrad.gradgradcheck`; with --fastgrad counted, and with --fastgrad=compare compared, like torch's."""
    return _checker(pytestconfig, "gradgradcheck")


def _checker(config: pytest.Config, name: str) -> Callable[..., bool]:
    import torch

    import fastgrad

    checker: Callable[..., bool] = getattr(torch.autograd if config.option.fastgrad else fastgrad, name)
    return checker
