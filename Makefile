# make demo   sets up everything and trains a GRU on pixel-by-pixel digits
# make test   sets up everything and runs all tests
# make help   lists the rest

PYTHON ?= python3
PIP_FLAGS ?=
RUNS ?= runs
WORKERS ?= 2
GPU_TEST_SECONDS ?= 180

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_FLAGS)

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast lint format types imports docs wheel gpu clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

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
	@$(PIP) -e '.[dev]'
	@touch $(VENV)/.demo $@

demo: $(VENV)/.demo  ## train a GRU on pixel-by-pixel digits; leaves a loss curve and a checkpoint in runs/
	$(BIN)/sparsebp demo --out $(RUNS)/demo

test: $(VENV)/.dev  ## all tests
	$(BIN)/python -m pytest -n $(WORKERS) -q $(TESTS)

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

# No install step: the source tree, this machine's own python3 and its packages.
gpu:  ## GPU tests and the GPU benchmark grid; writes docs/benchmarks/<gpu>-<commit>.json
	@status=0; \
	timeout $(GPU_TEST_SECONDS) $(PYTHON) -m pytest -m gpu -q tests || status=$$?; \
	$(PYTHON) -m sparsebp bench gpu --out docs/benchmarks || status=$$?; \
	exit $$status

clean:  ## remove everything that can be made again
	rm -rf $(VENV) build dist site .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find sparsebp tests -name __pycache__ -type d -prune -exec rm -rf {} +
