"""The keywords of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

GradOutputs = Literal["given", "random", "non-contiguous", "ones"]
"""The source of gradgradcheck's grad_outputs."""

Engine = Literal["auto", "dense", "compressed", "sketch"]
"""The engine that computes the Jacobians. "auto" lets fastgrad choose it."""

Precision = Literal["auto", "strict"]
"""Whether functions of a lower dtype are checked by measured rounding, or by tolerances as in double precision."""

UNNAMED = "a function"
"""Stands for the name of a reference that has none."""


@dataclass(frozen=True)
class Tolerances:
    """The step and the tolerances for one input.

    Attributes
    ----------
    eps
        The step of the differences, to each side of x.
    atol
        Absolute tolerance.
    rtol
        Relative tolerance.
    """

    eps: float = 1e-6
    atol: float = 1e-5
    rtol: float = 1e-3

    def allowed(self, values: Tensor) -> Tensor:
        """The allowed error of entries with these values."""
        return self.atol + self.rtol * values.abs()


@dataclass(frozen=True)
class Settings(Tolerances):
    """The keywords of one check; those that are not listed here are as in `fastgrad.gradcheck`.

    Attributes
    ----------
    confidence
        Confidence of fast mode.
    grad_outputs
        Source of gradgradcheck's grad_outputs; None in gradcheck.
    order
        Order of the derivatives that are checked.
    inputs
        The step and tolerances of each checked input; empty if all inputs have the same. Otherwise, eps, atol and rtol
        of these settings are the smallest values of all inputs.
    precision
        "auto", or "strict": the tolerances apply to every dtype.
    reference
        The name of the reference that was passed for a function in a lower dtype; None: the function itself, in double
        precision.
    reference_device
        The device that was passed for the reference; None: that of the function.
    """

    nondet_tol: float = 0.0
    check_undefined_grad: bool = True
    check_grad_dtypes: bool = False
    check_batched_grad: bool = False
    check_batched_forward_grad: bool = False
    check_forward_ad: bool = False
    check_backward_ad: bool = True
    fast_mode: bool = False
    masked: bool = False
    engine: Engine = "auto"
    seed: int = 0
    confidence: float = 1 - 1e-9
    memory_limit: int | None = None
    progress: bool | None = False
    grad_outputs: GradOutputs | None = None
    order: int = 1
    inputs: tuple[Tolerances, ...] = ()
    precision: Precision = "auto"
    reference: str | None = None
    reference_device: str | None = None

    def of(self, index: int) -> Tolerances:
        """The step and tolerances of an input; index: the number of its block."""
        return self.inputs[index] if self.inputs else self

    def of_entries(self, error: float) -> float:
        """The largest error of an entry that adds `error` to a sum. Sums weight inputs with a larger atol less."""
        return error * self.loosest().atol / self.atol if self.inputs and self.atol else error

    def loosest(self) -> Tolerances:
        """The largest step and the largest tolerances of all inputs, for sums over inputs."""
        largest = (max(getattr(own, name) for own in self.inputs) for name in ("eps", "atol", "rtol"))
        return Tolerances(*largest) if self.inputs else self
