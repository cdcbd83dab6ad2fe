"""The command line: python -m fastgrad COMMAND."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fastgrad import demo
from fastgrad._version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fastgrad", description="Gradient checks for PyTorch operators.")
    parser.add_argument("--version", action="version", version=f"fastgrad {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="check real operators, and a wrong one, beside torch's checker")
    parser.parse_args(arguments)
    return demo.main()
