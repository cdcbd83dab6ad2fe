"""jax.test_util.check_grads over torch functions: the verdict of jax's checker on a backward of torch's.

A torch function becomes a jax function by callbacks, its backward (or its jvp) the rule of differentiation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.test_util import check_grads
from torch import Tensor
from torch.autograd import forward_ad

from fastgrad.problem.arguments import as_tuple

jax.config.update("jax_enable_x64", True)

Func = Callable[..., Any]


def gradcheck(func: Func, inputs: Sequence[Any], *, check_forward_ad: bool = False, **_: Any) -> bool:
    """Like torch's gradcheck with raise_exception=False, but with jax's tolerances and random vectors."""
    return _passes(func, inputs, 1, "fwd" if check_forward_ad else "rev")


def gradgradcheck(func: Func, inputs: Sequence[Any], **_: Any) -> bool:
    """Checks first and second derivatives, as jax does for order 2."""
    return _passes(func, inputs, 2, "rev")


def _passes(func: Func, inputs: Sequence[Any], order: int, mode: str) -> bool:
    plain = _Plain(func, inputs)
    wrapped = plain.with_jvp() if mode == "fwd" else plain.with_vjp(order)
    arrays = tuple(jnp.asarray(inputs[i].detach().numpy()) for i in plain.checked)
    np.random.seed(0)  # check_grads draws from numpy's generator
    try:
        check_grads(wrapped, arrays, order=order, modes=[mode])
    except AssertionError:
        return False
    return True


class _Plain:
    """func as a function from the inputs that require grad to the outputs that require grad."""

    def __init__(self, func: Func, inputs: Sequence[Any]) -> None:
        self._func, self._inputs = func, tuple(inputs)
        self.checked = [i for i, value in enumerate(inputs) if isinstance(value, Tensor) and value.requires_grad]
        outputs = as_tuple(func(*inputs))
        self._kept = [k for k, value in enumerate(outputs) if isinstance(value, Tensor) and value.requires_grad]
        self._shapes = [_shape(outputs[k]) for k in self._kept]
        self._input_shapes = [_shape(inputs[i]) for i in self.checked]

    def __call__(self, *checked: Tensor) -> tuple[Tensor, ...]:
        given = list(self._inputs)
        for i, value in zip(self.checked, checked, strict=True):
            given[i] = value
        outputs = as_tuple(self._func(*given))
        return tuple(outputs[k] for k in self._kept)

    def _values(self, *arrays: Any) -> list[Any]:
        return [_array(value) for value in self(*_leaves(arrays))]

    def with_vjp(self, order: int) -> Func:
        """Makes a jax function of func; if the order is above 1, its vjp can be differentiated."""

        @jax.custom_vjp
        def wrapped(*arrays: Any) -> Any:
            return jax.pure_callback(self._values, self._shapes, *arrays)

        def backward(arrays: Any, cotangents: Any) -> Any:
            if order == 1:
                shapes = self._input_shapes
                gradients = jax.pure_callback(self._gradients, shapes, *arrays, *map(jnp.conj, cotangents))
            else:
                gradients = self._differentiable(order)(*arrays, *map(jnp.conj, cotangents))
            # jax's cotangents are the conjugates of torch's gradients.
            return tuple(jnp.conj(gradient) for gradient in gradients)

        wrapped.defvjp(lambda *arrays: (wrapped(*arrays), arrays), backward)
        return wrapped

    def _gradients(self, *arrays: Any) -> list[Any]:
        leaves, grad_outputs = (
            _leaves(arrays[: len(self.checked)]),
            [torch.tensor(np.array(a)) for a in arrays[len(self.checked) :]],
        )
        gradients = torch.autograd.grad(self(*leaves), leaves, grad_outputs, allow_unused=True)
        pairs = zip(gradients, leaves, strict=True)
        return [_array(torch.zeros_like(leaf) if gradient is None else gradient) for gradient, leaf in pairs]

    def _differentiable(self, order: int) -> Func:
        """The backward as a differentiable jax function of inputs and grad_outputs."""
        count = len(self.checked)

        def backward(*arguments: Tensor) -> tuple[Tensor, ...]:
            leaves = [value if value.requires_grad else value.requires_grad_() for value in arguments[:count]]
            found = torch.autograd.grad(self(*leaves), leaves, arguments[count:], create_graph=True, allow_unused=True)
            return tuple(
                torch.zeros_like(leaf) + 0 * leaf if gradient is None else gradient + 0 * leaf
                for gradient, leaf in zip(found, leaves, strict=True)
            )

        checked = [self._inputs[i].detach().clone().requires_grad_() for i in self.checked]
        ones = [torch.ones_like(value).requires_grad_() for value in self(*checked)]
        return _Plain(backward, (*checked, *ones)).with_vjp(order - 1)

    def with_jvp(self) -> Func:
        """A jax function whose jvp is torch's forward mode."""

        @jax.custom_jvp
        def wrapped(*arrays: Any) -> Any:
            return jax.pure_callback(self._values, self._shapes, *arrays)

        def jvp(primals: Any, tangents: Any) -> Any:
            return wrapped(*primals), jax.pure_callback(self._tangents, self._shapes, *primals, *tangents)

        wrapped.defjvp(jvp)
        return wrapped

    def _tangents(self, *arrays: Any) -> list[Any]:
        tensors = [torch.tensor(np.array(array)) for array in arrays]
        half = len(tensors) // 2
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(*pair) for pair in zip(tensors[:half], tensors[half:], strict=True)]
            outputs = [forward_ad.unpack_dual(value) for value in self(*duals)]
            return [_array(torch.zeros_like(p) if t is None else t) for p, t in outputs]


def _leaves(arrays: Sequence[Any]) -> list[Tensor]:
    return [torch.tensor(np.array(array)).requires_grad_() for array in arrays]


def _array(tensor: Tensor) -> Any:
    return tensor.detach().resolve_conj().numpy()


def _shape(tensor: Tensor) -> Any:
    return jax.ShapeDtypeStruct(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
