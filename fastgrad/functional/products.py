"""Products of Jacobians and Hessians with vectors: the signatures of torch.autograd.functional."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from fastgrad.functional.containers import Func, as_inputs, vector
from fastgrad.functional.numerical import numerical_hessian_product, numerical_jvp, numerical_vjp
from fastgrad.problem.arguments import check_callable
from fastgrad.problem.caller_state import restores_caller_state
from fastgrad.problem.validation import as_bool


@restores_caller_state
def vjp(
    func: Func,
    inputs: Any,
    v: Any = None,
    create_graph: bool = False,
    strict: bool = False,
    *,
    numerical: bool = False,
    return_error: bool = False,
) -> tuple[Any, ...]:
    """v^T J for the Jacobian J of func at inputs, as torch.autograd.functional.vjp gives it.

    Parameters
    ----------
    func, inputs, create_graph, strict, numerical, return_error
        As for `jacobian`. A numerical product costs as much as the numerical Jacobian.
    v
        Vectors of the shapes of func's outputs; may be left out if func returns a single element.

    Returns
    -------
    tuple
        func's outputs, and the product, of the form of the inputs. With return_error, the error too.

    Raises
    ------
    TypeError, ValueError
        As in `jacobian`.
    RuntimeError
        v is missing, or has other shapes; strict=True and an output, or the result, that does not depend on an input.

    Examples
    --------
    >>> import torch, fastgrad
    >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> fastgrad.functional.vjp(torch.square, x, torch.ones(2, dtype=torch.float64))[1].tolist()
    [2.0, 4.0]
    """
    return _product("vjp", func, inputs, v, create_graph, strict, numerical, return_error)


@restores_caller_state
def jvp(
    func: Func,
    inputs: Any,
    v: Any = None,
    create_graph: bool = False,
    strict: bool = False,
    *,
    numerical: bool = False,
    return_error: bool = False,
) -> tuple[Any, ...]:
    """J v for the Jacobian J of func at inputs, as torch.autograd.functional.jvp gives it.

    It is computed by differentiating the backward, so func needs no forward-mode AD.

    Parameters
    ----------
    func, inputs, create_graph, strict, numerical, return_error
        As for `jacobian`. A numerical product takes about 40 evaluations in all.
    v
        Vectors of the shapes of the inputs; may be left out if these are a single element.

    Returns
    -------
    tuple
        func's outputs, and the product, of the form of the outputs. With return_error, the error too.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `vjp`.

    Examples
    --------
    >>> import torch, fastgrad
    >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> fastgrad.functional.jvp(torch.square, x, torch.ones(2, dtype=torch.float64))[1].tolist()
    [2.0, 4.0]
    """
    return _product("jvp", func, inputs, v, create_graph, strict, numerical, return_error)


@restores_caller_state
def vhp(
    func: Func,
    inputs: Any,
    v: Any = None,
    create_graph: bool = False,
    strict: bool = False,
    *,
    numerical: bool = False,
    return_error: bool = False,
) -> tuple[Any, ...]:
    """v^T H for the Hessian H of func at inputs, as torch.autograd.functional.vhp gives it.

    Parameters
    ----------
    func
        Takes the inputs, returns a Tensor with a single element.
    inputs, create_graph, strict, numerical, return_error
        As for `hessian`. A numerical product takes 22 (2 n + 1) evaluations for n elements.
    v
        Vectors of the shapes of the inputs; may be left out if these are a single element.

    Returns
    -------
    tuple
        func's output, and the product, of the form of the inputs. With return_error, the error too.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `vjp` and `hessian`.

    Examples
    --------
    >>> import torch, fastgrad
    >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> fastgrad.functional.vhp(lambda x: (x**2).sum(), x, torch.ones(2, dtype=torch.float64))[1].tolist()
    [2.0, 2.0]
    """
    return _product("vhp", func, inputs, v, create_graph, strict, numerical, return_error)


@restores_caller_state
def hvp(
    func: Func,
    inputs: Any,
    v: Any = None,
    create_graph: bool = False,
    strict: bool = False,
    *,
    numerical: bool = False,
    return_error: bool = False,
) -> tuple[Any, ...]:
    """H v for the Hessian H of func at inputs, as torch.autograd.functional.hvp gives it.

    It is computed by differentiating v -> v^T H, so it is also right if H is not symmetric. `vhp` is faster.

    Parameters
    ----------
    func, inputs, v, create_graph, strict, numerical, return_error
        As for `vhp`.

    Returns
    -------
    tuple
        func's output, and the product, of the form of the inputs. With return_error, the error too.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `vhp`.

    Examples
    --------
    >>> import torch, fastgrad
    >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> fastgrad.functional.hvp(lambda x: (x**2).sum(), x, torch.ones(2, dtype=torch.float64))[1].tolist()
    [2.0, 2.0]
    """
    return _product("hvp", func, inputs, v, create_graph, strict, numerical, return_error)


def _product(
    name: Literal["vjp", "jvp", "vhp", "hvp"],
    func: Func,
    inputs: Any,
    v: Any,
    create_graph: bool,
    strict: bool,
    numerical: bool,
    return_error: bool,
) -> tuple[Any, ...]:
    """Calls torch's function, because sparsity does not save calls here, or its numerical counterpart."""
    check_callable(func)
    create_graph, strict = as_bool("create_graph", create_graph), as_bool("strict", strict)
    check_product_options(create_graph, strict, numerical, return_error)
    is_tuple, given = as_inputs(inputs, name)
    if not numerical:
        of_torch: Callable[..., tuple[Any, Any]] = getattr(torch.autograd.functional, name)
        return of_torch(func, inputs, v, create_graph=create_graph, strict=strict)
    with torch.enable_grad():
        if name == "vjp":
            found = numerical_vjp(func, given, is_tuple, v, return_error)
        elif name == "jvp":
            found = numerical_jvp(func, given, vector(v, given, is_tuple, name))
        else:
            found = numerical_hessian_product(name, func, given, is_tuple, vector(v, given, is_tuple, name))
    return found if return_error else found[:2]


def check_product_options(create_graph: bool, strict: bool, numerical: bool, return_error: bool) -> None:
    if return_error and not numerical:
        raise ValueError("return_error=True needs numerical=True: autograd gives no error estimate.")
    if numerical and (create_graph or strict):
        raise ValueError(
            f"numerical=True and {'create_graph' if create_graph else 'strict'}=True cannot be combined: differences "
            "record no graph."
        )
