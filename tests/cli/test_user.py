"""kl user."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Kl = Callable[..., Any]
SECRET = b"correct horse battery"


def test_users_are_added_listed_rotated_and_deleted(at: Kl, tmp_path: Path) -> None:
    added = at("user", "add", "user-a", "--password-file", "-", stdin=SECRET + b"\n")
    assert (added.code, added.told) == (0, "kl: user 'user-a' added\n")
    again = at("user", "add", "user-a", "--password-file", "-", stdin=SECRET + b"\n")
    assert again.code == 5 and "kl user rotate user-a" in again.told
    rows = {row["name"]: row for row in json.loads(at("user", "list", "-o", "json").out)}
    assert rows["user-a"]["mechanisms"] == ["SCRAM-SHA-256", "SCRAM-SHA-512"]
    file = tmp_path / "password"
    file.write_bytes(b"another one\r\nignored")
    assert at("user", "rotate", "user-a", "--password-file", str(file)).code == 0
    assert at("user", "delete", "user-a").code == 0
    for arguments in (["delete", "user-a"], ["rotate", "user-a", "--password-file", str(file)]):
        missing = at("user", *arguments)
        assert missing.code == 4 and "kl user list" in missing.told


def test_a_rotated_user_keeps_its_mechanisms(at: Kl) -> None:
    one = ["--mechanism", "scram-sha-512", "--password-file", "-"]
    assert at("user", "add", "user-b", *one, stdin=SECRET).code == 0
    assert at("user", "rotate", "user-b", "--password-file", "-", stdin=b"x").code == 0
    rows = {row["name"]: row for row in json.loads(at("user", "list", "-o", "json").out)}
    assert rows["user-b"]["mechanisms"] == ["SCRAM-SHA-512"]
    at("user", "delete", "user-b")


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "reason"),
    [
        ([], SECRET, 2, "--password-file"),
        (["--password-file", "-"], b"\n", 2, "the password is empty"),
        (["--password-file", "/nonexistent"], b"", 4, "/nonexistent"),
        (["--password-file", "-"], SECRET + b"\x07\n", 1, "SASLprep prohibits"),
        (["--password-file", "-", "--iterations", "5"], SECRET, 2, "4096"),
    ],
)
def test_a_bad_password_is_refused_and_never_shown(
    at: Kl, arguments: list[str], stdin: bytes, code: int, reason: str
) -> None:
    result = at("user", "add", "user-c", *arguments, stdin=stdin)
    assert result.code == code and reason in result.told
    assert SECRET.decode() not in result.told + result.text
