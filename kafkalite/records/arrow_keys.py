"""Chooses the partition of each key in an Arrow array, as ``partitioners.partition_for_key`` does.

Each distinct key is hashed once. Keys with the same number of 4-byte words are hashed together, word by word,
by Arrow's kernels over 32-bit integers, which wrap around as Kafka's do. Keys in small groups and long keys
are hashed one by one.
"""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from kafkalite.errors import RecordError
from kafkalite.records.partitioners import MURMUR2_M, MURMUR2_R, MURMUR2_SEED, partition_for_key

_UINT32: Final = pa.uint32()
_WORD_BYTES: Final = 4
_M: Final = pa.scalar(MURMUR2_M, _UINT32)
_R: Final = pa.scalar(MURMUR2_R, _UINT32)
_POSITIVE: Final = pa.scalar(0x7FFFFFFF, _UINT32)
_13: Final = pa.scalar(13, _UINT32)
_15: Final = pa.scalar(15, _UINT32)
_TWO: Final = pa.scalar(2, pa.int32())
_ZEROS: Final = pa.array([bytes(count) for count in range(_WORD_BYTES)], pa.binary())
_NOTHING: Final = pa.scalar(b"", pa.binary())

#: Below this number of keys, hashing one by one is faster than calling some twenty kernels.
_MIN_TOGETHER: Final = 64
#: Above this number of words, the kernels gain little.
_MAX_WORDS: Final = 64


def partitions_of_keys(keys: Any, partition_count: int) -> Any:
    """Return the partition of each binary or string key as int32, as ``partition_for_key`` does.

    A null key gets a null partition, which the caller replaces. Raises RecordError for an array of another
    type.
    """
    try:
        if isinstance(keys, pa.ChunkedArray):
            keys = keys.combine_chunks()
        encoded = keys.cast(pa.binary()).dictionary_encode()
    except (pa.ArrowException, AttributeError) as error:
        raise RecordError(f"{getattr(keys, 'type', type(keys))} cannot be keys: {error}") from error
    return _partitions(encoded.dictionary, partition_count).take(encoded.indices)


def _partitions(keys: Any, partition_count: int) -> Any:
    """Return the same as ``partitions_of_keys``, for keys without nulls."""
    if len(keys) < _MIN_TOGETHER:
        return _one_by_one(keys, partition_count)
    lengths = pc.binary_length(keys)
    sizes = pc.shift_right(pc.add(lengths, pa.scalar(_WORD_BYTES - 1, pa.int32())), _TWO)
    counts = pc.value_counts(sizes)
    if len(counts) == 1:
        return _of_one_size(keys, lengths, counts[0]["values"].as_py(), partition_count)
    parts, places = [], []
    for one in counts:
        indices = pc.indices_nonzero(pc.equal(sizes, one["values"]))
        size = one["values"].as_py()
        parts.append(_of_one_size(keys.take(indices), lengths.take(indices), size, partition_count))
        places.append(indices)
    return pa.concat_arrays(parts).take(pc.array_sort_indices(pa.concat_arrays(places)))


def _one_by_one(keys: Any, partition_count: int) -> Any:
    return pa.array([partition_for_key(key, partition_count) for key in keys.to_pylist()], pa.int32())


def _of_one_size(keys: Any, lengths: Any, word_count: int, partition_count: int) -> Any:
    if len(keys) < _MIN_TOGETHER or not 0 < word_count <= _MAX_WORDS:
        return _one_by_one(keys, partition_count)
    hashed = pc.bit_wise_and(_murmur2(keys, lengths.cast(_UINT32), word_count), _POSITIVE)
    count = pa.scalar(partition_count, _UINT32)
    return pc.subtract(hashed, pc.multiply(pc.divide(hashed, count), count)).cast(pa.int32())


def _murmur2(keys: Any, lengths: Any, word_count: int) -> Any:
    """Return the hash of each key as uint32. The last of the ``word_count`` words may be incomplete."""
    missing = pc.bit_wise_and(pc.negate(lengths.cast(pa.int32())), pa.scalar(_WORD_BYTES - 1, pa.int32()))
    bounds = pc.min_max(missing)
    if bounds["max"].as_py():  # zeros complete the last word
        keys = pc.binary_join_element_wise(keys, _ZEROS.take(missing), _NOTHING)
    first = keys.offset * word_count
    words = memoryview(keys.buffers()[2]).cast("B").cast("I")[first : first + len(keys) * word_count]
    hashed = pc.bit_wise_xor(lengths, pa.scalar(MURMUR2_SEED, _UINT32))
    for number in range(word_count - 1):
        hashed = _mixed(hashed, _column(words, number, word_count))
    last = _column(words, word_count - 1, word_count)
    if not bounds["max"].as_py():
        hashed = _mixed(hashed, last)
    else:
        tail = pc.multiply(pc.bit_wise_xor(hashed, last), _M)
        if not bounds["min"].as_py():
            is_whole = pc.equal(missing, pa.scalar(0, pa.int32()))
            tail = pc.if_else(is_whole, _mixed(hashed, last), tail)
        hashed = tail
    hashed = pc.multiply(pc.bit_wise_xor(hashed, pc.shift_right(hashed, _13)), _M)
    return pc.bit_wise_xor(hashed, pc.shift_right(hashed, _15))


def _mixed(hashed: Any, k: Any) -> Any:
    """Mix ``k``, the next word of each key, into ``hashed``, the hash of each key so far. Return the
    result."""
    k = pc.multiply(k, _M)
    k = pc.multiply(pc.bit_wise_xor(k, pc.shift_right(k, _R)), _M)
    return pc.bit_wise_xor(pc.multiply(hashed, _M), k)


def _column(words: memoryview, number: int, word_count: int) -> Any:
    """Return word ``number`` (from 0) of each key. ``words`` has ``word_count`` words for each key."""
    column = words[number::word_count].tobytes()
    return pa.Array.from_buffers(_UINT32, len(column) // _WORD_BYTES, [None, pa.py_buffer(column)])
