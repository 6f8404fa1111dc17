"""A single node with damaged metadata refuses to start, and starts after the command that it names (R45)."""

from __future__ import annotations

from pathlib import Path

from proof.processes import lone_damage

CASES = {"kill/journal.flip", "clean/journal.delete", "kill/metadata.delete", "clean/metadata.older"}


def test_r45_a_node_has_all_sound_records_after_the_command_of_its_refusal(tmp_path: Path) -> None:
    chosen = [case for case in lone_damage.cases() if str(case) in CASES]
    verdicts = lone_damage.run_cases(chosen, tmp_path, seed=1, jobs=2, tell=lambda _text: None)
    assert {str(case): one.problem for case, one in verdicts.items()} == dict.fromkeys(CASES)
    assert {one.outcome for one in verdicts.values()} == {lone_damage.REFUSED}
