"""The root command, and the mapping of exceptions to messages and exit codes."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any, Final

import click

from kafkalite.cli import exit_codes
from kafkalite.cli.habits import translate
from kafkalite.cli.invocation import Invocation, Terminated, check_environment, listing_options
from kafkalite.cli.lazy_group import LazyCommand, LazyGroup
from kafkalite.cli.stdio import silence_stdout
from kafkalite.errors import ConfigError, KafkaliteError, MissingExtraError
from kafkalite.log_fields import escaped

_DAILY: Final = "Every day"
_CLUSTER: Final = "Topics and brokers"
_TOOLS: Final = "Tools"

COMMANDS: Final = {
    "dev": LazyCommand("Start a broker or a cluster for development.", _DAILY),
    "produce": LazyCommand("Send lines, JSON or files to a topic.", _DAILY),
    "consume": LazyCommand("Print a topic's records, live or in a range.", _DAILY),
    "cat": LazyCommand("The same as consume.", _DAILY, "kafkalite.cli.consume:consume"),
    "fetch": LazyCommand("Print one record: Topic-Partition-Offset.", _DAILY),
    "topic": LazyCommand("Create, list, describe, alter, delete.", _CLUSTER),
    "group": LazyCommand(
        "Consumer groups: members, lag, reset, explain.", _CLUSTER, "kafkalite.cli.group_offsets:group"
    ),
    "txn": LazyCommand("Transactions: list, describe, abort, find hanging.", _CLUSTER),
    "offsets": LazyCommand("First and last offsets of partitions.", _CLUSTER),
    "cluster": LazyCommand(
        "Status, brokers, balance, reassign, elect, features.",
        _CLUSTER,
        "kafkalite.cli.cluster_features:cluster",
    ),
    "metadata": LazyCommand("The metadata as a tree, and its quorum.", _CLUSTER),
    "acl": LazyCommand("Access control rules: add, remove, list, check.", _CLUSTER),
    "user": LazyCommand("Users and their passwords.", _CLUSTER),
    "server": LazyCommand("Start a broker; format its data directory.", _CLUSTER),
    "config": LazyCommand("Every option; settings of topics and brokers.", _CLUSTER),
    "quota": LazyCommand("Quotas of clients: set, unset, list, describe.", _CLUSTER),
    "context": LazyCommand("Names of clusters, instead of addresses.", _CLUSTER),
    "pipeline": LazyCommand("Spark pipelines from a file.", _TOOLS),
    "log": LazyCommand("Inspect log files; data directories.", _TOOLS, "kafkalite.cli.log_dirs:log"),
    "bench": LazyCommand("Measure produce, consume, end to end.", _TOOLS),
    "cheat": LazyCommand("Commands of other tools beside those of kl.", _TOOLS),
    "conformance": LazyCommand("Check that a server speaks the protocol.", _TOOLS),
    "tls": LazyCommand("Certificates for development.", _TOOLS),
    "completion": LazyCommand("Tab completion for a shell.", _TOOLS),
    "version": LazyCommand("Versions of kafkalite and its dependencies.", _TOOLS),
}

_EPILOG: Final = """\b
Try:
  kl dev                                  a broker on localhost:9092
  echo hello | kl produce greetings       one record
  kl consume greetings -e                 print what is there, then exit
  kl consume greetings -f '%T %k %s\\n'    as kcat formats it

\b
Exit codes: 0 ok, 1 failed, 2 usage, 3 cannot connect, 4 not found, 5 exists,
6 not allowed, 7 timed out, 8 partial failure, 9 check failed, 129 SIGHUP,
130 Ctrl-C, 143 SIGTERM."""

_CONTEXT_SETTINGS: Final[dict[str, Any]] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _print_version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        from kafkalite import __version__

        click.echo(f"kafkalite {__version__}")
        context.exit()


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    epilog=_EPILOG,
    context_settings=_CONTEXT_SETTINGS,
    invoke_without_command=True,
)
@listing_options
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Version."
)
@click.pass_context
def root(context: click.Context) -> None:
    """kafkalite: a distributed commit log, from the command line."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def run(arguments: Sequence[str], *, command: click.Command | None = None, name: str = "kl") -> int:
    """Run one command line in this process and return the exit code, also if the command fails.

    ``command`` (None: the root command) is the command to run, and ``name`` its name in messages.
    """
    invocation = Invocation(debug="--debug" in arguments)
    try:
        if list(arguments[:1]) == ["help"]:
            arguments = [*arguments[1:], "--help"]
        words = translate(arguments, COMMANDS) if command is None else list(arguments)
        if words != list(arguments) and sorted(words) != sorted(arguments):
            _echo(f"kl: in kl's words: {name} {shlex.join(words)}")
        code = _invoke(command or root, name, words, invocation)
        sys.stdout.flush()
        return code
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as problem:
        _show_usage_problem(problem)
        return exit_codes.USAGE if isinstance(problem, click.UsageError) else exit_codes.FAILED
    except (KeyboardInterrupt, click.Abort):
        return exit_codes.INTERRUPTED
    except Terminated as terminated:
        return terminated.exit_code
    except BrokenPipeError:
        return _pipe_closed()
    except Exception as error:
        for line in _explained(error):
            _echo(line)
        if _is_of_stdout(error):
            silence_stdout()
        if invocation.debug:
            import traceback

            _echo("".join(traceback.format_exception(error)).rstrip())
        return exit_codes.exit_code_for(error)


