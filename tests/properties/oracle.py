"""Verdicts of both checkers on a program, the true verdict, and the listed difference that explains a disagreement."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

import fastgrad
from fastgrad.problem.second_order import random_grad_outputs
from tests.properties.operators import SPARSE, UNFIT, Input
from tests.properties.planted import LINEAR, UNDEFINED
from tests.properties.programs import IGNORED, KINDS, Program


@dataclass(frozen=True)
class Verdict:
    """The outcome of a checker: "pass", "fail" or the name of an exception; kind: of fastgrad's failure."""

    word: str
    message: str = ""
    kind: str | None = None

    def __str__(self) -> str:
        return f"{self.word} {self.kind or ''} {self.message[:200].splitlines()[0] if self.message else ''}"


def verdict(program: Program, own: bool) -> Verdict:
    """The verdict of fastgrad, or of torch slow mode."""
    kind = KINDS[program.kind]
    func, inputs = program.make_func(), program.make_inputs()
    keywords = {**kind.keywords, **dict(program.keywords), **(dict(program.own) if own else {})}
    library: Any = fastgrad if own else torch.autograd
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind.second_order and not own:
            keywords["grad_outputs"] = _grad_outputs(program) or None
        torch.manual_seed(0)
        try:
            getattr(library, kind.check)(func, inputs, **keywords)
        except GradcheckError as error:
            report = getattr(error, "report", None)
            failure = None if report is None else report.failure
            return Verdict("fail", str(error).strip(), failure and failure.kind)
        except Exception as error:
            return Verdict(type(error).__name__, str(error).strip())
    return Verdict("pass")


def _grad_outputs(program: Program) -> tuple[Tensor, ...]:
    """The grad_outputs that fastgrad makes: the verdict on a backward that is not linear depends on them."""
    keywords = dict(program.keywords + program.own)
    try:
        outputs = _tracked(program.results())
    except UNFIT:
        return ()
    return random_grad_outputs(outputs, keywords.get("seed", 0), keywords.get("gen_non_contig_grad_outputs", False))


def _tracked(results: Sequence[Any]) -> tuple[Tensor, ...]:
    return tuple(value for value in results if isinstance(value, Tensor) and value.requires_grad)


# The true verdict: products by autograd with many vectors, compared with differences of high order.


def flaws(program: Program) -> frozenset[str]:
    """The kinds of vectors for which autograd's products with the derivative are wrong, and other errors.

    This uses neither checker. The derivative is extrapolated from differences at three large steps: of a
    sparse input with respect to the specified elements under masked semantics, the others being zero, and otherwise to
    all elements of a copy that specifies them.

    "moves": two equal products differ; "results move": two equal calls of the function do; "... raises".
    """
    function, arguments = _function(program)
    inputs = list({id(x): x for x in arguments if isinstance(x, Tensor) and x.requires_grad}.values())
    repeats = [function(*arguments) for _ in range(4)]
    if any(
        not _tracked([x]) or x.shape != y.shape for other in repeats for x, y in zip(other, repeats[0], strict=True)
    ):
        return frozenset({"results move"})
    found = set()
    if any(not torch.equal(_flat(repeats[0]), _flat(other)) for other in repeats):
        found.add("results move")
    keywords = KINDS[program.kind].keywords
    masked = keywords.get("masked", False)
    jacobian = _jacobian(function, arguments, inputs, masked)
    moving = dict(program.keywords).get("nondet_tol", 0.0)
    products = []
    if keywords.get("check_backward_ad", True):
        products.append((_vjps(function(*arguments), inputs), jacobian))
    if program.forward:
        zero = dict(program.keywords).get("check_undefined_grad", True)
        products.append((_jvps(function, arguments, inputs, repeats[0], zero), jacobian.t()))
    for named, matrix in products:
        for name, vector, product in named:
            try:
                first, second = product(), product()
            except Exception:
                found.add(f"{name} raises")
                continue
            terms = vector[:, None] * matrix
            largest = max([1.0, *vector.abs().tolist()])
            if name.endswith("zero"):
                largest = 1e-3 if masked else 0.0  # as torch.allclose has it
            allowed = 1e-5 * largest + 1e-3 * terms.square().sum(0).sqrt()
            if not bool(((first - terms.sum(0)).abs() <= allowed).all()):
                found.add(name)
            if not name.startswith("tangent") and not torch.allclose(
                first, second, rtol=0, atol=moving, equal_nan=True
            ):
                found.add("moves")
    return frozenset(found)


