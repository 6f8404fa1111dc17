"""``kl pipeline``: runs, lists and validates Spark pipelines declared in files.

The package ``sparkbridge.pipelines`` runs them. It needs the extra ``spark``, and is imported when a command
needs it.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click

from kafkalite.cli import invocation
from kafkalite.cli.connect import security_settings
from kafkalite.cli.exit_codes import CheckFailedError, NotFoundError, UsageError
from kafkalite.cli.invocation import client_options, output_option
from kafkalite.cli.lazy_group import Group
from kafkalite.cli.output import Column, plural, print_listing, write
from kafkalite.cli.pipeline_view import Watcher, print_report
from kafkalite.errors import KafkaliteError
from kafkalite.suggestions import did_you_mean

_COLUMNS: Final = (
    Column("name", "NAME"),
    Column("source", "SOURCE"),
    Column("sink", "SINK"),
    Column("description", "DESCRIPTION"),
    Column("trigger", "TRIGGER", wide=True),
    Column("file", "FILE", wide=True),
)
_PROBLEM_COLUMNS: Final = (
    Column("file", "FILE"),
    Column("line", "LINE"),
    Column("level", "LEVEL"),
    Column("table", "TABLE"),
    Column("key", "KEY"),
    Column("message", "MESSAGE"),
    Column("hint", "HINT"),
)
_FILE: Final = click.Path(path_type=Path)


def part(name: str) -> Any:
    """Return the module ``name`` of sparkbridge.pipelines.

    Raises UsageError if sparkbridge, or a package that the module imports, is not installed.
    """
    if find_spec("sparkbridge") is None:
        raise UsageError(
            "pipelines need the extra 'spark' of kafkalite", hint='pip install "kafkalite[cli,spark]"'
        )
    try:
        return import_module(f"sparkbridge.pipelines.{name}")
    except ModuleNotFoundError as missing:
        raise UsageError(
            f"pipelines need {missing.name}, which is not installed",
            hint='pip install "kafkalite[spark]"; in a checkout: bin/setup',
        ) from missing


@click.group(cls=Group)
def pipeline() -> None:
    """Run a pipeline: topic to SQL to topic, Parquet or console, on Spark."""


# --- list ------------------------------------------------------------------------------------------


@pipeline.command("list", short_help="List the shipped pipelines, or those of a directory.")
@click.argument("directory", required=False, type=click.Path(path_type=Path, exists=True, file_okay=False))
@invocation.debug_option
@output_option
def list_(directory: Path | None) -> None:
    """List the pipelines of DIRECTORY.

    Without DIRECTORY, list the shipped pipelines and the pipelines of the current directory.
    """
    files = part("files")
    shipped = files.shipped()
    directories = [directory] if directory else [each for each in (shipped, Path()) if each is not None]
    found = dict.fromkeys(path.resolve() for each in directories for path in files.find(each))
    rows = [_row(files.read(path)) for path in found]
    none = f"no pipelines in {directory or 'this directory'}"
    print_listing(rows, _COLUMNS, invocation.current().output, if_empty=none)


def _row(file: Any) -> dict[str, Any]:
    path = str(shown_path(file.path))
    declared = file.pipeline
    if declared is None:
        count = plural(len(file.errors), "problem")
        description = f"has {count}: kl pipeline validate {path}"
        name = part("files").short_name(file.path)
        nothing = dict.fromkeys(("source", "sink", "trigger"))
        return {"name": name, "description": description, "file": path} | nothing
    return {
        "name": declared.name,
        "source": declared.source.text,
        "sink": ", ".join(sink.text for sink in declared.sinks),
        "description": declared.description,
        "trigger": declared.trigger,
        "file": path,
    }


def shown_path(path: Path) -> Path:
    """Return a path below the current directory as a relative path. Return other paths unchanged."""
    with contextlib.suppress(ValueError):
        return path.resolve().relative_to(Path.cwd())
    return path


# --- validate --------------------------------------------------------------------------------------


@pipeline.command(short_help="Report every mistake in a file, without running it.")
@click.argument("paths", nargs=-1, required=True, type=_FILE, metavar="FILE…")
@click.option("--set", "overrides", multiple=True, metavar="TABLE.KEY=VALUE", help="As in run.")
@click.option("--no-spark", is_flag=True, help="Don't start Spark's parser, which reads the SQL, in a JVM.")
@invocation.debug_option
@output_option
def validate(paths: tuple[Path, ...], overrides: tuple[str, ...], no_spark: bool) -> None:
    """Report mistakes in pipeline files, without a broker.

    Spark's parser checks the syntax of SQL queries if Spark and Java are installed. Only 'kl pipeline run'
    finds columns that do not exist.
    """
    files = part("files")
    output = invocation.current().output
    rows: list[dict[str, Any]] = []
    wrong = 0
    with part("sql_syntax").SqlSyntax() as syntax:
        if no_spark:
            syntax.unavailable = "--no-spark"
        for path in paths:
            file = _read(files, path, overrides, has_checkpoint=False, sql_problem=syntax.problem)
            wrong += bool(file.errors)
            rows += [dict(files.describe(problem, shown_path(file.path))) for problem in file.problems]
            if output in {"table", "wide"}:
                _print_file(files, file)
    if syntax.unavailable and not no_spark:
        invocation.say(f"the SQL was not parsed: {syntax.unavailable}")
    if output not in {"table", "wide"}:
        print_listing(rows, _PROBLEM_COLUMNS, output, name_key="file")
    if wrong:
        raise CheckFailedError(f"{wrong} of {plural(len(paths), 'file')} cannot run")


def _read(files: Any, path: Path, overrides: tuple[str, ...], **checks: Any) -> Any:
    """Return the ``files.PipelineFile`` at ``path``, with --set applied. Its ``problems`` are the mistakes.

    ``checks`` are keyword arguments of ``files.read``. Raises NotFoundError if the file does not exist, and
    UsageError if --set is invalid.
    """
    try:
        return files.read(path, overrides, **checks)
    except FileNotFoundError as problem:
        raise NotFoundError(f"there is no {problem.filename}", hint=_nearest(files, path)) from None
    except KafkaliteError as problem:
        raise UsageError(problem.message, hint=problem.hint) from None


def _nearest(files: Any, path: Path) -> str:
    """Return a hint for a missing file: the most similar pipeline, or how to list pipelines."""
    if path.is_dir() and files.find(path):
        return f"kl pipeline list {shown_path(path)}"
    directories = [each for each in (files.shipped(), path.parent) if each is not None]
    found = [each for directory in directories for each in files.find(directory)]
    named = {files.short_name(each): each for each in found}
    return did_you_mean(
        path.stem.replace("-", "_"),
        named,
        shown=lambda name: str(shown_path(files.named_by(named[name]))),
        otherwise="kl pipeline list",
    )


def _print_file(files: Any, file: Any) -> None:
    path = shown_path(file.path)
    for problem in file.problems:
        write(files.tell(problem, path) + "\n")
    if file.pipeline is not None:
        sinks = ", ".join(sink.text for sink in file.pipeline.sinks)
        needed = " with --checkpoint DIR" if file.pipeline.needs_checkpoint else ""
        write(f"{path}: ok{needed}, {file.pipeline.name}: {file.pipeline.source.text} to {sinks}\n")


# --- run -------------------------------------------------------------------------------------------


@pipeline.command(
    epilog="""\b
