# make demo: trains the main experiment on a real two-worker cluster on this machine.
# make test: lint, types and the whole test suite.
# Each does all set-up first; a fresh machine needs Python 3.10 or later and make.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install demo test lint clean

install: $(VENV)/.installed

$(VENV)/.installed: setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 10) else \
	    "make: tfdist needs Python 3.10 or later, found %d.%d; try make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cpu,experiments,test]'
	@touch $@

demo: install
	$(BIN)/tfdist run --workers 2 -m trainer.task --config configs/digits-multiworker.yaml

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

clean:
	rm -rf $(VENV) build dist *.egg-info runs
