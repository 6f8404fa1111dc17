"""Options that most commands accept: brokers, client properties, timeout, output format.

They may be given before or after the command (``kl -b host topic list``, ``kl topic list -b host``). Both
positions set the same ``Invocation``. If an option is given in both, the later value wins.
"""

# Tests: tests/cli/test_app.py

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

import click

from kafkalite.cli import contexts
from kafkalite.cli.argument_types import NotEmpty
from kafkalite.cli.exit_codes import HUNG_UP, TERMINATED, TimedOutError, UsageError
from kafkalite.durations import parse_duration
from kafkalite.errors import KafkaliteError
from kafkalite.parent_pipe import PARENT_PIPE
from kafkalite.suggestions import did_you_mean

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_BOOTSTRAP_SERVERS: Final = "localhost:9092"
BOOTSTRAP_VARIABLE: Final = "KL_BOOTSTRAP_SERVERS"
PROGRAM_VARIABLE: Final = (
    "KL_PROGRAM"  #: the name under which the user calls kl, set by the scripts of a checkout
)
#: Every variable that kl or a script of a checkout reads.
VARIABLES: Final = (
    BOOTSTRAP_VARIABLE,
    PROGRAM_VARIABLE,
    "KL_LOG_FORMAT",
    "KL_LOG_LEVEL",
    "KL_DEV_DATA",
    PARENT_PIPE,
)
OutputFormat = Literal["table", "wide", "name", "json", "jsonl", "yaml"]
OUTPUT_FORMATS: Final = ("table", "wide", "name", "json", "jsonl", "yaml")


def program_name() -> str:
    """Return the command with which the user calls ``kl``, quoted for a shell."""
    return shlex.quote(os.environ.get(PROGRAM_VARIABLE, "kl"))


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise UsageError for an unknown variable KL_… whose name resembles one of VARIABLES.

    Print a warning for any other unknown variable KL_…, which may belong to another program.
    """
    for name in environment:
        if name.startswith("KL_") and name not in VARIABLES:
            hint = did_you_mean(name, VARIABLES)
            if hint:
                raise UsageError(f"the environment variable {name} is not known", hint=hint)
            say(f"the environment variable {name} is ignored: kl has none of this name")


@dataclass(slots=True)
class Invocation:
    bootstrap: str | None = None
    context: str | None = None
    properties: dict[str, str] = field(default_factory=dict)
    timeout_ms: int | None = None
    debug: bool = False
    output: str = "table"

    @property
    def bootstrap_servers(self) -> str:
        return self._servers_and_source()[0]

    @property
    def bootstrap_source(self) -> str:
        return self._servers_and_source()[1]

    def _servers_and_source(self) -> tuple[str, str]:
        if self.bootstrap:
            return self.bootstrap, "flag -b"
        set_here = os.environ.get(BOOTSTRAP_VARIABLE)
        if set_here and not self.context:
            return set_here, f"environment {BOOTSTRAP_VARIABLE}"
        known = contexts.read()
        used = self.context or known.used
        if used:
            return known.get(used).servers, f"context {used}"
        return DEFAULT_BOOTSTRAP_SERVERS, "default"

    @property
    def all_properties(self) -> dict[str, str]:
        """The client properties of -X and, if the brokers come from a context, of that context. -X wins."""
        source = self.bootstrap_source
        of_context = {}
        if source.startswith("context "):
            of_context = dict(contexts.read().get(source.removeprefix("context ")).properties)
        return of_context | self.properties


def current() -> Invocation:
    return click.get_current_context().ensure_object(Invocation)


def _remember(name: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    def callback(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
        if value is not None and value is not False and value != ():
            setattr(ctx.ensure_object(Invocation), name, value)
        return value

    return callback


def _remember_properties(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> None:
    try:
        settings = parse_settings(values, "-X request.timeout.ms=5000")
    except UsageError as problem:
        raise click.BadParameter(problem.message) from None
    ctx.ensure_object(Invocation).properties.update(settings)


def _complete_property(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Any:
    from kafkalite.cli.registries import complete_setting

    return complete_setting("producer", "consumer", suffix="=")(ctx, parameter, incomplete)


def complete_contexts(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in contexts.read().known if name.startswith(incomplete)]


def duration_ms(text: str) -> int:
    """Parse ``10s`` or ``1h30m`` into milliseconds. Raises click's BadParameter."""
    try:
        return parse_duration(text)
    except ValueError as problem:
        raise click.BadParameter(str(problem)) from None