Examples:
  kl pipeline run examples/pipelines/access_log --demo      with a broker and input of its own
  kl pipeline run orders.toml -b broker:9092 --checkpoint /data/checkpoints/orders
  kl pipeline run orders.toml --once --set sink.topic=totals-2
  kl pipeline run orders.toml --master spark://master:7077"""
)
@click.argument("path", type=_FILE, metavar="FILE")
@click.option("--demo", is_flag=True, help="Run on the file's own [demo] input, and check the result.")
@click.option("--master", default="local[*]", show_default=True, metavar="URL", help="The Spark master.")
@click.option(
    "--once",
    "--available-now",
    "once",
    is_flag=True,
    help="Stop at the current end of the input, instead of using the file's trigger.",
)
@click.option(
    "--trigger", metavar="TIME", help="Overrides the file's trigger: '5 seconds', or available-now."
)
@click.option("--checkpoint", metavar="DIR", help="Overrides the file's checkpoint.")
@click.option(
    "--set", "overrides", multiple=True, metavar="TABLE.KEY=VALUE", help="Overrides a value in the file."
)
@click.option(
    "--check/--no-check", default=True, show_default=True, help="Run the file's [check] at the end."
)
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@click.option(
    "--spark-log", type=click.Path(path_type=Path), metavar="FILE", help="Write Spark's output to a file."
)
@client_options
@invocation.output_choice(("table", "json", "jsonl"), "jsonl also has a line per batch.")
def run(
    path: Path,
    demo: bool,
    master: str,
    once: bool,
    trigger: str | None,
    checkpoint: str | None,
    overrides: tuple[str, ...],
    check: bool,
    quiet: bool,
    spark_log: Path | None,
) -> None:
    """Run a pipeline until its input ends, or until Ctrl-C."""
    if once and trigger:
        raise UsageError("give --once or --trigger, not both")
    current = invocation.current()
    file = _valid_file(path, overrides)
    trigger = _trigger(trigger, once)
    _check_writable(spark_log)
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(brokers(current, is_demo=demo))
        security = {} if _has_own_broker(current, is_demo=demo) else security_settings(current)
        setting = _setting(file, servers, security, trigger, checkpoint, stack, is_demo=demo)
        part("runner").require_spark()
        if not demo:
            _check_topics(file.pipeline)
        watcher = Watcher(current.output, is_quiet=quiet)
        report = execute(
            file, setting, watcher, master=master, is_demo=demo, has_checks=check, spark_log=spark_log
        )
        print_report(report, current.output, watcher.rows)
    if not quiet and sys.stderr.isatty():
        _hint_at_warm_up(master)
    if report.was_stopped and (trigger or file.pipeline.trigger) == "available-now":
        raise KeyboardInterrupt
    if report.failed:
        raise CheckFailedError("the check failed: " + "; ".join(f"{x.name}: {x.text}" for x in report.failed))


