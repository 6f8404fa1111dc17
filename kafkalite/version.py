"""The version of kafkalite."""

# Tests: tests/cli/test_app.py

from __future__ import annotations

VERSION = "0.1.0"
