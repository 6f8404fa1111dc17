"""Compresses and decompresses batch bodies, bounded in memory and time against hostile bytes (S4).

======  ===========================================  ===============================================
codec   the compressed bytes are                     how the output is bounded
======  ===========================================  ===============================================
gzip    one gzip member (RFC 1952)                   zlib's own ``max_length``
snappy  one snappy block, its length in front        the length is read first
lz4     one LZ4 frame, blocks linked, no checksums   the size of the output buffer is limited
zstd    one Zstandard frame                          the length is read first if present, else as lz4
======  ===========================================  ===============================================

If the format allows it, frames are written without checksums of their own, because the batch's CRC-32C covers
them. An output buffer of more than 4 KiB is never larger than the given bytes could become
(``_MAX_RATIO``), so a few bytes that declare a large output cost little. gzip uses the standard library. For
the other codecs, cramjam is imported at the first batch that needs it.
"""

from __future__ import annotations

import zlib
from functools import cache
from typing import Any, Final

from kafkalite.errors import (
    BatchTooLargeError,
    ConfigError,
    CorruptBatchError,
    MissingExtraError,
    RecordError,
)
from kafkalite.limits import KIB, MIB
from kafkalite.records.header import Buffer, Codec

_GZIP_WINDOW: Final = 31  # 15 bits of window; adding 16 selects a gzip header instead of zlib's

_GZIP_INPUT_BYTES: Final = 256 * KIB
_GZIP_OUTPUT_BYTES: Final = 1 * MIB

#: (lowest, highest, default) level, with Kafka's ranges if the libraries agree.
_LEVELS: Final = {Codec.GZIP: (1, 9, 6), Codec.LZ4: (1, 12, 1), Codec.ZSTD: (-7, 22, 3)}

# The most output bytes per input byte. gzip: two bits copy 258 bytes. Snappy: a copy of 64 bytes takes 3.
# LZ4: a length byte adds up to 255. Zstandard: 128 KiB of one repeated byte take a block of 4.
_MAX_RATIO: Final = {Codec.GZIP: 1032, Codec.SNAPPY: 22, Codec.LZ4: 256, Codec.ZSTD: 32 * 1024}
# The first bytes of each codec's frame. A snappy block begins with its length.
_MAGIC: Final = {
    Codec.GZIP: b"\x1f\x8b\x08",
    Codec.SNAPPY: b"",
    Codec.LZ4: b"\x04\x22\x4d\x18",
    Codec.ZSTD: b"\x28\xb5\x2f\xfd",
}
# gzip data ends with the size of its output, modulo 2^32.
_GZIP_SIZE_BYTES: Final = 4
# Snappy data begins with the size of its output, in at most 5 bytes of 7 bits each, the lowest bits first.
_SNAPPY_SIZE_BYTES: Final = 5
_FIRST_GUESS_RATIO: Final = 4
_GUESS_GROWTH: Final = 8
_MIN_BUFFER_BYTES: Final = 4096

_ZSTD_DICTIONARY_ID_BYTES: Final = (0, 1, 2, 4)
_ZSTD_CONTENT_SIZE_BYTES: Final = (0, 2, 4, 8)


@cache
def _cramjam() -> Any:
    try:
        import cramjam
    except ImportError as error:
        raise RecordError(
            "snappy, lz4 and zstd need the package cramjam, which is not installed",
            hint="pip install 'kafkalite[compression]'",
        ) from error
    return cramjam


def check_installed(codec: Codec) -> None:
    """Raise MissingExtraError if ``codec`` needs cramjam and it is not installed."""
    if codec not in {Codec.NONE, Codec.GZIP}:
        try:
            _cramjam()
        except RecordError:
            raise MissingExtraError(f"compression.type={codec}", "cramjam", "compression") from None


def check_level(codec: Codec, level: int | None) -> None:
    """Raise ConfigError if ``codec`` does not have this level. None, the codec's default, is always valid."""
    if level is None:
        return
    if codec not in _LEVELS:
        raise ConfigError(key="compression.level", value=level, allowed=f"left out: {codec} has no levels")
    lowest, highest, _ = _LEVELS[codec]
    if not lowest <= level <= highest:
        allowed = f"a whole number from {lowest} to {highest}"
        raise ConfigError(key=f"compression.{codec}.level", value=level, allowed=allowed)