def execute(
    file: Any,
    setting: Any,
    watcher: Watcher,
    *,
    master: str = "local[*]",
    is_demo: bool = False,
    has_checks: bool = True,
    spark_log: Path | None = None,
) -> Any:
    """Run the pipeline ``file`` on Spark and return a ``runner.Report``. Raises KafkaliteError."""
    runner = part("runner")
    with tempfile.TemporaryDirectory(prefix="kafkalite-spark-") as directory:
        log = spark_log or Path(directory) / "spark.log"
        session = runner.spark_session(
            file.pipeline.name, master=master, settings=file.pipeline.spark, log=log
        )
        try:
            with contextlib.ExitStack() as opened:
                with watcher.timed(f"starting Spark ({master})"):
                    spark = opened.enter_context(session)
                is_asked = opened.enter_context(_stoppable())
                opened.enter_context(watcher)

                def on_tick(run: Any) -> None:
                    watcher.on_tick(run)
                    if is_asked():
                        raise KeyboardInterrupt

                run_it: Callable[..., Any] = runner.execute_demo if is_demo else runner.execute
                extra = {"on_filled": watcher.on_filled} if is_demo else {}
                listener = runner.Listener(
                    on_start=watcher.on_start,
                    on_batch=watcher.on_batch,
                    on_tick=on_tick,
                    on_rows=watcher.on_rows,
                    is_stopping=is_asked,
                )
                return run_it(spark, file, setting, has_checks=has_checks, listener=listener, **extra)
        except KafkaliteError as error:
            if spark_log is not None and error.hint == part("spark_errors").SEE_LOG:
                error.hint = f"{spark_log} has Spark's messages"
            raise


def _hint_at_warm_up(master: str) -> None:
    if part("runner").is_local(master) and _fast_start().can_make_class_archive():
        invocation.say("to start Spark in half the time, run once: kl pipeline warm-up")


def _fast_start() -> Any:
    return import_module("sparkbridge.local.fast_start")


def _check_writable(log: Path | None) -> None:
    if log is None:
        return
    try:
        log.open("a").close()
    except OSError as problem:
        raise UsageError(f"--spark-log {log} cannot be written: {problem.strerror}") from None


def _valid_file(path: Path, overrides: tuple[str, ...]) -> Any:
    files = part("files")
    file = _read(files, path, overrides)
    for problem in file.problems:
        if problem.is_warning or len(file.errors) > 1:
            click.echo(files.tell(problem, shown_path(file.path)), err=True)
    if len(file.errors) == 1:
        raise UsageError(files.tell(file.errors[0], shown_path(file.path)))
    if file.errors:
        raise UsageError(f"{shown_path(file.path)} has {plural(len(file.errors), 'problem')}")
    return file


def _trigger(text: str | None, once: bool) -> str:
    definition = part("definition")
    if once:
        return str(definition.AVAILABLE_NOW)
    if text is None:
        return ""
    try:
        return str(definition.parse_trigger(text))
    except ValueError as problem:
        raise UsageError(f"--trigger {problem}") from None


