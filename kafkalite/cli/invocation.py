"""Options that every command accepts: brokers, client properties, timeout, output format.

They may be given before and after the command (``kl -b host topic list``, ``kl topic list -b host``). Both
positions set the same ``Invocation``, and the later value wins.
"""

# Tests: tests/cli/test_app.py

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

import click

from kafkalite.cli.exit_codes import TimedOutError, UsageError
from kafkalite.durations import parse_duration
from kafkalite.errors import KafkaliteError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_BOOTSTRAP_SERVERS: Final = "localhost:9092"
BOOTSTRAP_VARIABLE: Final = "KL_BOOTSTRAP_SERVERS"
PROGRAM_VARIABLE: Final = (
    "KL_PROGRAM"  #: the name under which the user calls kl, set by the scripts of a checkout
)
OutputFormat = Literal["table", "wide", "name", "json", "jsonl", "yaml"]
OUTPUT_FORMATS: Final = ("table", "wide", "name", "json", "jsonl", "yaml")


def program_name() -> str:
    """Return the command with which the user calls ``kl``, quoted for a shell."""
    return shlex.quote(os.environ.get(PROGRAM_VARIABLE, "kl"))


@dataclass(slots=True)
class Invocation:
    bootstrap: str | None = None
    properties: dict[str, str] = field(default_factory=dict)
    timeout_ms: int | None = None
    debug: bool = False
    output: str = "table"

    @property
    def bootstrap_servers(self) -> str:
        return self.bootstrap or os.environ.get(BOOTSTRAP_VARIABLE) or DEFAULT_BOOTSTRAP_SERVERS

    @property
    def bootstrap_source(self) -> str:
        if self.bootstrap:
            return "flag -b"
        return f"environment {BOOTSTRAP_VARIABLE}" if os.environ.get(BOOTSTRAP_VARIABLE) else "default"


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


def duration_ms(text: str) -> int:
    """Parse ``10s`` or ``1h30m`` into milliseconds. Raises click's BadParameter."""
    try:
        return parse_duration(text)
    except ValueError as problem:
        raise click.BadParameter(str(problem)) from None


def apply(function: F, *decorators: Callable[[F], F]) -> F:
    """Decorate ``function`` with ``decorators``. The first decorator is the outermost."""
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def number_option(*names: str, minimum: int = 1, **attributes: Any) -> Callable[[F], F]:
    """Return a decorator that adds an option N, an integer of at least ``minimum``."""
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
    """Add -b, -X, --timeout and --debug, the options of every command that connects to a broker."""
    return apply(
        function,
        click.option(
            "-b",
            "--bootstrap-servers",
            metavar="HOST:PORT,…",
            expose_value=False,
            callback=_remember("bootstrap"),
            help=f"Brokers to connect to.  [env: {BOOTSTRAP_VARIABLE}; default: {DEFAULT_BOOTSTRAP_SERVERS}]",
        ),
        click.option(  # the name in Kafka's scripts
            "--bootstrap-server", expose_value=False, hidden=True, callback=_remember("bootstrap")
        ),
        click.option(
            "-X",
            "properties",
            multiple=True,
            metavar="NAME=VALUE",
            expose_value=False,
            callback=_remember_properties,
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
    """Add the options of a command that prints a listing from a broker: client_options and -o."""
    return apply(function, client_options, output_option)


def now_ms() -> int:
    from kafkalite.clock import SystemClock

    return SystemClock().wall_ms()


def run(main: Callable[[], Coroutine[Any, Any, T]], *, timeout_ms: int | None = None) -> T:
    """Run a coroutine on a new event loop, which is uvloop's if that is installed.

    Raises TimedOutError if ``timeout_ms`` passes first, and KeyboardInterrupt on Ctrl-C after clean-up.
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
        if timeout_ms is None:
            return await main()
        try:
            async with asyncio.timeout(timeout_ms / 1000) as limit:
                return await main()
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimedOutError(
                f"gave up after {timeout_ms / 1000:g} s", hint="a longer --timeout waits longer"
            ) from None

    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(bounded())


def run_command(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine that connects to brokers. It may take as long as --timeout permits."""
    listen_to_clients()
    return run(main, timeout_ms=current().timeout_ms)


def listen_to_clients() -> None:
    """Print the client library's warnings on stderr."""
    from kafkalite.cli.client_warnings import install

    install(debug=current().debug)


def say(message: str) -> None:
    """Print one line on stderr."""
    click.echo(f"kl: {message}", err=True)


def confirm(question: str, refusal: str) -> None:
    """Ask ``question`` on stderr. Raises KafkaliteError with the text ``refusal`` if the answer is no."""
    click.echo(f"{question} [y/N] ", err=True, nl=False)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise KafkaliteError(refusal, hint="--yes does it without asking")


def parse_settings(texts: Iterable[str], example: str) -> dict[str, str]:
    """Return ``name=value`` texts as a mapping. Raises UsageError, which shows the ``example``."""
    settings: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"{text!r} is not name=value, for example {example}")
        settings[name.strip()] = value.strip()
    return settings


def topic_names(
    positional: Iterable[str], flags: Sequence[str], command: str, rest: str = ""
) -> tuple[str, ...]:
    """Return the topics given as arguments or, as in Kafka's scripts, by ``--topic``, without duplicates.

    If ``--topic`` was used, prints a shorter command line on stderr, which consists of ``command``, the
    topics and ``rest``. Raises UsageError if no topic is given.
    """
    names = tuple(dict.fromkeys((*positional, *flags)))
    if not names:
        raise UsageError("which topic? Give its name as an argument", hint="kl topic list shows them")
    if flags:
        say(f"the short form: {command} {' '.join(names)}{rest}")
    return names