def compress(codec: Codec, data: Buffer, level: int | None = None) -> Buffer:
    """Return ``data`` compressed, or unchanged for NONE.

    Raises ConfigError for an invalid level, and RecordError if the codec needs cramjam and it is not
    installed.
    """
    check_level(codec, level)
    if level is None and codec in _LEVELS:
        level = _LEVELS[codec][2]
    match codec:
        case Codec.NONE:
            return data
        case Codec.GZIP:
            return zlib.compress(data, level if level is not None else -1, wbits=_GZIP_WINDOW)
        case Codec.SNAPPY:
            return memoryview(_cramjam().snappy.compress_raw(data))
        case Codec.LZ4:
            compressor = _cramjam().lz4.Compressor(level, content_checksum=False, block_linked=True)
            compressor.compress(data)
            return memoryview(compressor.finish())
        case Codec.ZSTD:
            return memoryview(_cramjam().zstd.compress(data, level))


def decompress(codec: Codec, data: Buffer, max_bytes: int) -> Buffer:
    """Return ``data`` decompressed, or unchanged for NONE.

    Raises BatchTooLargeError if the result exceeds ``max_bytes``, CorruptBatchError if the data is not valid
    for the codec, and RecordError if the codec needs cramjam and it is not installed. Stops decompressing at
    most 1 MiB after the output exceeds ``max_bytes``.
    """
    if codec is Codec.NONE:
        return data
    if codec is Codec.GZIP:
        return _gunzip(data, max_bytes)
    bound = unpacked_bound(codec, data, max_bytes)
    if _declared_bytes(codec, data) is not None:
        unpacked = _unpack_into(codec, data, bound)
        if isinstance(unpacked, Exception):
            raise _corrupt(codec, data, unpacked) from unpacked
        return unpacked
    return _unpack_growing(codec, data, max_bytes)


def _gunzip(data: Buffer, max_bytes: int) -> bytearray:
    """Decompress piece by piece. In one call, zlib would hold the output twice and copy unused input."""
    unpacker = zlib.decompressobj(_GZIP_WINDOW)
    unpacked = bytearray()
    view = memoryview(data)
    position = 0
    try:
        while position < len(view) and not unpacker.eof:
            piece: Buffer = view[position : position + _GZIP_INPUT_BYTES]
            position += len(piece)
            filled = _GZIP_OUTPUT_BYTES
            while piece or filled == _GZIP_OUTPUT_BYTES:  # zlib may have more output after a full buffer
                filled = -len(unpacked)
                unpacked += unpacker.decompress(piece, _GZIP_OUTPUT_BYTES)
                filled += len(unpacked)
                piece = unpacker.unconsumed_tail
                if len(unpacked) > max_bytes:
                    raise _too_large(Codec.GZIP, data, max_bytes)
    except zlib.error as error:
        raise _corrupt(Codec.GZIP, data, error) from error
    if not unpacker.eof or unpacker.unused_data or position < len(view):
        raise _corrupt(Codec.GZIP, data, "it does not end where the batch ends")
    return unpacked


def unpacked_bound(codec: Codec, data: Buffer, max_bytes: int) -> int:
    """Return an upper bound of the decompressed size of valid ``data`` in bytes, without decompressing it.

    The bound is the size that the data declares. If it declares none, the bound is the largest output of the
    codec for this many bytes, but at most ``max_bytes``. Raises BatchTooLargeError if the data declares more
    than ``max_bytes``. Raises CorruptBatchError if the data does not begin as the codec requires, or declares
    more than the codec can produce from it. ``codec`` must not be NONE.
    """
    magic = _MAGIC[codec]
    if not data or data[: len(magic)] != magic:
        raise _corrupt(codec, data, "no frame begins here")
    if codec is Codec.GZIP:
        declared: int | None = int.from_bytes(data[-_GZIP_SIZE_BYTES:], "little")
    else:
        declared = _declared_bytes(codec, data)
    if declared is None:
        return min(max_bytes, _most_bytes(codec, data))
    if declared > max_bytes:
        raise _too_large(codec, data, max_bytes)
    if declared > _most_bytes(codec, data):
        raise CorruptBatchError(f"{len(data)} bytes of {codec} cannot unpack to the declared {declared}")
    return declared


