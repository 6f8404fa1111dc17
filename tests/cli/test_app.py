"""The root command: start-up, error messages, exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from kafkalite import cli, errors
from kafkalite.cli import app, exit_codes, invocation
from kafkalite.cli.exit_codes import exit_code_for
from kafkalite.cli.lazy_group import LazyGroup
from kafkalite.cli.server import stop_signals

Kl = Callable[..., Any]

HEAVY = ("asyncio", "uvloop", "rich", "msgpack", "structlog", "yaml", "kafkalite.client", "kafkalite.broker")


def modules_after(arguments: str, repository: Path) -> set[str]:
    code = (
        "import json, sys\nfrom kafkalite.cli.app import run\n"
        f"code = run({arguments.split()!r})\n"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "--version",
        "topic --help",
        "produce --help",
        "consume --help",
        "dev --help",
        "completion bash",
    ],
)
def test_help_loads_nothing_heavy(arguments: str, repository: Path) -> None:
    loaded = modules_after(arguments, repository)
    assert not [heavy for heavy in HEAVY if heavy in loaded]


def test_help_names_every_command(kl: Kl) -> None:
    result = kl("--help")
    assert result.code == 0
    for name in app.COMMANDS:
        assert f"  {name} " in result.text
    assert "Exit codes: 0 ok" in result.text


def test_without_a_command_there_is_help(kl: Kl) -> None:
    assert kl().text == kl("--help").text
    assert kl().code == 0


def commands(group: LazyGroup | click.Group, path: str = "kl") -> list[tuple[str, click.Command]]:
    context = click.Context(group)
    found: list[tuple[str, click.Command]] = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found.append((f"{path} {name}", command))
        if isinstance(command, click.Group):
            found += commands(command, f"{path} {name}")
    return found


@pytest.mark.parametrize(("path", "command"), commands(app.root), ids=lambda value: str(value))
def test_every_command_loads_and_explains_itself(path: str, command: click.Command, kl: Kl) -> None:
    assert command.help
    result = kl(*path.split()[1:], "--help")
    assert (result.code, result.err) == (0, b"")
    assert result.text.startswith(f"Usage: {path} ")
    assert "\\b" not in result.text
    assert max(map(len, result.text.splitlines())) <= 100
    for parameter in command.params:
        assert isinstance(parameter, click.Argument) or parameter.hidden or parameter.help or parameter.name  # type: ignore[attr-defined]


def test_short_helps_are_short() -> None:
    for entry in app.COMMANDS.values():
        assert len(entry.short_help) <= 60
        assert entry.short_help.endswith(".")


@pytest.mark.parametrize(
    "name", ["acl", "cluster", "config", "context", "group", "log", "metadata", "topic", "txn", "user"]
)
def test_descriptions_of_commands_are_not_cut_off(kl: Kl, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = kl(name, "--help").text.partition("Commands:\n")[2]
    assert listed
    assert "..." not in listed
    assert max(map(len, listed.splitlines())) <= 80


def test_an_unknown_command_gets_the_nearest(kl: Kl) -> None:
    result = kl("topci")
    assert result.code == exit_codes.USAGE
    assert result.told == "kl: there is no command 'topci'; did you mean 'kl topic'?\n    try: kl --help\n"
    assert "see 'kl --help'" in kl("xyzzy").told


def test_a_bad_option_is_usage(kl: Kl) -> None:
    result = kl("produce", "t", "--rate", "fast")
    assert result.code == exit_codes.USAGE
    assert "'fast' is not a rate; write for example 100/s" in result.told
    assert "try: kl produce --help" in result.told


@pytest.mark.parametrize(
    "arguments", [("-X", "novalue", "topic", "list"), ("--timeout", "soon", "topic", "list")]
)
def test_a_bad_global_option_is_usage(kl: Kl, arguments: tuple[str, ...]) -> None:
    assert kl(*arguments).code == exit_codes.USAGE


def test_version(kl: Kl) -> None:
    assert kl("--version").text.startswith("kafkalite 0.")
    assert json.loads(kl("version", "-o", "json").out)["kafkalite"].count(".") == 2


# --- errors ----------------------------------------------------------------------------------------


@pytest.fixture
def failing(kl: Kl, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a command that raises."""

    def run(error: BaseException, *flags: str) -> Any:
        def invoke(context: click.Context) -> None:
            raise error

        monkeypatch.setattr(app.root, "invoke", invoke)
        return kl(*flags, "version")

    return run


