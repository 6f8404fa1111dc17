"""Prints the client library's warnings on stderr, at a limited rate."""

# Tests: tests/cli/test_stderr.py

from __future__ import annotations

import logging
import sys
import time
from typing import Final

_QUIET_SECONDS: Final = 10.0


class SparseHandler(logging.Handler):
    """Prints a warning at most every ten seconds, instead of at each retry to an unreachable broker."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._silent_until = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now < self._silent_until and record.levelno < logging.ERROR:
            return
        self._silent_until = now + _QUIET_SECONDS
        sys.stderr.write(f"kl: {record.getMessage()}\n")


def install(*, debug: bool) -> None:
    """Send the library's log records to stderr: rate-limited warnings, or all records with ``debug``."""
    logger = logging.getLogger("kafkalite")
    if any(isinstance(handler, SparseHandler) for handler in logger.handlers):
        return
    if debug:
        logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
        return
    logger.addHandler(SparseHandler())