@contextlib.contextmanager
def brokers(current: invocation.Invocation, *, is_demo: bool) -> Iterator[str]:
    """Yield the bootstrap servers. A demo without -b and --context gets an embedded broker.

    A demo ignores the brokers in the environment and of the context in use, because it creates topics and
    these brokers may be a real cluster.
    """
    if not _has_own_broker(current, is_demo=is_demo):
        yield current.bootstrap_servers
        return
    with own_broker() as servers:
        yield servers


def _has_own_broker(current: invocation.Invocation, *, is_demo: bool) -> bool:
    return is_demo and not current.bootstrap and not current.context


@contextlib.contextmanager
def own_broker() -> Iterator[str]:
    """Run an in-memory broker on the event loop that blocking clients share. Yield the broker's address."""
    from kafkalite.broker.broker import Broker
    from kafkalite.loop_thread import shared_loop_thread

    thread = shared_loop_thread()

    async def start() -> Broker:
        broker = Broker(listeners=("127.0.0.1:0",))
        await broker.start()
        return broker

    broker = thread.run(start())
    try:
        yield broker.bootstrap_servers
    finally:
        thread.run(broker.stop())


def _setting(
    file: Any,
    servers: str,
    security: dict[str, str],
    trigger: str,
    checkpoint: str | None,
    stack: contextlib.ExitStack,
    *,
    is_demo: bool,
) -> Any:
    if is_demo:
        if file.pipeline.demo is None:
            raise NotFoundError(
                f"{shown_path(file.path)} has no [demo]",
                hint='[demo] load = "load.py:load" creates input, see docs/pipelines.md',
            )
        return stack.enter_context(part("runner").demo_setting(servers, security))
    if checkpoint is None and file.pipeline.checkpoint:
        checkpoint = file.locate(file.pipeline.checkpoint)
    if checkpoint is None and file.pipeline.needs_checkpoint:
        raise UsageError(
            "the pipeline has no checkpoint directory",
            hint='--checkpoint DIR, or checkpoint = "DIR" in [pipeline]',
        )
    return part("engine").Setting(servers, checkpoint, trigger, security=security)


def _check_topics(declared: Any) -> None:
    """Raise NotFoundError if a source topic is missing, and ConnectionFailedError if no broker responds.

    Nothing is checked if the source has its own kafka.bootstrap.servers.
    """
    from kafkalite.cli import connect

    if any(name.lower() == "kafka.bootstrap.servers" for name in declared.source.options):
        return

    there = [topic.name for topic in connect.ask_admin(lambda admin: admin.list_topics())]
    for topic in declared.source.subscribe:
        if topic not in there:
            hint = did_you_mean(topic, there, otherwise=f"kl topic create {topic}")
            raise NotFoundError(f"[source] topic {topic!r} does not exist", hint=hint)


@contextlib.contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C or SIGTERM was received.

    The first signal raises no exception, because that could break a running call to the JVM. A second signal
    raises KeyboardInterrupt. pyspark's own handler, which fails the query, is replaced during the block.
    """
    has_come = False

    def on_signal(number: int, frame: Any) -> None:
        nonlocal has_come
        if has_come:
            raise KeyboardInterrupt
        has_come = True

    def is_asked() -> bool:
        return has_come

    try:
        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, the only one that handles signals
        yield is_asked
        return
    try:
        yield is_asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- warm-up ---------------------------------------------------------------------------------------


@pipeline.command("warm-up", short_help="Make Spark start in half the time.")
@invocation.debug_option
def warm_up() -> None:
    """Cache the Java classes that Spark loads, so that local runs start in half the time.

    This takes half a minute, and 200 MB in ~/.cache/kafkalite/spark or in the directory
    KAFKALITE_SPARK_CACHE. The directory may be removed at any time. Repeat the command after an update of
    Java or pyspark.
    """
    part("runner").require_spark()
    fast_start = _fast_start()
    archive = fast_start.class_archive()
    if archive is not None:
        write(f"{archive} exists already.\n")
        return
    invocation.say("starting Spark once to cache its classes ...")
    began_s = time.monotonic()
    archive = fast_start.make_class_archive()
    size_mb = archive.stat().st_size / 1_000_000
    write(f"{archive}: {size_mb:,.0f} MB, created in {time.monotonic() - began_s:.0f} s.\n")