def test_a_known_error_has_a_message_a_hint_and_a_next_command(failing: Kl) -> None:
    result = failing(errors.UnknownTopicOrPartitionError("topic 'x' does not exist", hint="create it"))
    assert result.code == exit_codes.NOT_FOUND
    assert result.told == "kl: topic 'x' does not exist\n    hint: create it\n    try: kl topic list\n"


def test_a_config_error_names_the_command_that_explains(failing: Kl) -> None:
    result = failing(errors.ConfigError(key="linger.ms", value="x", allowed="a whole number", source="-X"))
    assert result.code == exit_codes.USAGE
    assert "linger.ms is 'x', but must be a whole number (in -X)" in result.told
    assert "try: kl config explain linger.ms" in result.told


def test_the_text_of_a_broker_controls_no_terminal(failing: Kl) -> None:
    """S13: an error of a broker must not clear the screen, or look like a line of kl."""
    refused = errors.ClientError("refused\x1b[2J\nkl: done", hint="a\x07hint")
    assert failing(refused).told == "kl: refused\\x1b[2J\n    kl: done\n    hint: a\\x07hint\n"


def test_no_traceback_unless_asked(failing: Kl) -> None:
    assert "Traceback" not in failing(errors.ClientError("no")).told
    assert "Traceback" in failing(errors.ClientError("no"), "--debug").told


def test_an_unexpected_error_is_one_line_and_where_to_report_it(failing: Kl) -> None:
    result = failing(RuntimeError("boom"))
    assert result.code == exit_codes.FAILED
    assert result.told.startswith("kl: unexpected RuntimeError: boom\n")
    assert "please report it" in result.told
    assert "Traceback" not in result.told
    assert "Traceback" in failing(RuntimeError("boom"), "--debug").told


def test_a_system_error_names_the_file(failing: Kl) -> None:
    result = failing(FileNotFoundError(2, "No such file or directory", "x.log"))
    assert (result.code, result.told) == (exit_codes.NOT_FOUND, "kl: x.log: No such file or directory\n")
    assert failing(PermissionError(13, "Permission denied", "x")).code == exit_codes.NOT_ALLOWED
    assert "Traceback" in failing(OSError("odd"), "--debug").told


@pytest.mark.parametrize(
    "error", [TimeoutError(), OSError(), errors.KafkaliteError(""), click.ClickException("")]
)
def test_an_error_without_a_text_is_named(failing: Kl, error: Exception) -> None:
    assert failing(error).told.lower() == f"kl: {type(error).__name__}\n".lower()


def test_interrupts_are_quiet(failing: Kl) -> None:
    for error in (KeyboardInterrupt(), click.Abort()):
        assert failing(error) == (exit_codes.INTERRUPTED, b"", b"")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (exit_codes.UsageError("x"), 2),
        (errors.ConfigError(key="k", value=1, allowed="x"), 2),
        (errors.InvalidTopicError(), 2),
        (errors.ConnectionFailedError("x"), 3),
        (errors.UnknownTopicOrPartitionError(), 4),
        (exit_codes.NotFoundError("x"), 4),
        (errors.TopicAlreadyExistsError(), 5),
        (exit_codes.ExistsAlreadyError("x"), 5),
        (errors.SslAuthenticationError("x"), 6),
        (errors.SaslAuthenticationError("x"), 6),
        (errors.ClusterAuthorizationFailedError(), 6),
        (errors.TopicAuthorizationFailedError(), 6),
        (errors.GroupAuthorizationFailedError(), 6),
        (errors.TransactionalIdAuthorizationFailedError(), 6),
        (errors.RequestTimeoutError("x"), 7),
        (errors.DeliveryTimeoutError("x"), 7),
        (exit_codes.TimedOutError("x"), 7),
        (exit_codes.PartialFailureError("x"), 8),
        (exit_codes.CheckFailedError("x"), 9),
        (errors.CorruptLogError(path="p", position=1, expected="a", actual="b"), 9),
        (errors.MessageTooLargeError(), 1),
        (errors.StorageError("x"), 1),
    ],
)
def test_exit_code(error: BaseException, code: int) -> None:
    assert exit_code_for(error) == code


def test_no_broker_is_exit_code_3_soon(kl: Kl) -> None:
    result = kl("topic", "list", "-b", "127.0.0.1:1", "--timeout", "2s")
    assert result.code in {exit_codes.CANNOT_CONNECT, exit_codes.TIMED_OUT}
    assert "127.0.0.1:1" in result.told
    assert "kl dev" in result.told


