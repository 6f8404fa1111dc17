"""A server's log lines: structured, on one line, safe for a terminal."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from kafkalite.cli.server_logging import PEER_INTERVAL_S, PEER_LINES, LogFormat, configure
from kafkalite.log_fields import Fields


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def _json_line(stream: io.StringIO) -> dict[str, object]:
    (line,) = stream.getvalue().splitlines()
    parsed: dict[str, object] = json.loads(line)
    return parsed


def test_fields_become_keys_in_json() -> None:
    stream = io.StringIO()
    configure("info", "json", stream)
    logging.getLogger("kafkalite.x").info("log created %s", Fields(topic="t", partition=3, event="e"))
    line = _json_line(stream)
    assert line["event"] == "log created"
    assert (line["topic"], line["partition"], line["event_"]) == ("t", 3, "e")
    assert (line["level"], line["logger"]) == ("info", "kafkalite.x")
    assert str(line["timestamp"]).endswith("Z")


def test_plain_messages_and_tracebacks_pass() -> None:
    stream = io.StringIO()
    configure("info", None, stream)
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("x").exception("failed with %d", 3)
    line = _json_line(stream)
    assert line["event"] == "failed with 3"
    assert "ValueError: no" in str(line["exception"])


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_traceback_shows_no_values_of_variables(log_format: LogFormat) -> None:
    stream = io.StringIO()
    configure("info", log_format, stream)
    secret = "swordfish"[::-1]
    try:
        raise ValueError(f"wrong length {len(secret)}")
    except ValueError:
        logging.getLogger("x").exception("failed")
    assert "wrong length" in stream.getvalue()
    assert secret not in stream.getvalue()


def test_a_client_cannot_break_a_line_or_drive_the_terminal() -> None:
    stream = io.StringIO()
    configure("info", "console", stream)
    logging.getLogger("x").info("request refused %s", Fields(client="a\nb\x1b[31mred"))
    logging.getLogger("x").info("plain\nmessage")
    assert len(stream.getvalue().splitlines()) == 2
    assert "\x1b[31mred" not in stream.getvalue()


def test_levels_are_kept() -> None:
    stream = io.StringIO()
    configure("warning", "json", stream)
    logging.getLogger("x").info("not seen")
    assert stream.getvalue() == ""


def _refuse(seconds: float, **fields: object) -> None:
    """Log that a peer was refused ``seconds`` after the start of the test."""
    arguments = (Fields(**fields),)
    record = logging.LogRecord("x", logging.WARNING, "", 0, "connection refused %s", arguments, None)
    record.created = 1_000_000 + seconds
    logging.getLogger("x").handle(record)


def test_a_peer_that_is_refused_again_and_again_does_not_fill_the_log() -> None:
    stream = io.StringIO()
    configure("info", "json", stream)
    for number in range(1_000):
        _refuse(number / 1_000, peer="10.0.0.1:5000", reason="wrong proof")
    _refuse(2, topic="t")  # lines about other things are not limited
    assert len(stream.getvalue().splitlines()) == PEER_LINES + 1
    _refuse(PEER_INTERVAL_S, peer="10.0.0.2:5000", reason="wrong proof")
    *_, last = map(json.loads, stream.getvalue().splitlines())
    assert (last["peer"], last["omitted"]) == ("10.0.0.2:5000", 1_000 - PEER_LINES)
    _refuse(0, peer="10.0.0.3:5000")  # the clock was set back
    assert "10.0.0.3" in stream.getvalue()
