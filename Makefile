# Two commands for newcomers: `make demo` and `make test`. Everything they need is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: help demo deploy-demo test test-gpu test-all check compare-old lint types doctest docs notebooks torture mutants random-mistakes bench tables fuzz release-check clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.ready  ## train DP-SCAFFOLD and its rivals and draw the comparison (about a minute)
	$(BIN)/dpscaffold demo

deploy-demo: $(VENV)/.ready-flower  ## train across three sites as processes, and compare with the simulator
	$(BIN)/python tests/deploy_demo.py

test: $(VENV)/.ready-dev  ## run the tests (under ten minutes on two cores)
	$(BIN)/python -m pytest -n 2 -m "not slow"

GPU_TESTS = tests/test_devicedraws.py tests/conformance tests/statistical/test_noise.py \
	tests/statistical/test_sensitivity.py tests/engine/test_cuda.py tests/engine/test_programs.py \
	tests/engine/test_ranks.py tests/engine/test_stacks.py

test-gpu: $(VENV)/.ready-dev  ## conformance, statistics, draws and clipping on a CUDA device
	TEST_DEVICE=cuda $(BIN)/python -m pytest -n 4 -m "not slow" $(GPU_TESTS)

test-all: $(VENV)/.ready-all  ## run the longer checks too: the site, the notebooks, whole tutorials
	$(BIN)/python -m pytest -n 2
	$(MAKE) mutants

check: lint types doctest test  ## everything a reviewer would run

QUICK ?=
compare-old: $(VENV)/.ready-dev  ## what version 0.2.0 stated and what is stated now, side by side (QUICK=1: a sample)
	cd tests && PYTHONPATH=. OMP_NUM_THREADS=1 $(abspath $(BIN))/python -m frozen.compare $(if $(QUICK),--quick)

lint: $(VENV)/.ready-dev  ## ruff: rules and layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

types: $(VENV)/.ready-dev  ## mypy
	$(BIN)/mypy

doctest: $(VENV)/.ready-dev  ## the examples in the docstrings
	$(BIN)/python -m pytest --doctest-modules src/dpscaffold --ignore=src/dpscaffold/engine/programs.py

docs: $(VENV)/.ready-docs  ## the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open site/index.html (searching needs a server: $(BIN)/python -m http.server -d site)"

notebooks: $(VENV)/.ready-docs  ## run the notebooks of the documentation and keep what they show
	$(BIN)/python tests/notebooks.py

torture: $(VENV)/.ready-dev  ## the fault campaign: kills, full disks, damaged files, then a crash grid (at most 40 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tests/torture/campaign.py
	OMP_NUM_THREADS=1 $(BIN)/python tests/torture/campaign.py --grid 2

mutants: $(VENV)/.ready-dev  ## plant mistakes one at a time, and see that their tests fail (at most 15 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants/runner.py

random-mistakes: $(VENV)/.ready-dev  ## plant mistakes at random in each package: the share caught may not be below that of 0.2.0 (an hour)
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants/random_mistakes.py

fuzz: $(VENV)/.ready-dev  ## 100,000 mutated configurations, tables and command lines: no traceback
	PYTHONPATH=tests $(BIN)/python tests/fuzz.py 100000

release-check: $(VENV)/.ready-dev  ## build wheel and sdist, install each afresh, run demo and tests
	sh tests/release-check.sh $(BIN)/python

bench: $(VENV)/.ready-bench  ## timings compared with peers, as ratios
	$(BIN)/python benchmarks/round.py

DATA ?=
tables: $(VENV)/.ready-bench  ## what drafts reach compared with scikit-learn and Opacus (DATA=FOLDER adds real tables)
	$(BIN)/python benchmarks/tables.py $(if $(DATA),--data-dir $(DATA))

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("dpscaffold needs Python 3.11 to 3.13, and this is " + sys.version.split()[0] + "; set PYTHON=python3.x") if not (3, 11) <= sys.version_info[:2] <= (3, 13) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (a minute or two the first time)"
	$(PIP) -e .
	@touch $@

$(VENV)/.ready-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (a minute or two the first time)"
	$(PIP) -e '.[dev]'
	@touch $(VENV)/.ready $@

$(VENV)/.ready-flower: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (a minute or two the first time)"
	$(PIP) -e '.[flower]'
	@touch $(VENV)/.ready $@

$(VENV)/.ready-bench: $(VENV)/.ready-dev
	$(PIP) -e '.[dev,bench]'
	@touch $@

$(VENV)/.ready-all: $(VENV)/.ready-docs
	$(PIP) -e '.[dev,docs,notebooks,onnx]'
	@touch $@

$(VENV)/.ready-docs: $(VENV)/.ready-dev
	$(PIP) -e '.[dev,docs,notebooks]'
	@touch $@

clean:  ## remove the environment and caches
	rm -rf $(VENV) .venv-old build site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
