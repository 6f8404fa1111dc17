"""make upgrade: which version it takes for the previous one. The programme itself runs the two versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from proof.processes import upgrade


def test_without_a_previous_version_it_says_that_nothing_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(upgrade, "newest_tag", lambda: None)
    assert upgrade.main([]) == 0
    assert capsys.readouterr().out.startswith("SKIPPED: there is no tag v*")


def test_the_previous_version_is_the_package_of_its_revision(tmp_path: Path) -> None:
    if not (upgrade.ROOT / ".git").exists():
        pytest.skip("not a checkout")
    program = upgrade.unpack("HEAD", tmp_path / "previous")
    assert (program / "kafkalite" / "__main__.py").exists()
    assert [path.name for path in program.iterdir()] == ["kafkalite"]
