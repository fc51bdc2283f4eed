# On a bare machine, in a fresh clone: `make demo` or `make test`. Both need python3 (3.11 or newer) with venv.
PYTHON ?= python3
VENV ?= .venv
# the environment of the trainers' tests, which need packages of their own
TRAINERS_VENV ?= .venv-trainers
# the environment of the tests with a real MPI: that of all tests, and mpi4py and Open MPI beside it
MPI_VENV ?= .venv-mpi
# the oldest and the newest torch that is supported, which `make test-versions` tries
OLDEST_TORCH ?= 2.11.0
NEWEST_TORCH ?= 2.15.0
# more words for pip, such as `--extra-index-url URL` of a mirror that has the CPU build of torch
PIP_ARGS ?=
# tests at a time, on two cores: many of them start processes of their own and wait for them
NUM_WORKERS ?= 4
PYTEST_ARGS ?=
PYTEST = $(BIN)/pytest -n $(NUM_WORKERS) --dist loadfile --no-loadscope-reorder
DEMO_STEPS_AGAIN ?= 5

BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

# two ranks on two cores: one thread each, and the same order of summation everywhere
export OMP_NUM_THREADS = 1
# a test starts many processes: none but the first compiles farspan, also where the machine asks for no bytecode
export PYTHONDONTWRITEBYTECODE =

.PHONY: help test test-all pytest lint ruff doctests pyright test-trainers test-mpi test-versions programs-packages demo clean
.DEFAULT_GOAL := help

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-17s %s\n", $$1, $$2 }' Makefile

test: $(INSTALLED)  ## the quick tests, and ruff: what every submission passes, in minutes
	@$(MAKE) --no-print-directory --jobs=2 ruff pytest

test-all: $(INSTALLED)  ## every test, also those of tests/left_to_test_all.txt
	$(PYTEST) --tier=all $(PYTEST_ARGS)

pytest: $(INSTALLED)  ## the quick tests alone
	$(PYTEST) --tier=quick $(PYTEST_ARGS)

lint: $(INSTALLED)  ## ruff, pyright, and the examples in docstrings
	@$(MAKE) --no-print-directory --jobs=2 ruff doctests pyright

ruff: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

doctests: $(INSTALLED)
	$(BIN)/pytest --doctest-modules -q src

# one thread: with two, pyright takes half as much processor again, because each of them reads torch
pyright: $(INSTALLED)
	$(BIN)/pyright --pythonpath $(BIN)/python

test-trainers: $(TRAINERS_VENV)/installed  ## the real trainers (transformers, accelerate, Lightning, peft), in an environment of their own
	$(TRAINERS_VENV)/bin/pytest tests/trainers $(PYTEST_ARGS)

test-mpi: $(MPI_VENV)/installed  ## training in programs of MPI, by a real mpirun
	$(MPI_VENV)/bin/python -m pytest tests/mpi $(PYTEST_ARGS)

test-versions: .venv-torch-$(OLDEST_TORCH)/installed .venv-torch-$(NEWEST_TORCH)/installed  ## all tiers of tests with the oldest and the newest torch (the CUDA builds of PyPI take 6 GB each)
	$(MAKE) --no-print-directory VENV=.venv-torch-$(OLDEST_TORCH) test-all
	$(MAKE) --no-print-directory VENV=.venv-torch-$(NEWEST_TORCH) test-all

programs-packages: $(INSTALLED)  ## optimizers from pip, for benchmarks/programs, beside the environment (no other torch comes with them)
	$(BIN)/pip install $(PIP_ARGS) --no-deps --upgrade --target .packages-programs -r constraints-programs.txt

docs/report.svg: $(INSTALLED)  ## the picture of README.md, of a step of the demo
	$(BIN)/farspan run -n 2 --report $@ examples/train_gpt.py --stop-after 11 --evaluate-every 0 --sample-bytes 0

demo: $(INSTALLED)  ## train a GPT over two processes, and compare with one
	@mkdir -p build
	$(BIN)/farspan run -n 2 --report build/report.html examples/train_gpt.py --losses build/farspan.json
	@echo "The first $(DEMO_STEPS_AGAIN) steps again, in one process, without farspan:"
	$(BIN)/python examples/train_gpt_plain.py --stop-after $(DEMO_STEPS_AGAIN) --print-every 1 --evaluate-every 0 \
		--sample-bytes 0 --losses build/plain.json
	$(BIN)/python examples/compare_losses.py build/farspan.json build/plain.json
	@echo "The report, with a timeline of one step: file://$(CURDIR)/build/report.html"

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_ARGS) -c constraints.txt -e '.[test]'
	@touch $@

$(TRAINERS_VENV)/installed: pyproject.toml constraints.txt constraints-trainers.txt
	$(PYTHON) -m venv $(TRAINERS_VENV)
	$(TRAINERS_VENV)/bin/pip install $(PIP_ARGS) -c constraints.txt torch
	$(TRAINERS_VENV)/bin/pip install $(PIP_ARGS) -c constraints.txt -c constraints-trainers.txt -e '.[trainers]'
	@touch $@

$(MPI_VENV)/installed: $(INSTALLED) constraints-mpi.txt
	$(PYTHON) -m venv $(MPI_VENV)
	$(BIN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" > \
		"$$($(MPI_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/tests.pth"
	$(MPI_VENV)/bin/pip install $(PIP_ARGS) -r constraints-mpi.txt
	@touch $@

.venv-torch-%/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	sed 's/^torch==.*/torch==$*/' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/pip install $(PIP_ARGS) -c $(@D)/constraints.txt -e '.[test]'
	@touch $@

clean:  ## remove all that make has made, the environment too
	rm -rf $(VENV) $(TRAINERS_VENV) $(MPI_VENV) .venv-torch-* .packages-programs build .pytest_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
