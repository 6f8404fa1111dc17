"""The vocabulary: addresses, names, errors, the Rng and Clock seams."""

from __future__ import annotations

import pytest

from kafkalite.clock import SystemClock
from kafkalite.errors import (
    BrokerError,
    CorruptLogError,
    ErrorCode,
    KafkaliteError,
    OffsetOutOfRangeError,
    UnknownServerError,
    broker_error,
)
from kafkalite.model import Record, RecordAddress, TimestampType, TopicPartition, topic_name_problem
from kafkalite.rng import seeded_rng, system_rng


def test_an_address_is_topic_partition_offset() -> None:
    address = RecordAddress.parse("my-topic-1-456332")
    assert address == ("my-topic", 1, 456332)
    assert str(address) == "my-topic-1-456332"
    assert str(TopicPartition("t", 3)) == "t-3"
    record = Record("t", 0, 5, 0, TimestampType.CREATE_TIME, None, b"", ())
    assert str(record.address) == "t-0-5"


@pytest.mark.parametrize(
    "text", ["", "t", "t-1", "-1-2", "t-x-1", "t-1-x", "t-1-", "t-1-²", f"t-1-{'9' * 20}"]
)
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not Topic-Partition-Offset"):
        RecordAddress.parse(text)


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "...", "x" * 249])
def test_good_topic_names(name: str) -> None:
    assert topic_name_problem(name) is None


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "must not be empty"),
        (".", "must not be '.'"),
        ("..", "must not be '..'"),
        ("x" * 250, "this one has 250"),
        ("../x", "outside"),
        ("a/b", "outside"),
        ("a\x00", "outside"),
        ("а", "outside"),  # a Cyrillic letter that looks like a Latin one
        ("a\n", "outside"),
    ],
)
def test_bad_topic_names_say_why(name: str, problem: str) -> None:
    assert problem in (topic_name_problem(name) or "")


def test_every_error_code_has_its_class() -> None:
    for code in ErrorCode:
        if code is not ErrorCode.NONE:
            error = broker_error(code, "because")
            assert error.code == code
            assert "because" in str(error)
    assert isinstance(broker_error(ErrorCode.OFFSET_OUT_OF_RANGE), OffsetOutOfRangeError)
    unknown = broker_error(31337, "odd")
    assert isinstance(unknown, UnknownServerError)
    assert "31337" in str(unknown)


def test_a_code_has_one_class() -> None:
    with pytest.raises(AssertionError, match="has two classes"):
        type("Twin", (BrokerError,), {}, code=ErrorCode.OFFSET_OUT_OF_RANGE)


def test_errors_carry_a_hint() -> None:
    assert str(KafkaliteError("it broke", hint="mend it")) == "it broke (mend it)"
    assert str(KafkaliteError("it broke")) == "it broke"
    damage = CorruptLogError(path="f.log", position=7, expected="a", actual="b")
    assert "f.log is damaged at position 7" in str(damage)


def test_a_seed_repeats_itself() -> None:
    assert seeded_rng(5).randbytes(8) == seeded_rng(5).randbytes(8)
    assert 0 <= system_rng().random() < 1


async def test_the_system_clock_goes_forward() -> None:
    clock = SystemClock()
    before = clock.monotonic_ms()
    await clock.sleep_ms(1)
    assert clock.monotonic_ms() > before - 1
    assert clock.wall_ms() > 1_600_000_000_000
