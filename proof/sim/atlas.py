"""The fault atlas: damage to files at rest, which strikes at most one node of a run.

Every acknowledged record keeps a sound copy on another in-sync replica, so that any loss is a bug. Some runs
have one or two of the kinds; ``python -m proof.sim --factors flip_bit=20,lose_file=20`` has them often. Each
function changes files of a node that is down, at a place drawn from ``rng``, and returns what it did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kafkalite.rng import Rng
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.disk_trees import disk_with_files, tree_of
from proof.sim.nodes import DATA_PATH, SimNode

SECTOR_BYTES: Final = 512
Damage = Callable[[MemoryFileSystem, Rng], str]


class Atlas:
    """The node that damage may strike in this run: the first one that was chosen."""

    def __init__(self) -> None:
        self._victim: SimNode | None = None

    def victim(self, proposed: SimNode) -> SimNode:
        if self._victim is None:
            self._victim = proposed
        return self._victim

    @property
    def struck(self) -> SimNode | None:
        """The node that damage has struck, or None."""
        return self._victim


def _any_file(fs: MemoryFileSystem, rng: Rng, suffix: str = "") -> tuple[str, bytes]:
    """Return the path and content of a file that is not empty."""
    files = {path: data for path, data in tree_of(fs, DATA_PATH).items() if data and path.endswith(suffix)}
    path = sorted(files)[rng.randrange(len(files))]
    return path, files[path]


def _write(fs: MemoryFileSystem, path: str, position: int, data: bytes) -> None:
    file = fs.open(path)
    file.write_at(position, data)
    file.sync()
    file.close()


def flip_bit(fs: MemoryFileSystem, rng: Rng) -> str:
    path, data = _any_file(fs, rng)
    position = rng.randrange(len(data.rstrip(b"\0")) or len(data))
    _write(fs, path, position, bytes([data[position] ^ (1 << rng.randrange(8))]))
    return f"flipped a bit of {path} at {position}"


def lose_file(fs: MemoryFileSystem, rng: Rng) -> str:
    path, _ = _any_file(fs, rng)
    fs.unlink(path)
    return f"lost {path}"


def swap_files(fs: MemoryFileSystem, rng: Rng) -> str:
    """Exchange two files of the same kind."""
    one, first = _any_file(fs, rng, ".log")
    other, second = _any_file(fs, rng, ".log")
    fs.write_atomically(one, second)
    fs.write_atomically(other, first)
    return f"exchanged {one} and {other}"


def misdirect(fs: MemoryFileSystem, rng: Rng) -> str:
    """Write a sector of one file over a sector of another."""
    source, data = _any_file(fs, rng)
    target, old = _any_file(fs, rng)
    start = rng.randrange(len(data)) // SECTOR_BYTES * SECTOR_BYTES
    position = rng.randrange(len(old)) // SECTOR_BYTES * SECTOR_BYTES
    _write(fs, target, position, data[start : start + SECTOR_BYTES][: len(old) - position])
    return f"wrote a sector of {source} to {target} at {position}"


def tear(fs: MemoryFileSystem, rng: Rng) -> str:
    """Lose a sector in the middle of a segment, while what is behind it was written."""
    path, data = _any_file(fs, rng, ".log")
    position = rng.randrange(len(data.rstrip(b"\0")) or len(data)) // SECTOR_BYTES * SECTOR_BYTES
    _write(fs, path, position, bytes(min(SECTOR_BYTES, len(data) - position)))
    return f"tore {path} at {position}"


def older_copy(copy: dict[str, bytes], node: SimNode) -> None:
    """Give a node that is down the files of an earlier time."""
    node.host.filesystem = disk_with_files(copy, directories=(DATA_PATH,))


#: {name of a fault: what it does to the files of a node that is down}
DAMAGES: Final[dict[str, Damage]] = {
    "flip_bit": flip_bit,
    "lose_file": lose_file,
    "swap_files": swap_files,
    "misdirect": misdirect,
    "tear": tear,
}
#: Kinds that few runs have.
RARE: Final = (*DAMAGES, "older_copy", "no_descriptors", "clock_drift")
