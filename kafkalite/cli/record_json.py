"""Records as JSON and back: ``kl consume -o jsonl`` prints them, ``kl produce -i jsonl`` reads them.

One object per record::

    {"topic":"t","partition":0,"offset":7,"timestamp":1431857103000,
     "key":"k","value":"text","headers":[["name","value"]]}

UTF-8 bytes are a string, other bytes are ``{"b64":"..."}``, null is ``null``. Headers are pairs,
because their order matters and a name may repeat. A record that is consumed and produced again keeps
its key, value, headers, timestamp and partition; ``offset`` is ignored on input.

Lines written by hand need only ``value``. A key or value may be any other JSON, which is stored as
text without optional spaces; headers may be an object, and a timestamp may be a string that
``kl offsets --at`` accepts.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from kafkalite.cli.output import escape_json
from kafkalite.model import NO_TIMESTAMP, Headers, Record

FIELDS: Final = ("topic", "partition", "offset", "timestamp", "key", "value", "headers")
_KNOWN = frozenset(FIELDS)


class Draft(NamedTuple):
    """A record to produce. None means that a field was not given or, for the key and value, is null."""

    topic: str | None
    partition: int | None
    timestamp_ms: int | None
    key: bytes | None
    value: bytes | None
    headers: Headers


def encode_bytes(data: bytes | None) -> Any:
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(data).decode()}


def to_document(record: Record) -> dict[str, Any]:
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp_ms,
        "key": encode_bytes(record.key),
        "value": encode_bytes(record.value),
        "headers": [[name, encode_bytes(value)] for name, value in record.headers],
    }


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def to_line(record: Record) -> bytes:
    """Return a record as one line of jsonl with its newline."""
    return escape_json(_encode(to_document(record))).encode() + b"\n"


def decode_bytes(document: Any, what: str) -> bytes | None:
    """Return the bytes that a decoded JSON value stands for, or None for null.

    A string stands for its UTF-8 bytes, ``{"b64": ...}`` for the decoded bytes, and any other value for its
    JSON text. ``what`` names the field in errors. Raises ValueError for invalid base64.
    """
    if document is None:
        return None
    if isinstance(document, str):
        return document.encode("utf-8", "surrogatepass")
    if isinstance(document, dict) and document.keys() == {"b64"}:
        try:
            return base64.b64decode(document["b64"], validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise ValueError(f'{what} holds {{"b64": …}} that is not base64') from None
    return _encode(document).encode("utf-8", "surrogatepass")


def _headers(document: Any) -> Headers:
    pairs = document.items() if isinstance(document, dict) else document
    if not isinstance(document, dict | list):
        raise ValueError('headers must be pairs, [["name","value"]], or an object')
    found: list[tuple[str, bytes | None]] = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ValueError('headers must be pairs, [["name","value"]], or an object')
        found.append((pair[0], decode_bytes(pair[1], f"header {pair[0]!r}")))
    return tuple(found)


def from_document(document: Any, parse_timestamp: Callable[[str], int]) -> Draft:
    """Return the record that a decoded line of jsonl describes. Raises ValueError for an invalid record."""
    if not isinstance(document, dict):
        raise ValueError(f"a record is a JSON object with the fields {', '.join(FIELDS)}")
    unknown = document.keys() - _KNOWN
    if unknown:
        raise ValueError(
            f"{min(unknown)!r} is not a field of a record ({', '.join(FIELDS)}); "
            "for values that are whole lines of JSON use -i lines"
        )
    if "value" not in document:
        raise ValueError(
            'a record needs a "value" (null is one); for values that are whole lines use -i lines'
        )
    partition = document.get("partition")
    if partition is not None and (type(partition) is not int or partition < 0):
        raise ValueError(f"partition must be 0 or more, not {partition!r}")
    topic = document.get("topic")
    if topic is not None and not isinstance(topic, str):
        raise ValueError(f"topic must be text, not {topic!r}")
    return Draft(
        topic,
        partition,
        _timestamp(document.get("timestamp"), parse_timestamp),
        decode_bytes(document.get("key"), "key"),
        decode_bytes(document["value"], "value"),
        _headers(document["headers"]) if document.get("headers") else (),
    )


def _timestamp(document: Any, parse_timestamp: Callable[[str], int]) -> int | None:
    if document is None or document == NO_TIMESTAMP:
        return None
    if isinstance(document, str):
        return parse_timestamp(document)
    if type(document) is not int or not 0 <= document < 2**63:
        raise ValueError(
            f"timestamp must be milliseconds since the epoch or an RFC 3339 time, not {document!r}"
        )
    return document
