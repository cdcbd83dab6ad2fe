# Everything from nothing: each target makes .venv with a pinned torch and the tools it needs.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
RUN := $(VENV)/bin/python
export MAX_JOBS ?= 2
# Nothing here falls back to plain Python: what is built, tested and measured is the compiled module.
export FASTGRAD_NATIVE ?= 1

.PHONY: demo gallery docs docs-links test coverage test-oldest test-pretended-cuda sweep-pretended-cuda sanitize develop lint \
  cpp-test cuda-gate cuda-link gpu cuda-sanitize \
  parity bench comparison soak dist wheels clean

demo: $(VENV)/.built
	$(RUN) -m fastgrad demo

gallery: $(VENV)/.built
	$(RUN) -m docs.make_gallery

docs: $(VENV)/.docs
	$(RUN) -m sphinx -q -W --keep-going -n docs build/docs

# Needs the network, and its servers' goodwill: not in CI.
docs-links: $(VENV)/.docs
	$(RUN) -m sphinx -q -n -b linkcheck docs build/docs-links

test: $(VENV)/.tools
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(MAX_JOBS)

# An interrupt that comes while coverage holds its lock would never let go of it: those tests are left out.
coverage: $(VENV)/.tools
	$(RUN) -m pip install -q pytest-cov
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(MAX_JOBS) -k "not interrupt" --cov=fastgrad --cov-branch --cov-report=term

# A copy of the tree for other builds, so that the ordinary one stays as it is.
define copy_to
	mkdir -p $(1)
	git ls-files -z | xargs -0 cp --update --parents --target-directory=$(1)
endef

# PyPI has torch 2.11 with CUDA only (5 GB); PIP_INDEX_URL can name an index of CPU builds.
test-oldest:
	$(call copy_to,build/oldest)
	FASTGRAD_CUDA=0 $(MAKE) -C build/oldest test TORCH=torch==2.11.0

# Python and torch, which are not instrumented, need the runtime preloaded. The tests left out measure
# time or memory, which hold for the ordinary build.
SANITIZED := build/sanitize
sanitize: $(VENV)/.tools
	$(call copy_to,$(SANITIZED))
	cd $(SANITIZED) && FASTGRAD_SANITIZE=1 FASTGRAD_CUDA=0 $(abspath $(RUN)) setup.py -q build_ext --inplace
	cd $(SANITIZED) && LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 FASTGRAD_FUZZ_CALLS=3000 \
	  $(abspath $(RUN)) -m pytest \
	  --deselect tests/core/test_native.py::test_import_costs_little_beyond_torch \
	  --deselect tests/core/test_memory.py::test_dense_jacobians_take_what_the_plan_says \
	  --deselect tests/core/test_memory.py::test_address_space \
	  --deselect tests/checks/test_compressed.py::test_memory_stays_near_the_vectors

develop: $(VENV)/.tools

lint: $(VENV)/.tools
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/pyright -p tests/typed --pythonpath $(RUN)
	git ls-files '*.h' '*.cpp' '*.cu' | xargs $(VENV)/bin/clang-format --dry-run --Werror

define configure
	cmake -S . -B build/cmake -DPython3_EXECUTABLE=$(abspath $(RUN)) \
	  -DCMAKE_PREFIX_PATH="$$($(RUN) -c 'import torch; print(torch.utils.cmake_prefix_path)')"
endef

cpp-test: $(VENV)/.torch
	$(configure)
	cmake --build build/cmake --parallel $(MAX_JOBS)
	cd build/cmake && ctest --output-on-failure --no-tests=error --parallel $(MAX_JOBS)

# CPU memory that torch takes for cuda:0 and cuda:1, with the CUDA kernels in the emulation: tests/pretended_cuda.
# What is left out captures graphs, compiles CUDA, or takes a fiber for each of many threads: the C++ tests have these sizes.
PRETENDED := OMP_NUM_THREADS=1 $(RUN) -m pytest -q -p tests.pretended_cuda.plugin
test-pretended-cuda: $(VENV)/.tools pretended-cuda
	$(PRETENDED) -n $(MAX_JOBS) tests/pretended_cuda tests/cuda -k "not 1283 and not 1048577 and not 1000003" \
	  --ignore tests/cuda/test_cuda_graphs.py --ignore tests/cuda/test_cuda_operator.py \
	  --ignore tests/cuda/test_cuda_triton.py

sweep-pretended-cuda: $(VENV)/.tools pretended-cuda
	OMP_NUM_THREADS=1 $(RUN) -m tests.pretended_cuda.sweep --jobs $(MAX_JOBS)

.PHONY: pretended-cuda
pretended-cuda: $(VENV)/.torch
	$(configure)
	cmake --build build/cmake --target pretended_cuda --parallel $(MAX_JOBS)

cuda-gate: $(VENV)/.torch
	.ci/cuda-gate $(RUN)

