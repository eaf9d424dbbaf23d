# What people and CI run. Each target sets .venv up where it is missing or out of date.

PYTHON ?= python3
BIN := .venv/bin
CODE := src tests benchmarks scripts
BENCHMARKS := $(filter-out ablation busy campaign catalogue harness in_turn delayed_cable emulate first_token measure openvino_alone paper pictures results sampling_cliffs shared_gpu side_by_side stage_recorders stock_trace turns,$(patsubst benchmarks/%.py,%,$(wildcard benchmarks/[a-z]*.py)) emulation)
# Those that want a model or a GPU, or have no quick form, are run by name.
QUICK := $(filter-out one_gpu peers prefill scheduler_rows smollm2_logits speculation,$(BENCHMARKS))

# Three processes, as tests often wait; those that start engines first (tests/conftest.py).
PYTEST := $(BIN)/pytest -q -n 3 --dist loadscope
TESTS := not slow$(if $(CI),, and not ci)

# No proxy reaches the servers of demo and tests.
export no_proxy := $(if $(filter *,$(no_proxy) $(NO_PROXY)),*,$(or $(no_proxy),$(NO_PROXY)),127.0.0.1,localhost)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-faults soak week goldens mutants waits hooks lint format bench bench-paper campaign canary release clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "benchmarks: $(sort $(subst _,-,$(BENCHMARKS)))"

setup: ## make .venv with the CPU engine (quick when it exists)
	@$(PYTHON) scripts/setup

demo: setup ## serve a model in two stages, stream answers, measure against stock vLLM
	@$(BIN)/python scripts/demo.py

test: setup ## the tests that take seconds; with CI=true also those of more than five
	@$(PYTEST) -m "$(TESTS)"

test-all: setup ## all tests
	@$(PYTEST) -m ""

release: lint test-all ## is this tree ready to be released? Measures all figures anew, and uses what it builds
	@$(BIN)/python scripts/release.py

test-faults: setup ## 3,000 faults put into engines, hosts and servers; writes tests/faults/README.md
	@$(BIN)/python -m tests.faults --keep

soak: setup ## half an hour under clients that come and go: does anything grow? Writes tests/faults/README.md
	@$(BIN)/python -m tests.faults.soak --keep

week: setup ## 100,000 requests and 16,000 faults in one engine: an hour. Writes tests/faults/README.md
	@$(BIN)/python -m tests.faults.week --keep

goldens: setup ## record anew what stock vLLM gives for the tests' requests
	@rm -f tests/engine/goldens.json.gz
	@SIPIPE_RECORD_GOLDENS=1 $(BIN)/pytest -q -m engine tests/engine
	@SIPIPE_RECORD_GOLDENS=1 $(BIN)/pytest -q -m slow tests/test_newer_vllm.py

mutants: setup ## which small mistakes do the tests notice? Takes two hours
	@$(BIN)/python scripts/mutate.py

waits: setup ## write the table of tests/waits.md anew
	@$(BIN)/python scripts/waits.py

hooks: setup ## write docs/hooks.md anew
	@$(BIN)/python scripts/hooks.py

lint: setup ## formatting, lint, types, layers
	@$(BIN)/ruff format --check --quiet $(CODE)
	@$(BIN)/ruff check --quiet $(CODE)
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: setup ## format, and mend what lint can mend
	@$(BIN)/ruff format $(CODE)
	@$(BIN)/ruff check --fix $(CODE)

bench: setup ## the benchmarks that need no model, quick form
	@for name in $(sort $(QUICK)); do $(BIN)/python -m benchmarks.$$name --quick || exit 1; done

campaign: setup ## all figures of README and docs, in one run of about five hours; goes on where it ended
	@$(BIN)/python -m benchmarks.campaign --compare

canary: setup ## seven ratios beside the kept ones, within half an hour
	@$(BIN)/python -m benchmarks.campaign --canary

bench-paper: setup ## the paper's figures as far as this machine can, quick form
	@$(BIN)/python -m benchmarks.paper all --quick

bench-%: setup ## one benchmark, such as bench-sampling
	@$(BIN)/python -m benchmarks.$(subst -,_,$*)

clean: ## remove build/, caches and .venv
	rm -rf build dist .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
