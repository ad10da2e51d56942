# Everything is installed into .venv. `make demo` and `make test` need Rust, Python 3.11+ with pip, and a C compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TRACES := ../shared/traces
SOAK_MINUTES ?= 60
SOAK_DEVICE ?= cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The serving engine over the pools, an example.
SERVE := PYTHONPATH=examples/serving $(BIN)/python -m kvpool_serving
# Unpacks PyTorch in a fraction of pip's time. Where pip is told of another index, it takes that.
INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
# Fetches the source of a package, which pip keeps when the source has told its name: nothing of it is built.
SOURCE := PYTHONPATH=$(abspath tests/engines/sources_only) $(PIP) download --quiet --no-deps --no-build-isolation
RUST_SOURCES := $(shell find src -name '*.rs' -o -name '*.ptx' -o -name '*.cubin') Cargo.toml Cargo.lock
EXTENSION := $(VENV)/.extension
DRIVER := target/software_driver/lib/libcuda.so.1
DRIVER_SOURCES := $(shell find tests/software_driver -name "*.rs" -o -name "*.cpp" -o -name "Cargo.*") $(wildcard src/kernels/*.cu*)
CUDA_TOOLS := $(VENV)/cuda-tools
PEERS := $(VENV)/peers
ENGINES := $(VENV)/engines
MOONCAKE := $(VENV)/mooncake
VLLM := $(VENV)/vllm
LMCACHE := $(VENV)/lmcache
NIXL := $(VENV)/nixl
FLASHINFER := $(VENV)/flashinfer
VLLM_PARTS := $(addprefix vllm-0.33.0/,vllm vllm.egg-info tests/__init__.py \
    $(addprefix tests/v1/,__init__.py core kv_offload kv_connector/__init__.py $(addprefix kv_connector/unit/,__init__.py utils.py)))
LMCACHE_PARTS := $(addprefix lmcache-0.5.6/tests/,__init__.py $(addprefix v1/,__init__.py utils.py test_address_manager.py \
    test_memory_management.py test_memory_allocator_import_surface.py distributed/memory_manager \
    $(addprefix distributed/,__init__.py utils.py test_devdax_l1_allocator.py test_l1_memory_manager.py) \
    $(addprefix storage_backend/,__init__.py test_local_cpu_backend.py test_local_cpu_backend_nixl_paged.py)))
# The newest PyTorch that SGLang's compiled tree core takes, in a folder of its own.
SGLANG_TORCH := $(VENV)/torch-2.14
# The oldest PyTorch that kvpool supports, one of those before the exchange table. What it needs of CUDA is never called on
# the CPU: two small libraries are the real ones, the others are empty, which saves 2.5 GB.
OLD_TORCH := $(VENV)/torch-2.4
OLD_TORCH_EMPTY := cublas.so.12 cublasLt.so.12 cudnn.so.9 cufft.so.11 cupti.so.12 curand.so.10 cusolver.so.11 cusparse.so.12 \
    nccl.so.2 nvrtc.so.12
# Seconds for each fuzz target, the targets, and how many run at once. SANITIZER=address needs a nightly toolchain.
FUZZ_SECONDS ?= 3600
TARGETS ?= $(notdir $(wildcard tests/fuzz/corpus/*))
FUZZ_JOBS ?= $(shell nproc)
HOST := $(shell rustc -vV 2>/dev/null | sed -n 's/^host: //p')
FUZZ := target/fuzz/$(HOST)/release
# What `cargo fuzz` passes, as far as a stable compiler takes it: counters for libFuzzer to see where an input leads.
FUZZ_FLAGS := --cfg fuzzing -Cpasses=sancov-module $(addprefix -Cllvm-args=-sanitizer-coverage-,level=4 \
    inline-8bit-counters pc-table trace-compares) $(addprefix -Zsanitizer=,$(SANITIZER))
# Files of tests that mostly wait for other processes: they run beside the rest, which need not read them.
PROCESS_TESTS := $(shell grep -l '^pytestmark = pytest.mark.processes' tests/python/test_*.py examples/serving/tests/test_*.py)
OTHER_TESTS := tests/python benches/fleet/tests examples/serving/tests $(addprefix --ignore=,$(PROCESS_TESTS))
# Hundreds of processes import the same modules: each is compiled once, also where the environment tells Python to keep none.
unexport PYTHONDONTWRITEBYTECODE
# What `make wheels` builds: for each target one for CPython with the GIL, one for 3.14 without, and one for 3.15 and later.
WHEEL_TARGETS ?= x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu
WHEEL_PYTHONS ?= python3.10 python3.14t python3.15t
WHEELS := target/wheels
# No library names a folder of the machine that built it.
CARGO_HOME ?= $(HOME)/.cargo
WITHOUT_PATHS := RUSTFLAGS='$(strip $(RUSTFLAGS) --remap-path-prefix=$(CARGO_HOME)/registry/src=crates --remap-path-prefix=$(CURDIR)=kvpool)'
# The Python of the machine with a GPU.
GPU_PYTHON ?= 3.12
GPU_PACKAGE := .gpu/package.json
GPU_VENV := $(VENV)/gpu-$(GPU_PYTHON)
GPU_VERSIONS := torch==2.11.0 transformers==5.17.0 numpy matplotlib
GPU_PLAN ?= all
FILE ?= target/gpu/board.json
GPU_TOOLS := pytest pytest-timeout pytest-xdist hypothesis prometheus-client rich
# What that machine lacks or has too old, without what it depends on: for tests of models and engines, and peers of the board.
GPU_BROUGHT := transformers==5.24.0 'huggingface-hub>=1.31,<2' 'tokenizers>=0.23.1,<0.24' 'safetensors>=0.8' regex msgspec pyzmq \
    blake3 flashinfer-python==0.6.2 apache-tvm-ffi ninja
GPU_FETCH = $(PIP) download --quiet --only-binary=:all: --implementation cp --python-version $(GPU_PYTHON) \
    $(addprefix --platform=manylinux,_2_34_x86_64 _2_28_x86_64 _2_17_x86_64 2014_x86_64)
# Steps of `make histories`, the seed that decides all of them, and which histories: all, if none is named.
HISTORIES ?=
STEPS ?= 11000000
SEED ?= 1
# The sources that `make mutants` changes, and which part of the changes it tries: 0/4 to 3/4 are quarters.
MUTATED ?= src/cache/**/*.rs src/engines/**/*.rs src/index/**/*.rs
SHARD ?= 0/1
MUTANTS := $(VENV)/mutants/bin/cargo-mutants
# The tests read the environment, have addresses as numbers, and end while threads for copies wait.
MIRI_FLAGS := -Zmiri-disable-isolation -Zmiri-permissive-provenance -Zmiri-ignore-leaks

# Makes parts of a target, three at a time: on two cores one of them waits for a file, the network or a lock. The output of a
# part is shown when it ends, and that of one that has failed again when all have ended; then why a process ended that could
# not say so in a report.
define at_once
@mkdir -p target; rm -f target/$@.passed
@{ $(MAKE) --jobs=3 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) --print-directory $(1) 2>&1 \
    && touch target/$@.passed; } | tee target/$@.log
