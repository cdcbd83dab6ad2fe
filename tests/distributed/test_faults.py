"""If a rank exits, stops or skips a collective during a check, the others end with an error that names it."""

from __future__ import annotations

import pytest

from tests.distributed.faults import Fault, run


@pytest.mark.parametrize(
    "fault",
    [
        Fault("exits", rank=0, call=5),
        Fault("stops", rank=1, call=3),
        Fault("skips a collective", rank=0, call=4),
        Fault("is interrupted", rank=1, call=3),
    ],
    ids=lambda fault: fault.kind,
)
def test_all_ranks_end(fault: Fault) -> None:
    assert run(fault) == []