def _invoke(command: click.Command, name: str, arguments: list[str], invocation: Invocation) -> int:
    instruction = os.environ.get("_KL_COMPLETE")
    if instruction:
        from click.shell_completion import shell_complete

        return shell_complete(root, {}, "kl", "_KL_COMPLETE", instruction)
    check_environment(os.environ)
    with command.make_context(name, arguments, obj=invocation) as context:
        command.invoke(context)
    return exit_codes.OK


def _pipe_closed() -> int:
    """Discard further output, because the reader of stdout closed the pipe. Return exit code 0."""
    silence_stdout()
    return exit_codes.OK


def _echo(text: str) -> None:
    try:
        click.echo(text, err=True)
    except OSError:  # stderr is closed too
        return


def _show_usage_problem(problem: click.ClickException) -> None:
    context = problem.ctx if isinstance(problem, click.UsageError) else None
    if isinstance(problem, click.exceptions.NoArgsIsHelpError):
        _echo(problem.format_message())
        return
    message = problem.format_message() or type(problem).__name__
    _echo(f"kl: {message[:1].lower()}{message[1:].rstrip('.')}")
    if context is not None:
        _echo(f"    try: {context.command_path} --help")


#: Errors of a full disk or quota, and of a closed standard output.
_NOT_WRITTEN: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF}
_CLOSED_HINT: Final = "    hint: it is closed (>&-); >/dev/null discards the output"

_NEXT_COMMAND: Final = {
    exit_codes.CANNOT_CONNECT: "kl dev      starts a broker here;  -b HOST:PORT names another",
    exit_codes.NOT_FOUND: "kl topic list",
}


def _is_of_stdout(error: Exception) -> bool:
    """Whether writing to stdout failed with ``error``. Errors of files have a name; this one has none."""
    return isinstance(error, OSError) and not error.filename and error.errno in _NOT_WRITTEN


def _explained(error: Exception) -> list[str]:
    """Return the lines to print on stderr: the message of ``error`` and hints."""
    if isinstance(error, KafkaliteError):
        hint = [f"    hint: {escaped(error.hint)}"] if error.hint else []
        command = _next_command(error)
        attempt = [f"    try: {command}"] if command and command not in error.hint else []
        # Brokers choose the texts of their errors, so control characters are escaped (S13).
        message = "\n    ".join(map(escaped, (error.message or type(error).__name__).split("\n")))
        return [f"kl: {message}", *hint, *attempt]
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("kafkalite"):
        return _explained(MissingExtraError("this command", error.name or "", "all"))
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        if _is_of_stdout(error):
            where = "stdout can't be written: "
        hint = [_CLOSED_HINT] if where and error.errno == errno.EBADF else []
        return [f"kl: {where}{error.strerror or str(error) or type(error).__name__}", *hint]
    return [
        f"kl: unexpected {type(error).__name__}: {error}",
        "    this is a bug in kafkalite: please report it with the output of the same command with --debug",
    ]


def _next_command(error: KafkaliteError) -> str:
    if isinstance(error, ConfigError):
        from kafkalite.cli.registries import registries

        known = any(error.key in registry for registry in registries().values())
        return f"kl config explain {error.key}" if known else ""
    from kafkalite.errors import TopicAlreadyExistsError, UnknownTopicOrPartitionError

    if isinstance(error, UnknownTopicOrPartitionError):
        return "kl topic list"
    if isinstance(error, TopicAlreadyExistsError):
        return "the same with --if-not-exists"
    return _NEXT_COMMAND.get(exit_codes.exit_code_for(error), "") if not error.hint else ""
