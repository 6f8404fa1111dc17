"""Computes the same results by a loop over the same lines, without Spark and regular expressions.

A window is written to the topics when the watermark, ten minutes before the latest request, has passed its
end. Windows that are still open are not expected.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import datetime, timedelta
from typing import Any, NamedTuple

DELAY = timedelta(minutes=10)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


class Request(NamedTuple):
    client: str
    time: datetime
    path: str
    status: int
    size: int | None


def check(run: Any) -> str:
    requests = [request for record in run.input() if (request := parse(record.value.decode())) is not None]
    watermark = max(request.time for request in requests) - DELAY

    counts: Counter[tuple[datetime, int]] = Counter()
    sizes: dict[tuple[datetime, int], int | None] = {}
    paths: dict[tuple[datetime, str], Counter[str]] = defaultdict(Counter)
    for request in requests:
        hour = request.time.replace(minute=0, second=0)
        day = hour.replace(hour=0)
        if hour + HOUR <= watermark:
            key = (hour, request.status)
            counts[key] += 1
            sizes[key] = add(sizes.get(key), request.size)
        if day + DAY <= watermark:
            paths[day, request.client][request.path] += 1

    statuses = run.rows("statuses")
    got = {(moment(row["hour"]), row["status"]): (row["requests"], row.get("bytes")) for row in statuses}
    assert len(got) == len(statuses), f"{len(statuses) - len(got)} hours and statuses came twice"
    run.equal(
        "requests and bytes per hour and status", got, {key: (counts[key], sizes[key]) for key in counts}
    )

    tops = run.rows("top_paths")
    top_paths = {
        (moment(row["day"]), row["client"]): [(top["path"], top["requests"]) for top in row["paths"]]
        for row in tops
    }
    assert len(top_paths) == len(tops), f"{len(tops) - len(top_paths)} days and clients came twice"
    expected = {
        key: sorted(top.items(), key=lambda item: (-item[1], item[0]))[:3] for key, top in paths.items()
    }
    run.equal("top paths per day and client", top_paths, expected)
    return (
        f"{counts.total():,} requests in {len({hour for hour, _ in counts}):,} closed hours and the top paths"
        f" of {len({client for _, client in paths}):,} clients are those of a plain loop"
    )


def parse(line: str) -> Request | None:
    """Parse ``client - - [time] "GET path HTTP/1.1" status size …``. Return None for other lines."""
    head, quote, rest = line.partition('"')
    request, closing, tail = rest.partition('"')
    words, wanted, numbers = head.split(), request.split(), tail.split()
    if not (quote and closing) or len(words) < 5 or len(wanted) < 2 or len(numbers) < 2:
        return None
    time = datetime.strptime(" ".join(words[3:5]), "[%d/%b/%Y:%H:%M:%S %z]")
    size = int(numbers[1]) if numbers[1].isdigit() else None
    return Request(words[0], time, wanted[1].partition("?")[0], int(numbers[0]), size)


def add(total: int | None, size: int | None) -> int | None:
    """Add like SQL's sum: unknown values (None) are skipped, and the sum of no values is unknown."""
    return total if size is None else (total or 0) + size


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)
