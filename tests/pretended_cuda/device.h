// Shared by the files of the simulated device.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

namespace pretended {

constexpr c10::DeviceIndex devices = 2;

// Memory of the current device, full of NaN.
c10::Allocator* allocator();

// A device's own random numbers, and the generator on the CPU that makes them.
const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator on_cpu(const at::Generator& generator);

}  // namespace pretended
