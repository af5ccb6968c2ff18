# One word each.  Everything runs in $(VENV), which is made on first use.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
# The large installations show pip's own lines and bars: minutes of silence look like a fault.
PIP_SHOWN := $(PY) -m pip install --disable-pip-version-check -c constraints.txt
# -qq: errors only; a machine with several package indexes warns about each one that lacks a package.
PIP_INSTALL := $(PIP_SHOWN) -qq
# Each plugin is a distribution of its own; editable here, so that `edgellm plugins` lists them.
PLUGIN_PROJECTS := $(sort $(wildcard plugins/*/pyproject.toml))
EDITABLE_PLUGINS := $(patsubst %/pyproject.toml,-e ./%,$(PLUGIN_PROJECTS))
SOURCES := setup.py pyproject.toml constraints.txt $(PLUGIN_PROJECTS) $(shell find edgellm -name '*.pyx' -o -name '*.pxd' -o -name '*.h' -o -name '*.c' ! -name '_ops.c')
# Tools call each other by name (cython-lint runs pycodestyle).
export PATH := $(abspath $(VENV))/bin:$(PATH)
# Tiny models run faster with one thread; the default model's tests and the benches set their own.
TEST_ENV := OMP_NUM_THREADS=1
# Test processes: a core each, but no more than four, since each holds torch.
JOBS := $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 4 ] && echo 4 || echo $$n)
# Line and branch coverage of the cache and of the policies: the tests that are about them, without the slow ones.
COVERED := edgellm.cache,edgellm_eagle,edgellm_hybrid,edgellm_shared_kv,edgellm_template
COVERAGE_TESTS := $(addprefix tests/unit/test_,cache_deployment.py cache_invariants.py checkpoint_plan.py common_state.py draft_memory.py \
	growth.py manager_view.py policy_faults_mended.py publication_helpers.py rank_session.py request_adapter.py) \
	$(wildcard tests/unit/test_coordinator*.py) tests/policies/test_isolation.py tests/e2e/test_device_drafts.py plugins

.PHONY: help demo test dev build debug ends matrix lint unit coverage mutation kernels parity bench benchsmoke wheelcheck clean

help:
	@echo "make demo        install, fetch the default model, chat over a document cold and warm"
	@echo "make test        lint, all tests, debug build, other Pythons, bench smoke, wheel"
	@echo "make dev         environment with the development tools, extensions built in place"
	@echo "make lint        ruff, mypy, cython-lint"
	@echo "make unit        the test suite alone"
	@echo "make coverage    line and branch coverage of the cache and the policies, with its floor"
	@echo "make mutation    mutation testing of the same (an hour; not part of make test)"
	@echo "make debug       core and session tests on a build with checks and assertions"
	@echo "make matrix      core tests on every Python 3.10 to 3.13 that is installed; make ends: on the oldest and newest"
	@echo "make parity      many prompts against transformers' reference tokens"
	@echo "make kernels     compile check of every kernel source and CUDA variant"
	@echo "make bench       benchmarks, each against a peer in the same run"
	@echo "make wheelcheck  build the wheels, the plugins' too, and test them in a clean environment"

$(PY):
	$(PYTHON) -m venv $(VENV)

# The run-time environment: what a user gets, from this source tree.
$(VENV)/.run: $(SOURCES) | $(PY)
	@echo "installing edgellm and its plugins into $(VENV): the first time pip downloads PyTorch and transformers and compiles"
	@echo "edgellm's extensions, which takes 3 minutes on a fast machine and 15 or more on a busy one"
	$(PIP_SHOWN) -e . $(EDITABLE_PLUGINS)
	@touch $@

$(VENV)/.dev: $(SOURCES) | $(PY)
	@echo "installing edgellm, its plugins and the development tools into $(VENV): 4 minutes the first time, 15 or more on a"
	@echo "busy machine"
	$(PIP_SHOWN) -e ".[dev]" $(EDITABLE_PLUGINS)
	@touch $@ $(VENV)/.run

demo: $(VENV)/.run
	$(VENV)/bin/edgellm demo

dev: $(VENV)/.dev

build: $(VENV)/.dev
	$(PY) setup.py --quiet build_ext --inplace

test: $(VENV)/.dev
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory kernels
	$(MAKE) --no-print-directory unit
	$(MAKE) --no-print-directory coverage
	$(MAKE) --no-print-directory benchsmoke
	$(MAKE) --no-print-directory debug
	$(MAKE) --no-print-directory ends
	$(MAKE) --no-print-directory wheelcheck
	@echo "make test: every step passed"

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check --quiet .
	$(PY) -m mypy
	$(VENV)/bin/cython-lint edgellm

unit: build
	$(TEST_ENV) $(PY) -m pytest -q -m "not slow" -n $(JOBS) --dist loadfile

coverage: build
	@rm -f .coverage
	$(TEST_ENV) $(PY) -m coverage run --branch --source=$(COVERED) -m pytest -q -m "not slow" \
		-k "not Conformance and not soak and not memory_that_runs_out_anywhere" $(COVERAGE_TESTS)
	$(PY) tools/coverage_floor.py

mutation: build
	$(PIP_INSTALL) "mutmut>=3.8"
	$(PY) tools/mutation.py

debug: $(VENV)/.dev
	$(PY) tools/core_check.py --debug

matrix: $(VENV)/.dev
	$(PY) tools/core_check.py --matrix

ends: $(VENV)/.dev
	$(PY) tools/core_check.py --ends

kernels: $(VENV)/.dev
	$(PY) tools/kernel_check.py

parity: build
	$(PY) -m pytest -q -m "slow or not slow" tests/parity

bench: build
	$(PY) -m pytest -q -o python_files='bench_*.py' bench

benchsmoke: build
	$(PY) -m pytest -q -o python_files='bench_*.py' --benchmark-disable bench

wheelcheck: $(VENV)/.dev
	$(PY) tests/wheel/wheel_check.py

clean:
	rm -rf build dist *.egg-info plugins/*/build plugins/*/src/*.egg-info .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find edgellm -name '*.so' -delete -o -name '*.cpp' -delete -o -name '_ops.c' -delete