# --- completion ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str, kl: Kl) -> None:
    result = kl("completion", shell)
    assert result.code == 0
    assert "_KL_COMPLETE" in result.text
    assert "kafkalite" in result.text


def test_words_are_completed(repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kafkalite"],
        cwd=repository,
        capture_output=True,
        text=True,
        env={
            "_KL_COMPLETE": "bash_complete",
            "COMP_WORDS": "kl topic de",
            "COMP_CWORD": "2",
            "PATH": "/usr/bin:/bin",
        },
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["plain,delete", "plain,delete-records", "plain,describe"]


def test_ctrl_c_while_kl_is_being_imported_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "kafkalite.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "kafkalite.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ending:
        cli.main()
    assert ending.value.code == exit_codes.INTERRUPTED
    assert capsys.readouterr() == ("", "")


def test_ctrl_c_is_handled_before_other_modules_are_imported(repository: Path) -> None:
    """The interpreter prints a traceback for Ctrl-C until ``main`` runs, so no other module is imported
    before."""
    code = "import sys; old = set(sys.modules); import kafkalite.cli; print(*sorted(set(sys.modules) - old))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=repository, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["__future__", "kafkalite", "kafkalite.cli", "kafkalite.version"]


def test_ctrl_c_before_the_command_runs_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("kafkalite.cli.app.run", interrupted)
    with pytest.raises(SystemExit) as ending:
        cli.main()
    assert ending.value.code == exit_codes.INTERRUPTED
    assert capsys.readouterr() == ("", "")


def test_closed_streams_are_those_of_dev_null(repository: Path) -> None:
    """uvloop ends the process if it gets the descriptor of stdout or stderr."""
    kl = f"'{sys.executable}' -m kafkalite topic list -b 127.0.0.1:1"
    done = subprocess.run(
        ["bash", "-c", f"{kl} <&- >&-; echo $?; {kl} 2>&- <&- >&- ; echo $?"],
        cwd=repository,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["3", "3"], done.stderr
    assert done.stderr.startswith("kl: no broker could be reached: ")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, exit_codes.TERMINATED), (signal.SIGHUP, exit_codes.HUNG_UP)]
)
def test_a_signal_lets_a_command_clean_up(kl: Kl, number: signal.Signals, code: int) -> None:
    steps = []

    async def main() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(60)
        finally:
            if number == signal.SIGHUP:  # a closed terminal sends it twice
                os.kill(os.getpid(), number)
            await asyncio.sleep(0.01)
            steps.append("left the group")

    @click.command()
    def waits() -> None:
        invocation.run(main)

    assert app.run([], command=waits) == code
    assert steps == ["left the group"]


async def test_a_closed_terminal_stops_a_server_once() -> None:
    with stop_signals(lambda: pytest.fail("a terminal often sends two")) as stopped:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.wait_for(asyncio.shield(stopped), 30)
            await asyncio.sleep(0.01)


def test_sighup_stays_ignored_under_nohup(kl: Kl) -> None:
    async def main() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.01)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        invocation.run(main)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("name", ["KL_BOOTSTRAP_SERVER", "KL_BOOTSTRAP", "KL_BOOTSTRAP_SERVRES"])
def test_a_misspelt_variable_is_refused_with_the_right_name(
    kl: Kl, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "127.0.0.1:1")
    result = kl("topic", "list")
    assert result.code == 2
    assert result.told == (
        f"kl: the environment variable {name} is not known\n    hint: did you mean KL_BOOTSTRAP_SERVERS?\n"
    )


def test_an_unknown_variable_that_resembles_none_is_named(kl: Kl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KL_QQ", "1")
    result = kl("version")
    assert result.code == 0
    assert result.told == "kl: the environment variable KL_QQ is ignored: kl has none of this name\n"


def test_help_is_a_command(kl: Kl) -> None:
    assert kl("help").out == kl("--help").out
    assert kl("help", "topic", "create").out == kl("topic", "create", "--help").out


@pytest.mark.parametrize(
    "command", [("topic", "list", "-b"), ("conformance",), ("conformance", "--listen"), ("dev", "--host")]
)
def test_an_invalid_host_name_is_the_cause_that_is_named(kl: Kl, command: tuple[str, ...]) -> None:
    done = kl(*command, "a..b" if command[0] == "dev" else "a..b:9092")
    assert done.code in {1, 2, 3}
    assert "valid host name" in done.told or "the host name is not valid" in done.told, done.told
    assert "unexpected" not in done.told
