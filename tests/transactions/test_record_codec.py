"""The records of ``__transaction_state``: they are read back, and malformed ones are refused."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.coordinator_types import StateRecord
from kafkalite.errors import StorageError
from kafkalite.protocol.messages.transactions import TxnPartition
from kafkalite.transactions.record_codec import (
    GroupResult,
    parse_record,
    removal,
    result_record,
    transaction_record,
)
from kafkalite.transactions.transaction import NO_BATCH, NO_WRITER, Identity, Transaction, TransactionState

ids = st.integers(0, 2**62)
epochs = st.integers(0, 2**15 - 1)
times = st.integers(-1, 2**50)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
partitions = st.frozensets(
    st.builds(TxnPartition, st.sampled_from(["a", "b", "c"]), st.integers(0, 40)), max_size=60
)
identities = st.builds(Identity, st.integers(-1, 99), st.integers(-1, 99))
transactions = st.builds(
    Transaction,
    names,
    ids,
    epochs,
    st.sampled_from(TransactionState),
    times,
    times,
    times,
    partitions,
    identities,
    st.integers(-1, 99),
    st.just(NO_WRITER),
    st.just(NO_BATCH),
)
writers = st.builds(
    lambda transaction, writer, batch: transaction._replace(writer_name=writer, batch_id=batch),
    transactions,
    names,
    ids,
)
results = st.builds(GroupResult, names, ids, st.lists(names).map(tuple), times)


@settings(derandomize=True, deadline=None)
@given(st.one_of(transactions, writers))
def test_a_transaction_is_read_back(transaction: Transaction) -> None:
    record = transaction_record(transaction)
    assert parse_record(record) == transaction
    assert parse_record(StateRecord(record.key, None)) == transaction.key
    assert removal(transaction.key) == StateRecord(record.key, None)


@settings(derandomize=True, deadline=None)
@given(results)
def test_a_result_is_read_back(result: GroupResult) -> None:
    record = result_record(result)
    assert parse_record(record) == result
    forgotten = GroupResult(result.name, NO_BATCH, ())
    assert result_record(forgotten) == StateRecord(record.key, None)
    assert parse_record(StateRecord(record.key, None)) == forgotten


def test_the_bytes_are_frozen() -> None:
    """A change here changes the format on disk: it needs a new version."""
    orders = frozenset(TxnPartition("orders", number) for number in (0, 1, 2, 7))
    transaction = Transaction("t", 5000, 3, TransactionState.ONGOING, 60_000, 1_000, 2_000, orders)
    assert [msgpack.unpackb(part) for part in transaction_record(transaction)] == [
        [1, "t"],
        [0, 5000, 3, 1, 60_000, 1_000, 2_000, -1, -1, -1, [["orders", [0, 3, 7, 1]]]],
    ]
    member = transaction._replace(
        state=TransactionState.COMPLETE_ABORT, partitions=frozenset(), writer_name="a", batch_id=4
    )
    assert [msgpack.unpackb(part) for part in transaction_record(member)] == [
        [3, "t", 5000],
        [0, 5000, 3, 5, 60_000, 1_000, 2_000, -1, -1, -1, [], "a", 4],
    ]
    assert [msgpack.unpackb(part) for part in result_record(GroupResult("t", 4, ("a",)))] == [
        [2, "t"],
        [0, 4, ["a"]],
    ]
    assert [msgpack.unpackb(part) for part in result_record(GroupResult("t", 4, ("a",), 3_000))] == [
        [2, "t"],
        [1, 4, ["a"], 3_000],
    ]


KEY = msgpack.packb([1, "t"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"", b""),
        (b"\xc1", None),
        (msgpack.packb(5), None),
        (msgpack.packb([4, "t"]), None),
        (msgpack.packb([1, 5]), None),
        (msgpack.packb([3, "t"]), None),
        (msgpack.packb([3, "t", -1]), None),
        (KEY, b""),
        (KEY, msgpack.packb([1, 5000])),
        (KEY, msgpack.packb([0, 5000])),
        (KEY, msgpack.packb([0, 7, 3, 6, 60_000, -1, -1, -1, -1, -1, []])),
        (KEY, msgpack.packb([0, 7, 3, 1, 60_000, -1, -1, -1, -1, -1, [["orders", [0]]]])),
        (msgpack.packb([2, "t"]), msgpack.packb([0, 4])),
        (msgpack.packb([2, "t"]), msgpack.packb([1, 4, []])),
        (msgpack.packb([2, "t"]), msgpack.packb([2, 4, [], 3_000])),
    ],
)
def test_a_malformed_record_is_refused(key: bytes, value: bytes | None) -> None:
    with pytest.raises(StorageError, match="transaction log can't be read"):
        parse_record(StateRecord(key, value))


def test_the_page_has_the_numbers(repository: Path) -> None:
    page = (repository / "docs" / "storage-format.md").read_text()
    states = ", ".join(f"{number} {state.value}" for number, state in enumerate(TransactionState))
    assert f"*state*: {states}." in page
    for kind, rest in ((1, "transactional id"), (2, "application id"), (3, "application id, producer id")):
        assert f"| `[{kind}, {rest}]` |" in page
