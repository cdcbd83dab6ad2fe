"""The command line: python -m fastgrad COMMAND."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastgrad._version import __version__
from fastgrad.api.checkers import check
from fastgrad.core.errors import text_of
from fastgrad.problem.validation import as_seed
from fastgrad.report.report import Report
from fastgrad.report.variants import VariantsReport
from fastgrad.tools import specs, terminal

Checked = Report | VariantsReport

CHECKERS = {1: "gradcheck", 2: "gradgradcheck"}

EXIT_CODES = "exit code: 0 passed, 1 failed, 2 wrong usage or no verdict (an error, or incomplete), 130 interrupted"

_CODES = {"passed": 0, "undecided": 0, "failed": 1, "not converged": 1, "incomplete": 2}
"""Exit codes of the verdicts."""

_INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 plus the number of SIGINT."""

GRAMMAR = """\
functions
  package.module:name      file.py:name      module:Class.method      module:make_layer()
  for an autograd.Function, its apply is checked; for an nn.Module, parameters are checked with the inputs

inputs
  float64[64,32]           normal; floating and complex tensors require grad
  float64[10]{0.5..2}      uniform between 0.5 and 2
  int64[64]{0..31}         integers from 0 to 31 inclusive; bool[64] has no range
  float64[4,4],nograd      options, separated by commas: nograd, noncontiguous, channels_last,
                           layout=coo|csr|csc|bsr|bsc, blocksize=2x2, density=0.5
  @inputs.pt               a tensor or a list of inputs, saved by torch.save
  3  None  (1,2)  'mean'   Python literals

"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except specs.SpecError as error:
        print(f"fastgrad {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"fastgrad {options.command}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # as after `| head`: the interpreter must not write the rest at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except SystemExit as stop:  # for example, raised by __getattr__ of the module
        print(f"fastgrad {options.command}: sys.exit({stop.code!r}) was called: there is no verdict", file=sys.stderr)
        return 2
    except Exception:  # the interpreter's exit code would be 1, which means that the check failed
        traceback.print_exc()
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fastgrad", description="Gradient checks for PyTorch operators.")
    parser.add_argument("--version", action="version", version=f"fastgrad {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    checker = commands.add_parser(
        "check",
        help="check a function",
        description="Checks the gradients of a function at generated or saved inputs.",
        epilog=GRAMMAR + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for add in (_add_function, _add_what_to_check, _add_output):
        add(checker)
    checker.set_defaults(run=_check, group=None)
    doctor = commands.add_parser("doctor", help="versions, devices, a self-test, and what is missing")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=_doctor)
    bench = commands.add_parser("bench", help="a short comparison with torch's checker on this machine")
    bench.add_argument("--seconds", type=float, default=20.0, help="approximate duration in seconds (default: 20)")
    bench.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")
    bench.add_argument("--json", action="store_true", help="print JSON")
    bench.set_defaults(run=_bench)
    demo = commands.add_parser("demo", help="compare with torch's checker on real operators and a wrong one")
    demo.set_defaults(run=_demo)
    completion = commands.add_parser(
        "completion",
        help="print a completion script for a shell",
        description='Prints a completion script. bash: put eval "$(fastgrad completion bash)" in ~/.bashrc. zsh: save '
        "it as _fastgrad in a directory of $fpath.",
    )
    completion.add_argument("shell", choices=("bash", "zsh"))
    completion.set_defaults(run=lambda options: _completion(parser, options.shell))
    return parser


def _add_function(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", help="module:name or file.py:name; see below")
    parser.add_argument(
        "-i",
        "--input",
        action="append",
        default=[],
        metavar="INPUT",
        help="a positional argument; may be repeated; see below",
    )
    parser.add_argument(
        "-k", "--keyword", action="append", default=[], metavar="NAME=VALUE", help="a keyword argument; may be repeated"
    )
    parser.add_argument("--device", default="cpu", help="device of the inputs: cpu (default), cuda, cuda:1, ...")
    parser.add_argument("--seed", type=_seed, default=0, help="seed of the inputs and of the check (default: 0)")


def _add_what_to_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--order", choices=("1", "2", "both"), default="1", help="gradcheck (default), gradgradcheck, or both"
    )
    parser.add_argument(
        "--mode", choices=("reverse", "forward", "both"), default="reverse", help="modes of AD (default: reverse)"
    )
    parser.add_argument("--variants", action="store_true", help="check other points, layouts, orders and modes too")
    parser.add_argument("--compiled", action="store_true", help="with --variants: also under torch.compile")
    parser.add_argument(
        "--fast", dest="fast_mode", action="store_true", help="compare random combinations of the entries"
    )
    parser.add_argument("--batched", action="store_true", help="also check gradients under vmap")
    parser.add_argument("--no-undefined-grad", action="store_true", help="do not check undefined grad_outputs")
    for name in ("eps", "atol", "rtol"):
        own = f"gradcheck's {name}; INPUT=VALUE, which may be repeated, sets it for one input"
        parser.add_argument(f"--{name}", action="append", type=_number, metavar="VALUE", help=own)
    parser.add_argument("--nondet-tol", type=float, help="gradcheck's nondet_tol")
    parser.add_argument(
        "--wrt",
        choices=("inputs", "parameters", "both"),
        default="both",
        help="which gradients of a module to check (default: both); a function has only inputs",
    )
    parser.add_argument("--masked", action="store_true", help="perturb only the specified elements of sparse inputs")
    parser.add_argument(
        "--engine", choices=("auto", "dense", "compressed", "sketch"), default="auto", help="default: auto"
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", type=_file, metavar="FILE", help="write the report as an HTML page")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="show a progress bar (default: for long checks)"
    )
    parser.add_argument("--distributed", action="store_true", help="under torchrun: share the work among its processes")
    parser.add_argument(
        "--checkpoint", type=_file, metavar="FILE", help="save the state of a long check in FILE, and resume from it"
    )
    parser.add_argument("--traceback", action="store_true", help="print the traceback of an exception")


def _number(text: str) -> tuple[str, float]:
    """Parses VALUE or INPUT=VALUE; the first element is "" for VALUE."""
    name, equals, value = text.rpartition("=")
    try:
        if equals and not name:
            raise ValueError
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be VALUE or INPUT=VALUE with a number, got {text!r}") from None


def _file(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must be the name of a file, got an empty name")
    return Path(text)


def _seed(text: str) -> int:
    try:
        return as_seed(int(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer of 64 bits, got {text!r}") from None


def _for_inputs(option: str, given: list[tuple[str, float]]) -> float | dict[str, float]:
    """One number for all inputs, or numbers by names of inputs."""
    if len(given) == 1 and not given[0][0]:
        return given[0][1]
    if not all(name for name, _ in given):
        raise specs.SpecError(f"--{option} takes either one number or INPUT=VALUE, not both")
    return specs.by_name(f"--{option}", given)


def _check(options: argparse.Namespace) -> int:
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning  # type: ignore[assignment]
        return _checked_by_ranks(options) if options.distributed else _checked(options)


def _checked_by_ranks(options: argparse.Namespace) -> int:
    """Like `_checked`, in each process of torchrun; rank 0 prints the result."""
    import torch.distributed as dist

    if not dist.is_torchelastic_launched():
        raise specs.SpecError("--distributed needs torchrun: torchrun --nproc-per-node 2 -m fastgrad check ...")
    if options.device == "cuda":
        options.device = f"cuda:{os.environ['LOCAL_RANK']}"
    dist.init_process_group("gloo")
    try:
        options.group = dist.group.WORLD
        if dist.get_rank() == 0:
            return _checked(options)
        options.html = None
        with contextlib.redirect_stdout(io.StringIO()):
            return _checked(options)
    finally:
        dist.destroy_process_group()


def _checked(options: argparse.Namespace) -> int:
    _require_device(options.device)
    _reject_options(options)
    with _stdout_to_stderr(options):
        call = specs.call(options.function, options.input, options.keyword, options.seed, options.device)
    arguments = [specs.described(value) for value in call["inputs"]]
    if not options.json:
        print(f"{options.function} at {', '.join(arguments)}", flush=True)
    code, documents = 0, []
    for name, run in _checks(options, call):
        report, error = None, None
        try:
            with _stdout_to_stderr(options):
                report = run()
        except (Exception, SystemExit) as raised:  # there is no verdict: func raised, or arguments are invalid
            error = raised
            print(f"fastgrad check: {name} of {options.function} raised {text_of(error)}", file=sys.stderr)
            if options.traceback:
                traceback.print_exception(error)
        documents.append(_document(name, report, error))
        code = max(code, 2 if report is None else _CODES[report.verdict])
        if report is not None:
            _print(options, name, report)
            code = max(code, _write_page(options, name, report))
    if options.json:
        found = {"variants": documents[0]["report"]} if options.variants else {"checks": documents}
        print(json.dumps({"function": options.function, "inputs": arguments, **found}, indent=1))
    return code


def _checks(options: argparse.Namespace, call: dict[str, Any]) -> list[tuple[str, Callable[[], Checked]]]:
    """The checkers to run, by name."""
    if options.variants:
        from fastgrad.variants.check import check_variants  # imported only here, because it imports many modules

        keywords = {"compiled": options.compiled, "check_undefined_grad": not options.no_undefined_grad}
        return [("check_variants", partial(check_variants, **call, **keywords, **_common_keywords(options)))]
    return [
        (name, partial(check, **call, **_keywords(options, order)))
        for order, name in CHECKERS.items()
        if options.order in (str(order), "both")
    ]


def _reject_options(options: argparse.Namespace) -> None:
    """Raises a SpecError if options exclude each other, one needs another, or the path of the HTML page is unusable."""
    if options.engine == "sketch" and not options.fast_mode:
        raise specs.SpecError("--engine sketch needs --fast, because it compares sums of entries")
    if options.html is not None and not options.html.parent.is_dir():
        raise specs.SpecError(f"there is no directory {options.html.parent} for the HTML page")
    if options.html is not None and options.html.is_dir():
        raise specs.SpecError(f"--html must be a file, but {options.html} is a directory")
    if options.compiled and not options.variants:
        raise specs.SpecError("--compiled needs --variants")
    given = {"--order": options.order != "1", "--mode": options.mode != "reverse", "--batched": options.batched}
    given |= {"--distributed": options.distributed, "--checkpoint": options.checkpoint is not None}
    given["--wrt"] = options.wrt != "both"
    refused = [name for name, is_given in given.items() if is_given and options.variants]
    if refused:
        raise specs.SpecError(f"--variants checks all orders and modes: do not pass {', '.join(refused)}")


def _stdout_to_stderr(options: argparse.Namespace) -> contextlib.AbstractContextManager[object]:
    """A context in which, with --json, what func and its module print goes to stderr."""
    return contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()


def _write_page(options: argparse.Namespace, name: str, report: Checked) -> int:
    """Writes the HTML page if it is requested; returns 0, or 2 if the page cannot be written."""
    if options.html is None:
        return 0
    try:
        _path(options.html, options, name).write_text(report.to_html())
    except OSError as error:
        print(f"fastgrad check: the HTML page cannot be written: {error}", file=sys.stderr)
        return 2
    return 0


def _print(options: argparse.Namespace, name: str, report: Checked) -> None:
    if options.json:
        return
    # The message of a failed check does not begin with a verdict.
    text = f"{name} {report.verdict}\n{report}" if isinstance(report, Report) and not report.passed else str(report)
    print(terminal.colored(text) if terminal.takes_colors(sys.stdout) else text)


def _path(path: Path, options: argparse.Namespace, name: str) -> Path:
    """The path of a checker's file: with the checker's name if both checkers run."""
    return path.with_stem(f"{path.stem}-{name}") if options.order == "both" else path


def _keywords(options: argparse.Namespace, order: int) -> dict[str, Any]:
    """The keywords of a check, from the options."""
    reverse, forward = ("check_backward_ad", "check_forward_ad")
    if order == 2:
        reverse, forward = ("check_rev_over_rev", "check_fwd_over_rev")
    return {
        "order": order,
        reverse: options.mode != "forward",
        forward: options.mode != "reverse",
        "check_batched_grad": options.batched,
        # gradgradcheck without reverse mode rejects check_undefined_grad=True.
        "check_undefined_grad": not options.no_undefined_grad and not (order == 2 and options.mode == "forward"),
        "wrt": options.wrt,
        "group": options.group,
        "checkpoint": options.checkpoint and _path(options.checkpoint, options, CHECKERS[order]),
        **_common_keywords(options),
    }


def _common_keywords(options: argparse.Namespace) -> dict[str, Any]:
    """The keywords that apply to all orders and modes."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    names = ("fast_mode", "masked", "engine", "seed", "nondet_tol")
    keywords = {"progress": options.progress, **{name: given[name] for name in names if name in given}}
    return keywords | {name: _for_inputs(name, given[name]) for name in ("eps", "atol", "rtol") if name in given}


