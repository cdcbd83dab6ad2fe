"""Runs the adversary's table: python -m tests.planted.adversary_sweep --seeds 5 --mode slow --engine auto --jobs 2.

A wrong gradient is found where the check fails; shared where torch's slow mode passes it, too; declared where the
report says that errors of its size may be hidden; otherwise it is MISSED. A right function that fails is a FALSE ALARM
unless torch's slow mode fails it, too. torch runs only where it decides, in the sizes that it can do.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import multiprocessing
import re
import signal
import sys
import time
import warnings
import zlib
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

import fastgrad
from tests.planted import adversary
from tests.planted.adversary import ATTACKS, Attack

TORCH_MOST = 3000
"""Input elements. Above, torch's slow mode takes minutes and gigabytes, and the truth is the construction's."""

CACHE = Path("build/adversary-torch.json")
WALL = 8
"""Seconds by the clock for each second of processor time that a check may take: the machine may be busy."""

BAD = ("MISSED", "FALSE ALARM", "HANG")


class Late(BaseException):
    """The time limit of a check. Not an Exception, so that nothing takes it for an error of func."""


def _late(*_: Any) -> None:
    raise Late


def own(attack: Attack, seed: int, mode: str, engine: str) -> dict[str, Any]:
    """Fastgrad's verdict, and the size of the error against the bound of hidden errors in the report."""
    f, inputs = attack.make(seed, attack.size(seed))
    error = getattr(f, "error", None) or attack.error
    start = time.perf_counter()
    try:
        report = fastgrad.check(
            f, inputs, fast_mode=mode == "fast", engine=engine, progress=False, **dict(attack.keywords)
        )
    except Exception as raised:
        message = f"{type(raised).__name__}: {str(raised).strip().splitlines()[0][:150]}"
        return {"passed": False, "message": message, "raised": True, "seconds": time.perf_counter() - start}
    bounds = [c.bound for c in report.certificates if attack.cancels or "cancel" not in c.claim]
    bounds += [] if report.undecided is None else [report.undecided]
    hidden = report.passed and error is not None and any(bound >= error for bound in bounds)
    hidden = hidden or _is_later(attack, report)
    lines = str(report).strip().splitlines()
    message = next((line for line in lines if "allowed" in line), "") if not report.passed else ""
    return {
        "passed": report.passed,
        "hidden": hidden,
        "error": error,
        "message": f"{lines[0]} {message.strip()}"[:230],
        "engine": None if report.plan is None else next((x.split()[1] for x in lines if x.startswith("  engine")), "?"),
        "calls": f"{report.evaluations} evaluations, {report.vjps} VJPs",
        "seconds": time.perf_counter() - start,
    }


def _is_later(attack: Attack, report: fastgrad.Report) -> bool:
    """Whether gradients are wrong only after the last call that the report covers."""
    first = re.search(r"from the (\d+)th on", attack.name)
    claims = [re.search(r", up to call (\d+) of backward", certificate.claim) for certificate in report.certificates]
    calls = [int(claim[1]) for claim in claims if claim]
    return report.passed and first is not None and bool(calls) and max(calls) < int(first[1])


def torchs(attack: Attack, seed: int) -> dict[str, Any]:
    """The verdict of torch's slow mode."""
    f, inputs = attack.make(seed, attack.size(seed))
    try:
        passed = torch.autograd.gradcheck(f, inputs, raise_exception=False, **dict(attack.keywords))
    except Exception as raised:
        return {"passed": False, "message": f"{type(raised).__name__}: {str(raised)[:150]}"}
    return {"passed": passed, "message": ""}


def work(pipe: Connection, mode: str, engine: str) -> None:
    """A worker: answers (kind, row, seed, limit) until it gets None."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, _late)
    while (job := pipe.recv()) is not None:
        kind, row, seed, limit = job
        try:
            signal.setitimer(signal.ITIMER_PROF, limit)
            attack = ATTACKS[row]
            answer = own(attack, seed, mode, engine) if kind == "own" else torchs(attack, seed)
            signal.setitimer(signal.ITIMER_PROF, 0)
        except Late:
            answer = {"late": True}
        except Exception as raised:  # raised by the factory: a mistake of the table
            signal.setitimer(signal.ITIMER_PROF, 0)
            answer = {"broken": repr(raised)}
        pipe.send(answer)


class Worker:
    """A process that is replaced if it does not answer in time."""

    def __init__(self, mode: str, engine: str) -> None:
        self.mode, self.engine = mode, engine
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, self.mode, self.engine), daemon=True)
        self.process.start()
        other.close()
        self.job: Any = None

    def give(self, job: tuple[str, int, int, int]) -> None:
        self.job, self.until = job, time.monotonic() + WALL * job[3]
        self.pipe.send(job)

    def replace(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.start()


def classify(attack: Attack, mine: dict[str, Any], theirs: dict[str, Any] | None) -> str | None:
    """The class of a row; None if torch's verdict is needed. theirs is {} if torch cannot run."""
    if "broken" in mine:
        return "BROKEN"
    if mine.get("late"):
        return "HANG"
    if attack.wrong != mine["passed"]:
        return "found" if attack.wrong else "right"
    if attack.wrong and mine["hidden"]:
        return "declared"
    if theirs is None:
        return None
    if theirs.get("passed") == mine["passed"]:
        return "shared"
    return "MISSED" if attack.wrong else "FALSE ALARM"


