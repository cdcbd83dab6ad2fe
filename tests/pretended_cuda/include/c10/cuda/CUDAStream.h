#pragma once

namespace c10::cuda {
inline void* getCurrentCUDAStream() { return nullptr; }  // the emulation has one
}  // namespace c10::cuda
