"""Runs under torchrun: the examples of docs/distributed.md; rank 0 compares what they print."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.behavior.test_documented_examples import run_examples

if __name__ == "__main__":
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
    blocks = re.findall(r"```python\n.*?```(?:\s*```text\n.*?```)?", page, re.DOTALL)
    if os.environ["RANK"] != "0":
        blocks = [block.partition("```text")[0] for block in blocks]
    assert run_examples("\n\n".join(blocks)) >= 2