def _declared_bytes(codec: Codec, data: Buffer) -> int | None:
    """Return the decompressed size that the data declares at its beginning, or None."""
    if codec is Codec.SNAPPY:
        return _snappy_bytes(data)
    if codec is Codec.ZSTD:
        return _zstd_content_bytes(data)
    return None


def _snappy_bytes(data: Buffer) -> int:
    declared = 0
    for number, byte in enumerate(data[:_SNAPPY_SIZE_BYTES]):
        declared |= (byte & 0x7F) << 7 * number
        if not byte & 0x80:
            return declared
    raise _corrupt(Codec.SNAPPY, data, "it does not begin with its length")


def _zstd_content_bytes(data: Buffer) -> int | None:
    """Return Frame_Content_Size (RFC 8878, 3.1.1.1), or None if the frame does not have it."""
    if len(data) < 6 or data[:4] != _MAGIC[Codec.ZSTD]:
        return None
    descriptor = data[4]
    is_single_segment = bool(descriptor & 0x20)
    size_bytes = _ZSTD_CONTENT_SIZE_BYTES[descriptor >> 6] or int(is_single_segment)
    if not size_bytes:
        return None
    position = 5 + (not is_single_segment) + _ZSTD_DICTIONARY_ID_BYTES[descriptor & 3]
    declared = int.from_bytes(data[position : position + size_bytes], "little")
    return declared + 256 if size_bytes == 2 else declared


def _most_bytes(codec: Codec, data: Buffer) -> int:
    return _MAX_RATIO[codec] * len(data)


def _unpack_into(codec: Codec, data: Buffer, size_bytes: int) -> bytearray | Exception:
    """Decompress into a buffer of ``size_bytes``. Return the part of the buffer that was filled, or the
    exception if decompression fails."""
    buffer = bytearray(size_bytes)
    modules = _cramjam()
    unpackers = {
        Codec.SNAPPY: modules.snappy.decompress_raw_into,
        Codec.LZ4: modules.lz4.decompress_into,
        Codec.ZSTD: modules.zstd.decompress_into,
    }
    try:
        filled = unpackers[codec](data, buffer)
    except (modules.DecompressionError, ValueError, OSError) as error:
        return error
    del buffer[filled:]
    return buffer


def _unpack_growing(codec: Codec, data: Buffer, max_bytes: int) -> bytearray:
    """Decompress data without a declared size.

    Each attempt uses a buffer eight times as large as the one before, but no larger than ``max_bytes`` or the
    largest possible output (at least 4 KiB).
    """
    ceiling = min(max_bytes, max(_most_bytes(codec, data), _MIN_BUFFER_BYTES))
    size_bytes = min(ceiling, max(len(data) * _FIRST_GUESS_RATIO, _MIN_BUFFER_BYTES))
    while True:
        unpacked = _unpack_into(codec, data, size_bytes)
        if isinstance(unpacked, bytearray):
            return unpacked
        if size_bytes == ceiling:
            break
        size_bytes = min(ceiling, size_bytes * _GUESS_GROWTH)
    # cramjam has one error for all causes. Its text distinguishes a full buffer from damaged bytes.
    if ceiling == max_bytes and "whole buffer" in str(unpacked):
        raise _too_large(codec, data, max_bytes) from unpacked
    raise _corrupt(codec, data, unpacked) from unpacked


def _too_large(codec: Codec, data: Buffer, max_bytes: int) -> BatchTooLargeError:
    return BatchTooLargeError(
        f"{len(data)} bytes of {codec} unpack to more than {max_bytes} bytes",
        hint="builders leave a larger body uncompressed; this batch is refused",
    )


def _corrupt(codec: Codec, data: Buffer, why: object) -> CorruptBatchError:
    return CorruptBatchError(f"{len(data)} bytes of a batch are not valid {codec}: {why}")
