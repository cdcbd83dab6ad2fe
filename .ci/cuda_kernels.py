"""Whether the extension of this tree loads, which resolves all symbols, and has a CUDA kernel of every operator."""

import sys

sys.path.insert(0, ".")

import torch

import fastgrad  # noqa: F401  (registers the operators)

names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fastgrad::")]
missing = [name for name in names if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")]
print(f"CUDA kernels: {len(names) - len(missing)} of {len(names)} operators, torch {torch.__version__}")
sys.exit(f"no CUDA kernel of {', '.join(missing)}" if missing else 0)
