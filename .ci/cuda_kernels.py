"""Whether the extension of this tree loads, which resolves all symbols, and has a CUDA kernel of every operator."""

import sys

sys.path.insert(0, ".")

import torch  # noqa: E402

import fastgrad  # noqa: E402

names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fastgrad::")]
missing = [name for name in names if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")]
print(
    f"cuda-link: {fastgrad.__file__}, torch {torch.__version__}: {len(names) - len(missing)} of {len(names)} operators"
)
sys.exit(f"cuda kernels: none of {', '.join(missing)}" if missing else 0)
