"""``bin/quickstart [FILE]``: sends a file through a broker, compares the result, and prints tables.

If Java and pyspark are installed, a Spark pipeline then processes the same records.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import click
import quickstart_pipeline
from quickstart_job import LINES_PER_SEND, PARTITION_COUNT, Job

from kafkalite.cli import invocation
from kafkalite.cli.app import run
from kafkalite.cli.exit_codes import CheckFailedError
from kafkalite.cli.invocation import debug_option, program_name
from kafkalite.cli.output import percentile, show_ms, show_rate

_STANDARD_INPUT: Final = "standard-input"  #: the name of its copy


@click.command(
    epilog="""\b
Without FILE it makes up the purchases of a donut shop, keyed by country.
With FILE every line is a record keyed by its first word: in an access log, the client.
FILE may be - for standard input."""
)
@click.argument(
    "file", required=False, type=click.Path(path_type=Path, exists=True, dir_okay=False, allow_dash=True)
)
@click.option(
    "--records",
    type=click.IntRange(min=1),
    metavar="N",
    default=10_000,
    show_default=True,
    help="Purchases to make up.",
)
@click.option("--seed", type=int, default=7, show_default=True, help="Of the purchases.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option(
    "--spark/--no-spark",
    "has_spark",
    default=True,
    show_default=True,
    help="Also run the access log's pipeline, where Java and pyspark are there.",
)
@debug_option
def quickstart(file: Path | None, records: int, seed: int, output: str, has_spark: bool) -> None:
    """Send a file through a broker, run a pipeline over it, and print the results."""
    with tempfile.TemporaryDirectory(prefix="kafkalite-quickstart-") as directory:
        if file is not None and str(file) == "-":
            file = Path(directory) / _STANDARD_INPUT
            with file.open("wb") as copy:
                shutil.copyfileobj(sys.stdin.buffer, copy)
        _run(Job(file, records, seed, quiet=output == "json"), directory, output, has_spark=has_spark)


def _run(job: Job, directory: str, output: str, *, has_spark: bool) -> None:
    invocation.run(lambda: job.run(f"{directory}/data"))
    if output == "json":
        document = job.document()
        if has_spark:
            document["pipeline"] = _pipeline_document(job)
        click.echo(json.dumps(document, indent=2))
    else:
        _print_tables(job)
    problems = job.problems()
    if problems:
        raise CheckFailedError("what came out is not what went in: " + "; ".join(problems))
    if output != "json":
        if has_spark and job.is_access_log:
            quickstart_pipeline.show(job.file)
        elif has_spark:
            click.echo("\nThe Spark pipeline does not run: no line looks like an access log's.")
        click.echo(_next_steps(job))


def _pipeline_document(job: Job) -> dict[str, Any]:
    if not job.is_access_log:
        return {"missing": ["no line looks like an access log's"]}
    if absent := quickstart_pipeline.missing():
        return {"missing": absent}
    pipeline = quickstart_pipeline.PipelineJob(job.file, is_quiet=True)
    pipeline.run()
    return pipeline.document()


# --- tables ----------------------------------------------------------------------------------------


def _print_tables(job: Job) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print()
    console.print(_speed_table(job))
    console.print()
    console.print(_share_table(f"records per partition of {job.topic!r}", "partition", _per_partition(job)))
    if job.counts:
        console.print()
        console.print(
            _share_table(f"records by {job.counted_by}", job.counted_by, sorted(job.counts.items()))
        )
        if job.file is not None:
            console.print(f"lines of another shape: {job.unparseable_count:,}")
    else:
        console.print("No line looks like an access log's, so nothing is counted by status.")
    console.print()
    if not job.problems():
        keys = len(job.received.per_key)
        console.print(
            f"[bold green]{job.sent.count:,} records in, {job.received.count:,} out[/]; "
            f"each of the {keys:,} keys kept its partition and its order.",
            soft_wrap=True,
        )


def _per_partition(job: Job) -> list[tuple[str, int]]:
    return [(str(partition), job.per_partition[partition]) for partition in range(PARTITION_COUNT)]


def _speed_table(job: Job) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title="speed", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("step")
    for title in ("records", "time", "rate", "p50", "p99"):
        table.add_column(title, justify="right")

    def row(step: str, count: int, seconds: float, samples: list[float]) -> None:
        p50, p99 = (show_ms(percentile(samples, percent)) if samples else "-" for percent in (50, 99))
        table.add_row(step, f"{count:,}", show_ms(seconds), show_rate(count, seconds), p50, p99)

    row(f"produce, {LINES_PER_SEND} a send", job.sent.count, job.produce_seconds, job.ack_seconds)
    row("consume", job.received.count, job.consume_seconds, [])
    row(
        "one record, round trip",
        len(job.round_trip_seconds),
        sum(job.round_trip_seconds),
        job.round_trip_seconds,
    )
    return table


def _share_table(title: str, what: str, rows: list[tuple[str, int]]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    total = sum(count for _, count in rows) or 1
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column(what)
    table.add_column("records", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    for name, count in rows:
        table.add_row(name, f"{count:,}", f"{count / total:.1%}", "█" * round(30 * count / total))
    return table


def _next_steps(job: Job) -> str:
    program = program_name()
    if job.file is None:
        feed = f'echo \'{{"country":"CA","donut":"maple"}}\' | {program} produce Purchases -k CA'
    else:
        shown = "FILE" if job.file.name == _STANDARD_INPUT else shlex.quote(str(job.file))
        feed = f"{program} produce {job.topic} {shown} --progress"
    return f"""
The brokers are gone again, with their data. To go on:
  {program} dev --topic {job.topic}:{PARTITION_COUNT}        a broker that stays, on localhost:9092
  {feed}
  {program} consume {job.topic} -e -f '%p %o %k %s\\n' | head
  {program} topic describe {job.topic}
  {program} pipeline list                pipelines to try, each with --demo
  {program} --help"""


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], command=quickstart, name="bin/quickstart"))
