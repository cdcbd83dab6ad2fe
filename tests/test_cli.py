"""python -m fastgrad."""

from __future__ import annotations

import pytest

import fastgrad
from fastgrad import cli


def test_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo"]) == 0, "every verdict is as it must be, and torch's"
    text = capsys.readouterr().out
    rows = [line for line in text.splitlines() if line.startswith(("gradcheck", "gradgradcheck"))]
    assert len(rows) == 16
    assert sum("failed" in row for row in rows) == 1
    assert "a missing factor 2" in text


def test_version_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert fastgrad.__version__ in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        cli.main(["dance"])
    assert stop.value.code == 2
