"""A custom CUDA operator that the test compiles: bias + GELU in one kernel, right, and wrong in its last tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgrad

COLUMNS = 1000
ROWS = 1000
TAIL = ROWS * COLUMNS // 128 * 128
"""The first element that no full tile of 128 holds."""

SOURCE = r"""
#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

__global__ void bias_gelu(double* y, const double* x, const double* bias, int64_t size, int64_t columns) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < size; i += gridDim.x * int64_t(blockDim.x)) {
    const double z = x[i] + bias[i % columns];
    y[i] = 0.5 * z * (1 + erf(z * 0.70710678118654752));
  }
}

// The elements from `end` on get the gradient of the identity: a tail that was forgotten.
__global__ void bias_gelu_backward(
    double* dx, const double* dy, const double* x, const double* bias, int64_t size, int64_t columns, int64_t end) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < size; i += gridDim.x * int64_t(blockDim.x)) {
    const double z = x[i] + bias[i % columns];
    const double slope =
        0.5 * (1 + erf(z * 0.70710678118654752)) + z * 0.39894228040143268 * exp(-0.5 * z * z);
    dx[i] = dy[i] * (i < end ? slope : 1.0);
  }
}

at::Tensor forward(const at::Tensor& x, const at::Tensor& bias) {
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor y = at::empty_like(x);
  bias_gelu<<<1024, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
      y.mutable_data_ptr<double>(), x.const_data_ptr<double>(), bias.const_data_ptr<double>(), x.numel(),
      bias.numel());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}

at::Tensor backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& bias, int64_t end) {
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor dx = at::empty_like(x);
  const at::Tensor contiguous = dy.contiguous();
  bias_gelu_backward<<<1024, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
      dx.mutable_data_ptr<double>(), contiguous.const_data_ptr<double>(), x.const_data_ptr<double>(),
      bias.const_data_ptr<double>(), x.numel(), bias.numel(), end);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return dx;
}
"""
DECLARATIONS = """
at::Tensor forward(const at::Tensor& x, const at::Tensor& bias);
at::Tensor backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& bias, int64_t end);
"""


@pytest.fixture(scope="module")
def kernels() -> Any:
    from torch.utils.cpp_extension import load_inline

    return load_inline("bias_gelu", DECLARATIONS, SOURCE, functions=["forward", "backward"], extra_cuda_cflags=["-O3"])


def operator(kernels: Any, end: int) -> Callable[..., Tensor]:
    class BiasGELU(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
            ctx.save_for_backward(x, bias)
            return kernels.forward(x, bias)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
            x, bias = ctx.saved_tensors
            dx = kernels.backward(dy, x, bias, end)
            return dx, dx.sum(0)

    return BiasGELU.apply


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, bias = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((ROWS, COLUMNS), (COLUMNS,)))
    return x.cuda().requires_grad_(), bias.cuda().requires_grad_()


@pytest.mark.parametrize("fast_mode", [False, True])
def test_the_right_one_passes(kernels: Any, fast_mode: bool) -> None:
    assert fastgrad.gradcheck(operator(kernels, ROWS * COLUMNS), inputs(), fast_mode=fast_mode)


@pytest.mark.parametrize("fast_mode", [False, True])
def test_the_forgotten_tail_is_found(kernels: Any, fast_mode: bool) -> None:
    with pytest.raises(fastgrad.GradcheckError) as raised:
        fastgrad.gradcheck(operator(kernels, TAIL), inputs(), fast_mode=fast_mode)
    failure = raised.value.report.failure
    assert failure is not None
    assert failure.output == 0
    assert "Jacobian mismatch for output 0 with respect to input" in str(raised.value)
