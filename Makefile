PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed

# The package as mypy and mkdocstrings can follow it: see [tool.mypy] in pyproject.toml.
TYPED := $(VENV)/types/kindred

SOURCES := strategies data server_app client_app tests benchmarks examples docs/hooks.py

# Many processes import the package: let the first one keep what it has compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install run lint types tree docs test test-gpu test-faults test-deployment benchmarks clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[test,lint,docs,export,mlflow,tensorboard]'
# Otherwise the first run compiles the package, and makes matplotlib's list of fonts.
	$(VENV)/bin/python -m compileall -q strategies data server_app client_app
	$(VENV)/bin/python -c 'import matplotlib.font_manager'
	touch $@

run: $(INSTALLED)
	$(VENV)/bin/kindred run --against local,fedavg

lint: $(INSTALLED)
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/hadolint examples/services/Dockerfile
	$(MAKE) types

types: tree
	$(VENV)/bin/mypy

# The documentation site, in site/. Any warning is an error.
docs: tree
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

tree: $(INSTALLED)
	rm -rf $(TYPED)
	mkdir -p $(TYPED)
	ln -s $(addprefix $(CURDIR)/,$(wildcard strategies/*) data server_app client_app) $(TYPED)

test: $(INSTALLED)
	$(VENV)/bin/python -m pytest --durations=10 --numprocesses 3 --dist loadfile --no-loadscope-reorder

# On a machine with a GPU; the other tests do not use it.
test-gpu: $(INSTALLED)
	$(VENV)/bin/python -m pytest --durations=10 -m gpu

test-faults: $(INSTALLED)
	$(VENV)/bin/python -m pytest --durations=10 -m faults

test-deployment: $(INSTALLED)
	$(VENV)/bin/python -m pytest --durations=10 --numprocesses 3 --dist loadfile --no-loadscope-reorder -m deployment

benchmarks: $(INSTALLED)
	$(VENV)/bin/python -m benchmarks.cloud_models
	$(VENV)/bin/python -m benchmarks.clustering
	$(VENV)/bin/python -m benchmarks.collaboration
	$(VENV)/bin/python -m benchmarks.wire
	$(VENV)/bin/python -m benchmarks.latency
	$(VENV)/bin/python -m benchmarks.training
	$(VENV)/bin/python -m benchmarks.simulation --strategies all --data-dir '$(DATA_DIR)'
	$(VENV)/bin/python -m benchmarks.scale

clean:
	rm -rf $(VENV) .kindred build dist site *.egg-info
