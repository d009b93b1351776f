# Each target makes what it needs; PYTHON picks the interpreter of the environment, which lies in .venv.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
CONDA := .venv-conda/bin
RUN := $(VENV)/bin/python

.PHONY: test package env bench matrix lint format clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(RUN) -m pip install --quiet --disable-pip-version-check "setuptools>=77" ninja
	touch $@

# Editable, so that Python files need no step; ninja recompiles what has changed in csrc/ and nothing else.
.PHONY: build
build: $(VENV)/.ready
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-build-isolation -e ".[dev]"

test: build lint
	$(RUN) -m pytest

# The conda engine has an environment of its own: it needs no torch.
$(CONDA)/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-conda
	$(CONDA)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(CONDA)/python -m pip install --quiet --disable-pip-version-check --group conda
	touch $@

package: $(CONDA)/.ready
	PATH="$(CURDIR)/$(CONDA):$$PATH" $(CONDA)/python -m channel.package

bench: build
	$(RUN) -m benchmarks $(BENCH)

matrix: build
	$(RUN) tests/checkout/matrix.py $(MATRIX)

lint: build
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror csrc/*

format: build
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .
	$(VENV)/bin/clang-format -i csrc/*

clean:
	rm -rf build dist *.egg-info extension_cpp/*.so