def apply(function: F, *decorators: Callable[[F], F]) -> F:
    """Decorate ``function`` with ``decorators``, the last one first."""
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def number_option(*names: str, minimum: int = 1, **attributes: Any) -> Callable[[F], F]:
    """Return a decorator that adds an option whose value is an integer of at least ``minimum``."""
    return click.option(*names, type=click.IntRange(min=minimum), metavar="N", **attributes)


def debug_option(function: F) -> F:
    return click.option(
        "--debug",
        is_flag=True,
        expose_value=False,
        callback=_remember("debug"),
        help="Show the traceback of an unexpected error.",
    )(function)


def client_options(function: F) -> F:
    """Add the options of commands that connect to a broker: -b, --context, -X, --timeout and --debug."""
    return apply(
        function,
        click.option(
            "-b",
            "--bootstrap-servers",
            type=NotEmpty("the list of brokers"),
            metavar="HOST:PORT,…",
            expose_value=False,
            callback=_remember("bootstrap"),
            help=f"Brokers to connect to.  [env: {BOOTSTRAP_VARIABLE}; default: {DEFAULT_BOOTSTRAP_SERVERS}]",
        ),
        click.option(
            "--context",
            type=NotEmpty("the name of a context"),
            metavar="NAME",
            expose_value=False,
            callback=_remember("context"),
            help="Brokers of this context; see 'kl context'.",
            shell_complete=complete_contexts,
        ),
        click.option(  # the name in Kafka's scripts
            "--bootstrap-server",
            type=NotEmpty("the list of brokers"),
            expose_value=False,
            hidden=True,
            callback=_remember("bootstrap"),
        ),
        click.option(
            "-X",
            "properties",
            multiple=True,
            metavar="NAME=VALUE",
            expose_value=False,
            callback=_remember_properties,
            shell_complete=_complete_property,
            help="Any client property, such as linger.ms=20; see 'kl config list'.",
        ),
        click.option(
            "--timeout",
            type=duration_ms,
            metavar="TIME",
            expose_value=False,
            callback=_remember("timeout_ms"),
            help="Give up after this long (10s, 1m).",
        ),
        debug_option,
    )


def output_choice(formats: Sequence[str], more: str = "Output format.") -> Callable[[F], F]:
    """Return a decorator that adds the option -o for ``formats``. Its help text begins with ``more``."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(formats),
        expose_value=False,
        callback=_remember("output"),
        help=f"{more}  [default: table]",
    )


#: Adds -o, the output option of commands that print a listing.
output_option: Final = output_choice(OUTPUT_FORMATS)


def listing_options(function: F) -> F:
    """Add the options that ``client_options`` adds, and -o."""
    return apply(function, client_options, output_option)


def now_ms() -> int:
    from kafkalite.clock import SystemClock

    return SystemClock().wall_ms()


def run(main: Callable[[], Coroutine[Any, Any, T]], *, timeout_ms: int | None = None) -> T:
    """Return the result of ``main()``, which runs on a new event loop (uvloop's if it is installed).

    Raises TimedOutError if ``timeout_ms`` passes first. In the main thread, Ctrl-C and the signals in
    ``ending_signals()`` cancel the coroutine, so that it can clean up: for example, a consumer leaves its
    group. Then KeyboardInterrupt or Terminated is raised.
    """
    import asyncio

    factory: Callable[[], Any] | None = None
    if sys.platform != "win32":
        try:
            import uvloop
        except ImportError:
            pass
        else:
            factory = uvloop.new_event_loop

    async def bounded() -> T:
        with _cancelled_by_signals():
            return await within(timeout_ms, main)

    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(bounded())


async def within(timeout_ms: int | None, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Return the result of ``main()``. Raises TimedOutError if ``timeout_ms`` (None: no limit) passes."""
    import asyncio

    if timeout_ms is None:
        return await main()
    try:
        async with asyncio.timeout(timeout_ms / 1000) as limit:
            return await main()
    except TimeoutError:
        if not limit.expired():
            raise
        warning = last_warning()
        raise TimedOutError(
            f"gave up after {timeout_ms / 1000:g} s{warning}",
            hint="" if warning else "a longer --timeout waits longer",
        ) from None


class Terminated(BaseException):
    """SIGTERM or SIGHUP ended the command. ``except Exception`` does not catch this error."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.exit_code = TERMINATED if number == signal.SIGTERM else HUNG_UP


def ending_signals() -> list[signal.Signals]:
    """Return the signals that request a clean end: SIGTERM, and SIGHUP unless it is ignored, as by nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM] if is_ignored else [signal.SIGTERM, signal.SIGHUP]


