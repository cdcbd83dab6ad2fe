"""Jacobians, Hessians and their products, with the signatures of torch.autograd.functional."""

from fastgrad.functional.derivatives import hessian, jacobian
from fastgrad.functional.products import hvp, jvp, vhp, vjp

__all__ = ["hessian", "hvp", "jacobian", "jvp", "vhp", "vjp"]