def sweep(arguments: argparse.Namespace) -> list[tuple[str, Attack, int, dict[str, Any]]]:
    source = zlib.crc32(Path(adversary.__file__).read_bytes())
    cache = json.loads(CACHE.read_text()) if CACHE.exists() else {}
    cache = cache if cache.get("source") == source else {"source": source}
    stop = time.monotonic() + 60 * arguments.minutes
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    jobs = collections.deque(
        ("own", row, seed, arguments.limit)
        for seed, (row, attack) in itertools.product(seeds, enumerate(ATTACKS))
        if arguments.only in attack.name and attack.size(seed) <= arguments.most
    )
    answers: dict[tuple[int, int], dict[str, Any]] = {}
    results = []
    workers = [Worker(arguments.mode, arguments.engine) for _ in range(arguments.jobs)]

    def settle(kind: str, row: int, seed: int, answer: dict[str, Any]) -> None:
        attack = ATTACKS[row]
        n = attack.size(seed)
        key = f"{attack.name} | {seed} | {n}"
        if kind == "own":
            answers[row, seed] = answer
        else:
            cache[key] = answer
        theirs = {} if n > TORCH_MOST else cache.get(key)
        verdict = classify(attack, answers[row, seed], theirs)
        if verdict is None or (arguments.all and theirs is None):
            jobs.appendleft(("torch", row, seed, arguments.torch_limit))
            return
        results.append((verdict, attack, seed, answers[row, seed]))
        if verdict in (*BAD, "BROKEN"):
            print(describe(results[-1], theirs), flush=True)
        elif arguments.all and theirs and theirs.get("passed") == attack.wrong:
            print(f"torch differs   {attack.name}, n {n}, seed {seed}: ours {verdict}; {theirs}", flush=True)
        if len(results) % 200 == 0:
            print(f"# {len(results)} done", file=sys.stderr, flush=True)
            save(cache)

    while jobs or any(worker.job for worker in workers):
        if time.monotonic() > stop:
            jobs.clear()
        for worker in workers:
            if worker.job is None and jobs:
                worker.give(jobs.popleft())
        ready = wait([worker.pipe for worker in workers if worker.job], timeout=1)
        for worker in workers:
            if worker.job is None:
                continue
            job = worker.job
            if worker.pipe in ready:
                try:
                    answer = worker.pipe.recv()
                    worker.job = None
                except EOFError:  # the process died
                    answer = {"late": True, "message": "the process died"}
                    worker.replace()
                settle(*job[:3], answer)
            elif time.monotonic() > worker.until:
                worker.replace()
                settle(*job[:3], {"late": True, "message": "killed"})
    for worker in workers:
        worker.pipe.send(None)
        worker.process.join()
    save(cache)
    return results


def save(cache: dict[str, Any]) -> None:
    CACHE.parent.mkdir(exist_ok=True)
    CACHE.write_text(json.dumps(cache, indent=0))


def describe(result: tuple[str, Attack, int, dict[str, Any]], theirs: dict[str, Any] | None = None) -> str:
    verdict, attack, seed, mine = result
    note = "" if theirs is None else ", torch not run" if not theirs else ", torch late" if theirs.get("late") else ""
    details = mine.get("broken") or f"{mine.get('message', '')} {mine.get('calls', '')} {mine.get('engine', '')}"
    error = "" if mine.get("error") is None else f", error {mine['error']:.3g}"
    kind = "call, " if attack.call else ""
    return f"{verdict:12} {attack.name} [{kind}n {attack.size(seed)}, seed {seed}{error}{note}] {details}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--mode", choices=["slow", "fast"], default="slow")
    parser.add_argument("--engine", choices=["auto", "dense", "compressed", "sketch"], default="auto")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=10**9, help="leave out larger sizes")
    parser.add_argument("--limit", type=int, default=60, help="seconds of processor time for a check")
    parser.add_argument("--torch-limit", type=int, default=120, help="the same for torch's check")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after that, and print what there is")
    parser.add_argument("--all", action="store_true", help="run torch on every row, and print where the table differs")
    arguments = parser.parse_args()
    results = sweep(arguments)
    print("\n--- missed, false alarms, hanging")
    for result in sorted((r for r in results if r[0] in (*BAD, "BROKEN")), key=lambda r: (r[0], r[1].name, r[2])):
        print(describe(result))
    for is_wrong, title in ((True, "wrong"), (False, "right")):
        totals = collections.Counter(r[0] for r in results if r[1].wrong == is_wrong)
        print(f"{title}: " + ", ".join(f"{count} {verdict}" for verdict, count in totals.most_common()))
    print(f"checks: {sum(r[3].get('seconds', 0) for r in results):.0f} s")
    return int(any(r[0] in (*BAD, "BROKEN") for r in results))


if __name__ == "__main__":
    sys.exit(main())
