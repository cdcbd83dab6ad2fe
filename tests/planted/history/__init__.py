"""Wrong gradients that libraries shipped, planted again after their public issues, and their right twins."""

from __future__ import annotations

from tests.planted.history.elementary import ELEMENTARY
from tests.planted.history.layers import LAYERS
from tests.planted.history.linear_algebra import LINEAR_ALGEBRA
from tests.planted.history.losses import LOSSES
from tests.planted.history.normalization import NORMALIZATION
from tests.planted.history.reductions import REDUCTIONS
from tests.planted.history.sequences import SEQUENCES
from tests.planted.history.shipped import Shipped
from tests.planted.history.strides import STRIDES

__all__ = ["HISTORY", "Shipped"]

HISTORY: list[Shipped] = [
    *REDUCTIONS,
    *ELEMENTARY,
    *LINEAR_ALGEBRA,
    *NORMALIZATION,
    *LAYERS,
    *SEQUENCES,
    *LOSSES,
    *STRIDES,
]
