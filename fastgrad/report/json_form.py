"""The plain form of a report for JSON, and equality of reports by this form."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

SCHEMA = 2
"""The version of `Report.to_dict`: it increases if a key is removed or changes its meaning (docs/report.md)."""

LARGEST_TENSOR = 4096
"""Largest number of elements of a tensor whose values `Report.to_dict` includes."""


class EqualByContent:
    """Data with tensors; two are equal if their JSON forms are equal."""

    def _content(self) -> str:
        return json.dumps(plain(self), allow_nan=False)

    def __eq__(self, other: object) -> bool:
        """Equality of JSON forms: of tensors with more than LARGEST_TENSOR elements, only shape and dtype count."""
        if not isinstance(other, EqualByContent) or type(self) is not type(other):
            return NotImplemented
        return self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self._content())


def plain(value: Any) -> Any:
    """The JSON form of a value."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, complex):
        return {"re": plain(value.real), "im": plain(value.imag)}
    if isinstance(value, Tensor):
        values = plain(value.tolist()) if value.numel() <= LARGEST_TENSOR else None
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch."), "values": values}
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(item) for name, item in value._asdict().items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if is_dataclass(value):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    raise TypeError(f"a report cannot hold a {type(value).__name__}.")
