# Everything a fresh machine needs, from Python alone. `make demo` and `make test` set up their own virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST ?= $(BIN)/python -m pytest -n auto --dist loadfile --durations=10
IN_ORDER := --no-loadscope-reorder # long files first, tests/conftest.py
STAMP := $(VENV)/.installed-
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
unexport PYTHONDONTWRITEBYTECODE # hundreds of processes of the tests would compile every file again

.PHONY: help demo test test-shuffled test-slow test-exhaustive test-processors test-without-compat bench gpu gpu-carry docs docs-serve check collect format format-check lint types install install-dev clean

help: ## what there is to make
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(STAMP)run: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(STAMP)dev: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

$(STAMP)docs: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

install: $(STAMP)run ## the package in .venv
install-dev: $(STAMP)dev ## the package and what its tests need

demo: install ## a small model learns under SFT, PPO and GRPO on this CPU; minutes, no download
	env -u OMP_NUM_THREADS $(BIN)/weft demo

test: install-dev ## the default tests
	$(PYTEST) $(IN_ORDER) -m "not slow"

SEED ?= $(shell date +%s)
test-shuffled: install-dev ## the default tests in a random order of files, and of tests in each; SEED=N repeats one
	$(PYTEST) -m "not slow" --random-order-bucket=module --random-order-seed=$(SEED)

test-slow: install-dev ## the tests that take minutes: real runs, kills, benchmarks on tiny sizes
	$(PYTEST) $(IN_ORDER) -m "slow and not exhaustive"

test-exhaustive: install-dev ## the combinations that CI has no time for, such as every family in every layout; before a release
	$(PYTEST) $(IN_ORDER) -m exhaustive

PROCESSORS ?=
test-processors: install-dev ## the numerical tests as other processors, thread counts and versions of torch compute; PROCESSORS="--only NAME"
	$(BIN)/python tools/processors.py -n auto --dist loadfile $(PROCESSORS)

TESTS ?= tests
test-without-compat: install-dev ## the default tests in a copy without weft.compat; TESTS=tests/cli runs some
	$(BIN)/python tools/without_compat.py $(TESTS)

bench: install-dev ## every benchmark, against TRL and transformers; an hour; needs a clean tree and WEFT_BENCH_TRL_PPO
	for name in sft rw dpo grpo ppo generate jax_engine limit realloc runtime startup serving layouts scale suite plan placement; do $(BIN)/python -m benchmarks.$$name || exit; done

GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu: ## on a CUDA GPU: tests, then benchmarks; ends at wrong numbers; half an hour; writes gpu.md (to $$OUT, else benchmarks/results)
	env -u OMP_NUM_THREADS $(GPU_PYTHON) benchmarks/gpu.py --first

gpu-carry: ## fetch what a bare GPU machine lacks into build/gpu-carry and print the two commands to run there
	@$(GPU_PYTHON) benchmarks/gpu_carry.py

MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
docs: $(STAMP)docs ## the documentation site, in build/site; a broken link is an error
	$(MKDOCS) build --strict
	@echo "build/site/index.html is there; for the search: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site"

docs-serve: $(STAMP)docs ## the site on this machine while you write; pages renew by themselves
	$(MKDOCS) serve --dev-addr 127.0.0.1:8000

format: install-dev ## rewrite the code in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

format-check: install-dev
	$(BIN)/ruff format --check .

lint: install-dev
	$(BIN)/ruff check .

types: install-dev
	$(BIN)/mypy

collect: install-dev # imports all tests, and so compiles them and what they need, which the processes of `make test` would all do at once
	@mkdir -p build
	$(BIN)/python -m pytest --collect-only -qq > build/collected.txt || { cat build/collected.txt; exit 1; }

check: format-check lint types test ## what CI runs before the slow tests

clean: ## remove the environment and caches; runs stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