@test -e target/$@.passed || { printf '\n%s\n' '$@ has failed:'; \
    awk '/: Entering directory/ { part = "" } { part = part $$0 "\n" } /: [*][*][*] \[/ { failed = 1 } \
        /: Leaving directory/ { if (failed) printf "%s", part; failed = 0 }' target/$@.log | tee target/$@.failed; \
    grep -E -B 3 -A 12 'panicked at|^software driver:|^Fatal Python error|^(Current t|T)hread 0x' target/$@.failed; exit 1; }
endef

.PHONY: demo test lint test-engines bench bench-contiguous bench-cuda bench-generate bench-lmcache bench-nixl bench-peers bench-pymllm bench-sglang bench-vllm chart late-bytes api format clean kernels kernel-report rust-test python-test engines machine-test old-torch-test process-test software-test \
    rust-lint python-lint stub-lint kernel-lint verify-types wheel-lint licences wheels \
    version-test orders fuzz fuzz-build fuzz-briefly histories mutants miri soak soak-threads gpu gpu-package gpu-results gpu-rehearsal
.DEFAULT_GOAL := test

# The main job: models served through the pools, dense and hybrid, and conversations with the prefix cache and without, with
# every token checked; then a request trace, with every row of K and V checked.
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

test:
	$(call at_once,process-test software-test machine-test rust-test orders fuzz-briefly old-torch-test)

# Without the feature `cuda` only the table of the driver's functions differs, which is then empty: so it is in `fuzz`.
rust-test: $(DRIVER)
	LD_PRELOAD=$(abspath $(DRIVER)) KVPOOL_REQUIRE_CUDA=1 cargo test --locked --features cuda
	cargo test --quiet --locked --release --manifest-path tests/software_driver/Cargo.toml --target-dir target/software_driver

