"""The cases: what is damaged and how. A damage changes a tree of files, {path: content}, in place.

``older`` is an earlier copy of the same tree. ``siblings`` exchanges a file with the one that has the same
role in another log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from kafkalite.records.header import scan
from proof.damage.kinds import Tree, with_epoch

METADATA: Final = "__cluster_metadata"


class Layout(NamedTuple):
    """The names of the log directories that are damaged, relative to the data directory."""

    orders: str  #: of a partition with several segments
    sibling: str  #: another partition of that topic
    groups: str  #: the partition of __consumer_offsets that has the committed offsets
    young: tuple[str, str]  #: two partitions of which no recovery point is known


class Case(NamedTuple):
    kind: str
    operation: str
    is_clean: bool  #: the node stopped orderly; otherwise it was killed

    def __str__(self) -> str:
        return f"{self.kind}-{self.operation}-{'stopped' if self.is_clean else 'killed'}"


def _segments(tree: Tree, directory: str, suffix: str) -> list[str]:
    return sorted(path for path in tree if path.startswith(f"{directory}/") and path.endswith(suffix))


def _active(tree: Tree, directory: str) -> str:
    return _segments(tree, directory, ".log")[-1]


def _first(tree: Tree, directory: str) -> str:
    return _segments(tree, directory, ".log")[0]


def _middle(tree: Tree, directory: str) -> str:
    return _segments(tree, directory, ".log")[1]


def _with_suffix(number: int, suffix: str) -> Callable[[Tree, str], str]:
    return lambda tree, directory: _segments(tree, directory, suffix)[number]


def _named(name: str) -> Callable[[Tree, str], str]:
    return lambda tree, directory: f"{directory}/{name}"


#: {kind: path of the file in a log's directory}
LOG_FILES: Final[dict[str, Callable[[Tree, str], str]]] = {
    "active segment": _active,
    "closed segment": _first,
    "middle segment": _middle,
    "index": _with_suffix(0, ".index"),
    "timeindex": _with_suffix(0, ".timeindex"),
    "leader-epochs": _named("leader-epochs"),
    "log-state": _named("log-state"),
    "producers": _with_suffix(-1, ".producers"),
    "partition.json": _named("partition.json"),
}

#: {kind: (file, the file that it is exchanged with)}
NODE_FILES: Final = {
    "recovery-points": ("recovery-points", "node.json"),
    "clean-shutdown": ("clean-shutdown", "recovery-points"),
    "node.json": ("node.json", "recovery-points"),
    "boot-id": ("boot-id", "node.json"),
    "metadata journal": (f"{METADATA}/raft.log", f"{METADATA}/raft.snapshot"),
    "metadata snapshot": (f"{METADATA}/raft.snapshot", f"{METADATA}/raft.log"),
    "metadata end": (f"{METADATA}/raft.end", f"{METADATA}/raft.log"),
}

FILE_OPERATIONS: Final = ("flip", "zero", "third", "delete", "duplicate", "swap", "older")
DIRECTORIES: Final = ("partition directory", "group directory", "metadata directory")
DIRECTORY_OPERATIONS: Final = ("delete", "zero", "swap", "older")
MORE: Final = (
    ("metadata journal", "cut"),
    ("metadata journal", "flip middle"),
    ("group segment", "third"),
    ("group segment", "epoch up"),
    *(
        (kind, operation)
        for kind in ("active segment", "closed segment", "middle segment", "unproven segment")
        for operation in ("epoch up", "epoch down", "last epoch")
    ),
    *(
        (kind, operation)
        for kind in ("active segment", "closed segment", "middle segment")
        for operation in ("length", "base offset")
    ),
    ("unproven segment", "flip"),
    ("young segment", "zero"),
    ("young segment", "delete"),
    ("young segment", "swap"),
)


def all_cases() -> Iterator[Case]:
    for is_clean in (False, True):
        for kind in [*LOG_FILES, *NODE_FILES]:
            yield from (Case(kind, operation, is_clean) for operation in FILE_OPERATIONS)
        for kind in DIRECTORIES:
            yield from (Case(kind, operation, is_clean) for operation in DIRECTORY_OPERATIONS)
        yield from (Case(kind, operation, is_clean) for kind, operation in MORE)


def damage(case: Case, tree: Tree, older: Tree, names: Layout) -> bool:
    """Apply the damage to ``tree``. Returns False if it changes nothing: the file does not exist, or was
    the same."""
    before = dict(tree)
    if case.kind in {"unproven segment", "young segment"}:  # nothing shows how far it was synced
        tree.pop("recovery-points", None)
        tree.pop("recovery-points.copy", None)
        tree.pop("clean-shutdown", None)
    if case.kind in DIRECTORIES:
        _damage_directory(case, tree, older, names)
    else:
        path, sibling = _paths(case.kind, tree, names)
        if path in tree:
            _damage_file(case.operation, tree, older, path, sibling)
    return tree != before


def _paths(kind: str, tree: Tree, names: Layout) -> tuple[str, str]:
    if kind == "unproven segment":
        return _active(tree, names.orders), ""
    if kind == "young segment":
        return _active(tree, names.young[0]), _active(tree, names.young[1])
    if kind == "group segment":
        return _active(tree, names.groups), _active(tree, names.orders)
    if kind in NODE_FILES:
        return NODE_FILES[kind]
    find = LOG_FILES[kind]
    try:
        return find(tree, names.orders), find(tree, names.sibling)
    except IndexError:  # an index of a closed segment exists in both logs; a snapshot may not
        return "", ""


def _damage_file(operation: str, tree: Tree, older: Tree, path: str, sibling: str) -> None:
    data = tree[path]
    contents = data.rstrip(b"\0")  # without the space allocated ahead
    match operation:
        case "flip":
            tree[path] = _flipped(data, len(contents) // 2)
        case "flip middle":
            tree[path] = _flipped(data, len(contents) // 3)
        case "zero":
            tree[path] = bytes(len(data))
        case "epoch up":
            tree[path] = with_epoch(data, 1)
        case "epoch down":
            tree[path] = with_epoch(data, -1)
        case "last epoch":
            tree[path] = with_epoch(data, 1, is_last=True)
        case "length":
            tree[path] = _flipped(data, _middle_batch(data) + 9)
        case "base offset":
            tree[path] = _flipped(data, _middle_batch(data) + 6)
        case "third":
            tree[path] = data[: len(contents) // 3]
        case "cut":
            tree[path] = data[: len(contents) - 5]
        case "delete":
            del tree[path]
        case "duplicate":
            tree[path] = contents + data
        case "swap" if sibling in tree:
            tree[path], tree[sibling] = tree[sibling], tree[path]
        case "older" if path in older:
            tree[path] = older[path]


def _middle_batch(data: bytes) -> int:
    """Return the position of a batch in the middle of a segment."""
    positions = [one[0] for one in scan(data, 0, len(data))]
    return positions[len(positions) // 2]


def _flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes((data[position] ^ 16,)) + data[position + 1 :] if data else data


def _damage_directory(case: Case, tree: Tree, older: Tree, names: Layout) -> None:
    directory = {
        "partition directory": names.orders,
        "group directory": names.groups,
        "metadata directory": METADATA,
    }[case.kind]
    inside = {path: data for path, data in tree.items() if path.startswith(f"{directory}/")}
    for path in inside:
        del tree[path]
    match case.operation:
        case "zero":
            tree |= {path: bytes(len(data)) for path, data in inside.items()}
        case "older":
            tree |= {path: data for path, data in older.items() if path.startswith(f"{directory}/")}
        case "swap":
            other = names.sibling if directory != names.sibling else names.orders
            others = {path: data for path, data in tree.items() if path.startswith(f"{other}/")}
            if directory == METADATA:
                tree |= inside
                return
            for path in others:
                del tree[path]
            tree |= {path.replace(other, directory): data for path, data in others.items()}
            tree |= {path.replace(directory, other): data for path, data in inside.items()}
