# make demo    train a CNN and leave a picture, a checkpoint and TensorBoard events in demo_output/
# make test    run the tests; `make test-all` adds the slow ones, those that need TensorFlow and other optional libraries,
#              and the comparison of 300 random configurations with PyTorch Lightning
# make lint    ruff, and mypy on the installed package
# make bench   time per step beside a hand-written loop, images per second of a loader, and the time of the import
#
# Each makes its own virtual environment on first use. What can be chosen on the command line:
#   PYTHON=python3.12   the interpreter (default: the first of python3.11, 3.12, 3.13, 3.14, python3 that is new enough)
#   VENV=.venv312       the environment's folder; one folder holds one Python
#   TORCH=no            leave torch out; what needs it is then left out, and said so
#   EXTRAS=tf,grain     further extras of pyproject.toml to install for the tests
#   COVERAGE=90         fail the tests below so much per cent
#   ARGS=...            further options for pytest

SHELL := /bin/sh
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
VENV ?= .venv
TORCH ?= yes
EXTRAS ?=
COVERAGE ?=
ARGS ?=
PIPFLAGS ?=

comma := ,
# Every library that a part of the tests needs.
OPTIONAL := tf,tfds,grain,haiku,equinox,graph,export,onnx,serving,wandb
PY := $(abspath $(VENV))/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# A changed pyproject.toml, Python or choice of extras installs again; nothing else does.
HASH := $(shell { cat pyproject.toml; echo $(PYTHON) $(TORCH) $(EXTRAS); } | cksum | cut -d' ' -f1)
READY_DEMO := $(VENV)/.ready-demo-$(HASH)
READY_TEST := $(VENV)/.ready-test-$(HASH)
# With Python 3.11 the bounds say which releases of torch are known to work; newer Pythons may only have newer wheels.
BOUNDS = $(shell $(PYTHON) -c 'import sys; print("\"torch<2.15\" \"torchvision<0.30\"" if sys.version_info < (3, 12) else "")')

.PHONY: help demo test test-all lint bench clean
help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

# $(call install,extras with torch,extras without torch)
define install
	@if [ "$(TORCH)" = yes ] && $(PIP) install $(PIPFLAGS) -e ".[$(1)]" $(BOUNDS); then :; else \
		echo "LEFT OUT: torch, torchvision and PyTorch Lightning (TORCH=no, or no wheel for this Python)."; \
		echo "LEFT OUT with them: the torchvision examples and the tests that need them; the rest runs on arrays."; \
		$(PIP) install $(PIPFLAGS) -e ".[$(2)]"; fi
endef

$(PY):
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found: install one, or say make PYTHON=/path/to/python"; exit 1; }
	@echo "Making the environment $(VENV) with $$($(PYTHON) --version); the first install takes some minutes."
	@$(PYTHON) -m venv --clear $(VENV) || { echo "venv failed; on Debian and Ubuntu it needs the package python3-venv"; rm -rf $(VENV); exit 1; }

$(READY_DEMO): | $(PY)
	$(call install,examples$(comma)torch,examples)
	@touch $@

$(READY_TEST): | $(PY)
	$(call install,dev$(comma)examples$(comma)torch$(comma)reference$(if $(EXTRAS),$(comma)$(EXTRAS)),dev$(comma)examples$(if $(EXTRAS),$(comma)$(EXTRAS)))
	@touch $@ $(READY_DEMO)

demo: $(READY_DEMO)
	@POSSIBLE_USER_WARNINGS=off $(PY) examples/demo.py --output demo_output

test: $(READY_TEST)
	@$(PY) -m pytest -n 2 --dist loadfile -m "not slow" $(if $(COVERAGE),--cov --cov-report=term:skip-covered --cov-fail-under=$(COVERAGE)) $(ARGS)

test-all:
	@$(MAKE) --no-print-directory EXTRAS=$(OPTIONAL) test-everything

.PHONY: test-everything
test-everything: $(READY_TEST)
	@$(PY) -m pytest -n 2 --dist loadfile --write-status $(ARGS)
	@$(PY) tests/conformance/differential/run.py --seeds 0:300 --jobs 2 --write-status

# A type checker cannot see that adapters/ is installed as jaxlightning.adapters, so it reads an installed copy.
lint: $(READY_TEST)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@rm -rf build/lint build/lib build/bdist.*
	@$(PIP) install --quiet --no-deps --no-build-isolation --target build/lint .
	@cd build/lint && MYPYPATH=. $(PY) -m mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p jaxlightning

bench: $(READY_TEST)
	@$(PIP) install --quiet $(PIPFLAGS) -e ".[bench]" || echo "LEFT OUT: Keras and the pictures, which could not be installed."
	@$(PY) benchmarks/run.py $(ARGS)

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .coverage
