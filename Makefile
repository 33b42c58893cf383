# make demo   sets up everything and trains a GRU on pixel-by-pixel digits
# make test   sets up everything and runs all tests
# make help   lists the rest

PYTHON ?= python3
PIP_FLAGS ?=
RUNS ?= runs
WORKERS ?= 2
GPU_SECONDS ?= 340
GPU_OPTIONS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_FLAGS)

# Compiled modules are kept, whatever the shell says: the tests start some hundred processes.
unexport PYTHONDONTWRITEBYTECODE

# With several workers pytest says of a file that is not there no more than "no tests ran".
MISSING := $(strip $(foreach test,$(filter tests%,$(TESTS)),$(if $(wildcard $(firstword $(subst ::, ,$(test)))),,$(test))))
ifneq ($(MISSING),)
$(error There is no $(MISSING). Expected files or folders under tests/, as in make test TESTS="tests/scan tests/nn/test_gru.py")
endif

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast lint format types imports docs release gpu-prepare gpu-first gpu-check gpu-peers gpu-numbers gpu-grid gpu-graphs clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 13

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(f"sparsebp needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}; set PYTHON=…" if sys.version_info < (3, 11) else 0)'
	@echo "Creating $(VENV) …"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.created pyproject.toml
	@echo "Installing sparsebp[cli,plot,data] …"
	@$(PIP) -e '.[cli,plot,data]'
	@touch $@

$(VENV)/.dev: $(VENV)/.created pyproject.toml
	@echo "Installing sparsebp[dev] (PyTorch among it) …"
	@$(PIP) --no-compile -e '.[dev]'  # most of its modules are never imported
	@touch $(VENV)/.demo $@

demo: $(VENV)/.demo  ## train a GRU on pixel-by-pixel digits; leaves a loss curve and a checkpoint in runs/
	$(BIN)/sparsebp demo --out $(RUNS)/demo --overwrite

# Two workers would compile most kernels twice.
$(VENV)/.warm: $(VENV)/.dev $(shell find sparsebp/kernels sparsebp/scan -name '*.py')
	@$(BIN)/sparsebp warm-up
	@touch $@

test: $(VENV)/.warm  ## all tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q $(TESTS)

lint: $(VENV)/.dev  ## ruff, check and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev  ## let ruff rewrite the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.dev  ## mypy
	$(BIN)/mypy

imports: $(VENV)/.dev  ## the import contract
	$(BIN)/lint-imports

docs: $(VENV)/.dev  ## the documentation site, strict, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

release: $(VENV)/.dev  ## sdist, wheels (one with the machine code of all kernels), each tried in an empty environment; ten minutes
	@$(PIP) -e '.[release]'
	$(BIN)/python tools/release.py $(RELEASE_OPTIONS)

# On a GPU: no install step, the source tree and this machine's own python3 with its packages. Results are in runs/gpu;
# $OUT, if set, gets one archive of them.
GPU_RUN := $(PYTHON) tests/gpu_runs
GPU_RUN_ENDS := --seconds $(GPU_SECONDS) $(GPU_OPTIONS)

gpu-prepare: $(VENV)/.dev  ## make in .cache/gpu what travels to a GPU machine: machine code, results to compare with
	$(BIN)/python tests/gpu_runs prepare

gpu-first:  ## the first run on a GPU: CALL=1 checks everything, CALL=2 measures; each ends within $(GPU_SECONDS) s
	@$(GPU_RUN) first-$(or $(CALL),1) $(GPU_RUN_ENDS)

gpu-check:  ## its parts: launch and test everything, sanitizers
	@$(GPU_RUN) check $(GPU_RUN_ENDS)

gpu-peers:  ## layers, networks, recurrences and optimizers beside PyTorch's
	@$(GPU_RUN) peers $(GPU_RUN_ENDS)

gpu-numbers:  ## single kernels, chunks, launches, beside cuDNN
	@$(GPU_RUN) numbers $(GPU_RUN_ENDS)

gpu-grid:  ## the paper's grid beside cuDNN
	@$(GPU_RUN) grid $(GPU_RUN_ENDS)

gpu-graphs:  ## captured steps, tested and timed
	@$(GPU_RUN) graphs $(GPU_RUN_ENDS)

clean:  ## remove everything that can be made again
	rm -rf $(VENV) build dist site .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find sparsebp tests -name __pycache__ -type d -prune -exec rm -rf {} +