Function = Callable[..., tuple[Tensor, ...]]
Product = tuple[str, Tensor, Callable[[], Tensor]]
"""A kind of vector, one of that kind, and how to get autograd's product with it."""


def _function(program: Program) -> tuple[Function, tuple[Any, ...]]:
    """The function that is checked, and its arguments."""
    func, inputs = program.make_func(), program.make_inputs()
    count = len(inputs)

    def results(*arguments: Any) -> tuple[Any, ...]:
        found = func(*arguments)
        return found if isinstance(found, tuple) else (found,)

    def backward(*arguments: Any) -> tuple[Any, ...]:
        wanted = [x for x, like in zip(arguments[:count], inputs, strict=False) if _tracked([like])]
        grads = arguments[count:]
        for x in (*wanted, *grads):
            x.requires_grad_()
        outputs = _tracked(results(*arguments[:count]))
        return torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True)

    if KINDS[program.kind].second_order:
        inputs, whole = (*inputs, *_grad_outputs(program)), backward
    else:
        whole = results
    # In forward mode results do not require grad, so the results that require grad outside of it count.
    positions = [i for i, value in enumerate(whole(*inputs)) if _tracked([value])]

    def function(*arguments: Any) -> tuple[Tensor, ...]:
        found = whole(*arguments)
        return tuple(found[i] for i in positions)

    return function, inputs


def _flat(values: Sequence[Tensor | None], likes: Sequence[Tensor] = ()) -> Tensor:
    """Real coordinates end to end, zeros for None."""
    parts = [
        torch.zeros(like.shape, dtype=like.dtype) if value is None else value
        for value, like in zip(values, likes or values, strict=True)
    ]
    parts = [x if x.layout is torch.strided else x.to_dense() for x in parts]
    parts = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in (x.detach() for x in parts)]
    return torch.cat([x.reshape(-1).double() for x in parts] or [torch.zeros(0, dtype=torch.float64)])


