"""Prints the client library's warnings on stderr, at a limited rate."""

from __future__ import annotations

import logging
import sys
import time
from typing import Final

_QUIET_SECONDS: Final = 10.0


class SparseHandler(logging.Handler):
    """Print one warning, then none for ten seconds, so that an unreachable broker is not reported at every
    retry.
    """

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
    """Send the log records of ``kafkalite`` to stderr: warnings at a limited rate, or everything with
    ``debug``.
    """
    logger = logging.getLogger("kafkalite")
    if any(isinstance(handler, SparseHandler) for handler in logger.handlers):
        return
    if debug:
        logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
        return
    logger.addHandler(SparseHandler())
