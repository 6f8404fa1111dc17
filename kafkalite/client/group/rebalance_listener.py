"""The listener for assigned and revoked partitions."""

# Tests: tests/client/test_session.py

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from kafkalite.model import TopicPartition


class RebalanceListener:
    """Override what you need. Each method may be ordinary or ``async``.

    Methods are called inside the calls that ask the consumer for records, only with the partitions that
    are assigned or revoked; reading the others continues. They may commit and seek, but not ask for
    records. The call for records raises their exceptions.
    """

    def on_assigned(self, partitions: Sequence[TopicPartition]) -> Awaitable[None] | None:
        """Called when partitions are assigned. Their positions are known and may be changed by ``seek``."""
        return None

    def on_revoked(self, partitions: Sequence[TopicPartition]) -> Awaitable[None] | None:
        """Called before partitions are revoked: the last chance to commit their offsets.

        Also called when the consumer closes.
        """
        return None

    def on_lost(self, partitions: Sequence[TopicPartition]) -> Awaitable[None] | None:
        """Called when partitions are lost, because this consumer was expelled; other members may read them
        already. Nothing can be committed. By default calls ``on_revoked``, where a commit then raises
        CommitFailedError.
        """
        return self.on_revoked(partitions)
