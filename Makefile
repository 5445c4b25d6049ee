# make train: PPO on the embedded demo.   make test: the test suite.
# Both make .venv on first use and need no network after that.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# One thread for each process: two teams of threads on the same cores wait for each other.
ONE_THREAD := OMP_NUM_THREADS=1

.PHONY: train test interpret compile traffic gpu slow lint types check wheel

train: $(INSTALLED)
	$(BIN)/python -m ppo.train $(ARGS)

test: $(INSTALLED)
	$(ONE_THREAD) $(BIN)/python -m pytest -n auto -m "not slow and not gpu" $(ARGS)

# Every Triton kernel in the interpreter, on the CPU.
interpret: $(INSTALLED)
	$(ONE_THREAD) TRITON_INTERPRET=1 $(BIN)/python -m pytest -n auto tests/kernels -m "not slow and not gpu"

# Every Triton kernel, compiled for four GPUs on a machine that has none (part of `make test`).
compile: $(INSTALLED)
	$(ONE_THREAD) $(BIN)/python -m pytest -n auto tests/kernels/test_compile.py tests/kernels/test_launches.py

# Bytes and launches of every operator, counted in the interpreter.
traffic: $(INSTALLED)
	$(ONE_THREAD) $(BIN)/python benchmarks/traffic.py $(ARGS)

# What needs a GPU: tests, then a quick benchmark with JSON in benchmarks/results.
gpu: $(INSTALLED)
	PYTHON=$(BIN)/python benchmarks/gpu_check.sh

# Learning runs and the full build of the demo: minutes.
slow: $(INSTALLED)
	$(ONE_THREAD) $(BIN)/python -m pytest -n auto -m "slow and not gpu"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

check: lint types test interpret slow

wheel: $(INSTALLED)
	$(BIN)/python -m build

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@
