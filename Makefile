# `make demo` and `make test` install what they need into .venv first.
# PYTHON=/path/to/python3.12 picks the interpreter that makes .venv.

PYTHON ?=
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup test lint format demo bench compiled schemas docs soak test-vllm test-sglang clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup: ## Make .venv with everything for development; does nothing when it is up to date
	@PYTHON='$(PYTHON)' tools/setup.sh

test: setup ## Run the tests
	$(BIN)/pytest

test-vllm: ## Make .venv-vllm, and run real vLLM engines with the daemon between them
	@PYTHON='$(PYTHON)' tools/setup_engine.sh vllm
	.venv-vllm/bin/python -m pytest -p no:cacheprovider tests/engines/vllm/test_vllm_connector.py tests/engines/test_kv_events_classes.py
	.venv-vllm/bin/python -m tools.check_vllm
	.venv-vllm/bin/python -m tools.check_vllm_ranks

test-sglang: ## Make .venv-sglang, and run real SGLang engines with the daemon between them
	@PYTHON='$(PYTHON)' tools/setup_engine.sh sglang
	.venv-sglang/bin/python -m pytest -p no:cacheprovider tests/engines/sglang tests/engines/test_kv_events_classes.py

lint: setup ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## Put the code in shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: setup ## Run a daemon, D workers and P ranks on this machine, and compare every byte
	$(BIN)/snapd demo

bench: setup ## Measure against the floors
	$(BIN)/python tools/bench_push.py
	$(BIN)/python tools/bench_kv.py
	$(BIN)/python tools/bench_slab.py

compiled: setup ## Build the package with its hot modules compiled, and run the core's tests with it
	$(BIN)/python tools/compiled.py build/compiled --test

schemas: setup ## Write the JSON Schemas anew
	$(BIN)/python tools/make_schemas.py

soak: setup ## Run the long forms: hundreds of kills over each transport, and millions of lives; half an hour
	SNAPD_SOAK=1 $(BIN)/pytest -s tests/faults
	$(BIN)/python tools/soak.py
	$(BIN)/python tools/simulate.py --seeds 2000
	$(BIN)/python tools/fuzz.py --seconds 60

docs: setup ## Write the reference pages anew and build the site into build/docs, without a network
	$(BIN)/python tools/draw_fsm.py
	$(BIN)/python tools/make_docs.py
	$(BIN)/sphinx-build -q -W --keep-going -d build/doctrees docs build/docs

clean: ## Remove caches and build outputs, but not .venv
	rm -rf build dist demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name .venv -prune -o -type d \( -name __pycache__ -o -name '*.egg-info' \) -print0 | xargs -0 rm -rf
