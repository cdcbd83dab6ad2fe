"""All functions and mistakes of tests/planted/distributed.py on 2, 3 and 4 ranks, in both modes.

    python -m tests.distributed.sweep

prints for each how many verdicts and first causes are as expected, and those that are not; some minutes.
"""

from __future__ import annotations

from tests.distributed.test_rows import FAST, ROWS, judge, run

if __name__ == "__main__":
    for count in (2, 3, 4):
        names = [name for name, row in ROWS.items() if row.fewest <= count]
        said = run(count, [(names, {}), (names, FAST)])
        for keywords in ({}, FAST):
            wrong = []
            for name in names:
                try:
                    judge(said, name, count, keywords)
                except AssertionError as error:
                    wrong.append(f"{name}: {str(error).splitlines()[0]}")
            mistakes = sum(ROWS[name].is_wrong for name in names)
            mode = "fast" if keywords else "exact"
            print(
                f"{count} ranks, {mode}: {len(names) - len(wrong)} of {len(names)} rows, {mistakes} of them mistakes, "
                "are judged right"
            )
            print("".join(f"  {line}\n" for line in wrong), end="", flush=True)
