# Every target works from a clean clone that has make and Python 3.11 or newer: it first makes .venv where that is missing or
# older than the versions asked for. To use another interpreter:  make PYTHON=/path/to/python setup

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The first interpreter that is new enough and can make an environment (only looked for when one has to be made).
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

# Tests run in WORKERS processes of one thread each: on their small tensors that is faster than one process of many threads.
WORKERS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=
PAPER_ARGS ?=
BENCH_ARGS ?= $(if $(QUICK),--quick)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test lint types slow gpu fuzz coverage bench paper kernels lock clean distclean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(STAMP)  ## make .venv with the locked versions and adjcomp itself (editable)

# torch goes first and alone. Its builds for GPUs pin the Triton they were made with; then that one is taken, not the lock's.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || test -n "$(PYTHON)" || \
		{ echo "Python 3.11 or newer with its venv module is needed: make PYTHON=/path/to/python setup" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): about a minute, more where a build of torch for GPUs is fetched"
	$(BIN)/python -m pip install --quiet --upgrade $$(grep -E '^(pip|setuptools)==' constraints.txt)
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' constraints.txt)
	@if $(BIN)/python -m pip show torch | grep '^Requires:.*triton' > /dev/null; then grep -v '^triton==' constraints.txt; \
		else cat constraints.txt; fi > $(VENV)/constraints.txt
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-build-isolation -c $(VENV)/constraints.txt -e '.[dev,hf,bench]'
	@touch $@

demo: $(STAMP)  ## train on real text with a long context within a budget (DEMO_ARGS=--help)
	$(BIN)/python examples/train_long_context.py $(DEMO_ARGS)

test: $(STAMP)  ## all checks: ruff, mypy, import contracts, pytest (PYTEST_ARGS=…)
	@$(BIN)/python tests/checks.py --workers $(WORKERS) -- $(PYTEST_ARGS)

lint: $(STAMP)  ## ruff and the import contracts alone
	@$(BIN)/python tests/checks.py --only ruff imports

types: $(STAMP)  ## mypy alone
	@$(BIN)/python tests/checks.py --only mypy

slow: $(STAMP)  ## the tests that take long
	$(BIN)/python -m pytest -m "slow and not gpu" $(PYTEST_ARGS)

gpu: $(STAMP)  ## the tests that need an accelerator
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

fuzz: $(STAMP)  ## the property tests with many more examples
	$(BIN)/python -m pytest -m "not gpu" --hypothesis-profile=fuzz --timeout=0 tests/properties $(PYTEST_ARGS)

coverage: $(STAMP)  ## the default tests with a report of the lines that none reaches
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --cov --cov-report=term $(PYTEST_ARGS)

bench: $(STAMP)  ## measure against plain autograd and others (QUICK=1: a short form), into build/bench.json
	$(BIN)/python tests/benchmarks/run.py $(BENCH_ARGS)
	$(BIN)/python tests/benchmarks/floors.py --json build/floors.json

paper: $(STAMP)  ## reproduce the paper's tables and figures, measured and planned, into docs/paper.md (PAPER_ARGS=--help)
	$(BIN)/python tests/benchmarks/paper/run.py $(PAPER_ARGS)

kernels: $(STAMP)  ## compile every kernel and print what became of it
	$(BIN)/python -m adjcomp.runtime.kernels

lock: $(STAMP)  ## write constraints.txt anew from .venv
	@{ echo "# The versions that 'make setup' installs ('make lock' writes this file anew from .venv)."; \
		$(BIN)/python -m pip freeze --all --exclude adjcomp | sed 's/^\(torch==[0-9.]*\)+.*/\1/'; } > $(VENV)/lock.txt
	@mv $(VENV)/lock.txt constraints.txt

clean:  ## remove what builds and tools left behind
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(wildcard adjcomp passes runtime tests examples) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## the same, and .venv
	rm -rf $(VENV)