# Once as this machine is, in two parts, and every CUDA test on the software driver.
python-test:
	$(call at_once,process-test software-test machine-test)

# What tests run beside kvpool.
engines: $(addsuffix /.installed,$(ENGINES) $(MOONCAKE) $(NIXL) $(VLLM) $(FLASHINFER) $(LMCACHE))

machine-test: $(EXTENSION) $(VENV)/.test engines
	KVPOOL_REQUIRE_ENGINES=1 $(BIN)/python -m pytest --capture=sys $(OTHER_TESTS)

# What mostly waits: beside it there is time for the others.
process-test: $(EXTENSION) $(VENV)/.test engines
	KVPOOL_REQUIRE_ENGINES=1 $(BIN)/python -m pytest --capture=sys $(PROCESS_TESTS)

# What crosses between kvpool and PyTorch, with the oldest PyTorch.
old-torch-test: $(EXTENSION) $(VENV)/.test $(OLD_TORCH)/.installed
	if test -d $(OLD_TORCH)/torch; then LD_LIBRARY_PATH=$(abspath $(OLD_TORCH)/lib) PYTHONPATH=$(abspath $(OLD_TORCH)) \
	    $(BIN)/python -m pytest --capture=sys tests/python/test_dlpack.py tests/python/test_indices.py -k 'not numpy'; \
	    else echo "skipped, as PyTorch 2.4 has packages for x86-64 Linux and Python up to 3.12 alone"; fi

# What any CPython that is supported can run: every test on the CPU, without engines and, on 3.10, without transformers.
version-test: $(EXTENSION) $(VENV)/.test
	$(BIN)/python -m pytest --capture=sys

software-test: $(EXTENSION) $(VENV)/.test $(DRIVER)
	LD_PRELOAD=$(abspath $(DRIVER)) KVPOOL_REQUIRE_CUDA=1 $(BIN)/python -m pytest --capture=sys --software -m cuda

# Every interleaving of a few threads that share data.
orders: $(DRIVER)
	LD_PRELOAD=$(abspath $(DRIVER)) RUSTFLAGS='--cfg loom' cargo test --quiet --locked --features cuda --target-dir target/loom --test orders

# Every target from its seeds on, for FUZZ_SECONDS each. A finding is an error, and stays in tests/fuzz/artifacts.
fuzz: fuzz-build $(EXTENSION) $(VENV)/.fuzz
	printf '%s\n' $(TARGETS) | xargs -P $(FUZZ_JOBS) -I{} sh -c 'if test ! -e tests/fuzz/{}.py; \
	    then exec bash tests/fuzz/run {} $(FUZZ_SECONDS) env KVPOOL_HISTORY={} $(FUZZ)/histories; \
	    elif $(BIN)/python -c "import atheris" 2>/dev/null; \
	    then exec bash tests/fuzz/run {} $(FUZZ_SECONDS) $(BIN)/python tests/fuzz/{}.py; \
	    else echo "{}: skipped, as atheris needs Linux and Python 3.11"; fi'

# A look at each, in every run of the tests: without optimisations, which take longer than that.
fuzz-briefly: FUZZ_SECONDS = 1
fuzz-briefly: FUZZ_LEVEL = CARGO_PROFILE_RELEASE_OPT_LEVEL=0
fuzz-briefly: fuzz

fuzz-build:
	RUSTFLAGS='$(FUZZ_FLAGS)' $(FUZZ_LEVEL) cargo $(if $(SANITIZER),+nightly) build --quiet --locked --release --target $(HOST) \
	    --manifest-path tests/fuzz/Cargo.toml --target-dir target/fuzz

# Random histories of every pool, misuse included, against naive models.
histories:
	KVPOOL_HISTORY='$(HISTORIES)' KVPOOL_HISTORY_STEPS=$(STEPS) KVPOOL_HISTORY_SEED=$(SEED) cargo test --locked --profile checked --test rust -- \
	    --ignored --exact history_runs::long_histories_agree_with_their_models --nocapture

# Changes of the source that no Rust test notices: an error, and listed in target/mutants.out/missed.txt.
mutants: $(MUTANTS)
	$(MUTANTS) mutants $(foreach file,$(MUTATED),--file '$(file)') --shard $(SHARD) --no-shuffle --timeout 120 --output target \
	    -- --locked --test rust

$(MUTANTS):
	cargo install --quiet --locked --version 27.1.0 --root $(VENV)/mutants cargo-mutants

