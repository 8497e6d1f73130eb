# Every target sets up what it needs: a virtual environment in .venv, made once, from the locked versions.
# `make demo` and `make test` are all a newcomer needs; `make help` lists the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
BASE := $(VENV)/.stamp-base
TORCH := $(VENV)/.stamp-torch
NVRTC := $(VENV)/.stamp-nvrtc
WORKERS ?= 2
# The static checks run while torch is installed.
MAKEFLAGS += --jobs=2

.PHONY: help demo test alone lint bench bench-gpu fuzz lock clean

help:
	@echo "make demo   superoptimize an attention on this CPU, then synthesise a small model's decode and generate text"
	@echo "make test   lint, types, layers and the whole test suite"
	@echo "make lint   only the static checks"
	@echo "make bench  every named program against numpy, torch eager, torch.compile and SDPA"
	@echo "make bench-gpu  the same on a GPU, beside every SDPA back end and kernel libraries, too"
	@echo "make fuzz   200 random small graphs with a new seed"
	@echo "make lock   write the lock files anew from the newest versions that pyproject.toml allows"
	@echo "make clean  remove the environment and all caches of this checkout"

$(BASE): requirements.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "obelisk needs Python 3.11 or newer; name one with: make PYTHON=python3.11 ..."; exit 2; }
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing the locked requirements"
	$(PIP) install -r requirements.lock
	$(PIP) install --no-build-isolation --no-deps -e .
	@touch $@

$(TORCH): $(BASE) requirements-torch.lock
	@echo "installing torch, to compare with (the tests that need it are skipped where it cannot be had)"
	$(PIP) install -r requirements-torch.lock || echo "torch could not be installed; going on without it"
	@touch $@

$(NVRTC): $(TORCH) requirements-cuda.lock
	@echo "installing NVRTC, to compile CUDA kernels (where it cannot be had, tests use nvcc, or are skipped)"
	$(PIP) install -r requirements-cuda.lock || echo "NVRTC could not be installed; going on without it"
	@touch $@

DEMO := out/demo

demo: $(BASE) $(DEMO)/plan
	@$(BIN)/obelisk optimize gqa --device cpu --budget 60s
	@echo "the model's text, from one persistent kernel a step:"
	@$(BIN)/obelisk generate $(DEMO)/plan --prompt "The search" --max-tokens 48 --greedy

$(DEMO)/model/config.json: $(BASE)
	@echo "training a tiny model on this repository's documentation, to have one to synthesise for"
	@mkdir -p $(DEMO)/model
	@$(BIN)/python examples/tiny_model.py $(DEMO)/model

$(DEMO)/plan: $(DEMO)/model/config.json
	@$(BIN)/obelisk synth $(DEMO)/model --device cpu --context 256 -o $(DEMO)/plan

test: alone lint
	$(BIN)/python -m pytest -m "not alone" -n $(WORKERS) --dist worksteal

# By their files: collecting all the others takes longer than these tests.
alone: $(TORCH) $(NVRTC)
	$(BIN)/python -m pytest -m alone $$(grep -rl --include="test_*.py" "mark\.alone" tests)

lint: $(BASE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(TORCH)
	$(BIN)/obelisk bench --json bench/results/cpu.json
	$(BIN)/python bench/readme_table.py

bench-gpu: $(TORCH)
	rm -f bench/results/cuda_bench*.json
	$(BIN)/python bench/device_prepare.py
	$(BIN)/python bench/device_prepare.py --rivals
	$(BIN)/python bench/device_prepare.py --tuned
	$(BIN)/obelisk bench --device cuda --json bench/results/cuda_bench.json --chart bench/results/cuda_bench.svg
	$(BIN)/python bench/readme_table.py bench/results/cuda_bench.json

fuzz: $(BASE)
	$(BIN)/python -m tests.fuzz --seed $$(date +%s) --count 200

lock:
	$(PYTHON) -m venv --clear .lock-venv
	.lock-venv/bin/pip install --quiet --upgrade setuptools ".[dev]"
	( echo "# Exact versions of everything but torch; written from a fresh environment by \`make lock\`."; \
	  .lock-venv/bin/pip freeze --all | grep -vE '^(#|-e|obelisk|torch==|pip==)' ) > requirements.lock
	rm -rf .lock-venv

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
