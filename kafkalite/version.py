"""The version of kafkalite."""

# Tests: tests/cli/test_app.py

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
