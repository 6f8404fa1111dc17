"""Output of ``kl pipeline run``: a progress line, the rows of console sinks, the final report."""

# Tests: tests/cli/test_pipeline.py

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Self

import click

from kafkalite.cli.output import (
    Column,
    coloured,
    json_text,
    pick,
    plural,
    print_document,
    print_listing,
    rows_of,
    write,
)
from kafkalite.log_fields import escaped

_REPAINT_SECONDS: Final = 0.2
_TICK_SECONDS: Final = 1.0
_MAX_CELL: Final = 60
_COLUMNS: Final = (
    Column("name", "QUERY", read="tally.name"),
    Column("sink", "SINK", read="sink.text"),
    Column("batches", "BATCHES", show=lambda n: f"{n:,}", read="tally.batches"),
    Column("rows", "ROWS IN", show=lambda n: f"{n:,}", read="tally.rows"),
    Column("rows_per_second", "ROWS/S", show=lambda n: f"{n:,.0f}", read="tally.rows_per_second"),
    Column("batch_ms", "BATCH", show=lambda ms: f"{ms:,.0f} ms", read="tally.batch_ms"),
    Column("lag", "LAG", show=lambda n: "-" if n is None else f"{n:,}", read="tally.lag"),
    Column("late", read="tally.late"),
    Column("group", "GROUP", read="group_id"),
)


class Watcher:
    """Prints the progress and the rows of a running pipeline. On a terminal, the progress is one line."""

    def __init__(self, output: str = "table", *, is_quiet: bool = False, stream: Any = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._output = output
        self._is_painted = bool(self._stream.isatty()) and not is_quiet
        self._is_quiet = is_quiet
        self._painted_at = 0.0
        self._width = 0
        self.rows: list[dict[str, Any]] = []  #: rows of console sinks, kept for the final document

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._wipe()

    def say(self, text: str) -> None:
        if self._is_painted:
            self._paint(text)

    def begin(self, text: str) -> None:
        """Show the current step: on a terminal in the progress line, otherwise in a new line.

        If ``is_quiet``, print nothing.
        """
        if self._is_painted:
            self._paint(text)
        elif not self._is_quiet:
            self._stream.write(f"kl: {text} ...\n")
            self._stream.flush()

    @contextmanager
    def timed(self, text: str) -> Iterator[None]:
        """Show a long step and, on a terminal, its elapsed seconds, until the block ends."""
        self.begin(text)
        if not self._is_painted:
            yield
            return
        done, started = threading.Event(), time.monotonic()

        def repaint() -> None:
            while not done.wait(_TICK_SECONDS):
                self._paint(f"{text}, {time.monotonic() - started:.0f} s")

        painter = threading.Thread(target=repaint, name="kl-elapsed", daemon=True)
        painter.start()
        try:
            yield
        finally:
            done.set()
            painter.join()

    def on_filled(self, counts: Mapping[str, int]) -> None:
        if not self._is_quiet:
            self._wipe()
            listed = ", ".join(f"{plural(count, 'record')} in {topic}" for topic, count in counts.items())
            click.echo(f"kl: input: {listed}", err=True)

    def on_start(self, run: Any) -> None:
        self.say("the first batch is planned")

    def on_batch(self, query: Any, batch: Any) -> None:
        if self._output == "jsonl":
            self._wipe()
            write(json.dumps(_batch_row(query, batch)) + "\n")

    def on_tick(self, run: Any) -> None:
        if not self._is_painted:
            return
        now = time.monotonic()
        if now - self._painted_at >= _REPAINT_SECONDS:
            self._painted_at = now
            from importlib import import_module

            self._paint(import_module("sparkbridge.pipelines.progress").line_of(run.tallies))

    def on_rows(self, shown: Any) -> None:
        """Print rows of a console sink as a table or as jsonl. With -o json, keep them for the end."""
        self._wipe()
        if self._output in {"json", "jsonl"}:
            documents = [
                {"query": shown.query, "batch_id": shown.batch_id, "row": json.loads(document)}
                for document in shown.documents
            ]
            if self._output == "json":
                self.rows += documents
            else:
                write("".join(json_text(each) + "\n" for each in documents))
            return
        write(f"-- batch {shown.batch_id}, {shown.query}\n")
        columns = [Column(str(number), name) for number, name in enumerate(shown.columns)]
        rows = [{str(number): _cell(text) for number, text in enumerate(row)} for row in shown.rows]
        print_listing(rows, columns, "table")

    def _paint(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        dim, reset = ("\x1b[2m", "\x1b[0m") if coloured(self._stream) else ("", "")
        self._stream.write(f"\r\x1b[K{dim}{text[:width]}{reset}")
        self._stream.flush()
        self._width = len(text)

    def _wipe(self) -> None:
        if self._width:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._width = 0


def _cell(value: str | None) -> str:
    """Return the value on one line, with control characters escaped, truncated to _MAX_CELL characters.

    None, SQL's null value, becomes ``NULL``.
    """
    if value is None:
        return "NULL"
    text = escaped(value)
    return text if len(text) <= _MAX_CELL else text[: _MAX_CELL - 1] + "…"


def _batch_row(query: Any, batch: Any) -> dict[str, Any]:
    return {
        "query": query.tally.name,
        "batch_id": batch.batch_id,
        "timestamp": batch.timestamp,
        "rows": batch.row_count,
        **pick(batch, "rows_per_second", "batch_ms", "lag"),
        "late": batch.late_count,
    }


def report_row(report: Any) -> dict[str, Any]:
    """Convert the report to a JSON document."""
    return {
        "pipeline": report.run.pipeline.name,
        "was_stopped": report.was_stopped,
        "queries": rows_of(report.run.queries, _COLUMNS),
        "checks": [finding._asdict() for finding in report.findings],
    }


def print_report(report: Any, output: str, rows: Sequence[Mapping[str, Any]] = ()) -> None:
    """Print the report. With -o json, the document contains ``rows``, the rows of console sinks."""
    if output in {"json", "jsonl"}:
        shown = {"rows": list(rows)} if output == "json" else {}
        print_document(report_row(report) | shown, output)
        return
    print_listing(rows_of(report.run.queries, _COLUMNS), _COLUMNS, output)
    for each in report.run.queries:
        if each.tally.late:
            text = f"{each.tally.late:,} rows were dropped: older than the watermark"
            click.echo(f"kl: {each.tally.name}: {text} (counted after the first aggregation)", err=True)
    for finding in report.findings:
        write(f"check: {finding.text if finding.holds and finding.text != 'holds' else _told(finding)}\n")
    if report.was_stopped:
        click.echo("stopped.", err=True)
    elif report.findings and not report.failed:
        count = plural(len(report.findings), "check")
        write(f"{count} passed.\n")


def _told(finding: Any) -> str:
    return f"{finding.name}: {'holds' if finding.holds else 'FAILED: ' + finding.text}"
