"""Parses and checks the values of single options. Pure.

The functions with a parameter ``name``, the name of the option, raise SparkOptionError for an invalid value.
"""

# Tests: tests/sparkbridge/test_options.py

from __future__ import annotations

import json
import re
from typing import Final

from kafkalite import durations
from kafkalite.limits import MAX_TRANSACTIONAL_ID_LENGTH
from kafkalite.model import HOST_WORDS, is_host_name, topic_name_problem
from sparkbridge.errors import SparkOptionError

_MAX_INT: Final = 2**31 - 1
_MAX_LONG: Final = 2**63 - 1
_MAX_NAME_LENGTH: Final = MAX_TRANSACTIONAL_ID_LENGTH // 4
_SIZE: Final = re.compile(r"(\d{1,19})\s*(?:([kmgt]?)i?b?)?", re.IGNORECASE)
_SIZE_FACTOR: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_ADDRESS: Final = re.compile(r"(?:\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d{1,5})")


def option_text(value: object) -> str:
    """Return the text to which Spark's ``option`` and ``config`` convert a value."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_size(text: str, name: str) -> int:
    """Parse a size such as ``10m`` into bytes. As in Spark, k, m, g and t are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    size = 0 if match is None else int(match[1]) * _SIZE_FACTOR[(match[2] or "").lower()]
    if not 1 <= size <= _MAX_LONG:
        raise SparkOptionError(
            f"{name} is {text!r}, but must be a size above 0", hint="write 1000000, 512k, 10m or 1g"
        )
    return size


def parse_duration(text: str, name: str) -> int:
    """Parse a duration such as ``15m`` into milliseconds. As in Spark, the default unit is milliseconds."""
    try:
        return durations.parse_duration(text, bare_unit="ms")
    except ValueError as cause:
        raise SparkOptionError(
            f"{name} is {text!r}, but must be a duration", hint="write 500ms, 30s, 15m or 1h"
        ) from cause


def parse_servers(text: str, name: str) -> str:
    """Check a list of host:port. Return it without spaces and empty items: ``a:1, b:2,`` as ``a:1,b:2``."""
    servers = [part.strip() for part in text.split(",") if part.strip()]
    if not servers:
        raise SparkOptionError(f"{name} names no broker", hint="write host:port, several of them with commas")
    for server in servers:
        match = _ADDRESS.fullmatch(server)
        if match is None or not 1 <= int(match[1]) <= 65_535:
            raise SparkOptionError(
                f"{name} has {server!r}, which is not an address",
                hint="write host:port, several of them with commas",
            )
        if not is_host_name(server.rpartition(":")[0].strip("[]")):
            raise SparkOptionError(f"{name} has {server!r}", hint=f"write {HOST_WORDS}")
    return ",".join(servers)


def parse_assign(text: str, name: str) -> dict[str, tuple[int, ...]]:
    """Parse ``{"t":[2,0]}`` into {"t": (0, 2)}. Partitions are sorted, without duplicates."""
    example = 'write {"topic1":[0,1],"topic2":[0]}'
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise SparkOptionError(
            f"{name} is {text[:200]!r}, which is not json: {cause}", hint=example
        ) from cause
    if not isinstance(parsed, dict) or not parsed:
        raise SparkOptionError(f"{name} is {text[:200]!r}, which names no topic", hint=example)
    assign: dict[str, tuple[int, ...]] = {}
    for topic, numbers in parsed.items():
        problem = topic_name_problem(topic)
        if problem is not None:
            raise SparkOptionError(f"{name}: {problem}", hint=example)
        if not isinstance(numbers, list) or not numbers:
            raise SparkOptionError(f"{name} names no partition of topic {topic}", hint=example)
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= _MAX_INT:
                raise SparkOptionError(f"{name} has the partition {number!r} of topic {topic}", hint=example)
        assign[topic] = tuple(sorted(set(numbers)))
    return assign


def parse_subscribe(topics: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Check the topic names and return them without duplicates."""
    if not topics:
        raise SparkOptionError(f"{name} names no topic", hint=".option('subscribe', 'topic1,topic2')")
    for topic in topics:
        problem = topic_name_problem(topic)
        if problem is not None:
            raise SparkOptionError(f"{name}: {problem}", hint="subscribePattern takes a regular expression")
    return tuple(dict.fromkeys(topics))


def check_pattern(text: str, name: str) -> str:
    """Return the text. Raise SparkOptionError if it is not a regular expression."""
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as cause:
        raise SparkOptionError(
            f"{name} is {text[:200]!r}, which is not a regular expression: {cause}",
            hint="it is Python's, and matches a topic's whole name: logs-.*",
        ) from cause
    return text


def check_topic(text: str, name: str) -> str:
    """Return the text. Raise SparkOptionError if it is not a topic name."""
    problem = topic_name_problem(text)
    if problem is not None:
        raise SparkOptionError(f"{name} is {text!r}: {problem}", hint="name one topic")
    return text


def check_name_length(text: str, name: str) -> str:
    """Return the text. Raise SparkOptionError if a transactional id made from it could be too long."""
    if len(text) > _MAX_NAME_LENGTH:
        raise SparkOptionError(
            f"{name} has {len(text)} characters, more than {_MAX_NAME_LENGTH}",
            hint="it is part of a name that the brokers store",
        )
    return text
