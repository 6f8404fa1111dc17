"""Prints the client library's warnings on stderr, at a limited rate, and remembers the last one.

The library logs a warning if its work is late (``kafkalite.client.cluster.setbacks``). Therefore a command
that waits prints the reason. If its time limit passes, it prints the reason again.
"""

# Tests: tests/cli/test_stderr.py

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Final

from kafkalite.log_fields import escaped

_QUIET_SECONDS: Final = 10.0
_CHANGE_SECONDS: Final = 2.0
#: A warning that is older than this many seconds does not explain a current delay.
_CURRENT_SECONDS: Final = 12.0


def print_line(line: str) -> None:
    """Print a line on stderr."""
    sys.stderr.write(f"{line}\n")


class SparseHandler(logging.Handler):
    """Prints every error, and a warning if at least ten seconds have passed since the last printed line.

    If the warning differs from the last printed line in more than digits, two seconds must have passed.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        #: Prints a line. A progress bar replaces it, so that the line does not break the bar.
        self.write: Callable[[str], object] = print_line
        self._printed = ""
        self._printed_at = -_QUIET_SECONDS
        self._last = ""
        self._last_at = -_CURRENT_SECONDS

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        text = escaped(record.getMessage())
        self._last, self._last_at = text, now
        is_new = _without_digits(text) != _without_digits(self._printed)
        pause = _CHANGE_SECONDS if is_new else _QUIET_SECONDS
        if now - self._printed_at < pause and record.levelno < logging.ERROR:
            return
        self._printed, self._printed_at = text, now
        self.write(f"kl: {text}")

    @property
    def current(self) -> str:
        """The last warning or error, without ``waiting: ``; "" if it is older than 12 seconds."""
        is_recent = time.monotonic() - self._last_at <= _CURRENT_SECONDS
        return self._last.removeprefix("waiting: ") if is_recent else ""


def _without_digits(text: str) -> str:
    return "".join(character for character in text if not character.isdigit())


def installed() -> SparseHandler | None:
    """Return the handler that ``install`` has added, or None if there is none."""
    handlers = logging.getLogger("kafkalite").handlers
    return next((each for each in handlers if isinstance(each, SparseHandler)), None)


def install(*, debug: bool) -> None:
    """Print the library's warnings on stderr, at a limited rate. If ``debug``, also print all log records."""
    if debug:
        logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
    if installed() is None:
        logging.getLogger("kafkalite").addHandler(SparseHandler())
