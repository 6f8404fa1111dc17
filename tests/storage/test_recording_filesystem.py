"""The generator of crash states, with records small enough to list the expected states."""

from __future__ import annotations

import pytest

from kafkalite.errors import DiskFullError
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.recording_filesystem import RecordingFileSystem, crash_states


def recorder() -> RecordingFileSystem:
    fs = RecordingFileSystem(MemoryFileSystem())
    fs.make_dirs("/d")
    fs.sync_dir("/")
    return fs


def states(fs: RecordingFileSystem) -> list[dict[str, bytes]]:
    return [state.files for state in crash_states(fs.operations) if "/d" in state.directories]


def test_every_change_and_sync_is_recorded_in_order() -> None:
    fs = recorder()
    file = fs.open("/d/f", create=True)
    file.allocate(4)
    file.write_at(1, b"x")
    file.truncate(2)
    file.sync()
    fs.note("here")
    fs.rename("/d/f", "/d/g")
    fs.sync_dir("/d")
    fs.open("/d/g").write_at(0, b"y")
    fs.unlink("/d/g")
    fs.remove_tree("/d")
    kinds = (
        "make_dir sync_dir create allocate write truncate sync note rename sync_dir write unlink remove_tree"
    )
    assert [one.kind for one in fs.operations] == kinds.split()
    assert fs.operations[10].file_id == fs.operations[2].file_id, "a file keeps its identity when renamed"
    assert fs.operations[10].path == "/d/g"


def test_synced_bytes_under_a_synced_name_are_in_every_later_state() -> None:
    fs = recorder()
    file = fs.open("/d/f", create=True)
    file.write_at(0, b"safe")
    file.sync()
    fs.sync_dir("/d")
    before = len(fs.operations)
    file.write_at(4, b"1")
    file.write_at(5, b"2")
    later = [state.files for state in crash_states(fs.operations) if state.after >= before]
    assert sorted(one["/d/f"] for one in later) == [b"safe\x002", b"safe1", b"safe12"]


def test_a_name_without_its_bytes_and_bytes_without_their_name() -> None:
    fs = recorder()
    fs.open("/d/f", create=True).write_at(0, b"data")
    found = states(fs)
    assert {} in found
    assert {"/d/f": b""} in found
    assert {"/d/f": b"data"} in found


def test_the_last_write_is_torn_at_every_sector() -> None:
    fs = recorder()
    file = fs.open("/d/f", create=True)
    fs.sync_dir("/d")
    file.write_at(500, b"n" * 1100)
    torn = {state.label for state in crash_states(fs.operations) if state.label.startswith("torn")}
    assert torn == {f"torn at {at}, {half} lost" for at in (512, 1024, 1536) for half in ("head", "tail")}
    contents = [one["/d/f"] for one in states(fs) if "/d/f" in one]
    assert b"\0" * 500 + b"n" * 12 in contents
    assert b"\0" * 1536 + b"n" * 64 in contents


def test_renames_are_undone_one_by_one() -> None:
    fs = recorder()
    for name in "ab":
        fs.open(f"/d/{name}", create=True)
    fs.sync_dir("/d")
    fs.rename("/d/a", "/d/x")
    fs.rename("/d/b", "/d/y")
    fs.unlink("/d/y")
    found = {tuple(sorted(one)) for one in states(fs)}
    assert {("/d/a", "/d/b"), ("/d/b", "/d/x"), ("/d/x", "/d/y"), ("/d/x",), ("/d/a",)} <= found


def test_a_directory_is_renamed_with_what_is_in_it_and_removed_with_it() -> None:
    fs = recorder()
    fs.make_dirs("/d/e")
    fs.open("/d/e/f", create=True)
    fs.sync_dir("/d/e")
    fs.sync_dir("/d")
    fs.rename("/d/e", "/d/g")
    fs.remove_tree("/d/g")
    found = states(fs)
    assert {"/d/e/f": b""} in found and {"/d/g/f": b""} in found and {} in found


def test_notes_divide_the_record() -> None:
    fs = recorder()
    fs.note(1)
    fs.note(2)
    fs.open("/d/f", create=True)
    found = [(state.note, tuple(state.files)) for state in crash_states(fs.operations)]
    assert {note for note, _ in found} == {None, 2}
    assert (2, ("/d/f",)) in found
    assert (None, ("/d/f",)) not in found


def test_reads_are_not_recorded() -> None:
    fs = recorder()
    fs.write_atomically("/d/f", b"abc")
    count = len(fs.operations)
    assert fs.read_bytes("/d/f") == b"abc"
    file = fs.open("/d/f")
    assert file.read_at(0, 2) == b"ab"
    assert bytes(file.map(3)) == b"abc"
    assert file.size() == fs.file_size("/d/f") == 3
    assert fs.list_dir("/d") == ["f"]
    file.close()
    fs.lock("/d/.lock").release()
    assert len(fs.operations) == count


def test_a_failed_atomic_write_is_recorded_step_by_step() -> None:
    fs = RecordingFileSystem(MemoryFileSystem(capacity_bytes=2))
    with pytest.raises(DiskFullError):
        fs.write_atomically("/f", b"abc")
    assert [one.kind for one in fs.operations] == ["create", "truncate", "unlink"]
