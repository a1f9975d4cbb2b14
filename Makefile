PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed

.PHONY: install run test test-faults test-deployment benchmarks clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

run: $(INSTALLED)
	$(VENV)/bin/kindred run --against local,fedavg

test: $(INSTALLED)
	$(VENV)/bin/python -m pytest --durations=10 --numprocesses logical --maxprocesses 4 --dist loadfile

test-faults: $(INSTALLED)
	$(VENV)/bin/python -m pytest --durations=10 -m faults

test-deployment: $(INSTALLED)
	$(VENV)/bin/python -m pytest --durations=10 --numprocesses 2 --dist loadfile -m deployment

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
	rm -rf $(VENV) .kindred build dist *.egg-info