# Undefined behaviour and data races of tests on the host, as Miri finds them, in a few minutes.
miri:
	cargo +nightly miri --version || rustup toolchain install nightly --profile minimal --component miri --component rust-src
	MIRIFLAGS='$(MIRI_FLAGS)' cargo +nightly miri test --locked --target-dir target/miri --lib -- kernels::rows memory::region
	MIRIFLAGS='$(MIRI_FLAGS)' cargo +nightly miri test --locked --target-dir target/miri --test rust -- \
	    contract:: dlpack:: leases:: shortage:: threads::

# BESIDE is made at the same time, such as packages that the tests need.
lint:
	$(call at_once,rust-lint stub-lint $(BESIDE) python-lint kernel-lint wheel-lint)

rust-lint:
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings
	cargo clippy --locked --all-targets --features cuda,python -- -D warnings
	RUSTFLAGS='--cfg loom' cargo clippy --quiet --locked --features cuda --target-dir target/loom --test orders -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps --features cuda
	cargo fmt --check --manifest-path tests/fuzz/Cargo.toml
	RUSTFLAGS='$(FUZZ_FLAGS)' cargo clippy --locked --release --all-targets --target $(HOST) \
	    --manifest-path tests/fuzz/Cargo.toml --target-dir target/fuzz -- -D warnings
	cargo fmt --check --manifest-path tests/software_driver/Cargo.toml
	cargo clippy --locked --release --all-targets --manifest-path tests/software_driver/Cargo.toml --target-dir target/software_driver -- -D warnings
	test "$$(cargo tree --locked --features cuda -e features -i cudarc | grep -o 'feature "cuda-[^"]*"')" = 'feature "cuda-12000"'

python-lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --no-site-packages --follow-imports=silent --disable-error-code=import-not-found \
	    --cache-dir=.mypy_cache/without_pytorch tests/typing/none_checks.py

# How much of what users can import has a type that every checker sees alike. Not a part of `make lint`: pyright is large and
# reads the types of PyTorch and transformers for half a minute.
verify-types: $(EXTENSION) $(VENV)/.test
	$(INSTALL) --group types
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pyright --verifytypes kvpool --ignoreexternal --outputjson > $(VENV)/types.json; \
	    $(BIN)/python tests/typing/completeness.py $(VENV)/types.json

# The stub, the pages of docs/api and the options in docs/tools.md are what the extension and the commands have.
stub-lint: $(EXTENSION) $(VENV)/.test
	$(BIN)/python -m mypy.stubtest kvpool._kvpool --mypy-config-file tests/stubtest.ini
	$(BIN)/python docs/api.py --check

# The library that is compiled already, as a wheel that an index would take.
wheel-lint: $(EXTENSION) $(VENV)/.wheels
	$(BIN)/python tests/packaging/linked.py licences --check
	$(BIN)/python tests/packaging/linked.py sbom $(HOST) target/wheel/kvpool.cyclonedx.json
	rm -f target/wheel/*.whl
	VIRTUAL_ENV=$(abspath $(VENV)) $(WITHOUT_PATHS) $(BIN)/maturin build --release --locked --quiet \
	    --sbom-include target/wheel/kvpool.cyclonedx.json --out target/wheel
	$(BIN)/python tests/packaging/check_wheel.py target/wheel/*.whl

# Everything that is published, checked: into target/wheels. zig links for an old glibc and for other machines.
wheels: $(BIN)/python $(VENV)/.wheels
	$(INSTALL) --group zig
	rm -rf $(WHEELS)
	for target in $(WHEEL_TARGETS); do \
	    if ! test -d "$$(rustc --print target-libdir --target $$target)"; then \
	        echo "$$target: skipped, as Rust's standard library for it is not installed: rustup target add $$target"; continue; fi; \
	    $(BIN)/python tests/packaging/linked.py sbom $$target target/sbom/$$target/kvpool.cyclonedx.json || exit; \
	    for python in $(WHEEL_PYTHONS); do \
	        PATH=$(abspath $(BIN)):$$PATH $(WITHOUT_PATHS) maturin build --release --locked --quiet --zig --compatibility manylinux_2_17 \
	            --target $$target --interpreter $$python --sbom-include target/sbom/$$target/kvpool.cyclonedx.json \
	            --out $(WHEELS) || exit; \
	    done; \
	done
	$(BIN)/maturin sdist --out $(WHEELS)
	$(BIN)/python -m twine check --strict $(WHEELS)/*.tar.gz
	$(BIN)/python tests/packaging/check_wheel.py $(WHEELS)/*.whl

# What the licences of linked crates say.
licences: $(BIN)/python
	$(BIN)/python tests/packaging/linked.py licences

# The committed PTX and machine code are what the kernels give, and every architecture takes the PTX without spills.
kernel-lint: $(CUDA_TOOLS)/.installed $(CUDA_TOOLS)/cuda-12.1/.installed
	$(BIN)/python src/kernels/generate.py --tools $(CUDA_TOOLS) --check

kernels: $(CUDA_TOOLS)/.installed $(CUDA_TOOLS)/cuda-12.1/.installed
	$(BIN)/python src/kernels/generate.py --tools $(CUDA_TOOLS)

# What the machine code allows on each architecture: computed, not measured.
kernel-report: $(CUDA_TOOLS)/.installed $(CUDA_TOOLS)/.disassembler $(VENV)/.tools
	$(BIN)/python src/kernels/kernel_report.py --tools $(CUDA_TOOLS)

# Ratios against the alternatives, in the same process.
bench: $(EXTENSION) $(VENV)/.tools
	cargo bench --locked
	$(BIN)/python benches/bench_allocator.py
	$(BIN)/python benches/bench_kv_pool.py
	$(BIN)/python benches/bench_pools.py
	$(BIN)/python benches/bench_planner.py
	$(BIN)/python benches/bench_prefix_cache.py
	$(BIN)/python benches/bench_host_tier.py
	$(BIN)/python benches/bench_store.py
	if test -f $(TRACES)/azure/AzureLLMInferenceTrace_conv.csv; then \
	    $(BIN)/python -m kvpool replay $(TRACES)/azure/AzureLLMInferenceTrace_conv.csv --no-kv; \
	fi

# Engines on kvpool, at length. Those that have no package for this machine are skipped with the reason.
test-engines: $(EXTENSION) $(VENV)/.test $(ENGINES)/.installed $(VLLM)/.installed $(LMCACHE)/.installed $(SGLANG_TORCH)/.installed
	KVPOOL_REQUIRE_ENGINES=1 KVPOOL_ENGINE_REQUESTS=3000 KVPOOL_SGLANG_TORCH=$(abspath $(SGLANG_TORCH)) \
	    $(BIN)/python -m pytest --timeout=3600 tests/python/test_pymllm.py tests/engines

# Without what they depend on and the tests have: PyTorch, transformers and what these need. SGLang has packages for
# Linux and these versions of Python.
$(ENGINES)/.installed: $(VENV)/.test
	mkdir -p $(ENGINES)
	if $(BIN)/python -c 'import sys; sys.exit(sys.platform != "linux" or not (3, 11) <= sys.version_info < (3, 14))'; then \
	    $(INSTALL) --no-deps --upgrade --target $(ENGINES) --group sglang; fi
	touch $@

# Mooncake without what its other commands depend on. What it needs of Debian lies beside it, from lists of packages
# fetched here, so that no step needs root; it is not fetched where there is no apt, or the system has it.
$(MOONCAKE)/.installed: $(VENV)/.test
	mkdir -p $(MOONCAKE)/debian/lists
	if $(BIN)/python -c 'import sys; sys.exit(sys.platform != "linux" or sys.version_info >= (3, 14))'; then \
	    $(INSTALL) --no-deps --upgrade --target $(MOONCAKE) --group mooncake && \
	    chmod +x $(MOONCAKE)/mooncake/mooncake_master; fi
	cd $(MOONCAKE)/debian && if command -v apt-get >/dev/null && ! PATH=$$PATH:/sbin ldconfig -p | grep -q 'libibverbs\.so\.1 '; then \
	    own="-qq -o Dir::State::Lists=$$PWD/lists -o Dir::Cache=$$PWD/cache -o Debug::NoLocking=1"; \
	    apt-get $$own update && apt-get $$own download libibverbs1 libnl-3-200 libnl-route-3-200 && \
	    for package in *.deb; do dpkg -x $$package . || exit; done; fi
	rm -rf $(MOONCAKE)/debian/lists $(MOONCAKE)/debian/cache $(MOONCAKE)/debian/*.deb
	touch $@

# NIXL's build for the CUDA that PyTorch's normal build has: it takes that, and runs without a GPU.
$(NIXL)/.installed: $(VENV)/.test
	mkdir -p $(NIXL)
	if $(BIN)/python -c 'import sys; sys.exit(sys.platform != "linux" or sys.version_info >= (3, 15))'; then \
	    $(INSTALL) --no-deps --upgrade --target $(NIXL) --group nixl; fi
	touch $@

# FlashInfer for two of its functions, which are the same in 0.7.2: that package is eight times as large.
$(FLASHINFER)/.installed: $(VENV)/.test
	mkdir -p $(FLASHINFER)
	$(INSTALL) --no-deps --upgrade --target $(FLASHINFER) --group flashinfer
	touch $@

# The Python part of vLLM and its tests, from its source.
$(VLLM)/.installed: $(ENGINES)/.installed
	rm -rf $(VLLM)
	mkdir -p $(VLLM)
	if test -d $(ENGINES)/sglang; then \
	    $(INSTALL) --no-deps --target $(VLLM) --group vllm && \
	    $(SOURCE) --no-binary vllm --dest $(VLLM)/source vllm==0.33.0 && \
	    tar -xzf $(VLLM)/source/vllm-0.33.0.tar.gz -C $(VLLM) --strip-components=1 $(VLLM_PARTS) && \
	    rm -r $(VLLM)/source; fi
	touch $@

$(SGLANG_TORCH)/.installed: $(BIN)/python
	$(INSTALL) --no-deps --target $(SGLANG_TORCH) torch==2.14.1 nvidia-curand
	touch $@

# It has packages for x86-64 Linux and Python up to 3.12. Libraries are loaded lazily, as the empty ones lack every function.
$(OLD_TORCH)/.installed: $(BIN)/python
	rm -rf $(OLD_TORCH)
	mkdir -p $(OLD_TORCH)
	if test "$$(uname -sm)" = 'Linux x86_64' && $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then \
	    $(INSTALL) --no-deps --target $(OLD_TORCH) torch==2.4.1 \
	        nvidia-cuda-runtime-cu12==12.1.105 nvidia-nvtx-cu12==12.1.105 && \
	    mkdir $(OLD_TORCH)/lib && mv $(OLD_TORCH)/nvidia/*/lib/*.so.* $(OLD_TORCH)/lib && \
	    for name in $(OLD_TORCH_EMPTY); do \
	        cc -shared -o $(OLD_TORCH)/lib/lib$$name -Wl,-soname,lib$$name -x c /dev/null || exit; done && \
	    printf 'import os\nimport sys\n\nsys.setdlopenflags(os.RTLD_LAZY)\n' > $(OLD_TORCH)/sitecustomize.py; fi
	touch $@

# The same on a GPU.
bench-cuda: $(EXTENSION) $(VENV)/.tools
	$(BIN)/python benches/bench_cuda.py
	$(BIN)/python benches/bench_pools.py
	$(BIN)/python benches/bench_planner.py

# The pools and the tree core behind SGLang's classes, beside SGLang's own: its compiled tree core, too.
bench-sglang: $(EXTENSION) $(VENV)/.tools $(ENGINES)/.installed $(SGLANG_TORCH)/.installed
	PYTHONPATH=tests/engines/no_gpu:$(ENGINES) SGLANG_USE_CPU_ENGINE=1 SGLANG_PLUGINS=kvpool $(BIN)/python benches/bench_sglang.py
	PYTHONPATH=tests/engines/no_gpu:$(SGLANG_TORCH):$(ENGINES) SGLANG_USE_CPU_ENGINE=1 $(BIN)/python benches/bench_sglang_cache.py

# How many prompts get one run of slots.
bench-contiguous: $(EXTENSION) $(VENV)/.tools
	for more in '' '--growth 8' '--occupancy 0.8'; do \
	    $(BIN)/python benches/bench_contiguous.py $(TRACES)/azure/AzureLLMInferenceTrace_conv.csv $$more || exit; done

# Slots of another process, beside NIXL alone.
bench-nixl: $(EXTENSION) $(VENV)/.tools $(NIXL)/.installed
	PYTHONPATH=$(NIXL) NIXL_LOG_LEVEL=ERROR UCX_TLS=tcp $(BIN)/python benches/bench_nixl.py
	PYTHONPATH=$(NIXL) NIXL_LOG_LEVEL=ERROR $(BIN)/python benches/bench_nixl.py

# What a peer that was given up still sends, with NIXL alone.
late-bytes: $(VENV)/.tools $(NIXL)/.installed
	PYTHONPATH=$(NIXL) NIXL_LOG_LEVEL=FATAL UCX_LOG_LEVEL=fatal $(BIN)/python benches/late_bytes.py

# `generate()` of transformers over the pools, beside its own cache.
bench-generate: $(EXTENSION) $(VENV)/.tools
	$(BIN)/python benches/bench_generate.py

# vLLM's pool of blocks and managers of offloaded chunks, beside vLLM's own.
bench-vllm: $(EXTENSION) $(VENV)/.tools $(VLLM)/.installed
	PYTHONPATH=$(VLLM):$(ENGINES) VLLM_LOGGING_LEVEL=ERROR $(BIN)/python benches/bench_vllm_blocks.py
	PYTHONPATH=$(VLLM):$(ENGINES) VLLM_LOGGING_LEVEL=ERROR $(BIN)/python benches/bench_vllm.py

# The same beside pymllm's own, from the folder that PYMLLM_PATH names.
bench-pymllm: $(EXTENSION) $(VENV)/.tools $(VENV)/.test
	$(BIN)/python benches/bench_pymllm.py

# The prefix cache beside those of other engines, which are installed into a folder of their own: without what they
# depend on, and with the PyTorch that SGLang's compiled core wants. What cannot be had is skipped with the reason.
bench-peers: $(EXTENSION) $(VENV)/.tools $(PEERS)/.installed $(VLLM)/.installed $(SGLANG_TORCH)/.installed
	cargo build --quiet --release --manifest-path benches/peers/kvbm/Cargo.toml --target-dir $(PEERS)/kvbm || true
	PYTHONPATH=$(PEERS):$(SGLANG_TORCH):$(VLLM) KVPOOL_KVBM_BENCH=$(PEERS)/kvbm/release/kvbm-bench $(BIN)/python benches/bench_peers.py

# LMCache's bookkeeping of host memory on kvpool beside its own, and host memory below a prefix cache beside LMCache's pool of it.
bench-lmcache: $(EXTENSION) $(VENV)/.tools $(VLLM)/.installed $(LMCACHE)/.installed
	PYTHONPATH=$(LMCACHE):$(ENGINES):$(VLLM) $(BIN)/python benches/bench_lmcache.py
	PYTHONPATH=$(LMCACHE):$(ENGINES):$(VLLM) $(BIN)/python benches/bench_host_tier.py

# LMCache, whose dependencies are SGLang's and vLLM's but for a few, and its tests of memory, which its source has.
$(LMCACHE)/.installed: $(VLLM)/.installed
	rm -rf $(LMCACHE)
	mkdir -p $(LMCACHE)
	if test -d $(ENGINES)/sglang; then \
	    $(INSTALL) --no-deps --target $(LMCACHE) --group lmcache && \
	    $(SOURCE) --no-binary lmcache --dest $(LMCACHE)/source lmcache==0.5.6 && \
	    tar -xzf $(LMCACHE)/source/lmcache-0.5.6.tar.gz -C $(LMCACHE) --strip-components=1 $(LMCACHE_PARTS) && \
	    rm -r $(LMCACHE)/source; fi
	touch $@

$(PEERS)/.installed: $(BIN)/python
	mkdir -p $(PEERS)
	-$(INSTALL) --no-deps --target $(PEERS) sglang==0.5.23 \
	    msgspec cloudpickle cachetools dill openai distro jiter
	touch $@

# GPU checks in one report, target/gpu/report.md or in the folder OUT: all within ten minutes, or with GPU_PLAN the truth in
# three or the speed in five. It needs neither Rust nor a network where .gpu is there; PYTHON is the one that has PyTorch.
gpu: $(if $(shell command -v cargo 2>/dev/null),$(GPU_PACKAGE))
	$(PYTHON) tests/gpu/run.py --plan $(GPU_PLAN)

# The same run on the driver made of software, with the Python and the PyTorch of the machine with a GPU.
gpu-rehearsal: $(GPU_PACKAGE) $(DRIVER) $(GPU_VENV)/.installed
	if test -e $(GPU_VENV)/bin/python; then \
	    $(GPU_VENV)/bin/python tests/gpu/run.py --software --plan $(GPU_PLAN) --seconds 1800 --out target/gpu-rehearsal; fi

$(GPU_VENV)/.installed: $(BIN)/python
	mkdir -p $(GPU_VENV)
	if $(BIN)/uv python find --no-python-downloads $(GPU_PYTHON) >/dev/null 2>&1; then \
	    $(BIN)/uv venv --quiet --clear --no-python-downloads --python $(GPU_PYTHON) $(GPU_VENV) && \
	    $(BIN)/uv pip install --quiet --python $(GPU_VENV)/bin/python $(GPU_VERSIONS); \
	    else echo "skipped, as there is no Python $(GPU_PYTHON)"; fi
	touch $@

# The figures that `make gpu` brought back, in RESULTS.md and the charts: FILE is its board.json.
gpu-results: $(BIN)/python
	$(BIN)/python benches/gpu_results.py $(FILE)
	$(BIN)/python benches/chart.py

# What `make gpu` brings to a machine that has Python and PyTorch alone.
gpu-package:
	rm -f $(GPU_PACKAGE)
	$(MAKE) --no-print-directory $(GPU_PACKAGE)

$(GPU_PACKAGE): $(BIN)/python $(RUST_SOURCES) $(shell find python/kvpool -name '*.py' -o -name '*.html') pyproject.toml
	rm -rf .gpu
	VIRTUAL_ENV=$(abspath $(VENV)) $(WITHOUT_PATHS) $(BIN)/maturin build --release --locked --quiet --out .gpu/wheel
	$(BIN)/python -m zipfile -e .gpu/wheel/*.whl .gpu/kvpool
	rm -r .gpu/wheel
	$(GPU_FETCH) --dest .gpu/wheels $(GPU_TOOLS)
	$(GPU_FETCH) --dest .gpu/wheels --no-deps $(GPU_BROUGHT)
	rm -rf target/sglang
	$(GPU_FETCH) --dest target/sglang --no-deps sglang==0.5.23
	$(BIN)/python tests/gpu/package.py .gpu target/sglang/sglang-0.5.23-*.whl
	rm -r target/sglang
	printf '{"commit": "%s", "python": "%s"}\n' "$$(git describe --always --dirty --abbrev=12)" $(GPU_PYTHON) > $@

# The pictures of the documentation, from the tables of the results and from running pools.
chart: $(EXTENSION) $(VENV)/.tools
	$(BIN)/python benches/chart.py
	$(BIN)/python docs/img/snapshot.py

# All pools for SOAK_MINUTES, on the GPU with SOAK_DEVICE=cuda: fails if the process grows.
soak: $(EXTENSION) $(VENV)/.tools
	$(BIN)/python tests/soak/soak.py --minutes $(SOAK_MINUTES) --device $(SOAK_DEVICE) --out target

# The docstrings of the stub, the pages of docs/api, and the options in docs/tools.md.
api: $(EXTENSION) $(VENV)/.test
	$(BIN)/python docs/api.py
	$(BIN)/ruff format python/kvpool/_kvpool.pyi

# The same minutes for eight threads that share all pools.
soak-threads: $(EXTENSION) $(VENV)/.test
	KVPOOL_SOAK_S=$$(($(SOAK_MINUTES) * 60)) $(BIN)/python -m pytest tests/python/test_threads.py -k eight_threads

format: $(VENV)/.test
	cargo fmt
	cargo fmt --manifest-path tests/fuzz/Cargo.toml
	cargo fmt --manifest-path tests/software_driver/Cargo.toml
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) target .gpu python/kvpool/*.so

$(BIN)/python: | $(BIN)/uv ;

$(BIN)/uv:
	test -e $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet 'pip>=22.3' 'uv>=0.9' 'maturin>=1.10,<2'

# The extension is compiled while packages are installed; then it is installed itself.
$(VENV)/.compiled: $(BIN)/python $(RUST_SOURCES) pyproject.toml
	VIRTUAL_ENV=$(abspath $(VENV)) $(WITHOUT_PATHS) $(BIN)/maturin develop --release --locked --quiet --skip-install
	touch $@

$(EXTENSION): $(VENV)/.compiled | $(VENV)/.tools
	VIRTUAL_ENV=$(abspath $(VENV)) $(WITHOUT_PATHS) $(BIN)/maturin develop --release --locked --quiet
	touch $@

# Few of the modules of PyTorch and transformers are imported: Python compiles these when they are.
$(VENV)/.tools: pyproject.toml $(BIN)/python
	$(INSTALL) torch 'rich>=13' 'matplotlib>=3.8' 'numpy>=1.26' "transformers>=5.21,<6; python_version >= '3.11'"
	touch $@

# Not after the extension, whose link takes a minute of one core alone.
$(VENV)/.test: pyproject.toml $(VENV)/.tools
	$(INSTALL) --group test --group lint
	touch $@

$(VENV)/.wheels: pyproject.toml $(BIN)/python
	$(INSTALL) --group wheels
	touch $@

$(VENV)/.fuzz: pyproject.toml $(VENV)/.test
	$(INSTALL) --group fuzz
	touch $@

# The kernels are C++; where there is no compiler for it, one comes from PyPI.
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
