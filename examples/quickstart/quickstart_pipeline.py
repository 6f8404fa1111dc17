"""The last part of the quickstart: runs the pipeline of the access log example if Spark is available."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click

from kafkalite.cli import pipeline
from kafkalite.cli.exit_codes import CheckFailedError
from kafkalite.cli.invocation import program_name
from kafkalite.cli.pipeline_view import Watcher, print_report, report_row

EXAMPLE: Final = "access_log"
_TOP: Final = 5


def missing() -> list[str]:
    """Return the reasons why the pipeline cannot run here, one sentence each; empty if it can."""
    if find_spec("sparkbridge") is None:
        return ['Spark\'s part of kafkalite is not installed: pip install "kafkalite[cli,spark]"']
    runner = pipeline.part("runner")
    if found := list(runner.missing_requirements()):
        return found
    if pipeline.part("files").shipped() is None:
        return ["the example pipelines are in a checkout of kafkalite, not in its package"]
    return []


class PipelineJob:
    """Runs the example pipeline over ``file``, or over a file that the example finds or generates, and keeps
    the results.
    """

    def __init__(self, file: Path | None, *, is_quiet: bool = False) -> None:
        files = pipeline.part("files")
        overrides = [] if file is None else [f"demo.settings.file={str(file.resolve())!r}"]
        self._file = files.read(files.shipped() / EXAMPLE, overrides)
        self._is_quiet = is_quiet
        self.report: Any = None
        self.statuses: Counter[int] = Counter()
        self.hours = 0
        self.clients: list[dict[str, Any]] = []

    @property
    def path(self) -> Path:
        return Path(self._file.path)

    def run(self) -> None:
        """Run the pipeline. Raises KafkaliteError, or CheckFailedError if Spark's results differ from those
        of a plain loop."""
        watcher = Watcher("json" if self._is_quiet else "table", is_quiet=self._is_quiet)
        with pipeline.own_broker() as servers, pipeline.part("runner").demo_setting(servers) as setting:
            self.report = pipeline.execute(self._file, setting, watcher, is_demo=True)
            if not self.report.was_stopped:
                self._take(pipeline.part("checks").CheckRun(self.report.run, None))
        if self.report.was_stopped:
            raise KeyboardInterrupt
        if self.report.failed:
            told = "; ".join(f"{finding.name}: {finding.text}" for finding in self.report.failed)
            raise CheckFailedError(f"the pipeline's output is not what it should be: {told}")

    def _take(self, outcome: Any) -> None:
        rows = outcome.rows("statuses")
        for row in rows:
            self.statuses[row["status"]] += row["requests"]
        self.hours = len({row["hour"] for row in rows})
        self.clients = sorted(outcome.rows("top_paths"), key=lambda row: -row["requests"])[:_TOP]

    def document(self) -> dict[str, Any]:
        return report_row(self.report) | {
            "closed_hours": self.hours,
            "count_by_status": {str(status): count for status, count in sorted(self.statuses.items())},
            "busiest_clients": self.clients,
        }

    def print_tables(self) -> None:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        console = Console(highlight=False)
        total = self.statuses.total() or 1
        table = Table(title=f"requests of {self.hours:,} closed hours", title_justify="left", box=SIMPLE_HEAD)
        table.add_column("status")
        for title in ("requests", "share"):
            table.add_column(title, justify="right")
        table.add_column("")
        for status, count in sorted(self.statuses.items()):
            table.add_row(str(status), f"{count:,}", f"{count / total:.1%}", "█" * round(30 * count / total))
        console.print(table)
        tops = Table(title="top paths of the busiest clients", title_justify="left", box=SIMPLE_HEAD)
        tops.add_column("day")
        tops.add_column("client")
        tops.add_column("requests", justify="right")
        tops.add_column("most wanted path", overflow="fold")
        for row in self.clients:
            top = row["paths"][0]
            path = f"{top['path']} ({top['requests']:,})"
            tops.add_row(row["day"][:10], row["client"], f"{row['requests']:,}", path)
        console.print(tops)
        print_report(self.report, "table")


def show(file: Path | None) -> None:
    """Run the pipeline and print its results, or print the reasons why it cannot run."""
    absent = missing()
    click.echo()
    if absent:
        click.echo("The Spark pipeline over the same records does not run here:")
        for sentence in absent:
            click.echo(f"  {sentence}")
        return
    job = PipelineJob(file)
    path = pipeline.shown_path(job.path)
    click.echo(f"And a Spark pipeline over an access log, {path}, start to end:")
    click.echo()
    job.run()
    job.print_tables()
    if import_module("sparkbridge.local.fast_start").can_make_class_archive():
        program = program_name()
        click.echo()
        click.echo(f"So that Spark starts in half the time, once: {program} pipeline warm-up")