# Everything compiled and linked against a CUDA build of torch, without a GPU: an extension that imports has no
# undefined symbols. CUDA_TORCH comes with several GB of CUDA libraries; CUDA_PYTHON can name a Python that has it.
CUDA_TORCH ?= torch==2.11.0
CUDA_PYTHON ?= $(LINKED)/$(VENV)/bin/python
LINKED := build/cuda-link
# The toolkit that nvcc is of: nvcc itself may be a script elsewhere.
cuda-link: export CUDA_HOME ?= $(shell nvcc --dryrun -x cu /dev/null 2>&1 | sed -n 's/^\#\$$ TOP=//p' | xargs realpath)
cuda-link:
	$(call copy_to,$(LINKED))
	$(if $(filter $(LINKED)/%,$(CUDA_PYTHON)),$(MAKE) -C $(LINKED) $(VENV)/.torch TORCH=$(CUDA_TORCH))
	cd $(LINKED) && FASTGRAD_CUDA=1 FASTGRAD_WERROR=1 $(abspath $(CUDA_PYTHON)) setup.py -q build_ext --inplace
	cd $(LINKED) && $(abspath $(CUDA_PYTHON)) .ci/cuda_kernels.py

# On a machine with a GPU, by a Python that has a CUDA build of torch, setuptools, ninja, pybind11 and pytest:
# build, tests, then benchmarks/results/<device>.json and a table.
GPU_PYTHON ?= python3
GPU_RATIO ?= 1
# ninja lies with a virtual environment's Python, which nobody activates here; compilers are as many as processors.
gpu: export PATH := $(if $(findstring /,$(GPU_PYTHON)),$(abspath $(dir $(GPU_PYTHON))):)$(PATH)
gpu: export MAX_JOBS := $(shell nproc)
gpu:
	FASTGRAD_CUDA=1 $(GPU_PYTHON) setup.py -q build_ext --inplace
	$(GPU_PYTHON) .ci/cuda_kernels.py
	$(GPU_PYTHON) -m pytest tests/cuda
	$(GPU_PYTHON) -m benchmarks.bench_cuda --at-least $(GPU_RATIO)

# The same extension, operator by operator, under each tool; one allocation a tensor, so that bounds are seen. Only its
# own kernels are watched, except by initcheck, which must also see what torch's write.
cuda-sanitize:
	for tool in memcheck racecheck initcheck synccheck; do \
	  test $$tool = initcheck && kernels= || kernels="--kernel-name kns=fastgrad"; \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 $$kernels \
	    $(GPU_PYTHON) -m pytest -q -k "not 1048577" tests/cuda/test_cuda_ops.py || exit 1; \
	done

parity: $(VENV)/.tools
	$(RUN) -m tests.parity.sweep --jobs $(MAX_JOBS)

bench: $(VENV)/.tools
	$(RUN) -m benchmarks.bench_opinfo --every 6 --limit 3 --budget 0.1 --rounds 3 --longest 2 \
	  --name opinfo-float64-grad

# Other people's tools: nothing else here needs them.
comparison: $(VENV)/.built
	$(RUN) -m pip install -q --group comparison
	OMP_NUM_THREADS=1 $(RUN) -m benchmarks.bench_comparison

soak: $(VENV)/.built
	$(RUN) -m benchmarks.soak

dist: $(VENV)/.torch
	$(RUN) -m pip install -q build
	$(RUN) -m build --no-isolation

# One wheel for each minor version of torch, in dist/; the local version says which. An environment of its own each.
TORCHS ?= 2.11 2.12 2.13 2.14 2.15
wheels: $(TORCHS:%=wheel-%)

wheel-%:
	$(call copy_to,build/wheels/$*)
	$(MAKE) -C build/wheels/$* $(VENV)/.torch TORCH="torch==$*.*"
	cd build/wheels/$* && $(RUN) setup.py -q egg_info --tag-build=+torch$* bdist_wheel --dist-dir $(abspath dist)

clean:
	rm -rf $(VENV) build dist *.egg-info fastgrad/*.so fastgrad/_build.py

# torch first: the extension compiles against it.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q --upgrade "pip>=25.1"
	$(RUN) -m pip install -q "$(TORCH)" "setuptools>=77,<82" wheel ninja pybind11 numpy
	touch $@

$(VENV)/.built: $(VENV)/.torch setup.py pyproject.toml $(shell find csrc -type f)
	$(RUN) -m pip install -q --no-build-isolation --no-deps -e .
	touch $@

$(VENV)/.tools: $(VENV)/.built pyproject.toml
	$(RUN) -m pip install -q --group test --group lint --group bench
	touch $@

# After the tools: two runs of pip must not write into one environment.
$(VENV)/.docs: $(VENV)/.tools pyproject.toml
	$(RUN) -m pip install -q --group docs
	touch $@