def _unflat(vector: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous tensors with the given coordinates."""
    sizes = [like.numel() * (2 if like.is_complex() else 1) for like in likes]
    return [
        torch.view_as_complex(part.clone().reshape(*like.shape, 2))
        if like.is_complex()
        else part.clone().reshape(like.shape)
        for part, like in zip(vector.split(sizes), likes, strict=True)
    ]


@dataclass(frozen=True)
class Place:
    """The memory in which an input is moved, and the tensor that the function gets.

    values is strided memory; elements is the flat number of the element that each value of a sparse input is.
    """

    values: Tensor
    elements: Tensor | None
    argument: Tensor


def _place(x: Tensor, masked: bool) -> Place:
    """The place of an input: its own values if it is strided or masked, otherwise a copy that specifies all."""
    if x.layout is torch.strided:
        return Place(x.detach(), None, x)
    if x.layout is torch.sparse_coo:
        sparse, dense = x.shape[: x.sparse_dim()], x.shape[x.sparse_dim() :]
        indices = x.detach()._indices() if masked else torch.ones(sparse).nonzero().t()
        steps = torch.empty(x.shape, device="meta").stride()[: x.sparse_dim()]
        first = sum((step * index for step, index in zip(steps, indices, strict=True)), torch.zeros(1).long())
        elements = (first.reshape(-1, 1) + torch.arange(dense.numel())).reshape(-1)
        argument = x
        if not masked:
            values = x.detach().to_dense().reshape(-1)[elements].reshape(-1, *dense)
            argument = torch.sparse_coo_tensor(indices, values, x.shape, is_coalesced=True).requires_grad_()
        return Place(argument.detach()._values(), elements, argument)
    argument = x
    if not masked:
        blocks = x.values().shape[1:3] if x.layout in (torch.sparse_bsr, torch.sparse_bsc) else None
        ones = torch.ones(x.shape, dtype=x.dtype)
        argument = ones.to_sparse(layout=x.layout, blocksize=blocks, dense_dim=x.dense_dim()).requires_grad_()
    values, elements = argument.detach().values(), _elements(argument.detach())
    if not masked:
        values.copy_(x.detach().to_dense().reshape(-1)[elements].reshape(values.shape))
    return Place(values, elements, argument)


def _elements(x: Tensor) -> Tensor:
    """The flat number of the element that each value of a compressed tensor is, one by one."""
    by_rows = x.layout in (torch.sparse_csr, torch.sparse_bsr)
    ends, insides = (x.crow_indices(), x.col_indices()) if by_rows else (x.ccol_indices(), x.row_indices())
    blocked = x.layout in (torch.sparse_bsr, torch.sparse_bsc)
    height, width = x.values().shape[1:3] if blocked else (1, 1)
    rest = x.shape[2:].numel()
    found = []
    for outer in range(len(ends) - 1):
        for inner in insides[ends[outer] : ends[outer + 1]].tolist():
            row, column = (outer, inner) if by_rows else (inner, outer)
            for i, j, k in itertools.product(range(height), range(width), range(rest)):
                found.append(((row * height + i) * x.shape[1] + column * width + j) * rest + k)
    return torch.tensor(found, dtype=torch.int64)


def _jacobian(function: Function, given: Sequence[Any], inputs: Sequence[Tensor], masked: bool) -> Tensor:
    """Shape (m, n), by differences at three steps, extrapolated to order 6; ValueError where a kink is near.

    n counts all elements of sparse inputs; columns of those that are not moved are zero.
    """
    moved = [_place(x, masked) for x in inputs]
    places = [place.values for place in moved]
    instead = {id(x): place.argument for x, place in zip(inputs, moved, strict=True)}
    arguments = [instead.get(id(x), x) for x in given]
    start = _flat(places)

    def at(point: Tensor) -> Tensor:
        for place, values in zip(places, _unflat(point, places), strict=True):
            place.copy_(values)
        return _flat(function(*arguments))

    columns = []
    for unit in torch.eye(len(start), dtype=torch.float64):
        coarse, middle, fine = ((at(start + h * unit) - at(start - h * unit)) / (2 * h) for h in (4e-3, 2e-3, 1e-3))
        if not torch.allclose(coarse, fine, rtol=1e-2, atol=1e-2, equal_nan=True):
            raise ValueError("the differences do not converge")
        columns.append((16 * (4 * fine - middle) - (4 * middle - coarse)) / 45)
    at(start)
    size = len(_flat(function(*arguments)))
    matrix = torch.zeros(size, sum(x.numel() * (2 if x.is_complex() else 1) for x in inputs), dtype=torch.float64)
    first = 0
    for x, place in zip(inputs, moved, strict=True):
        width = 2 if x.is_complex() else 1
        elements = torch.arange(x.numel()) if place.elements is None else place.elements
        for element in elements.tolist():
            for part in range(width):
                matrix[:, first + width * element + part] = columns.pop(0)
        first += x.numel() * width
    return matrix


def _gapped(x: Tensor, between: float) -> Tensor:
    """A copy with transposed strides and gaps that hold a number. An empty tensor, which is contiguous, is returned."""
    if not x.numel():
        return x
    gaps = torch.full((*x.shape[::-1], 2), between, dtype=x.dtype)
    y = gaps[..., 0].permute(tuple(reversed(range(x.ndim))))
    return y.copy_(x)


def _offset(x: Tensor) -> Tensor:
    """A copy at a storage offset of one element."""
    storage = torch.cat([x.new_full((1,), float("nan")), x.reshape(-1)])
    return storage[1:].view(x.shape)


def _vectors(size: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    dense = torch.rand(size, generator=generator, dtype=torch.float64) + 0.5
    dense *= torch.randint(0, 2, (size,), generator=generator) * 2 - 1
    yield "zero", torch.zeros_like(dense)
    yield from (("one-hot", unit) for unit in torch.eye(size, dtype=torch.float64))
    yield from (("scaled", -4 * unit) for unit in torch.eye(size, dtype=torch.float64))
    yield "dense", dense
    for half in torch.rand(4, size, generator=generator) < 0.5:
        yield "halved", dense * half
    yield "gapped", dense
    yield "offset", dense
    yield "expanded", torch.full_like(dense, 1.25)


def _vjps(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Iterator[Product]:
    """VJPs. As in torch, a one-hot vector is a grad_output of one output; other vectors are those of all outputs."""
    size = len(_flat(outputs))
    for name, vector in _vectors(size):

        def product(name: str = name, vector: Tensor = vector) -> Tensor:
            grads = _unflat(vector, outputs)
            if name == "gapped":
                grads = [_gapped(x, float("nan")) for x in grads]
            if name == "offset":
                grads = [_offset(x) for x in grads]
            if name == "expanded":
                grads = [x.reshape(-1)[:1].reshape([1] * x.ndim).expand(x.shape) if x.numel() else x for x in grads]
            pairs = [
                (x, g) for x, g in zip(outputs, grads, strict=True) if name not in ("one-hot", "scaled") or g.any()
            ]
            kept, grads = zip(*pairs, strict=True)
            found = torch.autograd.grad(kept, inputs, grads, retain_graph=True, allow_unused=True)
            return _flat(found, inputs)

        if outputs:
            yield name, vector, product


def _jvps(
    function: Function, arguments: Sequence[Any], inputs: Sequence[Tensor], outputs: Sequence[Tensor], zero: bool
) -> Iterator[Product]:
    """JVPs. If a tensor is passed twice, both places get its tangent; zero: whether zero tangents are tried.

    Gaps hold a finite number: a jvp that reads it and multiplies it by zero is not a flaw, and is not reported.
    """
    if not len(_flat(inputs)):
        return  # there is no derivative, so no jvp is called
    for name, vector in _vectors(len(_flat(inputs))):
        if name in ("offset", "expanded") or (name == "zero" and not zero):
            continue

        def product(name: str = name, vector: Tensor = vector) -> Tensor:
            with forward_ad.dual_level():
                tangents = _unflat(vector, inputs)
                if name == "gapped":
                    tangents = [_gapped(x, 7.0) for x in tangents]
                pairs = zip(inputs, tangents, strict=True)
                duals = {id(x): forward_ad.make_dual(x.detach(), tangent) for x, tangent in pairs}
                results = function(*(duals.get(id(x), x) for x in arguments))
                return _flat([forward_ad.unpack_dual(x).tangent for x in results], outputs)

        yield f"tangent {name}", vector, product


# Differences


ABOUT_DERIVATIVES = ("mismatch", "nonlinear", "nondeterministic", "undefined tangent", "not multiplied by grad_output")


@dataclass(frozen=True)
class Comparison:
    """Both verdicts on a program, its flaws (None if undetermined) and the row that lists a difference, or ""."""

    program: Program
    torchs: Verdict
    own: Verdict
    flaws: frozenset[str] | None = None
    row: str = ""

    @property
    def differ(self) -> bool:
        """Whether the verdicts are not the same."""
        return self.torchs.word != self.own.word

    @property
    def untrue(self) -> bool:
        """Whether fastgrad passes although there is a flaw, or fails although there is none.

        Some exceptions do not count. A backward that varies between runs is found only by chance. A tiny tangent for
        zero tangents is only compared with that for undefined ones. torch's view_as_real does not accept an odd storage
        offset. Rounding to low precision dominates small steps, but not large ones. A clamp in backward affects only
        some vectors. Errors of entries below the tolerance may add up in sums.
        """
        if self.flaws is None:
            return False
        if self.own.word == "pass":
            linear = self.program.error in (None, "right", *LINEAR)
            sums = {"dense", "halved", "gapped", "offset", "expanded"} if linear else set()
            return bool(self.flaws - {"moves", "results move", "tangent zero", "offset raises"} - sums)
        return (
            self.own.kind in ABOUT_DERIVATIVES
            and not self.flaws
            and self.program.error not in ("low precision", "clamp")
        )

    @property
    def alarm(self) -> bool:
        """Whether the verdicts differ without a listed reason, or fastgrad's verdict is not the true one."""
        return (self.differ and not self.row) or self.untrue

    def __str__(self) -> str:
        truth = "unknown" if self.flaws is None else ", ".join(sorted(self.flaws)) or "no flaws"
        listed = f"\n  listed: {self.row}" if self.row else ""
        return f"{self.program}\n  torch: {self.torchs}\n  fastgrad: {self.own}\n  truth: {truth}{listed}"


OTHER_STEPS = (1e-4, 1e-3)
"""Where torch passes what it fails at eps: evidence that the step was wrong, and not the gradient."""


def compare(program: Program) -> Comparison:
    """Both checkers on a program, what is true of it, and the listed difference where their verdicts differ."""
    try:
        wrong: frozenset[str] | None = flaws(program)
    except UNFIT:
        wrong = None
    found = Comparison(program, verdict(program, False), verdict(program, True), wrong)
    return replace(found, row=_listed(found)) if found.differ else found


def _listed(found: Comparison) -> str:
    program, own, wrong = found.program, found.own, found.flaws or frozenset()
    rows = []
    for row, without in _MISTAKES.items():
        changed = without(program)
        if changed != program:
            rows.append(row)
            program = changed
    torchs = verdict(program, False) if rows else found.torchs
    if _asks_sparse(torchs):
        rows.append("sparse gradients of undefined grad_outputs")
        program = replace(program, keywords=(*program.keywords, ("check_undefined_grad", False)))
        torchs = verdict(program, False)
        if own.kind in ("undefined grad raises", "undefined grad not zero") and program.error in UNDEFINED:
            own = verdict(program, True)
    if torchs.word == own.word:
        return " and ".join(rows)
    if own.word == "fail" and verdict(_unlimited(program), True).word == torchs.word:
        return " and ".join([*rows, "a failure found before the exception of a later block of columns"])
    for row, holds in _ROWS.items():
        if holds(program, torchs, own, wrong):
            return " and ".join([*rows, row])
    if (torchs.word, own.word) == ("fail", "pass"):
        others = (replace(program, keywords=(*program.keywords, ("eps", eps))) for eps in OTHER_STEPS)
        if any(verdict(other, False).word == "pass" for other in others):
            return " and ".join([*rows, "re-measured"])
    return ""


def _unlimited(program: Program) -> Program:
    return replace(program, own=tuple(pair for pair in program.own if pair[0] != "memory_limit"))


def _asks_sparse(torchs: Verdict) -> bool:
    """Whether torch raised because it cannot compare a sparse gradient with zero."""
    return "aten::eq.Scalar" in torchs.message or torchs.message.startswith("unsupported tensor layout: Sparse")


def _without_ignored(program: Program) -> Program:
    kept = tuple(output for output in program.outputs if output[1] not in IGNORED)
    return replace(program, outputs=kept) if kept else program


def _without_untracked(program: Program) -> Program:
    if not program.forward or KINDS[program.kind].second_order:
        return program
    kept = tuple(o for o, result in zip(program.outputs, program.results(), strict=True) if _tracked([result]))
    return replace(program, outputs=kept) if kept else program


def _once(program: Program) -> Program:
    """The same program with each tensor passed once; changed only in forward mode or with masked=False."""
    if not program.forward and KINDS[program.kind].keywords.get("masked") is not False:
        return program
    to = list(range(len(program.inputs) + len(program.steps)))
    for i, value in enumerate(program.inputs):
        to[i] = i if value.same_as is None else value.same_as
    return replace(
        program,
        inputs=tuple(value if value.same_as is None else Input(requires_grad=False) for value in program.inputs),
        steps=tuple(replace(step, values=tuple(to[i] for i in step.values)) for step in program.steps),
        outputs=tuple((to[i], how) for i, how in program.outputs),
    )


_MISTAKES: dict[str, Callable[[Program], Program]] = {
    "bool, integer and None results": _without_ignored,
    "results that do not require grad in forward mode": _without_untracked,
    "the same tensor twice, in forward mode or sparse": _once,
    "sparse inputs that do not require grad, not masked": lambda program: (
        replace(program, captures=any(value.layout in SPARSE and not value.requires_grad for value in program.inputs))
        if KINDS[program.kind].keywords.get("masked") is False
        else program
    ),
}
"""Rows of docs/differences.md by the program without what torch mistakes: on that, both verdicts must be equal."""

OTHERS = {"scaled", "dense", "halved", "gapped", "offset", "expanded"}
"""Vectors that torch does not try."""


def _others_wrong(wrong: frozenset[str], prefix: str = "") -> bool:
    return any(flaw.removesuffix(" raises") == prefix + name for flaw in wrong for name in OTHERS)


_ROWS: dict[str, Callable[[Program, Verdict, Verdict, frozenset[str]], bool]] = {
    "backward not linear in grad_output": lambda program, torchs, own, wrong: (
        torchs.word == "pass"
        and "backward is not linear in grad_output" in own.message
        and "one-hot" not in wrong
        and (_others_wrong(wrong) or program.error == "clamp")
    ),
    "backward that raises for other than one-hot grad_outputs": lambda program, torchs, own, wrong: (
        own.kind == "raises" and "one-hot raises" not in wrong and _others_wrong(wrong)
    ),
    "backward that modifies its grad_output": lambda program, torchs, own, wrong: (
        torchs.word == "pass" and own.kind == "modified grad_output" and program.error == "scales grad_output"
    ),
    "jvp not linear in its tangent": lambda program, torchs, own, wrong: (
        torchs.word == "pass"
        and "jvp is not linear in its tangent" in own.message
        and ("tangent one-hot" not in wrong or program.error == "last")
        and (_others_wrong(wrong, "tangent ") or program.error == "clamp")
    ),
    "undefined tangents are zero": lambda program, torchs, own, wrong: (
        torchs.word == "pass" and own.kind == "undefined tangent" and "tangent zero" in wrong
    ),
    "determinism": lambda program, torchs, own, wrong: (
        torchs.word == "pass" and own.kind == "nondeterministic" and bool(wrong & {"moves", "results move"})
    ),
    "determinism, cost": lambda program, torchs, own, wrong: (
        own.word == "pass" and "not reentrant" in torchs.message and "moves" in wrong and program.error == "third call"
    ),
    "func gives other results when called again": lambda program, torchs, own, wrong: (
        KINDS[program.kind].second_order and "results move" in wrong
    ),
    "sparse inputs, no output requires grad, not masked": lambda program, torchs, own, wrong: (
        torchs.word == "pass"
        and program.kind == "sparse"
        and own.kind == "nonzero numerical gradient"
        and not _tracked(program.results())
    ),
    "gradgradcheck of a func without differentiable outputs": lambda program, torchs, own, wrong: (
        KINDS[program.kind].second_order and own.word == "ValueError" and not _tracked(program.results())
    ),
    "a sparse output, and no output requires grad": lambda program, torchs, own, wrong: (
        torchs.word == "RuntimeError" and "Sparse output is not supported" in own.message
    ),
}
"""Rows of docs/differences.md by what must hold of a program, the two verdicts, torch's first, and its flaws."""
