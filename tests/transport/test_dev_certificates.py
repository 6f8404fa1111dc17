"""Certificates for development: what is written, with which rights, and what a second run keeps."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from kafkalite.errors import ConfigError
from kafkalite.transport.certificates import parse_certificate, pem_certificates
from kafkalite.transport.dev_certificates import CA_CERTIFICATE, CA_KEY, make_dev_certificates


def test_only_the_owner_reads_keys(tmp_path: Path) -> None:
    directory = tmp_path / "certificates"
    written = make_dev_certificates(directory, ["node1", "node2"], ["alice"], ["127.0.0.1"])
    assert written == {name: directory / f"{name}.pem" for name in ("node1", "node2", "alice")}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    keystores = dict.fromkeys(["node1.pem", "node2.pem", "alice.pem"], 0o600)
    assert modes == {**keystores, CA_KEY: 0o600, CA_CERTIFICATE: 0o644}


def test_a_second_run_keeps_the_authority(tmp_path: Path) -> None:
    make_dev_certificates(tmp_path, ["node1"], [], [])
    authority, first = (tmp_path / CA_CERTIFICATE).read_bytes(), (tmp_path / "node1.pem").read_bytes()
    make_dev_certificates(tmp_path, ["node1"], ["alice"], [])
    assert (tmp_path / CA_CERTIFICATE).read_bytes() == authority
    assert (tmp_path / "node1.pem").read_bytes() != first
    assert pem_certificates((tmp_path / "alice.pem").read_bytes())[1] == pem_certificates(authority)[0]


def test_two_authorities_have_different_names(tmp_path: Path) -> None:
    names = set()
    for directory in (tmp_path / "a", tmp_path / "b"):
        make_dev_certificates(directory, [], [], [])
        pem = (directory / CA_CERTIFICATE).read_bytes()
        names.add(parse_certificate(pem_certificates(pem)[0]).subject)
    assert len(names) == 2


def test_an_authority_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / CA_KEY).write_text("nothing")
    with pytest.raises(ConfigError, match=r"directory is .* but must be a directory with ca\.pem and ca-key"):
        make_dev_certificates(tmp_path, ["node1"], [], [])


def test_openssl_accepts_the_chain(tmp_path: Path) -> None:
    make_dev_certificates(tmp_path, ["node1"], [], ["localhost"])
    command = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-verify_hostname", "localhost"]
    ca, leaf = str(tmp_path / CA_CERTIFICATE), str(tmp_path / "node1.pem")
    done = subprocess.run([*command, "-CAfile", ca, leaf], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
