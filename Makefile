# `make train` and `make test` are all a new machine needs: Python 3.11+, pip and git.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest --numprocesses=logical --maxprocesses=8 --dist=worksteal

.PHONY: train test check docs clean

train: $(VENV)/.installed
	$(BIN)/python scripts/train.py experiment=quickstart

test: $(VENV)/.installed-dev
	$(PYTEST)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(PYTEST)

# What is generated from the code.
docs: $(VENV)/.installed
	$(BIN)/python -c 'from tdmpc.telemetry.metrics import markdown; print(markdown(), end="")' > docs/metrics.md

# Exact versions come from constraints.txt, so every machine runs what was tested.
$(VENV)/.installed: PACKAGE := .
$(VENV)/.installed-dev: PACKAGE := .[dev]
$(VENV)/.installed $(VENV)/.installed-dev: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e "$(PACKAGE)"
	touch $@

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .ruff_cache
