"""The function under test as a map of real coordinates: its values, differences, VJPs and JVPs."""

from __future__ import annotations

from fastgrad.problem.differences import CentralDifferences
from fastgrad.problem.forward import ForwardMode
from fastgrad.problem.reverse import ReverseMode
from fastgrad.problem.second_order import Backward


class Problem(CentralDifferences, ReverseMode, ForwardMode):
    """The map f: R^n -> R^m of func and its inputs, with its derivatives by autograd.

    This is a context manager: on leaving it, also after an exception or Ctrl-C, the inputs have the bits that they had
    on entering. Its methods take the eps of the check; the step of an input is eps times `Block.step`.

    Attributes
    ----------
    inputs, outputs
        The coordinates of the differentiable inputs, and of the outputs whose differences are taken: the outputs that
        require grad or, if there are none, all outputs that could.
    has_graph
        Whether any output requires grad.
    is_custom
        Whether a custom Function, a hook or other user code runs in backward, as far as visible.
    vectorizes
        Whether VJPs may be vectorized: only if no such code runs.
    nodes, custom_nodes
        Number of nodes of the graph of the outputs, and number of custom Functions among them.
    records_differences
        Whether func records gradients when it is evaluated next to x.
    n, m
        Numbers of real coordinates of inputs and outputs.
    device
        The device of Jacobian blocks, which is the device of the outputs.
    seconds
        Seconds of the first evaluation.
    working_seconds
        The part of these seconds in which the processor ran this process; on a CUDA device, all of them.
    ranks
        Number of processes that compute columns and rows.
    has_checkpoint, restores
        Whether a file keeps columns and rows, and whether some were loaded from it since `restores` was last set to
        False.
    progress
        The bar that shows how far the check is.
    unit_roundoff
        Half an ulp of the coarsest dtype among inputs and outputs.
    scales
        The different pairs of step and weight of the inputs.
    mixes_inputs
        Whether there is more than one such pair.
    base_change
        The largest difference so far between `base` and the outputs of a later graph at x.
    irreproducible
        The evaluations that gave other values when they were repeated, as text.
    unspecified
        The largest magnitude so far of an entry of a VJP at an element that a sparse input does not specify.
    derivative_error
        The last exception that `vjps_of` or `jvps_of` has raised.
    evaluations, vjps, jvps
        Numbers of calls of func, of VJPs and of JVPs so far; a JVP is one of the evaluations.
    """

    @property
    def differentiates_custom_code(self) -> bool:
        """Whether func runs custom code, or, for second derivatives, the function whose backward it is."""
        return self.is_custom or (isinstance(self.func, Backward) and self.func.is_custom)
