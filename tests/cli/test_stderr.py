"""Output on stderr beside errors: progress on terminals, rate-limited warnings of the client library."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from kafkalite.cli import client_warnings
from kafkalite.cli.client_warnings import SparseHandler
from kafkalite.cli.progress import Progress, bar_on


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_bar_without_a_terminal() -> None:
    stream = io.StringIO()
    bar = bar_on(stream, "in", total_bytes=10)
    assert type(bar) is Progress
    bar.advance_bytes(5)
    bar.advance_records(5)
    bar.close()
    assert stream.getvalue() == ""


@pytest.mark.parametrize("total", [{"total_bytes": 10}, {"total_records": 2}, {}])
def test_a_bar_on_a_terminal(total: dict[str, int]) -> None:
    stream = Terminal()
    bar = bar_on(stream, "producing", **total)
    bar.advance_records(1)
    bar.advance_bytes(5)
    bar.advance_records(1)
    bar.advance_bytes(5)
    bar.close()
    assert "producing" in stream.getvalue()
    assert "2 records" in stream.getvalue()
    assert not total or "100%" in stream.getvalue()


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger("kafkalite")
    before = list(found.handlers)
    yield found
    found.handlers[:] = before


def test_warnings_are_rate_limited(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(client_warnings.time, "monotonic", lambda: now[0])
    client_warnings.install(debug=False)
    client_warnings.install(debug=False)
    assert sum(isinstance(handler, SparseHandler) for handler in logger.handlers) == 1
    child = logging.getLogger("kafkalite.client.cluster.client")
    child.info("not worth a word")
    child.warning("%s is away", "broker 1")
    child.warning("broker 1 is still away")
    now[0] += 11
    child.warning("broker 1 is away for good")
    child.error("this is shown at once\x1b[2J\nkl: done")
    assert capsys.readouterr().err == (
        "kl: broker 1 is away\nkl: broker 1 is away for good\nkl: this is shown at once\\x1b[2J\\nkl: done\n"
    )
