"""Entries of the metadata log: the format of commands, and the rule by which they take effect.

::

    entry    (command, index, term)
    command  00 | u64 after_offset | msgpack bytes of the records         big-endian
             01                                                           no-op, the first entry of a leader
             04 | msgpack of all voters                                   see ``voter_set``

A command takes effect only if ``after_offset`` is the offset of the current state: the offset of the last
command that took effect, or 0. Otherwise the command is void on every node (R19). The offset of an entry is
its index. Offsets have gaps, because no-ops, lists of voters and void commands do not change the state.
"""

from __future__ import annotations

import struct
from typing import Final

from kafkalite.limits import MIB

Entry = tuple[bytes, int, int]
"""(command, index, term)"""

REGULAR: Final = 0  # the first byte of a regular command in pysyncobj
NO_OP: Final = 1
VOTERS: Final = 4  # 2 and 3 are commands of pysyncobj, which are never used
MAX_COMMAND_BYTES: Final = 4 * MIB  # 20,000 partition records take 2.5 MiB

#: The first entry of every log. No leader has written it.
FIRST_ENTRY: Final[Entry] = (bytes((NO_OP,)), 1, 0)

_AFTER_OFFSET: Final = struct.Struct(">Q")


def change_after(offset: int, records: bytes) -> bytes:
    """Return the change, which is a command without its first byte, for ``records`` that were decided on the
    state at ``offset``."""
    return _AFTER_OFFSET.pack(offset) + records


def is_void(after_offset: int, offset: int) -> bool:
    """Whether an entry that was decided at ``after_offset`` has no effect on the state at ``offset``."""
    return after_offset != offset


def effective_records(change: bytes, offset: int) -> bytes | None:
    """Return the encoded records of a change, or None if it is void on the state at ``offset``."""
    (after_offset,) = _AFTER_OFFSET.unpack_from(change)
    return None if is_void(after_offset, offset) else change[_AFTER_OFFSET.size :]
