"""The function under test as a map of real coordinates: its values, differences, VJPs and JVPs."""

from __future__ import annotations

from fastgrad.problem.differences import Differences
from fastgrad.problem.forward import ForwardMode
from fastgrad.problem.reverse import ReverseMode


class Problem(Differences, ReverseMode, ForwardMode):
    """The map f: R^n -> R^m of func and its inputs, with its derivatives by autograd.

    A context manager: on leaving it, exceptions and Ctrl-C included, the inputs hold the bits they
    had on entering. The eps that its methods take is the check's; an input's own is `Block.step` times as large.

    Attributes
    ----------
    inputs, outputs
        The coordinates of the differentiable inputs, and of the outputs to difference: those that
        require grad or, if there is none, all that could.
    has_graph
        Whether any output requires grad.
    is_custom
        Whether a custom Function, a hook or other code of the user's is seen to run in backward.
    vectorizes
        Whether VJPs may be vectorized: where no such code is.
    nodes, custom_nodes
        Number of nodes of the graph behind the outputs, and of custom Functions among them.
    records_differences
        Whether func next to x records gradients.
    n, m
        Real coordinates of inputs and outputs.
    device
        Where Jacobian blocks live: with the outputs.
    seconds
        Seconds of the first evaluation.
    undisturbed_seconds
        Those of them in which no other process had the processor.
    ranks
        The processes that compute columns and rows.
    has_checkpoint, restores
        Whether a file keeps columns and rows, and whether it had some that an earlier run computed.
    progress
        The bar that shows how far the check is.
    unit_roundoff
        Half an ulp of the coarsest dtype among inputs and outputs.
    scales
        The different pairs of step and weight that its inputs have.
    mixes_inputs
        Whether there is more than one.
    unspecified
        The largest entry that `vjp` met at an element that a sparse input does not specify.
    evaluations, vjps, jvps
        Calls of func and of backward so far; a JVP is one of the evaluations.
    """
