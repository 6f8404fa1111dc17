"""An exactly-once ledger in SQLite. Offsets and results are stored together, without Kafka transactions.

The consumer group divides the partitions, and the database stores their offsets. Whatever happens between two
lines (a crash, a power failure, an expelled member that resumes), either both a record's amount and the next
offset are in the database, or neither is.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from kafkalite import Consumer, RebalanceListener, Record, TopicPartition

_SCHEMA = """
CREATE TABLE IF NOT EXISTS balance (account TEXT PRIMARY KEY, amount INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS progress (
    topic TEXT NOT NULL, number INTEGER NOT NULL, next_offset INTEGER NOT NULL, PRIMARY KEY (topic, number)
);
"""


class Ledger:
    """Balances, and the next offset of each partition, in two tables of one database."""

    def __init__(self, path: Path | str) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.executescript(_SCHEMA)

    def close(self) -> None:
        self._database.close()

    def next_offset(self, tp: TopicPartition) -> int | None:
        """Return the offset at which to continue, or None if no record of the partition was applied."""
        row = self._database.execute(
            "SELECT next_offset FROM progress WHERE topic = ? AND number = ?", tuple(tp)
        ).fetchone()
        return row[0] if row else None

    def apply(self, record: Record) -> bool:
        """Apply one record. Return False if this or another member has already applied it."""
        account, amount = (record.key or b"").decode(), int(record.value or b"0")
        self._database.execute("BEGIN IMMEDIATE")
        try:
            done = self.next_offset(TopicPartition(record.topic, record.partition))
            if done is not None and record.offset < done:
                return False
            self._database.execute(
                "INSERT INTO balance VALUES (?, ?) ON CONFLICT (account) DO UPDATE SET amount = amount + ?",
                (account, amount, amount),
            )
            self._database.execute(
                "INSERT INTO progress VALUES (?, ?, ?) "
                "ON CONFLICT (topic, number) DO UPDATE SET next_offset = excluded.next_offset",
                (record.topic, record.partition, record.offset + 1),
            )
            self._database.execute("COMMIT")
            return True
        finally:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")

    def balances(self) -> dict[str, int]:
        return dict(self._database.execute("SELECT account, amount FROM balance ORDER BY account"))


class GoOnWhereTheLedgerStands(RebalanceListener):
    """Starts assigned partitions at the offsets in the database."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.consumer: Consumer | None = None

    async def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        assert self.consumer is not None
        for tp in partitions:
            offset = self.ledger.next_offset(tp)
            if offset is not None:
                await self.consumer.seek(tp, offset)


def ledger_consumer(bootstrap_servers: str, ledger: Ledger, **settings: object) -> Consumer:
    """Return a consumer whose offsets are stored in ``ledger``. It does not commit any to the group."""
    listener = GoOnWhereTheLedgerStands(ledger)
    consumer = Consumer(
        "payments",
        group_id="ledger",
        bootstrap_servers=bootstrap_servers,
        listener=listener,
        config={"enable.auto.commit": False, "auto.offset.reset": "earliest", **settings},
    )
    listener.consumer = consumer
    return consumer


async def keep_ledger(
    consumer: Consumer, ledger: Ledger, step: Callable[[], None] = lambda: None, *, idle_ms: int = 300
) -> None:
    """Apply records until none arrives for ``idle_ms``. ``step`` is called between any two actions."""
    while records := await consumer.get_many(timeout_ms=idle_ms):
        for record in records:
            step()
            ledger.apply(record)
            step()
