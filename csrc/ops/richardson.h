// fastgrad::richardson_: a directional derivative and its measured noise, output by output.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastgrad {

// derivative[i] = kernels/richardson.h's richardson of the four values of output i;
// noise[i] = max(noise[i], difference_noise of them), NaN counting as the largest.
// All float64, contiguous, shape (outputs,); derivative and noise are mutated in place. Values: at
// x + h u, x - h u and halfway; base: at x. eps: the nominal h. ulp: the relative spacing of
// the dtype that the values were computed in.
void richardson_(
    const at::Tensor& derivative, const at::Tensor& noise, const at::Tensor& base, const at::Tensor& plus,
    const at::Tensor& minus, const at::Tensor& half_plus, const at::Tensor& half_minus, double eps, double ulp);

// Argument checks shared by all kernels except Meta.
void check_richardson(
    const at::Tensor& derivative, const at::Tensor& noise, const at::Tensor& base, const at::Tensor& plus,
    const at::Tensor& minus, const at::Tensor& half_plus, const at::Tensor& half_minus);

}  // namespace fastgrad
