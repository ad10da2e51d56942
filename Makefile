# Everything is installed into .venv. `make demo` and `make test` need Rust, Python 3.10+ with pip, and a C compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TRACES := ../shared/traces
PIP := $(BIN)/python -m pip --disable-pip-version-check
RUST_SOURCES := $(shell find src -name '*.rs') Cargo.toml Cargo.lock
EXTENSION := $(VENV)/.extension

.PHONY: demo test lint bench format clean rust-test python-test rust-lint python-lint
.DEFAULT_GOAL := test

# The main job: a request trace through the pools, with every row of K and V checked.
demo: $(EXTENSION) $(VENV)/.tools
	if test -f $(TRACES)/mooncake/conversation_trace.jsonl; then \
	    $(BIN)/python -m kvpool replay $(TRACES)/mooncake/conversation_trace.jsonl --requests 2000 --plot target/replay.png; \
	else \
	    $(BIN)/python -m kvpool replay --synthetic --plot target/replay.png; \
	fi

test: rust-test python-test

rust-test:
	cargo test --locked
	cargo test --locked --features cuda

python-test: $(EXTENSION) $(VENV)/.test
	$(BIN)/python -m pytest

lint: rust-lint python-lint

rust-lint:
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings
	cargo clippy --locked --all-targets --features cuda,python -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps --features cuda
	test "$$(cargo tree --locked --features cuda -e features -i cudarc | grep -o 'feature "cuda-[^"]*"')" = 'feature "cuda-12000"'

python-lint: $(EXTENSION) $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest kvpool._kvpool --mypy-config-file pyproject.toml

# Ratios against the alternatives, in the same process.
bench: $(EXTENSION) $(VENV)/.tools
	cargo bench --locked
	$(BIN)/python benches/bench_allocator.py
	$(BIN)/python benches/bench_kv_pool.py
	if test -f $(TRACES)/azure/AzureLLMInferenceTrace_conv.csv; then \
	    $(BIN)/python -m kvpool replay $(TRACES)/azure/AzureLLMInferenceTrace_conv.csv --no-kv; \
	fi

format: $(VENV)/.test
	cargo fmt
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) target python/kvpool/*.so

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade 'pip>=25.1'

$(EXTENSION): $(BIN)/python $(RUST_SOURCES) pyproject.toml
	$(PIP) install --quiet 'maturin>=1.10,<2'
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --release --locked --quiet
	touch $@

$(VENV)/.tools: pyproject.toml $(EXTENSION)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install --quiet torch
	$(PIP) install --quiet 'typer>=0.15' 'rich>=13' 'matplotlib>=3.8' 'numpy>=1.26'
	touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.tools
	$(PIP) install --quiet --group test --group lint
	touch $@
