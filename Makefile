# Two commands on a fresh machine: `make demo` and `make test`. Everything lives in .venv.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test check bench clean
.DEFAULT_GOAL := help

help: ## What can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(VENV)/.demo ## Personalize a model for 20 smartwatch wearers over a real broker; writes runs/demo
	$(BIN)/python examples/demo.py --out runs/demo

test: $(VENV)/.dev ## Run all tests (installs Mosquitto, PostgreSQL, Chromium and Node where they are missing)
	scripts/needs mosquitto postgresql chromium nodejs npm
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

check: $(VENV)/.dev ## Lint, format, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.dev ## The benchmarks behind benchmarks/RESULTS.md (long)
	$(BIN)/talaria bench planner
	$(BIN)/talaria bench adapters
	$(BIN)/talaria bench export
	$(BIN)/talaria bench chaos --faults 200 --seed 1
	$(BIN)/talaria bench chaos --faults 200 --seed 2
	$(BIN)/talaria bench chaos --faults 30 --seed 3 --fresh
	$(BIN)/talaria bench load --devices 1000 --rounds 50
	$(BIN)/talaria bench load --body-mib 100 --cuts 10
	$(BIN)/talaria bench fuzz --seconds 300
	$(BIN)/python -m pytest -q tests/sdk/protocol/test_machines.py --hypothesis-profile=minutes --timeout=3600
	$(BIN)/python benchmarks/aggregate.py
	$(BIN)/python benchmarks/smartwatch.py

clean: ## Remove what was built and run (not .venv)
	rm -rf build dist runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Talaria needs Python 3.11 or later; set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "python venv is missing; on Debian: apt-get install python3-venv" >&2; exit 1; }

$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing Talaria into $(VENV) (two to four minutes the first time: torch is large)"
	$(INSTALL) -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing Talaria with its test tools into $(VENV) (two to four minutes the first time)"
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.demo
