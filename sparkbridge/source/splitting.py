"""Splits the ranges of partitions into ranges of tasks. Pure.

The algorithm is that of Spark's connector (KafkaOffsetRangeCalculator). ``maxRecordsPerPartition`` is applied
first, and ``minPartitions`` is then approximated by splitting ranges that are large compared to the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from sparkbridge.offsets import OffsetRange


def split(
    ranges: Iterable[OffsetRange], *, min_partitions: int | None = None, max_records: int | None = None
) -> list[OffsetRange]:
    """Split ``ranges`` into about ``min_partitions`` or more ranges of at most ``max_records`` offsets.

    None means no limit. Empty ranges are omitted.
    """
    pieces = [range_ for range_ in ranges if range_.size > 0]
    if max_records is not None:
        pieces = [piece for whole in pieces for piece in cut(whole, -(-whole.size // max_records))]
    if min_partitions is None or min_partitions <= len(pieces):
        return pieces
    total = sum(piece.size for piece in pieces)
    # Ranges that are not split are excluded from the proportions, or large ranges would get too few tasks.
    is_large = [_share(piece.size, total, min_partitions) > 1 for piece in pieces]
    large_total = sum(piece.size for piece, large in zip(pieces, is_large, strict=True) if large)
    left = max(min_partitions - is_large.count(False), 1)
    cuts: list[OffsetRange] = []
    for piece, large in zip(pieces, is_large, strict=True):
        cuts += cut(piece, _share(piece.size, large_total, left) if large else 1)
    return cuts


def cut(whole: OffsetRange, count: int) -> list[OffsetRange]:
    """Split ``whole`` into at most ``count`` pieces of at least one offset. The larger pieces are last."""
    count = min(count, whole.size)
    size, larger = divmod(whole.size, count)
    borders = [whole.start + index * size + max(0, index - (count - larger)) for index in range(count + 1)]
    return [whole._replace(start=start, end=end) for start, end in pairwise(borders)]


def _share(size: int, total: int, count: int) -> int:
    """Return ``count * size / total``, rounded half up, at least 1. Floats would be too imprecise."""
    return max((2 * size * count + total) // (2 * total), 1)
