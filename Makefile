# Every target creates .venv, with a pinned torch and the tools that it needs.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
RUN := $(VENV)/bin/python
export MAX_JOBS ?= 2
# No target falls back to plain Python: the compiled module is built, tested and measured.
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

# Needs the network and servers of others, so CI does not run it.
docs-links: $(VENV)/.docs
	$(RUN) -m sphinx -q -n -b linkcheck docs build/docs-links

test: $(VENV)/.tools
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(MAX_JOBS)

# Tests with interrupts are left out: an interrupt while coverage holds its lock would never release the lock.
coverage: $(VENV)/.tools
	$(RUN) -m pip install -q pytest-cov
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(MAX_JOBS) -k "not interrupt" --cov=fastgrad --cov-branch --cov-report=term

# A copy of the tree for other builds, so that the usual build is not changed.
define copy_to
	mkdir -p $(1)
	git ls-files -z | xargs -0 cp --update --parents --target-directory=$(1)
endef

# PyPI has torch 2.11 with CUDA only (5 GB); PIP_INDEX_URL can name an index of CPU builds.
test-oldest:
	$(call copy_to,build/oldest)
	FASTGRAD_CUDA=0 $(MAKE) -C build/oldest test TORCH=torch==2.11.0

# Python and torch are not instrumented, so the runtime must be preloaded. The tests that are left out measure
# time or memory, whose limits are for the usual build.
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

# CPU memory that torch treats as cuda:0 and cuda:1, with the CUDA kernels in the emulation: tests/pretended_cuda.
# Tests are left out that capture graphs, compile CUDA, or need a fiber for each of many threads (see the C++ tests).
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

# The kernels include no torch headers, so CI compiles them while torch is being installed.
cuda-gate: cuda-gate-kernels $(VENV)/.torch
	.ci/cuda-gate $(RUN)

.PHONY: cuda-gate-kernels
cuda-gate-kernels:
	.ci/cuda-gate

# Compiles and links everything against a CUDA build of torch, without a GPU. A module that can be imported has no
# undefined symbols. CUDA_TORCH comes with several GB of CUDA libraries; CUDA_PYTHON can name a Python that has it.
CUDA_TORCH ?= torch==2.11.0
CUDA_PYTHON ?= $(LINKED)/$(VENV)/bin/python
LINKED := build/cuda-link
# The toolkit that nvcc belongs to; nvcc itself may be a script elsewhere.
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
# ninja is next to the Python of a virtual environment that is not activated here; there is one compiler per processor.
gpu: export PATH := $(if $(findstring /,$(GPU_PYTHON)),$(abspath $(dir $(GPU_PYTHON))):)$(PATH)
gpu: export MAX_JOBS := $(shell nproc)
gpu:
	FASTGRAD_CUDA=1 $(GPU_PYTHON) setup.py -q build_ext --inplace
	$(GPU_PYTHON) .ci/cuda_kernels.py
	$(GPU_PYTHON) -m pytest tests/cuda
	$(GPU_PYTHON) -m benchmarks.bench_cuda --at-least $(GPU_RATIO)

# The tests of the operators under each tool, with one allocation per tensor, so that accesses out of bounds are found.
# Only fastgrad's kernels are watched, except by initcheck, which must also see the writes of torch's kernels.
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

# Other gradient checkers, which no other target needs.
comparison: $(VENV)/.built
	$(RUN) -m pip install -q --group comparison
	OMP_NUM_THREADS=1 $(RUN) -m benchmarks.bench_comparison

soak: $(VENV)/.built
	$(RUN) -m benchmarks.soak

dist: $(VENV)/.torch
	$(RUN) -m pip install -q build
	$(RUN) -m build --no-isolation

# One wheel per minor version of torch, in dist/; the local version contains it. Each has its own environment.
TORCHS ?= 2.11 2.12 2.13 2.14 2.15
wheels: $(TORCHS:%=wheel-%)

wheel-%:
	$(call copy_to,build/wheels/$*)
	$(MAKE) -C build/wheels/$* $(VENV)/.torch TORCH="torch==$*.*"
	cd build/wheels/$* && $(RUN) setup.py -q egg_info --tag-build=+torch$* bdist_wheel --dist-dir $(abspath dist)

clean:
	rm -rf $(VENV) build dist *.egg-info fastgrad/*.so fastgrad/_build.py

# torch is installed first, because the module is compiled against it.
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

# After the tools, because two runs of pip must not write into one environment.
$(VENV)/.docs: $(VENV)/.tools pyproject.toml
	$(RUN) -m pip install -q --group docs
	touch $@
