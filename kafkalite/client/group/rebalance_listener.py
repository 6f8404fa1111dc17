"""The listener for assigned and revoked partitions."""

# Tests: tests/client/test_session.py

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from kafkalite.model import TopicPartition


class RebalanceListener:
    """Receives changes of the assignment. Override methods as needed; they may be ordinary or ``async``.

    Methods are called inside the consumer's calls for records, only with the partitions that are assigned or
    revoked; reading the other partitions continues. They may commit and seek, but must not ask for records.
    The call for records raises their exceptions.
    """

    def on_assigned(self, partitions: Sequence[TopicPartition]) -> Awaitable[None] | None:
        """Called when partitions are assigned. Their positions are known and may be changed by ``seek``."""
        return None

    def on_revoked(self, partitions: Sequence[TopicPartition]) -> Awaitable[None] | None:
        """Called before partitions are revoked. This is the last chance to commit their offsets.

        Also called when the consumer closes.
        """
        return None

    def on_lost(self, partitions: Sequence[TopicPartition]) -> Awaitable[None] | None:
        """Called when partitions are lost because this consumer was expelled.

        Other members may already read them, so no offsets can be committed. By default calls ``on_revoked``,
        in which a commit then raises CommitFailedError.
        """
        return self.on_revoked(partitions)
