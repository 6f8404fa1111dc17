"""Exceptions become error codes in one place; assertions never do."""

from __future__ import annotations

import logging

import pytest

from kafkalite.broker.server.error_responses import KEPT_TEXTS, translate, without_texts
from kafkalite.errors import (
    BatchTooLargeError,
    ConfigError,
    CorruptBatchError,
    CorruptLogError,
    DiskFullError,
    ErrorCode,
    LogOfflineError,
    OffsetOutOfRangeError,
    RemoteProtocolError,
)
from kafkalite.limits import MAX_ERROR_MESSAGE_LENGTH
from kafkalite.protocol.messages.admin import DeleteTopicsResponse, TopicResult


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OffsetOutOfRangeError("no"), ErrorCode.OFFSET_OUT_OF_RANGE),
        (CorruptBatchError("no"), ErrorCode.CORRUPT_MESSAGE),
        (BatchTooLargeError("no"), ErrorCode.MESSAGE_TOO_LARGE),
        (DiskFullError("no"), ErrorCode.KAFKA_STORAGE_ERROR),
        (LogOfflineError("no"), ErrorCode.KAFKA_STORAGE_ERROR),
        (CorruptLogError(path="p", position=1, expected="a", actual="b"), ErrorCode.KAFKA_STORAGE_ERROR),
        (ConfigError(key="k", value=1, allowed="2"), ErrorCode.INVALID_CONFIG),
        (RemoteProtocolError("no"), ErrorCode.INVALID_REQUEST),
    ],
)
def test_every_expected_failure_has_its_code(error: Exception, code: ErrorCode) -> None:
    outcome = translate(error)
    assert outcome.error_code == code
    assert outcome.error_message


def test_messages_are_cut() -> None:
    error = OffsetOutOfRangeError("x" * 10_000)
    assert len(translate(error).error_message or "") == MAX_ERROR_MESSAGE_LENGTH


def test_unexpected_errors_are_logged_under_the_id_that_the_client_receives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        outcome = translate(ZeroDivisionError("secret detail"))
    assert outcome.error_code == ErrorCode.UNKNOWN_SERVER_ERROR
    assert outcome.error_message is not None
    assert "secret" not in outcome.error_message
    incident = outcome.error_message.rsplit(" ", 1)[1]
    assert incident in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_broken_invariant_is_not_translated() -> None:
    with pytest.raises(AssertionError, match="broken"):
        translate(AssertionError("broken"))


def test_only_the_first_items_of_a_large_response_keep_their_texts() -> None:
    failed = [TopicResult(f"t{number}", 3, "no such topic") for number in range(KEPT_TEXTS + 2)]
    created = TopicResult("new", 0, None)
    shorter = without_texts(DeleteTopicsResponse(0, "text", [created, *failed]))
    assert shorter == DeleteTopicsResponse(
        0, "text", [created, *failed[:-2], *(one._replace(error_message=None) for one in failed[-2:])]
    )
