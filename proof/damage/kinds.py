"""Kinds of damage to the files of a node that is down: which file, and what happens to it.

``LOG_KINDS`` are those of one partition's directory, ``NODE_KINDS`` those of the node's whole directory. The
simulator and the programme with real processes use the same kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from kafkalite.errors import WrongFileTypeError
from kafkalite.records.header import parse_header, scan, stamp
from kafkalite.rng import Rng
from kafkalite.storage import layout
from kafkalite.storage.filesystem import FileSystem

Tree = dict[str, bytes]
"""The files of a directory by path relative to it."""

ACTIVE: Final = "active"
CLOSED: Final = "closed"
FIRST: Final = "first"
DIRECTORY: Final = "directory"
METADATA: Final = "metadata"
NODE: Final = "node"

SWAP: Final = "swap"
OLDER: Final = "older"
EARLIER: Final = "earlier"  #: like OLDER, and another process has run in between


class Kind(NamedTuple):
    file: str
    operation: str

    def __str__(self) -> str:
        return f"{self.file}.{self.operation}"


# --- operations on one file ------------------------------------------------------------------------------


def flip(fs: FileSystem, path: str, rng: Rng) -> None:
    """Flip one bit of the content, but not in the zeros at the end of the file."""
    _flip_at(fs, path, rng.randrange(_used_bytes(fs, path)), 1 << rng.randrange(8))


def flip_last(fs: FileSystem, path: str, _rng: Rng) -> None:
    """Flip one bit in the last batch or frame, so that nothing valid follows the damage."""
    _flip_at(fs, path, max(_used_bytes(fs, path) - 2, 0), 1)


def zero(fs: FileSystem, path: str, _rng: Rng) -> None:
    _overwrite(fs, path, 0, bytes(fs.file_size(path)))


def zero_block(fs: FileSystem, path: str, rng: Rng) -> None:
    """Zero up to 512 bytes, as if a write was lost."""
    length = _used_bytes(fs, path)
    position = rng.randrange(length)
    _overwrite(fs, path, position, bytes(min(512, length - position)))


def truncate(fs: FileSystem, path: str, _rng: Rng) -> None:
    """Cut the file to a third of its content."""
    file = fs.open(path)
    file.truncate(_used_bytes(fs, path) // 3)
    file.close()


def delete(fs: FileSystem, path: str, _rng: Rng) -> None:
    fs.unlink(path)


def duplicate(fs: FileSystem, path: str, _rng: Rng) -> None:
    """Append the content once more, as if it was written twice."""
    content = fs.read_bytes(path)[: _used_bytes(fs, path)]
    _overwrite(fs, path, len(content), content)


def epoch_up(fs: FileSystem, path: str, _rng: Rng) -> None:
    """Give a batch in the middle a later leader epoch."""
    _overwrite(fs, path, 0, with_epoch(fs.read_bytes(path), 1))


def epoch_down(fs: FileSystem, path: str, _rng: Rng) -> None:
    """Give a batch in the middle an earlier leader epoch."""
    _overwrite(fs, path, 0, with_epoch(fs.read_bytes(path), -1))


def epoch_last(fs: FileSystem, path: str, _rng: Rng) -> None:
    """Give the last batch a later leader epoch."""
    _overwrite(fs, path, 0, with_epoch(fs.read_bytes(path), 1, is_last=True))


def with_epoch(content: bytes, change: int, *, is_last: bool = False) -> bytes:
    """Return the content of a segment with another leader epoch of one batch, which its CRC does not cover:
    the last epoch in the segment if that is later and ``change`` is positive, else changed by ``change``."""
    positions = [one[0] for one in scan(content, 0, len(content))]
    if not positions:
        return content
    at = positions[-1 if is_last else len(positions) // 2]
    epoch = parse_header(content, at).leader_epoch
    last = parse_header(content, positions[-1]).leader_epoch
    changed = bytearray(content)
    new = last if last > epoch and change > 0 else epoch + change
    stamp(memoryview(changed)[at:], base_offset=parse_header(content, at).base_offset, leader_epoch=new)
    return bytes(changed)


def replace(fs: FileSystem, path: str, content: bytes | None) -> None:
    """Replace the content of a file; None removes it."""
    if fs.exists(path):
        fs.unlink(path)
    if content is not None:
        file = fs.open(path, create=True)
        file.write_at(0, content)
        file.close()


def _used_bytes(fs: FileSystem, path: str) -> int:
    return max(len(fs.read_bytes(path).rstrip(b"\0")), 1)


def _flip_at(fs: FileSystem, path: str, position: int, bit: int) -> None:
    _overwrite(fs, path, position, bytes([(fs.read_bytes(path)[position : position + 1] or b"\0")[0] ^ bit]))


def _overwrite(fs: FileSystem, path: str, position: int, content: bytes) -> None:
    file = fs.open(path)
    file.write_at(position, content)
    file.close()


OPERATIONS: Final[dict[str, Callable[[FileSystem, str, Rng], None]]] = {
    "flip": flip,
    "flip-last": flip_last,
    "zero": zero,
    "zero-block": zero_block,
    "truncate": truncate,
    "delete": delete,
    "duplicate": duplicate,
    "epoch-up": epoch_up,
    "epoch-down": epoch_down,
    "epoch-last": epoch_last,
}


# --- trees -----------------------------------------------------------------------------------------------


def copy_tree(fs: FileSystem, path: str) -> Tree:
    """Return the files below ``path``; empty if it is missing."""
    found: Tree = {}
    for name in fs.list_dir(path) if fs.exists(path) else ():
        inner = layout.join(path, name)
        try:
            found[name] = fs.read_bytes(inner)
        except (WrongFileTypeError, FileNotFoundError, AssertionError):
            found |= {f"{name}/{each}": content for each, content in copy_tree(fs, inner).items()}
    return found


def restore_tree(fs: FileSystem, path: str, tree: Tree) -> None:
    """Replace the directory ``path``; an empty tree removes it."""
    if fs.exists(path):
        fs.remove_tree(path)
    for name, content in tree.items():
        inner = layout.join(path, name)
        fs.make_dirs(layout.parent(inner))
        replace(fs, inner, content)


# --- damage to a log -------------------------------------------------------------------------------------

_SMALL_FILES: Final = {
    "epochs": layout.LEADER_EPOCHS_FILE,
    "state": layout.LOG_STATE_FILE,
    "partition": layout.PARTITION_FILE,
}
_WITH_SUFFIX: Final = {
    ACTIVE: (layout.LOG_SUFFIX, -1),
    CLOSED: (layout.LOG_SUFFIX, 1),
    FIRST: (layout.LOG_SUFFIX, 0),
    "index": (layout.OFFSET_INDEX_SUFFIX, 1),
    "timeindex": (layout.TIME_INDEX_SUFFIX, 1),
    "producers": (layout.PRODUCERS_SUFFIX, -1),
}


def file_of_log(fs: FileSystem, directory: str, file: str) -> str | None:
    """Return the path of a kind of file in a log's directory, or None if the log has none.

    CLOSED is the second of at least three segments.
    """
    if file in _SMALL_FILES:
        path = layout.join(directory, _SMALL_FILES[file])
        return path if fs.exists(path) else None
    suffix, index = _WITH_SUFFIX[file]
    names = sorted(name for name in fs.list_dir(directory) if name.endswith(suffix))
    is_there = len(names) > max(index, 0) and (file != CLOSED or len(names) > 2)
    return layout.join(directory, names[index]) if is_there else None


def _kinds(file: str, operations: str) -> list[Kind]:
    return [Kind(file, operation) for operation in operations.split()]


LOG_KINDS: Final = (
    *_kinds(ACTIVE, "flip flip-last zero zero-block truncate delete duplicate swap older"),
    *_kinds(ACTIVE, "epoch-up epoch-down epoch-last"),
    *_kinds(CLOSED, "flip zero zero-block truncate delete duplicate swap epoch-up epoch-down"),
    *_kinds(FIRST, "flip truncate delete"),
    *_kinds(DIRECTORY, "delete swap older"),
    *_kinds("index", "flip zero truncate delete swap"),
    *_kinds("timeindex", "flip zero truncate delete"),
    *_kinds("epochs", "flip zero truncate delete older"),
    *_kinds("state", "flip zero truncate delete older"),
    *_kinds("partition", "flip zero truncate delete swap"),
    *_kinds("producers", "flip zero truncate delete swap"),
)


def damage_log(
    fs: FileSystem, directory: str, kind: Kind, rng: Rng, *, sibling: str = "", earlier: Tree | None = None
) -> bool:
    """Damage a log. Return False if it has no such file, or if other damage has removed it or its sibling.

    SWAP also damages the log in the directory ``sibling``; OLDER restores files of ``earlier``.
    """
    if not all(fs.exists(each) for each in (directory, sibling) if each):
        return False
    if kind.file == DIRECTORY:
        tree = {} if kind.operation == "delete" else earlier or {}
        if kind.operation == SWAP:
            tree = copy_tree(fs, sibling)
            restore_tree(fs, sibling, copy_tree(fs, directory))
        restore_tree(fs, directory, tree)
        return True
    path = file_of_log(fs, directory, kind.file)
    if path is None:
        return False
    if kind.operation == SWAP:
        other = file_of_log(fs, sibling, kind.file)
        if other is None:
            return False
        own_content = fs.read_bytes(path)
        replace(fs, path, fs.read_bytes(other))
        replace(fs, other, own_content)
    elif kind.operation == OLDER:
        replace(fs, path, (earlier or {}).get(path.rpartition("/")[2]))
    else:
        OPERATIONS[kind.operation](fs, path, rng)
    return True


# --- damage to a node's directory ------------------------------------------------------------------------

#: Kinds of files by the ends of their paths in the node's directory.
NODE_FILES: Final = {
    "identity": layout.NODE_FILE,
    "points": layout.RECOVERY_POINTS_FILE,
    "marker": layout.CLEAN_SHUTDOWN_FILE,
    "start-count": "start-count",
    "voters": "quorum-voters",
    "journal": "__cluster_metadata/raft.log",
    "snapshot": "__cluster_metadata/raft.snapshot",
}

NODE_KINDS: Final = (
    *_kinds(NODE, "delete older earlier"),
    *_kinds(METADATA, "delete older"),
    *_kinds("journal", "flip flip-last zero zero-block truncate delete duplicate older"),
    *_kinds("identity", "flip zero truncate delete"),
    *_kinds("points", "flip zero truncate delete older"),
    *_kinds("marker", "flip zero truncate delete older"),
    *_kinds("start-count", "flip zero delete older"),
    *_kinds("voters", "flip zero delete"),
)


def damage_node(fs: FileSystem, directory: str, kind: Kind, rng: Rng, *, earlier: Tree | None = None) -> bool:
    """Damage the directory of a node. Return False if it has no such file."""
    old = earlier or {}
    is_delete = kind.operation == "delete"
    if kind.file == NODE:
        restore_tree(fs, directory, {} if is_delete else old)
        return True
    if kind.file == METADATA:
        name = "__cluster_metadata"
        tree = {each.removeprefix(f"{name}/"): old[each] for each in _below(old, name)}
        restore_tree(fs, layout.join(directory, name), {} if is_delete else tree)
        return True
    path = layout.join(directory, NODE_FILES[kind.file])
    if kind.operation == OLDER:
        replace(fs, path, old.get(NODE_FILES[kind.file]))
    elif fs.exists(path):
        OPERATIONS[kind.operation](fs, path, rng)
    else:
        return False
    return True


def _below(names: Iterable[str], directory: str) -> list[str]:
    return [name for name in names if name.startswith(f"{directory}/")]
