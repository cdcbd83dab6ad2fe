"""Tensors that operations save for backward, and whether they changed before backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgrad.core import torch_private
from fastgrad.model.fingerprint import fingerprint
from fastgrad.model.places import Places
from fastgrad.report.model_data import Site


@dataclass(eq=False)
class Saved:
    """A tensor that an operation saved for its backward.

    Attributes
    ----------
    number
        Number of the tensor, in the order of saving.
    tensor, bits
        The tensor, and its fingerprint when it was saved.
    event
        Number of operators that had run before it was saved.
    site
        Where it was saved.
    copy
        The tensor that backward gets instead, if any.
    changed
        Whether backward found other bits.
    writer
        What wrote to the tensor, as far as known.
    """

    number: int
    tensor: Tensor
    bits: int
    event: int
    site: Site
    copy: Tensor | None = None
    changed: bool = False
    writer: str = ""


class SavedWatch:
    """Watches saved tensors; `pack` and `unpack` are hooks of autograd.

    Attributes
    ----------
    all
        All saved tensors, in the order of saving.
    events
        Number of operators that have run; the owner of this object counts them.

    Parameters
    ----------
    places
        The current position in the model.
    kept
        Which saved tensors are copied, by `Saved.number`; backward gets the copies.
    watched
        Which saved tensors are compared before and after every operation, by `Saved.number`.
    """

    def __init__(self, places: Places, kept: frozenset[int], watched: frozenset[int]) -> None:
        self.all: list[Saved] = []
        self.events = 0
        self._places, self._kept, self._watched = places, kept, watched
        self._writes: list[tuple[int, int, str]] = []

    def changed(self) -> list[Saved]:
        """The tensors that had changed when backward read them."""
        return [saved for saved in self.all if saved.changed]

    def note_writes(self, tensors: Sequence[Tensor], writer: str) -> None:
        """Records that an operator writes to tensors."""
        self._writes += [(self.events, address(tensor), writer) for tensor in tensors]

    def pack(self, tensor: Tensor) -> Saved:
        """Called when an operation saves a tensor."""
        with unrecorded():
            bits = fingerprint(tensor)
            copy = tensor.detach().clone() if len(self.all) in self._kept else None
        saved = Saved(len(self.all), tensor, bits, self.events, self._places.site(), copy)
        self.all.append(saved)
        return saved

    def unpack(self, saved: Saved) -> Tensor:
        """Called when backward reads the tensor."""
        with unrecorded():
            if fingerprint(saved.tensor) != saved.bits:
                saved.changed = True
                saved.writer = saved.writer or self._writer_of(saved)
        return saved.tensor if saved.copy is None else saved.copy

    def _writer_of(self, saved: Saved) -> str:
        where = address(saved.tensor)
        return next((by for event, at, by in self._writes if event >= saved.event and at == where), "")

    def look(self, writer: Callable[[], str]) -> None:
        """Records the writer of watched tensors that have changed since the last call."""
        for number in self._watched:
            if number < len(self.all) and not self.all[number].writer:
                saved = self.all[number]
                with unrecorded():
                    saved.writer = writer() if fingerprint(saved.tensor) != saved.bits else ""

    def by_nobody(self) -> str:
        """A description of what may have changed a tensor between two events."""
        return f"code outside of torch's operators, just before {self._places.text()}"


@contextmanager
def unrecorded() -> Iterator[None]:
    """A context without modes, in which autograd records nothing."""
    with torch_private.no_modes(), torch.no_grad():
        yield


def address(tensor: Tensor) -> int:
    """The address of a tensor's storage; zero if it has none."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # the tensor is of a subclass without memory of its own
        return 0
