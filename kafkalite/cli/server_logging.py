"""Logging of a server process: structured lines on stderr, readable or JSON.

Other modules log through the standard library. Values from outside are escaped (S13), so that control
characters in a client id or a topic name neither reach a terminal nor start a new line.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import structlog

from kafkalite.log_fields import Fields, printable

LogFormat = Literal["console", "json"]


def configure(level: str = "info", log_format: LogFormat | None = None, stream: TextIO | None = None) -> None:
    """Send every log record of the process to ``stream`` (default: stderr).

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
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


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