def _show_warning(message: Warning | str, *_: object) -> None:
    """Prints a warning without its line of code, which would be a line of the command line itself."""
    print(f"fastgrad check: warning: {message}", file=sys.stderr)


def _document(name: str, report: Checked | None, error: BaseException | None) -> dict[str, Any]:
    """A check as JSON fields."""
    return {
        "checker": name,
        "verdict": "raised" if report is None else report.verdict,
        "error": None if error is None else {"type": type(error).__name__, "message": str(error)},
        "message": None if report is None else str(report),
        "report": None if report is None else report.to_dict(),
    }


def _require_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise specs.SpecError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error


def _doctor(options: argparse.Namespace) -> int:
    from fastgrad.tools import doctor

    return doctor.main(options.json)


def _bench(options: argparse.Namespace) -> int:
    from fastgrad.tools import bench

    if not options.seconds > 0:
        raise specs.SpecError(f"--seconds must be positive, got {options.seconds:g}")
    _require_device(options.device)
    rows = bench.rows(options.seconds, options.device)
    measured = list(rows) if options.json else bench.printed(rows)
    if options.json:
        print(json.dumps(bench.document(measured, options.device), indent=1))
    # Every operator in this table is right.
    return 0 if all(row["verdict"] == row["torch_verdict"] == "passed" for row in measured) else 1


def _demo(options: argparse.Namespace) -> int:
    from fastgrad.tools import demo

    return demo.main()


def _completion(parser: argparse.ArgumentParser, shell: str) -> int:
    try:
        import shtab
    except ImportError:
        raise specs.SpecError("completion scripts need the package shtab: pip install shtab") from None
    print(shtab.complete(parser, shell))
    return 0
