"""The gallery of mistakes has the messages of the present code."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import make_gallery


def test_the_gallery_is_up_to_date(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_gallery.main(["--check"]) == 0
    old = tmp_path / "gallery.md"
    old.write_text(make_gallery.FILE.read_text().replace("allowed", "aloud", 1))
    monkeypatch.setattr(make_gallery, "FILE", old)
    assert make_gallery.main(["--check"]) == 1
    assert "make gallery" in capsys.readouterr().err


def test_what_differs_from_run_to_run() -> None:
    left, right = "4.1 +- 8e-14 (residual 2e-11), allowed 1e-05", "4.1 +- 7.5e-13 (residual 3e-10), allowed 1e-05"
    assert make_gallery.without_chance(left) == make_gallery.without_chance(right)
    assert make_gallery.without_chance(left) != make_gallery.without_chance(left.replace("4.1", "4.2"))
    assert "allowed 1e-05" in make_gallery.without_chance(left)
    calls = "dense: 8 input coordinates, 59 evaluations, 12 VJPs"
    assert make_gallery.without_chance(calls) == make_gallery.without_chance(calls.replace("59", "63"))
    assert make_gallery.without_chance(calls) != make_gallery.without_chance(calls.replace("8 input", "9 input"))
    worst = "  worst      d out0[0, 2] / d signal[0, 3]   analytical 1.08134"
    assert make_gallery.without_chance(worst) == make_gallery.without_chance(worst.replace("[0, 3]", "[0, 1]"))
    assert make_gallery.without_chance(worst) != make_gallery.without_chance(worst.replace("1.08134", "1.2"))
