"""Wrong gradients of functions that act on each element."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.planted.history.shipped import FORWARD, JAX, TORCH, TT_METAL, Shipped, at, beside, with_jvp
from tests.planted.row import function, normal


def _softplus(x: Tensor) -> Tensor:
    return F.softplus(x, beta=3, threshold=1)


def _softplus_by_output(g: Tensor, x: Tensor) -> Tensor:
    return torch.where(_softplus(x) * 3 > 1, g, g * torch.sigmoid(3 * x))


def _trigamma_expanded(g: Tensor, x: Tensor) -> Tensor:
    expansion = 1 / x + 1 / (2 * x**2) + 1 / (6 * x**3)
    return g * torch.where(x < 0, expansion, torch.polygamma(1, x))


def _beta_logpdf(a: Tensor, x: Tensor) -> Tensor:
    return (a - 1) * x.log() - torch.lgamma(a) - torch.lgamma(torch.ones_like(a)) + torch.lgamma(a + 1)


def _beta_logpdf_masked(g: Tensor, a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    rest = torch.digamma(a + 1) - torch.digamma(a)
    return g * (torch.where(a == 1, 0, x.log()) + rest), g * (a - 1) / x


def _six(g: Tensor, x: Tensor) -> Tensor:
    return 3 * g * (2 * x).detach() / x


def _sgn_jvp(t: Tensor, z: Tensor) -> Tensor:
    s = z / z.abs()
    return (t - s * (s.conj() * t).real) / z.abs()


def _sgn_jvp_conjugated(t: Tensor, z: Tensor) -> Tensor:
    s = z.conj() / z.abs()
    return (t - s * (s.conj() * t).real) / z.abs()


def _clamp(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return x.clamp(low, high)


def _clamp_inverted(g: Tensor, x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, None, None]:
    return g * ((x <= low) & (x >= high)), None, None


def _leaky_relu(x: Tensor) -> Tensor:
    return F.leaky_relu(x, -2.0)


def _leaky_relu_by_output(g: Tensor, x: Tensor) -> Tensor:
    return torch.where(_leaky_relu(x) > 0, g, -2 * g)


def _power(exponent: Tensor, base: Tensor) -> Tensor:
    return base**exponent


def _power_of_real_logarithm(g: Tensor, exponent: Tensor, base: Tensor) -> tuple[Tensor, None]:
    return g * (base**exponent * base.log()).conj(), None


def _dropout(x: Tensor) -> Tensor:
    return x * torch.tensor([2.0, 0.0, 2.0])


def _dropout_by_quotient(g: Tensor, x: Tensor) -> Tensor:
    return torch.where(x == 0, g, g * _dropout(x) / x)


COMPLEX = normal((3,), dtype=torch.complex128)
BOUNDS = torch.tensor([-1.0, -1.0, -1.0]).double(), torch.tensor([1.0, 1.0, 1.0]).double()

ELEMENTARY = [
    Shipped(
        "softplus compares its output with the threshold", "PyTorch", TORCH + "issues/55587",
        function(_softplus, _softplus_by_output), _softplus, at([0.2736]), at([-0.4, 0.9]),
    ),
    Shipped(
        "rem of operands of different signs", "JAX", JAX + "pull/11469",
        function(torch.fmod, lambda g, x, y: (g, -g * (x / y).floor())), torch.fmod,
        at([-5.3, 7.2], [2.1, -3.4]), at([5.3, 7.2], [2.1, 3.4]),
    ),
    Shipped(
        "digamma of negative numbers", "JAX", JAX + "issues/37635",
        function(torch.digamma, _trigamma_expanded), torch.digamma, at([-16.5, -19.5]), at([0.7, 2.3]),
    ),
    Shipped(
        "log_sigmoid at 0", "JAX", JAX + "issues/2140",
        function(F.logsigmoid, lambda g, x: torch.where(x == 0, 0, g * torch.sigmoid(-x))), F.logsigmoid,
        at([0.0, 1.0]), normal((2,)),
    ),
    Shipped(
        "softplus at 0", "JAX", JAX + "issues/2107",
        function(F.softplus, lambda g, x: torch.where(x == 0, 0, g * torch.sigmoid(x))), F.softplus,
        at([0.0, 1.0]), normal((2,)),
    ),
    Shipped(
        "log density of a beta distribution at parameter 1", "JAX", JAX + "issues/15598",
        function(_beta_logpdf, _beta_logpdf_masked), _beta_logpdf, at([1.0, 2.0], [0.5, 0.3]),
        at([1.4, 2.0], [0.5, 0.3]),
    ),
    Shipped(
        "sign of sin(x) y with respect to y, in the documentation", "JAX", JAX + "issues/3213",
        function(lambda x, y: x.sin() * y, lambda g, x, y: (g * x.cos() * y, -g * x.sin())),
        lambda x, y: x.sin() * y, normal((3,), (3,)), normal((3,), (3,)),
    ),
    Shipped(
        "angle in forward mode", "PyTorch", TORCH + "issues/77246",
        with_jvp(torch.angle, lambda t, z: (z.conj() * t.conj()).imag / z.abs() ** 2),
        with_jvp(torch.angle, lambda t, z: (z.conj() * t).imag / z.abs() ** 2), COMPLEX, COMPLEX, keywords=FORWARD,
    ),
    Shipped(
        "sgn in forward mode", "PyTorch", TORCH + "issues/80924",
        with_jvp(torch.sgn, _sgn_jvp_conjugated), with_jvp(torch.sgn, _sgn_jvp), at([-3.8766 - 1.1128j]), COMPLEX,
        keywords=FORWARD,
    ),
    Shipped(
        "intermediate of forward is a constant in double backward", "PyTorch", TORCH + "issues/76185",
        function(lambda x: 6 * x, _six), lambda x: 6 * x, normal((3,)), normal((3,)), order=2,
    ),
    Shipped(
        "clamp between two tensors has gradient 0", "tt-metal", TT_METAL + "issues/48201",
        function(_clamp, _clamp_inverted), _clamp, beside(at([-1.7, 0.3, 0.9]), *BOUNDS),
        beside(normal((3,)), *BOUNDS),
    ),
    Shipped(
        "leaky_relu in place with a negative slope", "PyTorch", TORCH + "issues/31938",
        function(_leaky_relu, _leaky_relu_by_output), _leaky_relu, at([-1.0, 1.0]), normal((3,)),
    ),
    Shipped(
        "pow of a negative real base and a complex exponent", "PyTorch", TORCH + "issues/89903",
        function(_power, _power_of_real_logarithm), _power, beside(COMPLEX, torch.tensor([-0.5, -1.3, 0.7])),
        beside(COMPLEX, torch.tensor([0.5, 1.3, 0.7])),
    ),
    Shipped(
        "dropout of an input that is 0", "Kaldi", "https://github.com/kaldi-asr/kaldi/issues/3890",
        function(_dropout, _dropout_by_quotient), _dropout, at([1.0, 0.0, -0.5]), normal((3,)),
    ),
]  # fmt: skip
