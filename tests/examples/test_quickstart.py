"""The quickstart, on the real access log and without a file; its counts against those of a plain script."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quickstart_pipeline
from donut_purchases import COUNTRIES, purchases
from quickstart_job import Job, Tally

from kafkalite.rng import seeded_rng

Quickstart = Callable[..., Any]


def test_access_log(quickstart: Quickstart, access_log: Path) -> None:
    result = quickstart(access_log, "--no-spark", "-o", "json")
    assert result.code == 0, result.err
    report = json.loads(result.out)

    lines = access_log.read_text("utf-8", "replace").splitlines()
    statuses = Counter(line.split('" ')[1].split()[0] for line in lines)
    clients = {line.split()[0] for line in lines}
    assert (report["records_in"], report["records_out"]) == (len(lines), len(lines)) == (10_000, 10_000)
    assert report["count_by_status"] == dict(statuses)
    assert report["unparseable"] == 0
    assert report["keys"] == len(clients)
    assert report["in_equals_out"] is True
    assert sum(report["records_per_partition"].values()) == len(lines)
    assert all(report["records_per_partition"].values())


def test_tables_for_people(quickstart: Quickstart, tmp_path: Path) -> None:
    log = tmp_path / "a log"
    line = '1.2.3.4 - - [17/May/2015:10:05:03 +0000] "GET /a\\"b HTTP/1.1" {} 10 "-" "x"\n'
    log.write_text(line.format(200) * 3 + line.format(404) + "\nsomething else")
    result = quickstart(log, "--no-spark")
    assert result.code == 0, result.err
    rows = [line.replace("│", " ").split() for line in result.out.splitlines()]
    assert ["200", "3", "75.0%"] in [row[:3] for row in rows]
    assert ["404", "1", "25.0%"] in [row[:3] for row in rows]
    assert "lines of another shape: 2" in result.out
    assert "6 records in, 6 out" in result.out
    assert f"produce access-log '{log}'" in result.out


def test_a_file_of_another_kind(quickstart: Quickstart, tmp_path: Path) -> None:
    (tmp_path / "words").write_text("alpha beta\ngamma\n")
    result = quickstart(tmp_path / "words", "--no-spark")
    assert result.code == 0
    assert "No line looks like an access log's" in result.out


def test_standard_input_and_long_lines(
    quickstart: Quickstart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped = tmp_path / "piped"
    piped.write_bytes(b"long " + b"x" * 2_500_000 + b"\nshort line\n")
    with piped.open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        result = quickstart("-")
    assert result.code == 0, result.err
    assert "2 records in, 2 out" in result.out
    assert "produce access-log FILE --progress" in result.out, "no name of a file that is gone"
    assert "The Spark pipeline does not run: no line looks like an access log's." in result.out


def test_donuts(quickstart: Quickstart) -> None:
    first, second = (
        json.loads(quickstart("--no-spark", "--records", "500", "-o", "json").out) for _ in range(2)
    )
    assert first["count_by_country"] == second["count_by_country"]
    assert sum(first["count_by_country"].values()) == first["records_out"] == 500
    assert first["acknowledged_ms"]["p50"] <= first["acknowledged_ms"]["p99"]
    assert "records by country" in quickstart("--no-spark", "--records", "500").out


def test_a_missing_file_is_usage(quickstart: Quickstart) -> None:
    result = quickstart("nowhere.log")
    assert result.code == 2
    assert "nowhere.log" in result.err


def test_the_pipelines_missing_requirements_are_printed(
    quickstart: Quickstart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart_pipeline, "missing", lambda: ["there is no java that runs"])
    result = quickstart("--records", "100")
    assert result.code == 0, result.err
    assert "The Spark pipeline over the same records does not run here:\n  there is no java" in result.out
    document = json.loads(quickstart("--records", "100", "-o", "json").out)
    assert document["pipeline"] == {"missing": ["there is no java that runs"]}


def test_purchases_follow_from_the_seed() -> None:
    first = list(purchases(200, seeded_rng(1)))
    assert first == list(purchases(200, seeded_rng(1)))
    assert first != list(purchases(200, seeded_rng(2)))
    for key, value in first:
        purchase = json.loads(value)
        assert purchase["country"] == key.decode() in dict(COUNTRIES)
        assert purchase["amount"] > 0


def tally(*pairs: tuple[bytes | None, bytes]) -> Tally:
    found = Tally()
    for key, value in pairs:
        found.add(key, value)
    return found


@pytest.mark.parametrize(
    ("received", "problem"),
    [
        (tally((b"a", b"1"), (b"a", b"2"), (None, b"x")), None),
        (tally((b"a", b"2"), (b"a", b"1"), (None, b"x")), "1 keys whose records differ"),
        (tally((b"a", b"12"), (b"a", b""), (None, b"x")), "1 keys whose records differ"),
        (tally((b"a", b"1"), (b"b", b"2"), (None, b"x")), "2 keys whose records differ"),
        (tally((b"a", b"1"), (b"a", b"2")), "3 records in, 2 out"),
    ],
)
def test_differences_are_found(received: Tally, problem: str | None) -> None:
    job = Job(None, 0, 0)
    job.sent = tally((b"a", b"1"), (b"a", b"2"), (None, b"x"))
    job.received = received
    assert (problem is None) == (not job.problems())
    assert problem is None or problem in "; ".join(job.problems())


def test_a_key_in_two_partitions_is_found() -> None:
    job = Job(None, 0, 0)
    job.strayed = 1
    assert "in another partition" in job.problems()[0]
