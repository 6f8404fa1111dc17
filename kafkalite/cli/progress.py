"""A progress bar on stderr, if that is a terminal. rich is imported with the first bar."""

from __future__ import annotations

import sys
from typing import Any


class Progress:
    """A progress bar that shows nothing. The base class of ``_Bar``."""

    def tell(self, line: str) -> None:
        """Print a line on stderr, above the bar if one is shown."""
        sys.stderr.write(f"{line}\n")

    def advance_bytes(self, count: int) -> None:
        pass

    def advance_records(self, count: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Bar(Progress):
    """Shows the number of records, and a bar that counts bytes if ``total_bytes`` is known, else records."""

    def __init__(self, stream: Any, title: str, total_bytes: int | None, total_records: int | None) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._counts_bytes = total_bytes is not None
        self._records = 0
        total = total_bytes if self._counts_bytes else total_records
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[records]:,} records"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(file=stream),
        )
        self._task = self._progress.add_task(title, total=total, records=0)
        self._progress.start()

    def tell(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False)

    def advance_bytes(self, count: int) -> None:
        if self._counts_bytes:
            self._progress.advance(self._task, count)

    def advance_records(self, count: int) -> None:
        self._records += count
        self._progress.update(self._task, records=self._records)
        if not self._counts_bytes:
            self._progress.advance(self._task, count)

    def close(self) -> None:
        self._progress.stop()


def bar_on(
    stream: Any, title: str, *, total_bytes: int | None = None, total_records: int | None = None
) -> Progress:
    """Return a progress bar on ``stream``.

    It shows nothing unless ``stream`` is a terminal and rich is installed.
    """
    if not stream.isatty():
        return Progress()
    try:
        return _Bar(stream, title, total_bytes, total_records)
    except ImportError:
        return Progress()
