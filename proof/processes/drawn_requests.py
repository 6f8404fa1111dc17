"""Draws requests of all APIs, and mutants of them, from a source of random numbers.

The values of well-formed requests fit each other. Mutants have other types, sizes and nesting; flipped, cut
and repeated bytes; lengths that lie; batches that are not what they declare.
"""

# Tests: tests/processes/test_fuzz.py

from __future__ import annotations

import functools
import random
import struct
import time
import types
import typing
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

import msgpack

from kafkalite.errors import KafkaliteError
from kafkalite.protocol.api import APIS, ApiKey
from kafkalite.protocol.messages.data import ProducePartition, ProduceRequest
from kafkalite.protocol.structs import Struct
from kafkalite.records.builder import build_batch
from kafkalite.records.header import HEADER_BYTES, seal

TOPICS: Final = ("a", "b", "c", "orders")
TEXTS: Final = (*TOPICS, "__consumer_offsets", "__transaction_state", "", ".", "../x", "é" * 200, "g", "t-1")
IDS: Final = ("g", "h", "t-1", "t-2")
INTEGERS: Final = (0, 1, 2, 3, -1, -2, 7, 100, 300, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, -(2**63))
FRAMES_OF_SCRIPT: Final = 30

Row: TypeAlias = Any


class Generator:
    """Draws requests, mutants and frames from one random source."""

    def __init__(self, rng: random.Random, keys: Sequence[ApiKey]) -> None:
        self._rng = rng
        self._keys = keys

    def script(self) -> list[bytes]:
        """Return the bytes that one connection sends, frame by frame."""
        rng = self._rng
        handshake = frame_of(ApiKey.API_VERSIONS, 0, self._row(APIS[ApiKey.API_VERSIONS].request))
        frames = [] if rng.random() < 0.03 else [handshake]
        for number in range(1, rng.randrange(2, FRAMES_OF_SCRIPT)):
            frame = self.request(number)
            if rng.random() < 0.15:
                frame = self._mutate_bytes(frame)
            frames.append(frame)
        if rng.random() < 0.2:
            frames[-1] = frames[-1][: rng.randrange(max(len(frames[-1]), 1))]
        return frames

    def request(self, correlation_id: int) -> bytes:
        """Return a request of any API, or a mutant of one."""
        rng = self._rng
        key = rng.choice(self._keys)
        payload = b""
        if key == ApiKey.PRODUCE and rng.random() < 0.9:
            row, payload = self._produce()
        else:
            row = self._row(APIS[key].request)
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 5))):
            row = self._mutate_row(row)
        version = rng.choice((0, 0, 0, 0, 0, 0, 0, 1, -1, 2**31))
        return frame_of(key, correlation_id, row, payload, version)

    def _produce(self) -> tuple[Row, bytes]:
        rng = self._rng
        batches = [self._batch() for _ in range(rng.choice((1, 1, 1, 2, 5)))]
        partitions = [
            tuple(ProducePartition(rng.choice(TOPICS), rng.randrange(3), len(batch))) for batch in batches
        ]
        row = list(self._row(ProduceRequest))
        row[ProduceRequest._fields.index("partitions")] = partitions
        return row, b"".join(batches)

    def _batch(self) -> bytes:
        rng = self._rng
        now_ms = time.time_ns() // 1_000_000
        values = [rng.randbytes(rng.choice((0, 1, 20, 500))) for _ in range(rng.choice((1, 1, 3, 50)))]
        batch = bytearray(build_batch(values, timestamps_ms=now_ms))
        for _ in range(rng.choice((0, 0, 1, 1, 3))):
            batch[rng.randrange(len(batch))] = rng.randrange(256)
        if rng.random() < 0.2:
            batch = batch[: rng.randrange(1, len(batch) + 1)]
        if rng.random() < 0.5 and len(batch) >= HEADER_BYTES:
            with suppress(KafkaliteError, struct.error, ValueError):
                seal(batch)
        return bytes(batch)

    def _row(self, kind: type[Struct]) -> Row:
        return [self._value(name, hint) for name, hint in hints(kind).items()]

    def _value(self, name: str, hint: Any) -> Any:
        rng = self._rng
        origin = typing.get_origin(hint)
        if origin in (types.UnionType, typing.Union):
            inner = [each for each in typing.get_args(hint) if each is not type(None)]
            return None if rng.random() < 0.3 else self._value(name, inner[0])
        if origin is list:
            (inner_hint,) = typing.get_args(hint)
            entries = [self._value(name, inner_hint) for _ in range(rng.choice((0, 1, 1, 1, 2, 3)))]
            return entries * rng.choice((1, 1, 1, 1, 1, 2, 200))
        if isinstance(hint, type) and issubclass(hint, Struct):
            return self._row(hint)
        if hint is bool:
            return rng.random() < 0.5
        if hint is int:
            return self._integer(name)
        if hint is bytes:
            return rng.randbytes(rng.randrange(100))
        if hint is float:
            return rng.random()
        if "topic" in name or name == "name":
            return rng.choice(TOPICS if rng.random() < 0.9 else TEXTS)
        return rng.choice(IDS if rng.random() < 0.8 else TEXTS)

    def _integer(self, name: str) -> int:
        rng = self._rng
        if name.endswith("_ms") and rng.random() < 0.9:
            return rng.randrange(50)
        if rng.random() < 0.8:
            return rng.choice((0, 0, 1, 1, 2, 3, -1))
        return rng.choice(INTEGERS)

    # --- mutants

    def _mutate_row(self, row: Row) -> Row:
        """Return the row with one element, at any depth, replaced, removed, added or nested."""
        rng = self._rng
        if not isinstance(row, list | tuple) or not row or rng.random() < 0.1:
            return self._junk()
        found = list(row)
        index = rng.randrange(len(found))
        action = rng.randrange(8)
        if action == 0:
            del found[index]
        elif action == 1:
            found.insert(index, self._junk())
        elif action == 2:
            found.append(self._junk())
        elif action <= 4:
            found[index] = self._junk()
        else:
            found[index] = self._mutate_row(found[index])
        return found

    def _junk(self) -> Any:
        rng = self._rng
        kind = rng.randrange(11)
        if kind == 0:
            return None
        if kind <= 3:
            return rng.choice(INTEGERS)
        if kind == 4:
            return rng.choice((0.5, float("nan"), float("inf"), True, False))
        if kind == 5:
            return rng.choice(TEXTS)
        if kind == 6:
            return rng.randbytes(rng.choice((0, 5, 1000)))
        if kind == 7:
            return [self._junk() for _ in range(rng.randrange(4))]
        if kind == 8:
            return {rng.choice(TEXTS): rng.choice(INTEGERS)}
        if kind == 9:
            return msgpack.ExtType(rng.randrange(128), rng.randbytes(rng.randrange(20)))
        nested: Any = []
        for _ in range(rng.choice((3, 30, 400))):
            nested = [nested]
        return nested

    def _mutate_bytes(self, frame: bytes) -> bytes:
        rng = self._rng
        data = bytearray(frame)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(max(len(data), 1))
            action = rng.randrange(5)
            if action == 0 and data:
                data[at : at + 1] = bytes([data[at] ^ 1 << rng.randrange(8)])
            elif action == 1:
                del data[at : at + rng.randrange(1, 9)]
            elif action == 2:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            elif action == 3:
                data[at:at] = data[at : at + rng.randrange(1, 64)]
            else:
                length = rng.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, rng.randrange(1 << 20)))
                data[rng.choice((0, 4)) :][:4] = struct.pack(">I", length)
        return bytes(data)


def frame_of(key: ApiKey, correlation_id: int, row: Row, payload: bytes = b"", version: int = 0) -> bytes:
    """Return the frame of a request whose body is ``row``, which need not be valid."""
    envelope = bytes(msgpack.packb([int(key), version, correlation_id, "fuzz", row]))
    return struct.pack(">II", len(envelope), len(payload)) + envelope + payload


@functools.cache
def hints(kind: type[Struct]) -> dict[str, Any]:
    """Return the types of a struct's fields, in order."""
    found = typing.get_type_hints(kind)
    return {name: found[name] for name in kind._fields}
