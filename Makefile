# Everything is installed into .venv. `make help` lists what people use; the rest are parts of it.
# `make demo` and `make test` need Rust, Python 3.11+ with pip, and a C compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TRACES := ../shared/traces
SOAK_MINUTES ?= 60
SOAK_DEVICE ?= cpu
# The serving engine over the pools, an example.
SERVE := PYTHONPATH=examples/serving $(BIN)/python -m kvpool_serving
# Unpacks PyTorch in a fraction of pip's time. If pip is told to use another index, so is uv.
INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
RUST_SOURCES := $(shell find src -name '*.rs' -o -name '*.ptx' -o -name '*.cubin') Cargo.toml Cargo.lock
EXTENSION := $(VENV)/.extension
# The same with debug assertions, compiled in parts: after a change that takes seconds. One of both is installed.
QUICK_EXTENSION := $(VENV)/.quick_extension
DEV := $(EXTENSION) $(VENV)/.test
DRIVER := target/software_driver/lib/libcuda.so.1
DRIVER_SOURCES := $(shell find tests/software_driver -name "*.rs" -o -name "*.cpp" -o -name "Cargo.*") $(wildcard src/kernels/*.cu*)
CUDA_TOOLS := $(VENV)/cuda-tools
# What is tested or measured beside kvpool: `tests/engines/install` says what each folder has.
ENGINES := $(addprefix $(VENV)/,$(addsuffix /.installed,engines mooncake nixl flashinfer vllm lmcache vllm-engine))
# vLLM's servers, its router, and how K and V go from one to the other.
CLUSTER := $(addprefix $(VENV)/,$(addsuffix /.installed,vllm-router nixl))
OLD_TORCH := $(VENV)/torch-2.4
SGLANG_TORCH := $(VENV)/torch-2.14
# Seconds for each fuzz target, the targets, and how many run at once. SANITIZER=address needs a nightly toolchain.
FUZZ_SECONDS ?= 3600
TARGETS ?= $(notdir $(wildcard tests/fuzz/corpus/*))
FUZZ_JOBS ?= $(shell nproc)
HOST := $(shell rustc -vV 2>/dev/null | sed -n 's/^host: //p')
FUZZ := target/fuzz/$(HOST)/release
# The flags of `cargo fuzz` that a stable compiler takes: counters that show libFuzzer where an input leads.
FUZZ_FLAGS := --cfg fuzzing -Cpasses=sancov-module $(addprefix -Cllvm-args=-sanitizer-coverage-,level=4 \
    inline-8bit-counters pc-table trace-compares) $(addprefix -Zsanitizer=,$(SANITIZER))
# Test files that mostly wait for other processes run in a process of their own, beside the others. Tests of engines are
# in neither: `make test` runs without engines.
ENGINE_TESTS := $(shell grep -l 'pytest\.mark\.engines' tests/python/test_*.py examples/serving/tests/test_*.py)
PROCESS_TESTS := $(filter-out $(ENGINE_TESTS),$(shell grep -l '^pytestmark = pytest\.mark\.processes' tests/python/test_*.py \
    examples/serving/tests/test_*.py))
# A missing engine is an error, also where a test was not marked as one of an engine.
PYTEST := KVPOOL_REQUIRE_ENGINES=1 $(BIN)/python -m pytest --capture=sys
# Hundreds of processes import the same modules: Python keeps what it compiles, even if the environment forbids it.
unexport PYTHONDONTWRITEBYTECODE
# No library names a folder of the machine that built it.
CARGO_HOME ?= $(HOME)/.cargo
WITHOUT_PATHS := RUSTFLAGS='$(strip $(RUSTFLAGS) --remap-path-prefix=$(CARGO_HOME)/registry/src=crates --remap-path-prefix=$(CURDIR)=kvpool)'
# The Python of the machine with a GPU.
export GPU_PYTHON ?= 3.12
GPU_PACKAGE := .gpu/package.json
GPU_VENV := $(VENV)/gpu-$(GPU_PYTHON)
GPU_PLAN ?= all
FILE ?= target/gpu/board.json
# Steps of `make histories`, the seed that decides all of them, and which histories: all, if none is named.
HISTORIES ?=
STEPS ?= 11000000
SEED ?= 1
# The sources that `make mutants` changes, and which part of the changes it tries: 0/4 to 3/4 are quarters.
MUTATED ?= src/cache/**/*.rs src/engines/**/*.rs src/index/**/*.rs
SHARD ?= 0/1
MUTANTS := $(VENV)/mutants/bin/cargo-mutants
# The tests read the environment, use addresses as numbers, and end while threads for copies still wait.
MIRI_FLAGS := -Zmiri-disable-isolation -Zmiri-permissive-provenance -Zmiri-ignore-leaks
.DEFAULT_GOAL := help
COMMANDS := help demo demo-cluster dev test test-engines test-vllm-engine lint format docs api bench gpu \
    cpu-test process-test software-test rust-test orders fuzz-briefly engines engine-test engine-runs old-torch-test version-test \
    rust-lint test-crates-lint python-lint stub-lint kernel-lint wheel-lint verify-types \
    bench-contiguous bench-cuda bench-eviction-least bench-generate bench-late-bytes bench-lmcache bench-nixl bench-peers bench-pymllm \
    bench-sglang bench-sglang-engine bench-sglang-eviction bench-tier-eviction bench-vllm bench-vllm-engine bench-vllm-eviction chart fuzz \
    fuzz-build histories mutants miri soak soak-threads kernels kernel-report wheels licences gpu-package gpu-results gpu-rehearsal clean
.PHONY: $(COMMANDS)

## This list
help:
	@awk '/^## / { text = substr($$0, 4); next } text && /^[a-z-]+:/ { sub(/:.*/, ""); printf "make %-14s %s\n", $$0, text } { text = "" }' \
	    $(firstword $(MAKEFILE_LIST))

# Models served through the pools, dense and hybrid, and conversations with the prefix cache and without, with every token
# checked; then a request trace, with every row of K and V checked.
## Set everything up, serve a small model and check every token, replay a request trace and check every row
demo: $(EXTENSION) $(VENV)/.tools
	$(SERVE) --requests 240
	$(SERVE) --conversations 16 --pool-size 8192
	$(SERVE) --model qwen3-next --requests 60
	if test -f $(TRACES)/mooncake/conversation_trace.jsonl; then \
	    $(BIN)/python -m kvpool replay $(TRACES)/mooncake/conversation_trace.jsonl --requests 1800 --prefix-cache \
	        --pool-size 4000000 --heads 1 --plot target/replay.png; \
	else \
	    $(BIN)/python -m kvpool replay --synthetic --prefix-cache --plot target/replay.png; \
	fi

# The commands of docs/engines/vllm.md.
## Two servers of vLLM on the CPU behind its router, by KV events and with prefill and decode apart
demo-cluster: $(EXTENSION) $(VENV)/.tools $(CLUSTER)
	$(BIN)/python tests/engines/vllm_cluster_runs.py

## Everything for work on kvpool: .venv, the extension, pytest. Again after a change of Rust
dev: $(QUICK_EXTENSION) $(VENV)/.test
	@echo 'ready, for example: .venv/bin/python -m pytest tests/python/test_kv_pool.py'

# BESIDE is made at the same time: packages that are needed later, or tests of engines.
## All tests that need no engine: Rust, Python on the CPU, and CUDA tests on the software driver
test:
	.ci/at_once $@ software-test process-test cpu-test rust-test orders fuzz-briefly $(BESIDE)

## Tests of SGLang, vLLM, LMCache, Mooncake, NIXL and the oldest PyTorch, which it installs; also the long runs
test-engines:
	.ci/at_once $@ engine-test old-torch-test engine-runs

# Without the feature `cuda` only the table of the driver's functions differs: it is then empty, which `fuzz` uses.
rust-test: $(DRIVER)
	LD_PRELOAD=$(abspath $(DRIVER)) KVPOOL_REQUIRE_CUDA=1 cargo test --locked --features cuda
	cargo run --quiet --locked --manifest-path examples/engine/Cargo.toml --target-dir target
	cargo test --quiet --locked --release --manifest-path tests/software_driver/Cargo.toml --target-dir target/software_driver

cpu-test: $(DEV)
	$(PYTEST) -m 'not engines' $(addprefix --ignore=,$(PROCESS_TESTS))

# Tests that mostly wait; they run beside the CPU-bound ones.
process-test: $(DEV)
	$(PYTEST) -m 'not engines' $(PROCESS_TESTS)

# Every CUDA test.
software-test: $(DEV) $(DRIVER)
	LD_PRELOAD=$(abspath $(DRIVER)) KVPOOL_REQUIRE_CUDA=1 $(PYTEST) --software -m 'cuda and not engines'

# CPU tests for any supported CPython: no engines and, on 3.10, no transformers.
version-test: $(DEV)
	$(PYTEST) -m 'not engines'

# The packages of all engines.
engines: $(ENGINES)

# Tests of engines in short: an engine that has no package for this machine is skipped with the reason.
engine-test: $(DEV) $(ENGINES)
	$(PYTEST) -m engines $(ENGINE_TESTS)

# A whole vLLM on the CPU: every step, token and block on its own classes and on kvpool's; and two servers.
# A part of `make engine-runs`.
test-vllm-engine: $(DEV) $(CLUSTER)
	$(PYTEST) --timeout=3600 $(addprefix tests/engines/test_vllm_,engine.py transfer.py cluster.py)

# The long runs: SGLang in many configurations, all tests of vLLM and LMCache that need no GPU.
engine-runs: $(DEV) $(ENGINES) $(CLUSTER) $(SGLANG_TORCH)/.installed
	KVPOOL_ENGINE_REQUESTS=3000 KVPOOL_SGLANG_TORCH=$(abspath $(SGLANG_TORCH)) \
	    $(PYTEST) --timeout=3600 tests/python/test_pymllm.py tests/engines

# What crosses between kvpool and PyTorch, with the oldest PyTorch.
old-torch-test: $(DEV) $(OLD_TORCH)/.installed
	if test -d $(OLD_TORCH)/torch; then LD_LIBRARY_PATH=$(abspath $(OLD_TORCH)/lib) PYTHONPATH=$(abspath $(OLD_TORCH)) \
	    $(PYTEST) tests/python/test_dlpack.py tests/python/test_indices.py -k 'not numpy'; \
	    else echo "skipped, as PyTorch 2.4 has packages for x86-64 Linux and Python up to 3.12 alone"; fi

# Every interleaving of a few threads that share data.
orders: $(DRIVER)
	LD_PRELOAD=$(abspath $(DRIVER)) RUSTFLAGS='--cfg loom' cargo test --quiet --locked --features cuda --target-dir target/loom --test orders

## Formatting, lints, types, documentation, the committed kernels, a wheel
lint:
	.ci/at_once $@ rust-lint stub-lint $(BESIDE) test-crates-lint python-lint kernel-lint wheel-lint

rust-lint:
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings
	cargo clippy --locked --all-targets --features cuda,python -- -D warnings
	RUSTFLAGS='--cfg loom' cargo clippy --quiet --locked --features cuda --target-dir target/loom --test orders -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps --features cuda
	cargo publish --quiet --locked --allow-dirty --dry-run
	test "$$(cargo tree --locked --features cuda -e features -i cudarc | grep -o 'feature "cuda-[^"]*"')" = 'feature "cuda-12000"'

# The crates of the tests.
test-crates-lint:
	cargo fmt --check --manifest-path tests/fuzz/Cargo.toml
	RUSTFLAGS='$(FUZZ_FLAGS)' cargo clippy --locked --release --all-targets --target $(HOST) \
	    --manifest-path tests/fuzz/Cargo.toml --target-dir target/fuzz -- -D warnings
	cargo fmt --check --manifest-path examples/engine/Cargo.toml
	cargo clippy --locked --manifest-path examples/engine/Cargo.toml --target-dir target -- -D warnings
	cargo fmt --check --manifest-path tests/software_driver/Cargo.toml
	cargo clippy --locked --release --all-targets --manifest-path tests/software_driver/Cargo.toml --target-dir target/software_driver -- -D warnings

python-lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --no-site-packages --follow-imports=silent --disable-error-code=import-not-found \
	    --cache-dir=.mypy_cache/without_pytorch tests/typing/none_checks.py

# The share of the public names whose types pyright knows. Not a part of `make lint`: pyright is large, and reads the types
# of PyTorch and transformers for half a minute.
verify-types: $(DEV)
	$(INSTALL) --group types
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pyright --verifytypes kvpool --ignoreexternal --outputjson > $(VENV)/types.json; \
	    $(BIN)/python tests/typing/completeness.py $(VENV)/types.json

# The stub and the options in docs/tools.md agree with the extension and the commands.
stub-lint: $(DEV)
	$(BIN)/python -m mypy.stubtest kvpool._kvpool --mypy-config-file tests/stubtest.ini
	$(BIN)/python docs/api.py --check

# Packs the library that is compiled already into a wheel, and checks it as an index would.
wheel-lint: $(EXTENSION) $(VENV)/.wheels
	$(BIN)/python tests/packaging/linked.py licences --check
	$(BIN)/python tests/packaging/linked.py sbom $(HOST) target/wheel/kvpool.cyclonedx.json
	rm -f target/wheel/*.whl
	VIRTUAL_ENV=$(abspath $(VENV)) $(WITHOUT_PATHS) $(BIN)/maturin build --release --locked --quiet \
	    --sbom-include target/wheel/kvpool.cyclonedx.json --out target/wheel
	$(BIN)/python tests/packaging/check_wheel.py target/wheel/*.whl

## Format Rust and Python
format: $(VENV)/.test
	cargo fmt
	cargo fmt --manifest-path examples/engine/Cargo.toml
	cargo fmt --manifest-path tests/fuzz/Cargo.toml
	cargo fmt --manifest-path tests/software_driver/Cargo.toml
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

## The documentation with its reference as a site, into target/site
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

## Write the docstrings of the stub, and the options in docs/tools.md
api: $(DEV)
	$(BIN)/python docs/api.py
	$(BIN)/ruff format python/kvpool/_kvpool.pyi

# `benches/run` has the commands; `make bench-NAME` runs those of an engine, a GPU or a trace, beside the same of kvpool.
bench-sglang bench-sglang-engine: $(VENV)/engines/.installed $(SGLANG_TORCH)/.installed
bench-sglang-eviction: $(VENV)/engines/.installed
bench-nixl bench-late-bytes: $(VENV)/nixl/.installed
bench-vllm: $(VENV)/vllm/.installed
bench-vllm-engine bench-vllm-eviction: $(VENV)/vllm-engine/.installed
bench-pymllm: $(VENV)/.test
bench-peers: $(VENV)/peers/.installed $(VENV)/vllm/.installed $(SGLANG_TORCH)/.installed
bench-lmcache: $(VENV)/lmcache/.installed
## Benchmarks on the CPU, as ratios to the alternatives in the same process
bench:
$(filter bench%,$(COMMANDS)): $(EXTENSION) $(VENV)/.tools
	benches/run $@

# Packages that tests need: with the versions of pyproject.toml, anew when it changes.
$(addprefix $(VENV)/,$(addsuffix /.installed,engines mooncake nixl flashinfer)): $(VENV)/.test
$(VENV)/vllm/.installed: $(VENV)/engines/.installed
$(VENV)/lmcache/.installed: $(VENV)/vllm/.installed
$(VENV)/vllm-engine/.installed: $(VENV)/lmcache/.installed
$(VENV)/vllm-router/.installed: $(VENV)/vllm-engine/.installed
$(VENV)/%/.installed: | $(BIN)/python
	tests/engines/install $*
	touch $@

# In a report, target/gpu/report.md or in the folder OUT: all within ten minutes, or with GPU_PLAN=truth the faults in three, or
# with GPU_PLAN=speed the speed in five. It needs neither Rust nor a network where .gpu exists; PYTHON is the one with PyTorch.
## All checks that need a GPU, in ten minutes, in one report
gpu: $(if $(shell command -v cargo 2>/dev/null),$(GPU_PACKAGE))
	$(PYTHON) tests/gpu/run.py --plan $(GPU_PLAN)

# The same run on the software driver, with the Python and the PyTorch of the machine with a GPU.
gpu-rehearsal: $(GPU_PACKAGE) $(DRIVER) $(GPU_VENV)/.installed
	if test -e $(GPU_VENV)/bin/python; then \
	    $(GPU_VENV)/bin/python tests/gpu/run.py --software --plan $(GPU_PLAN) --seconds 1800 --out target/gpu-rehearsal; fi

$(GPU_VENV)/.installed: $(BIN)/python
	mkdir -p $(GPU_VENV)
	if $(BIN)/uv python find --no-python-downloads $(GPU_PYTHON) >/dev/null 2>&1; then \
	    $(BIN)/uv venv --quiet --clear --no-python-downloads --python $(GPU_PYTHON) $(GPU_VENV) && \
	    $(BIN)/uv pip install --quiet --python $(GPU_VENV)/bin/python torch==2.11.0 transformers==5.17.0 numpy matplotlib; \
	    else echo "skipped, as there is no Python $(GPU_PYTHON)"; fi
	touch $@

# Writes the figures of `make gpu` into RESULTS.md: FILE is its board.json.
gpu-results: $(BIN)/python
	$(BIN)/python benches/gpu_results.py $(FILE)

# What `make gpu` brings to a machine that has Python and PyTorch alone.
gpu-package:
	rm -f $(GPU_PACKAGE)
	$(MAKE) --no-print-directory $(GPU_PACKAGE)

$(GPU_PACKAGE): $(BIN)/python $(RUST_SOURCES) $(shell find python/kvpool -name '*.py' -o -name '*.html') pyproject.toml
	$(WITHOUT_PATHS) tests/gpu/make_package

# From the seeds on, for FUZZ_SECONDS each. A finding is an error, and stays in tests/fuzz/artifacts.
## An hour of fuzzing for each target
fuzz: fuzz-build $(EXTENSION) $(VENV)/.fuzz
	printf '%s\n' $(TARGETS) | xargs -P $(FUZZ_JOBS) -I{} sh -c 'if test ! -e tests/fuzz/{}.py; \
	    then exec bash tests/fuzz/run {} $(FUZZ_SECONDS) env KVPOOL_HISTORY={} $(FUZZ)/histories; \
	    elif $(BIN)/python -c "import atheris" 2>/dev/null; \
	    then exec bash tests/fuzz/run {} $(FUZZ_SECONDS) $(BIN)/python tests/fuzz/{}.py; \
	    else echo "{}: skipped, as atheris needs Linux and Python 3.11"; fi'

# A second of each target, without optimisations, which would take longer to compile.
fuzz-briefly: FUZZ_SECONDS = 1
fuzz-briefly: FUZZ_LEVEL = CARGO_PROFILE_RELEASE_OPT_LEVEL=0
fuzz-briefly: fuzz

fuzz-build:
	RUSTFLAGS='$(FUZZ_FLAGS)' $(FUZZ_LEVEL) cargo $(if $(SANITIZER),+nightly) build --quiet --locked --release --target $(HOST) \
	    --manifest-path tests/fuzz/Cargo.toml --target-dir target/fuzz

## Long random histories of every pool, misuse included, against naive models
histories:
	KVPOOL_HISTORY='$(HISTORIES)' KVPOOL_HISTORY_STEPS=$(STEPS) KVPOOL_HISTORY_SEED=$(SEED) cargo test --locked --profile checked --test rust -- \
	    --ignored --exact history_runs::long_histories_agree_with_their_models --nocapture

# A change that no Rust test notices is an error, and listed in target/mutants.out/missed.txt.
## Change the source in one place after the other, to see whether a Rust test fails
mutants: $(MUTANTS)
	$(MUTANTS) mutants $(foreach file,$(MUTATED),--file '$(file)') --shard $(SHARD) --no-shuffle --timeout 120 --output target \
	    -- --locked --test rust

$(MUTANTS):
	cargo install --quiet --locked --version 27.1.0 --root $(VENV)/mutants cargo-mutants

## Undefined behaviour and data races in tests on the host, by Miri: a few minutes
miri:
	cargo +nightly miri --version || rustup toolchain install nightly --profile minimal --component miri --component rust-src
	MIRIFLAGS='$(MIRI_FLAGS)' cargo +nightly miri test --locked --target-dir target/miri --lib -- kernels::rows memory::region
	MIRIFLAGS='$(MIRI_FLAGS)' cargo +nightly miri test --locked --target-dir target/miri --test rust -- \
	    contract:: dlpack:: leases:: shortage:: threads::

## The files for a package index, built and checked, into target/wheels
wheels: $(BIN)/python $(VENV)/.wheels
	$(INSTALL) --group zig
	$(WITHOUT_PATHS) tests/packaging/wheels

# Writes the licences of linked crates.
licences: $(BIN)/python
	$(BIN)/python tests/packaging/linked.py licences

# The committed PTX and machine code are what the kernels compile to, and every architecture takes the PTX without spills.
kernel-lint: $(CUDA_TOOLS)/.installed $(CUDA_TOOLS)/cuda-12.1/.installed
	$(BIN)/python src/kernels/generate.py --tools $(CUDA_TOOLS) --check

## Compile the kernels into the committed PTX and machine code
kernels: $(CUDA_TOOLS)/.installed $(CUDA_TOOLS)/cuda-12.1/.installed
	$(BIN)/python src/kernels/generate.py --tools $(CUDA_TOOLS)

# The limits of the machine code on each architecture: computed, not measured.
kernel-report: $(CUDA_TOOLS)/.installed $(CUDA_TOOLS)/.disassembler $(VENV)/.tools
	$(BIN)/python src/kernels/kernel_report.py --tools $(CUDA_TOOLS)

# The pictures of the documentation, from the tables of the results and from running pools.
chart: $(EXTENSION) $(VENV)/.tools
	$(BIN)/python benches/chart.py
	$(BIN)/python docs/img/snapshot.py

# With SOAK_DEVICE=cuda on the GPU.
## Use all pools for SOAK_MINUTES, and fail if the process grows
soak: $(EXTENSION) $(VENV)/.tools
	$(BIN)/python tests/soak/soak.py --minutes $(SOAK_MINUTES) --device $(SOAK_DEVICE) --out target

# The same minutes for eight threads that share all pools.
soak-threads: $(DEV)
	KVPOOL_SOAK_S=$$(($(SOAK_MINUTES) * 60)) $(BIN)/python -m pytest tests/python/test_threads.py -k eight_threads

## Remove .venv and everything that was built
clean:
	rm -rf $(VENV) target .gpu python/kvpool/*.so

$(BIN)/python: | $(BIN)/uv ;

$(BIN)/uv:
	test -e $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --disable-pip-version-check install --quiet 'pip>=22.3' 'uv>=0.9' 'maturin>=1.10,<2'

# The extension is compiled while packages are installed; then it is installed itself.
$(VENV)/.compiled: $(BIN)/python $(RUST_SOURCES) pyproject.toml
	VIRTUAL_ENV=$(abspath $(VENV)) $(WITHOUT_PATHS) $(BIN)/maturin develop --release --locked --quiet --skip-install
	touch $@

$(EXTENSION): $(VENV)/.compiled | $(VENV)/.tools
	rm -f $(QUICK_EXTENSION)
	VIRTUAL_ENV=$(abspath $(VENV)) $(WITHOUT_PATHS) $(BIN)/maturin develop --release --locked --quiet
	touch $@

$(QUICK_EXTENSION): $(RUST_SOURCES) pyproject.toml | $(VENV)/.tools
	rm -f $(EXTENSION)
	VIRTUAL_ENV=$(abspath $(VENV)) CARGO_INCREMENTAL=1 $(BIN)/maturin develop --profile checked --locked --quiet
	touch $@

# Python compiles modules of PyTorch and transformers when they are imported; few are.
$(VENV)/.tools: pyproject.toml $(BIN)/python
	$(INSTALL) torch 'rich>=13' 'matplotlib>=3.8' 'numpy>=1.26' "transformers>=5.21,<6; python_version >= '3.11'"
	touch $@

# At the same time as the extension, whose link takes a minute of one core alone.
$(VENV)/.test: pyproject.toml $(VENV)/.tools
	$(INSTALL) --group test --group lint
	touch $@

$(VENV)/.wheels: pyproject.toml $(BIN)/python
	$(INSTALL) --group wheels
	touch $@

$(VENV)/.docs: pyproject.toml $(BIN)/python
	$(INSTALL) --group docs
	touch $@

$(VENV)/.fuzz: pyproject.toml $(VENV)/.test
	$(INSTALL) --group fuzz
	touch $@

# The kernels are C++; where there is no compiler for it, PyPI has one.
$(DRIVER): $(DRIVER_SOURCES) $(BIN)/python
	if ! command -v c++ >/dev/null; then \
	    $(INSTALL) ziglang && export CXX=$(abspath $(VENV))/zig-c++ && \
	    printf '#!/bin/sh\nexec $(abspath $(BIN))/python -m ziglang c++ "$$@"\n' > $$CXX && chmod +x $$CXX; fi && \
	cargo build --quiet --release --locked --manifest-path tests/software_driver/Cargo.toml --target-dir target/software_driver
	mkdir -p $(@D)
	cp target/software_driver/release/libcuda.so $@.new
	mv $@.new $@

$(CUDA_TOOLS)/.installed: $(BIN)/python
	$(INSTALL) --no-deps --target $(CUDA_TOOLS) nvidia-cuda-nvrtc-cu12==12.0.76 \
	    nvidia-cuda-nvcc-cu12==12.9.86 nvidia-cuda-nvcc==13.0.88
	touch $@

# The compiler for kernels with long parameters, beside the other of the same name.
$(CUDA_TOOLS)/cuda-12.1/.installed: $(BIN)/python
	$(INSTALL) --no-deps --target $(@D) nvidia-cuda-nvrtc-cu12==12.1.55
	touch $@

$(CUDA_TOOLS)/.disassembler: $(BIN)/python
	$(INSTALL) --no-deps --upgrade --target $(CUDA_TOOLS) nvidia-cuda-nvdisasm==13.5.37
	touch $@