@contextmanager
def _cancelled_by_signals() -> Iterator[None]:
    """Cancel the current task if SIGTERM or SIGHUP arrives during the block, then raise Terminated.

    After that signal, SIGTERM ends the process at once. SIGHUP is ignored then, because a closed terminal
    often sends it twice. Outside the main thread, signals are not handled.
    """
    import asyncio

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    numbers = ending_signals()
    received: signal.Signals | None = None

    def on_signal(number: signal.Signals) -> None:
        nonlocal received
        loop.remove_signal_handler(signal.SIGTERM)
        if received is None and task is not None:
            received = number
            task.cancel()

    try:
        for number in numbers:
            loop.add_signal_handler(number, on_signal, number)
    except (NotImplementedError, RuntimeError, ValueError):  # not the main thread, or no signals here
        yield
        return
    try:
        yield
    except asyncio.CancelledError:
        if received is not None:
            raise Terminated(received) from None
        raise
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def run_command(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Return the result of ``main()``, and print the clients' warnings.

    Raises TimedOutError if it takes longer than --timeout.
    """
    listen_to_clients()
    return run(main, timeout_ms=current().timeout_ms)


def last_warning() -> str:
    """Return ``; the last error: …`` with the client library's last warning, or "" if none is recent."""
    from kafkalite.cli.client_warnings import installed

    handler = installed()
    return f"; the last error: {handler.current}" if handler is not None and handler.current else ""


def listen_to_clients() -> None:
    """Print the client library's warnings on stderr from now on; with --debug, all log records."""
    from kafkalite.cli.client_warnings import install

    install(debug=current().debug)


def say(message: str) -> None:
    """Print one line on stderr."""
    click.echo(f"kl: {message}", err=True)


def confirm(question: str, refusal: str) -> None:
    """Ask ``question`` on stderr. Raises KafkaliteError(``refusal``) unless the answer is y or yes."""
    click.echo(f"{question} [y/N] ", err=True, nl=False)
    answer = sys.stdin.readline()
    if not answer.endswith("\n"):  # the end of the input
        click.echo(err=True)
    if answer.strip().lower() not in {"y", "yes"}:
        raise KafkaliteError(refusal, hint="--yes does it without asking")


def parse_settings(texts: Iterable[str], example: str) -> dict[str, str]:
    """Return ``name=value`` texts as {name: value}.

    Raises UsageError, whose message contains ``example``, for a text without name or equals sign.
    """
    settings: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"{text!r} is not name=value, for example {example}")
        settings[name.strip()] = value.strip()
    return settings


def parse_changes(texts: Iterable[str], unset: Iterable[str], example: str) -> dict[str, str | None]:
    """Return the changes of settings: a value for each ``name=value``, and None for each name in ``unset``.

    Raises UsageError for other texts, and if a setting is both changed and unset.
    """
    settings = parse_settings(texts, example)
    for name in unset:
        if name in settings:
            raise UsageError(f"{name} is both set and unset")
    return settings | dict.fromkeys(unset)


def topic_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return ``names`` without duplicates. Raises UsageError if there is no name."""
    found = tuple(dict.fromkeys(names))
    if not found:
        raise UsageError("which topic? Give its name as an argument", hint="kl topic list shows them")
    return found
