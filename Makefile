# make demo    a tiny gpt-oss trains on packed text, unpatched and patched, and is measured against an fp64 oracle
# make test    lint, types and every CPU test
# make nightly the behaviour tests again, on each release of compat_matrix/cells.toml
# make bench   what apply() and check cost, and the attention ops against eager
# make clean
#
# Each target sets up .venv first, once: a second run installs nothing unless pyproject.toml or constraints.txt changed.
# DEMO_ARGS, PYTEST_ARGS and CELLS are handed on to what runs. WORKERS test files run at a time (2).
#
#   PYTHON       interpreter for .venv, 3.11 or newer                                    (python3)
#   VENV         where it goes                                                           (.venv)
#   TORCH_INDEX  package index that torch, and torch alone, is taken from. Without it torch comes from pip's own
#                configuration; on x86-64 Linux that is a CUDA build of several GB on most machines, so name the CPU
#                wheel index given on PyTorch's install page here.
#   PIP_ARGS     more arguments for every pip install, e.g. --find-links
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
PIP_ARGS ?=
WORKERS ?= 2

BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)
# One thread a process: the tests and the demo start two ranks each, and torch would take every core for each of them.
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test lint types tables nightly bench clean
.DELETE_ON_ERROR:

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"PYTHON={sys.executable} is {v[0]}.{v[1]}; the pinned transformers needs 3.11 or newer. Run: make PYTHON=python3.11 ...")'
	@echo "setting up $(VENV) (once, a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX) --no-deps) torch
	$(PIP) --editable '.[test]'
	@touch $@

demo: $(READY)
	$(BIN)/python demo/run.py $(DEMO_ARGS)

# pytest comes last: its closing line is what CI reads.
test: lint types tables
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# The tables of README.md and compat_matrix/MATRIX.md say what the evidence says.
tables: $(READY)
	$(BIN)/python -m fsdp_sink_patches.matrix table --check

nightly: $(READY)
	$(BIN)/python tests/cells.py $(CELLS)

bench: $(READY)
	$(BIN)/python benchmarks/apply_cost.py
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	then $(BIN)/python benchmarks/sink_attention.py; \
	else echo "no CUDA device here: benchmarks/sink_attention.py (the kernels against eager and flex) was not run"; fi

clean:
	rm -rf $(VENV) build dist demo_out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
