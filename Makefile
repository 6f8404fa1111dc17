# The daily words. Each sets .venv up when it has to.
PYTHON := .venv/bin/python
.PHONY: check test bench docs

check: ; @bin/setup all dev test
	@$(PYTHON) -m ruff format --check -q . && $(PYTHON) -m ruff check -q . && $(PYTHON) -m mypy && .venv/bin/lint-imports

test: ; @bin/test

bench: ; @bin/setup all dev test && $(PYTHON) -m benchmarks

docs: ; @bin/setup all dev test && $(PYTHON) -m pytest -q tests/test_docs.py
