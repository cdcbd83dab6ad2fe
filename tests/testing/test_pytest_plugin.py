"""pytest --fastgrad, in sessions inside this one; few have their own process, because importing torch takes long."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

# Imports torch here, because sessions inside tests undo their imports, and torch cannot be imported twice.
import fastgrad.report.html  # noqa: F401
from fastgrad.testing.pytest_plugin import Session, Summary

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
# Hypothesis would be imported again in every session.
PLUGIN = ("-p", "pytest_fastgrad", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")

OPERATORS = """
import torch

x = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)

class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output

class Rolled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad_output):
        return 2 * grad_output.roll(1)

def rolled(check, **keywords):
    many = torch.linspace(-1, 1, 8000, dtype=torch.float64, requires_grad=True)
    return check(Rolled.apply, many, fast_mode=True, **keywords)
"""


@pytest.fixture(scope="module", autouse=True)
def torchs_imports() -> None:
    torch.autograd.gradcheck(torch.sin, torch.ones(1, dtype=torch.float64, requires_grad=True))


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """An empty suite with its operators; workers find this source tree, installed or not."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    pytester.makepyfile(operators=OPERATORS)
    return pytester


def run(suite: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    original = torch.autograd.gradcheck.__code__
    result = suite.runpytest_inprocess(*PLUGIN, *arguments)
    assert torch.autograd.gradcheck.__code__ is original, "restored, however the session ended"
    return result


def test_names_imported_early_and_late_classes_and_fixtures(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        early="from torch.autograd import gradcheck as theirs",
        conftest="import early",
        test_suite="""
        import unittest

        import early
        import pytest
        import torch
        from torch.autograd import gradcheck, gradgradcheck
        from operators import Halved, x

        @pytest.mark.parametrize("check", [gradcheck, gradgradcheck, early.theirs])
        def test_names(check):
            assert check(torch.sin, x)

        def test_fixtures(gradcheck, gradgradcheck):
            assert gradcheck(torch.sin, x, engine="dense")
            assert gradgradcheck(torch.sin, x)

        class TestOld(unittest.TestCase):
            def setUp(self):
                gradcheck(torch.cos, x)

            def test_one(self):
                self.assertTrue(gradcheck(torch.sin, x))
                with self.assertRaisesRegex(RuntimeError, "Jacobian mismatch"):
                    gradcheck(Halved.apply, x)

        def test_wrong():
            gradcheck(Halved.apply, x)

        def test_raising():
            def func(x):
                raise IndexError("of func")
            gradcheck(func, x)
        """,
    )
    result = run(suite, "--fastgrad", ".")  # a path after the flag is not its value
    result.assert_outcomes(passed=5, failed=2)
    result.stdout.fnmatch_lines(
        [
            "fastgrad *: gradcheck and gradgradcheck instead of torch's",
            # The line of the test is shown, but no line of the checker.
            ">       gradcheck(Halved.apply, x)",
            "E       fastgrad.GradcheckError: Halved: gradient of x (*) is wrong in *",
            "*= fastgrad =*",
            "10 checks (8 gradcheck, 2 gradgradcheck): 7 passed, 2 failed, 1 raised (1 IndexError)",
            "fastgrad *s",
            "engines: 9 dense",
            "slowest:",
            "*gradcheck * dense * test_suite.py::*",
        ]
    )
    assert "patching.py" not in result.stdout.str()


def test_compare_fails_where_the_verdicts_differ_whatever_the_test_makes_of_it(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_suite="""
        import pytest
        from operators import Halved, rolled, x
        from torch.autograd import gradcheck

        def test_same():
            with pytest.raises(RuntimeError):
                gradcheck(Halved.apply, x)

        def test_planted():
            assert rolled(gradcheck)

        def test_swallowed():
            try:
                rolled(gradcheck)
            except Exception:
                pass

        @pytest.mark.xfail
        def test_expected():
            assert not rolled(gradcheck, raise_exception=False)
        """
    )
    result = run(suite, "--fastgrad=compare")
    result.assert_outcomes(passed=1, failed=3)
    text = result.stdout.str().partition("short test summary")[0]  # it repeats the messages if CI is set
    assert text.count("fastgrad's gradcheck failed, and torch's passed") == 3
    assert text.count("torch: passed after") == 3
    assert text.count("its slow mode shows which verdict is right") == 3
    result.stdout.fnmatch_lines(
        [
            "4 checks (4 gradcheck): 4 failed",
            "fastgrad *s, torch *s (* takes * times as long)",
            "verdicts that differ: 3",
            "  test_suite.py::test_expected",
            "  test_suite.py::test_planted",
            "  test_suite.py::test_swallowed",
            "engines: *",
            "* torch * gradcheck *",
        ]
    )


def test_reports_of_failing_checks(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # plots take a second each; other tests have some
    long = "x" * 300
    suite.makepyfile(
        test_suite=f"""
        import pytest
        from operators import Halved, x
        from torch.autograd import gradcheck

        def test_twice():
            assert gradcheck(lambda x: x * 2, x)
            assert not gradcheck(Halved.apply, x, raise_exception=False)
            gradcheck(Halved.apply, x)

        @pytest.mark.parametrize("name", ["a/b:c"])
        def test_names(name):
            gradcheck(Halved.apply, x)

        def test_{long}1():
            gradcheck(Halved.apply, x)

        def test_{long}2():
            gradcheck(Halved.apply, x)
        """
    )
    result = run(suite, "--fastgrad", "--fastgrad-report=reports/here")
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(["*fastgrad's report*", "*test_twice-2.html", "reports of 5 failing checks: *here"])
    directory = suite.path / "reports/here"
    names = {path.name for path in directory.iterdir()}
    pages = {name for name in names if name.endswith(".html")}
    assert len(pages) == 6
    assert {"index.html", "test_suite.py-test_twice-1.html", "test_suite.py-test_names-a-b-c-1.html"} <= pages
    reports = {name.replace(".html", ".json") for name in pages - {"index.html"}}
    assert names - pages == reports | {"summary.json", "durations.json"}
    report = json.loads((directory / "test_suite.py-test_twice-1.json").read_text())
    assert report["failure"]["kind"] == "mismatch"
    assert "<html" in (directory / "test_suite.py-test_twice-1.html").read_text()
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["verdicts"] == {"passed": 1, "failed": 5}
    assert len(summary["reports"]) == 5
    index = (directory / "index.html").read_text()
    assert "5 failing checks" in index
    assert all(f'href="{name}"' in index for name in pages - {"index.html"})
    assert "Halved: gradient of x" in index


def test_a_single_check_is_counted_in_the_singular(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        from operators import Halved, x
        from torch.autograd import gradcheck

        def test_wrong():
            gradcheck(Halved.apply, x)
        """
    )
    result = run(suite, "--fastgrad", "--fastgrad-report=reports")
    result.stdout.fnmatch_lines(["1 check (1 gradcheck): 1 failed", "reports of 1 failing check: *reports"])
    assert "1 failing check<" in (suite.path / "reports/index.html").read_text()
    result = run(suite, "--fastgrad=estimate", "--fastgrad-report=reports")
    result.stdout.fnmatch_lines(["1 test would take *"])


def test_workers_of_xdist_hand_over_what_they_counted(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        conftest="import sys; sys.modules['matplotlib'] = None",
        test_suite="""
        import pytest
        import torch
        from operators import Halved, rolled, x
        from torch.autograd import gradcheck, gradgradcheck

        @pytest.mark.parametrize("number", range(6))
        def test_many(number):
            assert gradcheck(torch.sin, x) and gradgradcheck(torch.sin, x)

        def test_wrong():
            gradcheck(Halved.apply, x)

        def test_planted():
            rolled(gradcheck)
        """,
    )
    result = run(suite, "-n", "2", "--fastgrad=compare", "--fastgrad-report=reports")
    result.assert_outcomes(passed=6, failed=2)
    result.stdout.fnmatch_lines(
        [
            "14 checks (8 gradcheck, 6 gradgradcheck): 12 passed, 2 failed",
            "fastgrad *s, torch *s (* takes * times as long)",
            "verdicts that differ: 1",
            "  test_suite.py::test_planted",
            "reports of 2 failing checks: *reports",
        ]
    )
    assert len(list((suite.path / "reports").glob("*.html"))) == 3
    assert (suite.path / "reports/index.html").read_text().count("<a href=") == 2
    durations = json.loads((suite.path / "reports/durations.json").read_text())
    assert len(durations) == 8
    assert min(durations.values()) > 0


def test_what_continuous_integration_reads(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.makepyfile(
        test_suite="""
        from operators import Halved, x
        from torch.autograd import gradcheck

        def test_wrong():
            assert gradcheck(lambda x: x * 2, x)
            gradcheck(Halved.apply, x)
        """
    )
    step = suite.path / "step.md"
    step.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(step))
    run(suite, "--fastgrad", "--junit-xml=junit.xml").assert_outcomes(failed=1)
    assert step.read_text().startswith("before\n### fastgrad\n\n```\n2 checks (2 gradcheck): 1 passed, 1 failed\n")
    properties = re.findall(r'<property name="([^"]+)" value="(\w+) in', (suite.path / "junit.xml").read_text())
    assert properties == [("fastgrad gradcheck 1", "passed"), ("fastgrad gradcheck 2", "failed")]


def test_undecided_checks_are_listed() -> None:
    summary = Summary()
    report: Any = SimpleNamespace(verdict="undecided", plan=None)
    outcome: Any = SimpleNamespace(verdict="passed", seconds=1.0)
    check: Any = SimpleNamespace(name="gradcheck", report=report, ours=outcome, torch=None, differs=False)
    summary.add(check, "test_a.py::test_b")
    merged = Summary()
    merged.merge(json.loads(json.dumps(summary.as_dict())))
    assert merged.lines()[2:4] == [
        'undecided (see the message of each; engine="dense" compares every entry):',
        "  test_a.py::test_b",
    ]


def test_durations_are_what_pytest_split_reads(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_suite="""
        import time
        import pytest

        @pytest.mark.parametrize("seconds", [0.3, 0.1, 0.1, 0.1])
        def test_sleeping(seconds):
            time.sleep(seconds)
        """
    )
    run(suite, "--fastgrad", "--fastgrad-report=reports").assert_outcomes(passed=4)
    split = ["--splits", "2", "--durations-path", "reports/durations.json", "--splitting-algorithm", "least_duration"]
    counts = [run(suite, *split, "--group", group).parseoutcomes()["passed"] for group in ("1", "2")]
    assert sorted(counts) == [1, 3]


def test_estimates_of_a_suite_that_has_never_run(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_suite="""
        import time
        import pytest
        import torch

        def slow(x):
            time.sleep(0.05)
            return x.cumsum(0)

        @pytest.mark.parametrize("n", [20, 200])
        @pytest.mark.parametrize("fast", [False, True])
        def test_slow(n, fast):
            x = torch.ones(n, dtype=torch.float64, requires_grad=True)
            assert torch.autograd.gradcheck(slow, x, fast_mode=fast)

        def test_both_orders():
            x = torch.ones(3, dtype=torch.float64, requires_grad=True)
            assert torch.autograd.gradcheck(torch.sin, x) and torch.autograd.gradgradcheck(torch.sin, x)

        def test_wrong():
            x = torch.ones(3, dtype=torch.float64, requires_grad=True)
            with pytest.raises(RuntimeError):
                torch.autograd.gradcheck(lambda x: x.detach() + x, x)

        def test_none():
            pass
        """
    )
    begin = time.monotonic()
    run(suite, "--fastgrad=estimate", "--fastgrad-report=reports").assert_outcomes(passed=1, skipped=6)
    durations = {
        name.partition("::")[2]: n for name, n in json.loads(Path("reports/durations.json").read_text()).items()
    }
    assert sum(durations.values()) > time.monotonic() - begin, "it runs what it says nothing of"
    assert 1.5 < durations["test_slow[False-20]"] < 5  # 40 evaluations of 50 ms, in addition to those of the estimate
    assert 5 < durations["test_slow[False-200]"] / durations["test_slow[False-20]"] < 12
    assert durations["test_slow[True-200]"] < durations["test_slow[False-200]"] / 4
    assert len(durations) == 7


def test_a_worker_that_crashes_is_told() -> None:
    session: Any = SimpleNamespace(_summary=Summary())
    Session.pytest_testnodedown(session, SimpleNamespace())
    assert session._summary.lines()[-1] == "not counted: the checks of crashed workers (1)"


@pytest.mark.parametrize(
    ("conftest", "code"),
    [
        ("def pytest_runtest_setup(item): raise KeyboardInterrupt", pytest.ExitCode.INTERRUPTED),
        ("raise RuntimeError('of conftest')", pytest.ExitCode.USAGE_ERROR),
        ("import pytest\ndef pytest_sessionstart(): pytest.exit('enough')", pytest.ExitCode.INTERRUPTED),
    ],
)
def test_interrupted_sessions_restore_torch(suite: pytest.Pytester, conftest: str, code: pytest.ExitCode) -> None:
    suite.makepyfile(conftest=conftest, test_suite="def test_nothing(): pass")
    try:
        assert run(suite, "--fastgrad").ret == code
    except KeyboardInterrupt:
        assert code == pytest.ExitCode.INTERRUPTED


def test_usage(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.makepyfile(test_suite="def test_nothing(): pass")
    result = run(suite, "--fastgrad-report=reports")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--fastgrad-report needs --fastgrad."])
    result = run(suite, "--fastgrad=estimate")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*--fastgrad=estimate needs --fastgrad-report=DIR, to which it writes durations.json."]
    )
    result = run(suite, "--fastgrad", "--fastgrad-report=")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--fastgrad-report must be the name of a directory, got an empty name."])
    (suite.path / "taken").write_text("a file")
    result = run(suite, "--fastgrad", "--fastgrad-report=taken/reports")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--fastgrad-report must be a directory that can be made: *taken/reports*"])
    result = run(suite, "--fastgrad=contrast")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    wanted = "ERROR: pass --fastgrad, --fastgrad=compare or --fastgrad=estimate, got --fastgrad=contrast"
    assert [line for line in result.errlines if line] == [wanted]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "fastgrad.testing.pytest_plugin", None)
        result = run(suite, "--fastgrad")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--fastgrad: import of fastgrad.testing.pytest_plugin halted*"])
    result = run(suite, "--fastgrad")
    result.stdout.fnmatch_lines(["no checks: no test called*"])


def test_without_the_flag_the_fixtures_are_fastgrads_and_torchs_names_are_torchs(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_suite="""
        import fastgrad
        import torch

        def test_fixtures(gradcheck, gradgradcheck):
            assert gradcheck is fastgrad.gradcheck and gradgradcheck is fastgrad.gradgradcheck
            assert torch.autograd.gradcheck.__code__.co_filename.endswith("gradcheck.py")
        """
    )
    result = run(suite)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*= fastgrad =*")
    result.stdout.no_fnmatch_line("fastgrad *")


def test_without_the_flag_nothing_is_imported(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_suite="def test_nothing(): pass")
    code = f"""
import sys, pytest
assert pytest.main(["-q", *{PLUGIN!r}, "test_suite.py"]) == 0
print("imported:", sorted({{"torch", "numpy", "fastgrad", "pytest_fastgrad"}} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=suite.path)
    assert result.stdout.splitlines()[-1] == "imported: ['pytest_fastgrad']"
