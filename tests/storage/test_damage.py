"""R24, R25, R42-R45: every kind of damage of a single node, after a kill and after an orderly stop."""

from __future__ import annotations

import asyncio
import logging
from functools import cache

import pytest

from proof.damage.cases import Case, all_cases
from proof.damage.single_node import Node, prepare, run_case


@cache
def node(*, is_clean: bool) -> Node:
    return asyncio.run(prepare(is_clean=is_clean))


@pytest.mark.parametrize("case", list(all_cases()), ids=str)
def test_no_acknowledged_record_is_lost_or_changed_without_notice(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    outcome = asyncio.run(run_case(case, node(is_clean=case.is_clean)))
    if outcome is None:
        pytest.skip("the file does not exist, or this changes nothing")
    assert outcome.verdict in {"whole", "offline", "refused"}, outcome.detail
