# Two commands: `make smoke` measures the method on a real small model, `make test` checks the code.
# Both set up everything they need in .venv first; all that a fresh machine must have is Python 3.11 and make.
#
# Variables:
#   PYTHON      the interpreter of the environment (python3.11)
#   TORCH       the pinned version of torch
#   TORCH_ARGS  further arguments of the command that installs torch, for example to take the CPU
#               build from PyTorch's own wheel index: TORCH_ARGS="--index-url ..."
#   PIP_ARGS    further arguments of every pip command
#   CORES       cores that an experiment may use (all)
#   RESULTS     folder of the results (results)
#   IMAGE_DIR   folder of the container image, with a slash at its end (here)

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(firstword $(foreach p,python3.11 python3 python,$(shell $(p) -c 'import sys; sys.version_info[:2] == (3, 11) and print("$(p)")' 2>/dev/null)))
TORCH ?= 2.13.0
TRITON ?= 3.9.0
UV ?= 0.9.30
TORCH_ARGS ?=
PIP_ARGS ?=
CORES ?= all
RESULTS ?= results
IMAGE_DIR ?=
VENV ?= .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS)
STAMP := $(VENV)/.ready

.PHONY: help
help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.PHONY: env
env: $(STAMP) ## Set up the environment in .venv

# torch comes first and by version only, so that a machine with a GPU may take another build of it than
# one without; the rest is pinned by hash; triton is added only where torch did not bring its own.
$(STAMP): requirements/lock.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 was not found: install it, or name it with PYTHON=..." >&2; exit 1; }
	@echo "setting up $(VENV) (once; takes some minutes)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH_ARGS) torch==$(TORCH)
	$(PIP) --require-hashes --no-deps -r requirements/lock.txt
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) --no-deps triton==$(TRITON)
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $(STAMP)

.PHONY: smoke
smoke: $(STAMP) ## Run the smoke experiment: records, tables, figures and a report in results/smoke
	$(BIN)/kitty run smoke --cores $(CORES) --results $(RESULTS)

.PHONY: tiny ablation
tiny ablation: $(STAMP) ## Run another experiment of configs/experiments
	$(BIN)/kitty run $@ --cores $(CORES) --results $(RESULTS)

.PHONY: test
test: $(STAMP) ## Run the tests (about 20 minutes on 2 cores)
	$(BIN)/python -m pytest -m "not slow and not gpu and not container and not slurm" $(PYTEST_ARGS)

.PHONY: test-slow
test-slow: $(STAMP) ## Run the tests that take minutes each
	$(BIN)/python -m pytest -m "slow and not gpu and not container and not slurm" $(PYTEST_ARGS)

.PHONY: test-gpu
test-gpu: $(STAMP) ## Run the tests that need a GPU
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

.PHONY: image-cpu image-cuda
image-cpu image-cuda: image-%: ## Build kitty-cpu.sif or kitty-cuda.sif, the container image (needs Apptainer alone)
	containers/build.sh $* $(IMAGE_DIR)kitty-$*.sif

.PHONY: image-test
image-test: ## Run the image's own tests
	apptainer test $(IMAGE_DIR)kitty-cpu.sif

.PHONY: test-container
test-container: $(STAMP) ## Build the cpu image and run the tests inside it and around it
	$(BIN)/python -m pytest -m container $(PYTEST_ARGS)

.PHONY: test-slurm
test-slurm: $(STAMP) ## Run the tests on a one-node SLURM; jobs run in the image that KITTY_IMAGE names, if any
	$(BIN)/python -m pytest -m slurm $(PYTEST_ARGS)

.PHONY: lint
lint: $(STAMP) ## Check style, types and the workflow
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile workflows
	$(BIN)/snakemake --lint

.PHONY: format
format: $(STAMP) ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/snakefmt Snakefile workflows

.PHONY: lock
lock: ## Pin the dependencies anew, in requirements (LOCK_ARGS=--upgrade for newer versions)
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) uv==$(UV)
	build/lock/bin/python requirements/lock.py --torch $(TORCH) --triton $(TRITON) $(LOCK_ARGS)

.PHONY: wheel
wheel: $(STAMP) ## Build the wheel in dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

.PHONY: clean
clean: ## Remove the environment and the caches of the tools; results stay
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
