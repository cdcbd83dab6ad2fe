"""New processes in which torch is already imported, because this takes most of the time of a short process.

They are forked from a server that has imported torch and, by default, nothing of fastgrad. A test gives the same result
with `python -c` in place of `run`.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class _Server:
    """A server that forks processes; it ends when this process closes the server's standard input."""

    def __init__(self, imported: str) -> None:
        command = [sys.executable, "-m", "tests.processes", imported]
        self._server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, request: dict[str, Any]) -> int | None:
        """Sends a request; returns the id of a new process, or the exit code of a process."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        answer: int | None = json.loads(self._server.stdout.readline())
        return answer


_server = functools.cache(_Server)


class Process:
    """A process that runs code, with further environment variables.

    Attributes
    ----------
    returncode
        Its exit code; None until it has ended and was waited for.
    """

    def __init__(
        self, code: str, variables: dict[str, str], imported: str, out: str = os.devnull, err: str = os.devnull
    ) -> None:
        self._server = _server(imported)
        request = {"code": code, "variables": variables, "out": out, "err": err}
        self._number = self._server.ask(request)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask({"number": self._number})
        return self.returncode

    def wait(self, seconds: float = 600.0) -> int:
        end = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > end:
                raise TimeoutError(f"it did not end within {seconds:g} s")
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """Ends the process if it is running."""
        if self.poll() is None:
            assert self._number is not None
            os.kill(self._number, signal.SIGKILL)
            self.wait()


def run(code: str, imported: str = "torch", **variables: str) -> subprocess.CompletedProcess[str]:
    """The result and output of a process that runs code, with these environment variables in addition."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = Process(code, variables, imported, str(out), str(err))
        try:
            return subprocess.CompletedProcess(code, process.wait(), out.read_text(), err.read_text())
        finally:
            process.kill()


def _serve() -> None:
    importlib.import_module(sys.argv[1])
    faulthandler.enable()  # a process that crashes writes where
    for line in sys.stdin:
        request = json.loads(line)
        if "number" in request:
            number, status = os.waitpid(request["number"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if number else None), flush=True)
            continue
        child = os.fork()
        if child:
            print(child, flush=True)
            continue
        for stream, path in enumerate((os.devnull, request["out"], request["err"])):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), stream)
        os.environ.update(request["variables"])
        exec(request["code"], {"__name__": "__main__"})
        return


if __name__ == "__main__":
    _serve()
