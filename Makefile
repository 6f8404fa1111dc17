# The daily words. Each sets .venv up when it has to.
PYTHON := .venv/bin/python
.PHONY: check test bench docs coverage

check: ; @bin/setup all dev test
	@$(PYTHON) -m ruff format --check -q . && $(PYTHON) -m ruff check -q . && $(PYTHON) -m mypy && .venv/bin/lint-imports

test: ; @bin/test

bench: ; @bin/setup all dev test && $(PYTHON) -m benchmarks

docs: ; @bin/setup all dev test && $(PYTHON) -m pytest -q tests/test_docs.py

# Branch coverage of the floors that decide; the bound is the project's own.
PURE := kafkalite/model.py,kafkalite/errors.py,kafkalite/limits.py,kafkalite/options.py,kafkalite/protocol/*,kafkalite/records/*,kafkalite/metadata/*,kafkalite/replication/*,kafkalite/storage/layout.py,kafkalite/storage/offset_index.py,kafkalite/storage/time_index.py,kafkalite/storage/leader_epochs.py,kafkalite/storage/retention.py,kafkalite/storage/log_config.py,kafkalite/client/routing.py,kafkalite/client/accumulator.py,kafkalite/client/fetch_state.py,kafkalite/client/retry.py
coverage: ; @bin/setup all dev test && $(PYTHON) -m coverage run -m pytest -q --deselect tests/storage/test_power_loss.py tests/vocabulary tests/protocol tests/records tests/metadata tests/replication tests/storage tests/client
	@$(PYTHON) -m coverage report --include='$(PURE)' --fail-under=95
