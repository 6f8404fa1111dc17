"""Logging of a server process: structured lines on stderr, readable or JSON.

Other modules log through the standard library. Values from outside are escaped (S13), so that control
characters in a client id or a topic name neither reach a terminal nor start a new line. Peers that are
refused again and again do not fill the log.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Final, Literal, TextIO

import structlog

from kafkalite.log_fields import Fields, printable

LogFormat = Literal["console", "json"]

#: The most lines of one event about peers that are printed in PEER_INTERVAL_S.
PEER_LINES: Final = 20
PEER_INTERVAL_S: Final = 10.0


def configure(level: str = "info", log_format: LogFormat | None = None, stream: TextIO | None = None) -> None:
    """Send the process's log records of at least ``level`` to ``stream`` (default: stderr).

    If ``log_format`` is None, it is console on a terminal and JSON elsewhere. Replaces any earlier
    configuration.
    """
    out = sys.stderr if stream is None else stream
    is_terminal = out.isatty()
    if log_format is None:
        log_format = "console" if is_terminal else "json"
    renderer: Any
    if log_format == "json":
        renderer = structlog.processors.JSONRenderer(sort_keys=False)
    else:
        # Tracebacks without the values of variables: among them are records and cluster.secret (S13).
        renderer = structlog.dev.ConsoleRenderer(
            colors=is_terminal, exception_formatter=structlog.dev.plain_traceback
        )
    before: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        unfold_fields,
    ]
    after: list[Any] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if log_format == "json":
        after.append(structlog.processors.format_exc_info)
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=before, processors=[*after, renderer], pass_foreign_args=True
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    handler.addFilter(PeerLineLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class PeerLineLimit(logging.Filter):
    """Limits the lines that name a peer to PEER_LINES per event in PEER_INTERVAL_S seconds.

    Lines with the same logger, message and level belong to the same event. Any client can cause such lines.
    The event's next line after the interval states the number of omitted lines as ``omitted``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._intervals: dict[
            tuple[str, str, int], tuple[float, int]
        ] = {}  # {event: (begin of its interval, number of lines in it)}

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        fields = next((one for one in arguments if isinstance(one, Fields) and "peer" in one.values), None)
        if fields is None:
            return True
        event = (record.name, record.msg, record.levelno)
        begin_s, lines = self._intervals.get(event, (record.created, 0))
        if not 0 <= record.created - begin_s < PEER_INTERVAL_S:
            if lines > PEER_LINES:
                fields.values["omitted"] = lines - PEER_LINES
            begin_s, lines = record.created, 0
        self._intervals[event] = (begin_s, lines + 1)
        return lines < PEER_LINES


def unfold_fields(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Convert the Fields of a log record to keys of ``event``. This is a structlog processor."""
    record: logging.LogRecord | None = event.get("_record")
    arguments = event.pop("positional_args", None)
    if record is not None and isinstance(arguments, tuple):
        for argument in arguments:
            if isinstance(argument, Fields):
                event["event"] = str(record.msg).replace("%s", "").strip()
                for name, value in argument.values.items():
                    is_plain = value is None or isinstance(value, bool | int | float)
                    event[name if name not in event else f"{name}_"] = value if is_plain else printable(value)
    event["event"] = printable(event["event"])
    return event
