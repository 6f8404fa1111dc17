"""Yields the lines of an access log as records keyed by client. The log is a file, or is generated."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from kafkalite.rng import seeded_rng

TOPIC = "access-log"
_START = datetime(2015, 5, 17, 10, 5, 3, tzinfo=UTC)
_PATHS = (
    "/",
    "/style2.css",
    "/favicon.ico",
    "/blog/tags/puppet",
    "/images/web/2009/banner.png",
    "/robots.txt",
)
_STATUSES = (200,) * 16 + (304, 404, 301, 500)


def load(demo: Any) -> Iterator[tuple[str, bytes, bytes]]:
    """Yield (topic, client, line). Settings: ``file``, or else ``lines``, the number of lines to generate."""
    path = demo.path("file")
    lines = lines_of(path) if path is not None else made_up(int(demo.settings.get("lines", "3000")))
    for line in lines:
        yield TOPIC, line.split(b" ", 1)[0], line


def lines_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        for line in stream:
            yield line.removesuffix(b"\n")


def made_up(count: int) -> Iterator[bytes]:
    """Yield requests of two and a half days. One line in a hundred is not a request."""
    rng = seeded_rng(7)
    step = timedelta(hours=60) / max(1, count)
    for number in range(count):
        if rng.randrange(100) == 0:
            yield b"10.0.0.%d -- closed before a request came" % rng.randrange(20)
            continue
        moment = _START + number * step - timedelta(seconds=rng.randrange(60))
        path = _PATHS[rng.randrange(len(_PATHS))]
        status = _STATUSES[rng.randrange(len(_STATUSES))]
        size = "-" if status == 304 else str(rng.randrange(50_000))
        stamp = moment.strftime("%d/%b/%Y:%H:%M:%S +0000")
        request = (
            f'10.0.0.{rng.randrange(20)} - - [{stamp}] "GET {path} HTTP/1.1" {status} {size} "-" "made up"'
        )
        yield request.encode()
