"""Parses the input of ``kl produce`` into blocks for ``send_many``. Pure.

A block contains records of one topic and partition, as columns. If the partition is None, the producer
selects a partition for each record. Records with the same topic and partition keep the order of the input.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from kafkalite.cli.record_json import Draft, from_document
from kafkalite.model import Headers

InputFormat = Literal["lines", "json", "jsonl", "raw"]
INPUT_FORMATS: Final = ("lines", "json", "jsonl", "raw")


class InputError(ValueError):
    """The input contains something that is not a record, or a record without a topic."""


@dataclass(frozen=True, slots=True)
class Block:
    """Records as columns of equal length. If a column is None, the records do not have the field."""

    topic: str
    partition: int | None
    values: list[bytes | None]
    keys: list[bytes | None] | None
    timestamps_ms: list[int] | None
    headers: list[Headers] | None
    #: Returns the place in the input of the record with an index of the columns, for messages.
    place_of: Callable[[int], str] = field(default=str, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class RecordDefaults:
    """Options of the command line that set fields of records.

    A ``topic`` or ``partition`` that is not None replaces the record's topic or partition in the input.
    ``key`` is for records without a key in the input. ``headers`` are added to the headers in the input.
    """

    topic: str | None  #: None: each line names its topic
    partition: int | None = None
    any_partition: bool = False  #: ignore the partitions in jsonl lines
    key: bytes | None = None
    key_separator: bytes | None = None
    headers: Headers = ()
    empty_is_null: bool = False


class RecordReader:
    """Parses one file: ``feed`` parses a chunk, and ``finish`` the rest. Both raise InputError."""

    def __init__(
        self,
        source: str,
        how: InputFormat,
        defaults: RecordDefaults,
        *,
        now_ms: int,
        parse_timestamp: Callable[[str], int],
    ) -> None:
        self._source = source
        self._how = how
        self._defaults = defaults
        self._now_ms = now_ms
        self._parse_timestamp = parse_timestamp
        # Pieces of a line without a newline. They are joined only once, so that long lines take linear time.
        self._pending: list[bytes] = []
        self._line_count = 0

    def feed(self, chunk: bytes, *, max_records: int) -> Iterator[list[Block]]:
        """Yield the blocks of all complete lines, in lists of at most ``max_records`` records.

        If the format is raw or json, yield nothing, because only ``finish`` parses these formats.
        """
        if self._how in {"raw", "json"} or b"\n" not in chunk:
            self._pending.append(chunk)
            return
        head, _, rest = chunk.rpartition(b"\n")
        lines = b"".join([*self._pending, head]).split(b"\n")
        self._pending = [rest] if rest else []
        yield from self._blocks(lines, max_records)

    def finish(self, *, max_records: int) -> Iterator[list[Block]]:
        left = b"".join(self._pending)
        self._pending = []
        match self._how:
            case "raw":
                yield [self._columns([left], None)]
            case "json":
                yield from self._documents(left, max_records)
            case _:
                if left:
                    yield from self._blocks([left], max_records)

    def _blocks(self, lines: list[bytes], max_records: int) -> Iterator[list[Block]]:
        for start in range(0, len(lines), max_records):
            part = lines[start : start + max_records]
            if self._how == "lines":
                yield [self._columns(part, self._line_count + 1)]
            else:
                yield list(self._group(self._parse(part)))
            self._line_count += len(part)

    def _columns(self, texts: list[bytes], first_line: int | None) -> Block:
        defaults = self._defaults
        if defaults.topic is None:
            raise InputError("only -i json and -i jsonl carry a topic; name it: kl produce TOPIC")
        keys: list[bytes | None] | None = None
        values: list[bytes | None]
        if defaults.key_separator is not None and self._how == "lines":
            keys, values = [], []
            for text in texts:
                key, separator, value = text.partition(defaults.key_separator)
                keys.append(key if separator else defaults.key)
                values.append(value if separator else text)
        else:
            values = list(texts)
            if defaults.key is not None:
                keys = [defaults.key] * len(values)
        if defaults.empty_is_null:
            values = [value or None for value in values]
            keys = [key or None for key in keys] if keys is not None else None
        headers = [defaults.headers] * len(values) if defaults.headers else None
        source = self._source

        def place_of(index: int) -> str:
            return source if first_line is None else f"{source}:{first_line + index}"

        return Block(defaults.topic, defaults.partition, values, keys, None, headers, place_of)

    def _parse(self, lines: list[bytes]) -> Iterator[tuple[str, Draft]]:
        for number, line in enumerate(lines, self._line_count + 1):
            if not line.strip():
                continue
            try:
                draft = from_document(json.loads(line), self._parse_timestamp)
            except (ValueError, RecursionError) as problem:
                raise InputError(f"{self._source}:{number}: {_in_words(problem)}") from None
            yield f"{self._source}:{number}", draft

    def _documents(self, data: bytes, max_records: int) -> Iterator[list[Block]]:
        """Parse a sequence of JSON records and of arrays of records."""
        drafts: list[tuple[str, Draft]] = []

        def place() -> str:
            return f"{self._source}: record {len(drafts) + 1}"

        try:
            text = data.decode()
            decoder, position = json.JSONDecoder(), _skip_space(text, 0)
            while position < len(text):
                document, position = decoder.raw_decode(text, position)
                for each in document if isinstance(document, list) else [document]:
                    drafts.append((place(), from_document(each, self._parse_timestamp)))
                position = _skip_space(text, position)
        except (ValueError, RecursionError) as problem:
            raise InputError(f"{place()}: {_in_words(problem)}") from None
        for start in range(0, len(drafts), max_records):
            yield list(self._group(drafts[start : start + max_records]))

    def _group(self, drafts: Iterable[tuple[str, Draft]]) -> Iterator[Block]:
        """Yield a block for each topic and partition. ``drafts`` yields pairs (place in the input, draft)."""
        defaults = self._defaults
        groups: dict[tuple[str, int | None], tuple[list[str], list[Draft]]] = {}
        for place, draft in drafts:
            topic = defaults.topic or draft.topic
            if topic is None:
                raise InputError(f'{self._source}: a record has no "topic"; name it: kl produce TOPIC')
            partition = defaults.partition
            if partition is None and not defaults.any_partition:
                partition = draft.partition
            places, members = groups.setdefault((topic, partition), ([], []))
            places.append(place)
            members.append(draft)
        for (topic, partition), (places, members) in groups.items():
            keys = [defaults.key if draft.key is None else draft.key for draft in members]
            headers = [draft.headers + defaults.headers for draft in members]
            stamps = [self._now_ms if d.timestamp_ms is None else d.timestamp_ms for d in members]
            yield Block(
                topic,
                partition,
                [draft.value for draft in members],
                keys if any(key is not None for key in keys) else None,
                stamps if any(draft.timestamp_ms is not None for draft in members) else None,
                headers if any(headers) else None,
                places.__getitem__,
            )


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n,":
        position += 1
    return position


def _in_words(problem: ValueError | RecursionError) -> str:
    if isinstance(problem, json.JSONDecodeError):
        return f"not JSON: {problem.msg} at column {problem.colno}; for plain lines use -i lines"
    if isinstance(problem, UnicodeDecodeError):
        return "not JSON: not UTF-8"
    if isinstance(problem, RecursionError):
        return "JSON that is nested too deeply; for plain lines use -i lines"
    return str(problem)
