"""The command line: fastgrad, python -m fastgrad."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import fastgrad
from fastgrad.tools import bench, cli, doctor, specs

OPERATORS = """
import torch

class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output

class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x, power=1):
        return x * self.weight**power

class Wrong(Scale):
    def forward(self, x):
        return x.detach() * self.weight + Halved.apply(self.weight)

class Sized(torch.nn.Module):
    def __init__(self, size):
        super().__init__()

def take(x, index, *, twice=False):
    return x[index] * (2 if twice else 1)

def make():
    return Scale()

def boom(x):
    raise RuntimeError("of func")

def leave():
    raise SystemExit(0)

def leaving(x):
    raise SystemExit(0)

class Leaving(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad_output):
        raise SystemExit(0)

scale = Scale()
number = 3
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file with operators; changes of sys.path and sys.modules are undone."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "operators_of_mine", None)
    monkeypatch.delitem(sys.modules, "operators_of_mine")
    path = tmp_path / "operators_of_mine.py"
    path.write_text(OPERATORS)
    monkeypatch.chdir(tmp_path)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("torch:sin", "-i", "float64[3,2]"),
        ("torch.nn.functional:softmax", "-i", "float64[4,3]{-1..1}", "-k", "dim=1"),
        ("operators_of_mine:take", "-i", "float64[6,2]", "--input", "int64[4]{0..5}", "-k", "twice=True"),
        ("operators_of_mine.py:take", "-i", "float64[6,2]", "-i", "[1, 3]"),
        ("operators_of_mine:Scale", "-i", "float64[2,3]"),
        ("operators_of_mine:scale.forward", "-i", "float64[2,3]"),
        ("operators_of_mine:make()", "-i", "complex128[2,3]", "-k", "power=2", "--order", "both"),
        ("torch:sin", "-i", "float64[3,2],noncontiguous", "--order", "2", "--mode", "both"),
        ("torch:sin", "-i", "float64[3]", "--order", "2", "--mode", "forward"),
        ("torch:sin", "-i", "float64[40]", "--fast", "--engine", "sketch", "--batched", "--no-undefined-grad"),
        ("torch:sin", "-i", "float64[]", "--engine", "dense", "--eps", "1e-5", "--seed", "3", "--no-progress"),
    ],
)
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_right_functions_pass(file: str, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    code, out, err = run(capsys, "check", *arguments)
    assert (code, err) == (0, "")
    orders = 2 if "both" in arguments and "--order" in arguments and "--mode" not in arguments else 1
    assert out.count(" passed") == orders
    assert out.startswith(f"{arguments[0]} at ")


def test_tolerances_of_one_input(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ("check", f"{file}:Wrong", "-i", "float64[2,3]")
    assert run(capsys, *wrong)[0] == 1
    assert run(capsys, *wrong, "--atol", "inputs[0]=100", "--atol", "module.weight=100")[0] == 0
    assert run(capsys, *wrong, "--atol", "100")[0] == 0
    code, _, err = run(capsys, *wrong, "--atol", "inputs[0]=100", "--atol", "3")
    assert (code, err) == (
        2,
        "fastgrad check: --atol takes either one number or INPUT=VALUE, not both\n",
    )
    code, _, err = run(capsys, *wrong, "--atol", "inputs[0]=100", "--atol", "inputs[0]=1")
    assert (code, err) == (2, "fastgrad check: --atol gives inputs[0] twice\n")


def test_a_tolerance_that_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("inputs[0]=x", "=1"):
        with pytest.raises(SystemExit):
            cli.main(["check", "torch:sin", "-i", "float64[3]", "--atol", text])
        assert f"--atol: must be VALUE or INPUT=VALUE with a number, got '{text}'" in capsys.readouterr().err


def test_a_file_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--checkpoint", "--html"):
        with pytest.raises(SystemExit):
            cli.main(["check", "torch:sin", "-i", "float64[3]", f"{option}="])
        assert f"{option}: must be the name of a file, got an empty name" in capsys.readouterr().err


def test_derivatives_of_the_inputs_alone(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    for wrt, names in (("inputs", ["inputs[0]"]), ("parameters", ["module.weight"])):
        _, out, _ = run(capsys, "check", f"{file}:Wrong", "-i", "float64[2,3]", "--wrt", wrt, "--json")
        assert json.loads(out)["checks"][0]["report"]["input_names"] == names


def test_an_interrupt_ends_quietly(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "sin", interrupted)
    code, _, err = run(capsys, "check", "torch:sin", "-i", "float64[3]")
    assert (code, err) == (130, "fastgrad check: interrupted\n")


def test_a_closed_pipe_ends_quietly() -> None:
    # without the warning that plain Python is slower
    command = [sys.executable, "-W", "ignore", "-m", "fastgrad", "check", "torch:sin", "-i", "float64[3]"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 2


def test_a_wrong_function_fails_and_is_reported(
    file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    code, out, err = run(capsys, "check", f"{file}:Halved", "-i", "float64[4]", "--html", str(page))
    assert (code, err) == (1, "")
    assert out.startswith(f"{file}:Halved at float64[4]\ngradcheck failed\nHalved: gradient of inputs[0] (float64[4])")
    assert "  worst      d " in out
    assert "<html" in page.read_text()
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # one page with plots is enough
    arguments = ("check", f"{file}:Wrong", "-i", "float64[2,3]", "--order", "both", "--json", "--html", str(page))
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (1, "")
    document = json.loads(out)
    assert document["inputs"] == ["float64[2,3]"]
    assert [check["checker"] for check in document["checks"]] == ["gradcheck", "gradgradcheck"]
    failed = document["checks"][0]
    assert failed["verdict"] == "failed"
    assert failed["error"] is None
    assert "\nJacobian mismatch" in failed["message"]
    assert failed["report"]["failure"]["kind"] == "mismatch"
    # The parameter that requires grad is checked, too, in the dtype of the input.
    assert failed["report"]["input_names"] == ["inputs[0]", "module.weight"]
    assert page.with_name("page-gradcheck.html").exists()
    assert page.with_name("page-gradgradcheck.html").exists()


def test_variants(file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, out, err = run(capsys, "check", "torch:sin", "-i", "float64[4,3]", "--variants", "--html", str(page))
    assert (code, err) == (0, "")
    assert "\ncheck_variants passed: 0 of " in out
    assert "layouts: rows expanded" in page.read_text()
    code, out, err = run(capsys, "check", f"{file}:Halved", "-i", "float64[4]", "--variants", "--fast", "--json")
    assert (code, err) == (1, "")
    rows = json.loads(out)["variants"]["rows"]
    assert (rows[0]["name"], rows[0]["verdict"]) == ("as given", "failed")


def test_variants_without_a_verdict(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "check", f"{file}:boom", "-i", "float64[4]", "--variants")
    assert (code, err) == (2, "")
    assert "\ncheck_variants incomplete: none of " in out
    code, out, err = run(capsys, "check", f"{file}:boom", "-i", "float64[4]", "--variants", "--json")
    report = json.loads(out)["variants"]
    assert (code, report["verdict"], report["passed"]) == (2, "incomplete", False)
    code, out, err = run(capsys, "check", "torch:sin", "-i", "float64[4],nograd", "--variants", "--json")
    assert (code, json.loads(out)["variants"]) == (2, None)
    assert err.startswith(
        "fastgrad check: check_variants of torch:sin raised ValueError: check_variants needs a tensor"
    )


@pytest.mark.parametrize("name", ["Leaving", "leaving"])
@pytest.mark.parametrize("options", [(), ("--variants",), ("--json",), ("--order", "both")])
def test_a_func_or_backward_that_ends_the_process_is_no_verdict(
    file: str, capsys: pytest.CaptureFixture[str], name: str, options: tuple[str, ...]
) -> None:
    code, _, err = run(capsys, "check", f"{file}:{name}", "-i", "float64[4]", *options)
    assert code == 2
    for line in err.splitlines():
        assert line.startswith("fastgrad check: ")
        assert line.endswith(f" of {file}:{name} raised SystemExit: 0")


def test_a_module_that_ends_the_process_when_asked_for_a_name(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("lazy.py").write_text("import sys\n\ndef __getattr__(name):\n    sys.exit(0)\n")
    assert run(capsys, "check", "lazy.py:f", "-i", "float64[4]") == (
        *(2, ""),
        "fastgrad check: sys.exit(0) was called: there is no verdict\n",
    )


def test_an_error_of_the_command_line_is_not_a_failed_check(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specs, "described", None)
    code, out, err = run(capsys, "check", "torch:sin", "-i", "float64[4]")
    assert (code, out) == (2, "")
    assert err.endswith("TypeError: 'NoneType' object is not callable\n")


def test_prints_of_func_are_not_in_the_json(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("printing.py").write_text(
        "import torch\nprint('imported')\ndef f(x):\n    print('called')\n    return x.sin()\n"
    )
    for options in ((), ("--variants",)):
        sys.modules.pop("printing", None)
        code, out, err = run(capsys, "check", "printing.py:f", "-i", "float64[4]", "--json", *options)
        assert code == 0
        assert json.loads(out)["function"] == "printing.py:f"
        assert err.startswith("imported\ncalled\n")


@pytest.mark.parametrize("options", [(), ("--variants",)])
def test_a_page_that_cannot_be_written(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    def refuse(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_text", refuse)
    code, out, err = run(capsys, "check", "torch:sin", "-i", "float64[4]", "--html", "page.html", *options)
    assert (code, err) == (
        2,
        "fastgrad check: the HTML page cannot be written: [Errno 13] Permission denied: 'page.html'\n",
    )
    assert " passed: " in out


def test_a_seed_that_is_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    for seed in ("99999999999999999999999", "1.5"):
        with pytest.raises(SystemExit) as caught:
            cli.main(["check", "torch:sin", "-i", "float64[3]", "--seed", seed])
        assert caught.value.code == 2
        assert f"--seed: must be an integer of 64 bits, got '{seed}'" in capsys.readouterr().err


def test_errors_of_func_and_of_inputs_are_no_verdict(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "check", f"{file}:boom", "-i", "float64[4]")
    assert code == 2
    assert err == f"fastgrad check: gradcheck of {file}:boom raised RuntimeError: of func\n"
    code, out, err = run(capsys, "check", f"{file}:boom", "-i", "float64[4]", "--json", "--traceback")
    assert code == 2
    assert json.loads(out)["checks"][0]["error"] == {"type": "RuntimeError", "message": "of func"}
    assert json.loads(out)["checks"][0]["verdict"] == "raised"
    assert "in boom" in err
    code, _, err = run(capsys, "check", "torch:sin", "-i", "float64[4],nograd")
    assert code == 2
    assert "raised ValueError: " in err
    _, _, err = run(capsys, "check", "torch:neg", "-i", "float32[2]", "--eps", "1e-5")
    assert err.startswith("fastgrad check: warning: inputs[0] requires gradient and is not a double precision")


@pytest.mark.parametrize(
    ("function", "arguments", "sentence"),
    [
        ("torch.sin", ("-i", "float64[3]"), "a function must be module:name or file.py:name, got 'torch.sin'"),
        ("nowhere:f", ("-i", "float64[3]"), "there is no module 'nowhere'"),
        ("torch.nowhere:f", ("-i", "float64[3]"), "there is no module 'torch.nowhere'"),
        ("nowhere.py:f", ("-i", "float64[3]"), "there is no file nowhere.py"),
        ("broken.py:f", ("-i", "float64[3]"), "importing broken.py raised ZeroDivisionError"),
        ("lacking.py:f", ("-i", "float64[3]"), "importing lacking.py raised ModuleNotFoundError: No module"),
        ("torch:sine", ("-i", "float64[3]"), "torch has no attribute 'sine'"),
        ("torch:nn.functional.sine", ("-i", "float64[3]"), "torch:nn.functional has no attribute 'sine'"),
        ("operators_of_mine:number", ("-i", "float64[3]"), "is of type int, which cannot be called"),
        ("operators_of_mine:number()", ("-i", "float64[3]"), "calling operators_of_mine:number() raised TypeError"),
        ("operators_of_mine:Sized", ("-i", "float64[3]"), "is a module class that needs arguments"),
        ("torch:sin", (), "pass one --input per positional argument"),
        ("torch:sin", ("-i", "float46[3]"), "torch has no dtype 'float46'"),
        ("torch:sin", ("-i", "float64"), "an input must be a tensor (for example float64[64,32] or int64[64]{0..31})"),
        ("torch:sin", ("-i", "float64[3,-1]"), "the sizes of a tensor must be integers"),
        ("torch:sin", ("-i", "int64[3]"), "integers need a range, for example int64[3]{0..9}"),
        ("torch:sin", ("-i", "int64[3]{0..1.5}"), "two integers that fit the dtype"),
        ("torch:sin", ("-i", "int8[3]{0..300}"), "two integers that fit the dtype"),
        ("torch:sin", ("-i", "float64[3]{2..1}"), "a range must be low..high"),
        ("torch:sin", ("-i", "bool[3]{0..1}"), "a bool tensor has no range"),
        ("torch:sin", ("-i", "float64[3],sparse"), "got 'sparse', in 'float64[3],sparse'"),
        ("torch:sin", ("-i", "float64[3],nograd=1"), "'nograd=1', in"),
        ("torch:sin", ("-i", "float64[3,3],layout=row"), "layout must be one of strided, coo, csr"),
        ("torch:sin", ("-i", "float64[4,4],layout=bsr,blocksize=2"), "blocksize must be two sizes"),
        ("torch:sin", ("-i", "float64[4,4],layout=coo,density=2"), "density must be a number from 0 to 1"),
        ("torch:sin", ("-i", "float64[3],layout=csr"), "cannot be made: "),
        ("torch:sin", ("-i", "float64[3],channels_last"), "cannot be made: "),
        ("torch:sin", ("-i", f"float64[{10**13}]"), "'float64[10000000000000]' cannot be made: "),
        ("torch:sin", ("-i", f"float64[{10**20}]"), "'float64[100000000000000000000]' cannot be made: "),
        ("torch:sin", ("-i", "float64[3]", "--html", "."), "--html must be a file, but . is a directory"),
        ("leaving.py:f", ("-i", "float64[3]"), "importing leaving.py raised SystemExit: 0"),
        ("operators_of_mine:leave()", ("-i", "float64[3]"), "calling operators_of_mine:leave() raised SystemExit: 0"),
        ("torch:sin", ("-i", "float64[],noncontiguous"), "without dimensions is contiguous"),
        ("torch:sin", ("-i", "float64[3,3],layout=coo,noncontiguous"), "are for strided tensors"),
        ("torch:sin", ("-i", "@nowhere.pt"), "there is no file nowhere.pt"),
        ("torch:sin", ("-i", "@"), "@ must be followed by the path of a file"),
        ("torch:sin", ("-i", "@broken.py"), "broken.py does not contain tensors saved by torch.save"),
        ("torch:sin", ("-i", "@broken.py,csr"), "after @FILE only nograd is allowed, got 'csr'"),
        ("torch:sin", ("-i", "float64[3]", "-k", "dim"), "a keyword must be name=value"),
        ("torch:sin", ("-i", "float64[3]", "-k", "dim=1+"), "a Python literal or a bare word, got 'dim=1+'"),
        ("torch:sin", ("-i", "float64[3]", "-k", "dim=1", "-k", "dim=2"), "--keyword gives dim twice"),
        ("torch:sin", ("-i", "float64[3]", "--engine", "sketch"), "--engine sketch needs --fast"),
        ("torch:sin", ("-i", "float64[3]", "--device", "abacus"), "device 'abacus' cannot be used: "),
        ("torch:sin", ("-i", "float64[3]", "--html", "nowhere/page.html"), "there is no directory nowhere"),
        ("torch:sin", ("-i", "float64[3]", "--compiled"), "--compiled needs --variants"),
        (
            "torch:sin",
            ("-i", "float64[3]", "--variants", "--order", "2", "--batched"),
            "do not pass --order, --batched",
        ),
    ],
)
def test_bad_specifications_are_one_sentence(
    file: str, capsys: pytest.CaptureFixture[str], function: str, arguments: tuple[str, ...], sentence: str
) -> None:
    Path("broken.py").write_text("1 / 0")
    Path("leaving.py").write_text("import sys; sys.exit(0)")
    Path("lacking.py").write_text("import no_such_module")
    code, out, err = run(capsys, "check", function, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.startswith("fastgrad check: ")
    assert err.count("\n") == 1


def made(text: str, seed: int = 0) -> Any:
    [value] = specs.parse_input(text, torch.Generator().manual_seed(seed), "cpu")
    return value


def test_inputs_are_what_their_specifications_say() -> None:
    x = made("float64[200,2]{0.5..2}")
    assert (x.shape, x.dtype, x.requires_grad) == ((200, 2), torch.float64, True)
    assert 0.5 <= x.min() < 0.6
    assert 1.9 < x.max() < 2
    z = made("complex64[300]{-1..1},nograd")
    assert (z.dtype, z.requires_grad) == (torch.complex64, False)
    assert z.real.abs().max() <= 1
    assert z.imag.min() < -0.9
    i = made("int32[300]{-2..3}")
    assert (i.dtype, i.min().item(), i.max().item(), i.requires_grad) == (torch.int32, -2, 3, False)
    assert made("bool[50]").unique().numel() == 2
    assert made("float64[]").shape == ()
    assert made("float64[3,0]").shape == (3, 0)
    assert made("float64[2,3,4,5],channels_last").is_contiguous(memory_format=torch.channels_last)
    assert made("float64[4],noncontiguous").stride() == (2,)
    assert [made(text) for text in ("3", "None", "(1, 2)", "'mean'")] == [3, None, (1, 2), "mean"]
    assert torch.equal(made("float64[5]", seed=1), made("float64[5]", seed=1))
    assert not torch.equal(made("float64[5]", seed=1), made("float64[5]", seed=2))
    # A seed gives the same values in all dtypes.
    assert torch.equal(made("float32[5]"), made("float64[5]").float())
    for layout in ("coo", "csr", "csc", "bsr", "bsc"):
        s = made(f"float64[20,10],layout={layout},density=0.3")
        assert s.layout is getattr(torch, f"sparse_{layout}")
        assert s.requires_grad
        assert s.is_leaf
    assert 30 < made("float64[20,10],layout=coo,density=0.3").detach()._nnz() < 90
    assert specs.described(made("float64[20,10],layout=csr,nograd")) == "float64[20,10],layout=csr,nograd"


def test_inputs_from_a_file(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save([torch.randn(6, 2, dtype=torch.float64), torch.tensor([0, 3])], "inputs.pt")
    code, out, _ = run(capsys, "check", "operators_of_mine:take", "-i", "@inputs.pt")
    assert code == 0
    assert out.startswith("operators_of_mine:take at float64[6,2], int64[2]\n")


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert f"fastgrad       {fastgrad.__version__}\n" in out
    assert str(torch.__version__) in out
    tests = [line for line in out.splitlines() if line.startswith("self-test")]
    assert len(tests) >= 6
    assert all(line.endswith("as expected") for line in tests)
    monkeypatch.setattr(doctor, "OPTIONAL", {"no_such_module": "nothing much"})
    # The self-test fails for a checker that passes everything.
    monkeypatch.setattr(doctor.ForgottenFactor, "backward", doctor.SquaredReLU.backward)
    code, out, _ = run(capsys, "doctor", "--json")
    assert code == 1
    found = json.loads(out)
    assert [row["right"] for row in found["self-test"][:6]] == [True, False] * 3
    assert "no_such_module, for nothing much: pip install no_such_module" in found["missing"]


def test_bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    few = [row for row in bench._operators("cpu") if row[0] in ("sin, small", "matmul")]
    monkeypatch.setattr(bench, "_operators", lambda device: few)
    code, out, _ = run(capsys, "bench", "--seconds", "0.5")
    assert code == 0
    assert sum(line.count("passed") == 2 and line.endswith("x") for line in out.splitlines()) == 4
    assert "torch's time divided by fastgrad's in slow mode: " in out
    wrong = (few[0][0], doctor.ForgottenFactor.apply, few[0][2])
    monkeypatch.setattr(bench, "_operators", lambda device: [wrong])
    code, out, _ = run(capsys, "bench", "--seconds", "0.1", "--json")
    assert code == 1
    document = json.loads(out)
    assert [row["verdict"] for row in document["rows"]] == ["failed", "failed"]
    assert document["rows"][0]["ratio"] > 0
    code, _, err = run(capsys, "bench", "--seconds", "0")
    assert (code, err) == (2, "fastgrad bench: --seconds must be positive, got 0\n")


def test_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo"]) == 0, "every verdict is as it must be, and torch's"
    text = capsys.readouterr().out
    rows = [line for line in text.splitlines() if line.startswith(("gradcheck", "gradgradcheck"))]
    assert len(rows) == 16
    assert sum("failed" in row for row in rows) == 1
    assert "the factor 2 is missing" in text


def test_version_help_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, text in [
        (["--version"], 0, fastgrad.__version__),
        (["check", "--help"], 0, "float64[10]{0.5..2}      uniform between 0.5 and 2"),
        (["dance"], 2, "invalid choice"),
        (["check"], 2, "required: function"),
        (["check", "torch:sin", "--order", "3"], 2, "invalid choice"),
    ]:
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == code
        captured = capsys.readouterr()
        assert text in captured.out + captured.err


def test_the_console_script_and_the_plugin_are_declared() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'fastgrad = "fastgrad.tools.cli:main"' in project
    assert 'pytest_fastgrad = "pytest_fastgrad"' in project
    assert callable(import_module("fastgrad.tools.cli").main)
    assert import_module("pytest_fastgrad").pytest_addoption


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_scripts_know_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "fastgrad" in script
    for word in ("doctor", "--variants", "--nondet-tol", "sketch"):
        assert word in script


def test_bash_completes_what_is_typed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cli.main(["completion", "bash"])
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    typed = f"source {script}; COMP_WORDS=(fastgrad check --var); COMP_CWORD=2; _shtab_fastgrad; echo ${{COMPREPLY[@]}}"
    found = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, check=True).stdout
    assert found.split() == ["--variants"]


def test_completion_without_shtab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    assert "pip install shtab" in capsys.readouterr().err


RED, GREEN, RESET = "\033[31m", "\033[32m", "\033[0m"


def test_colors(file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", f"{file}:Halved", "-i", "float64[3]"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli.main(arguments) == 1
    failed = capsys.readouterr().out
    assert f"{RED}gradcheck failed{RESET}" in failed
    assert "\033[1m  probably" in failed
    assert cli.main(["check", "torch:sin", "-i", "float64[3]"]) == 0
    assert f"{GREEN}gradcheck passed{RESET}: 9 entries" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main(arguments) == 1
    plain = capsys.readouterr().out
    assert "\033" not in plain
    without = failed
    for style in (RED, "\033[1m", "\033[2m", RESET):
        without = without.replace(style, "")
    assert without.splitlines()[1] == plain.splitlines()[1]


def test_json_has_no_colors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli.main(["check", "torch:sin", "-i", "float64[3]", "--json"]) == 0
    json.loads(capsys.readouterr().out)


def test_an_empty_file_of_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "inputs.pt"
    path.touch()
    assert cli.main(["check", "torch:sin", "-i", f"@{path}"]) == 2
    assert f"{path} does not contain tensors saved by torch.save: EOFError" in capsys.readouterr().err
