"""The listener for assigned and revoked partitions."""

# Tests: tests/client/test_session.py

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from kafkalite.model import TopicPartition


class RebalanceListener:
    """Receives changes of the assignment. Override methods as needed; they may be ordinary or ``async``.

    The consumer calls these methods while the user's code waits in a call that reads records, and that call
    raises their exceptions. Only the partitions that change are passed; the others are not interrupted. The
    methods may commit and seek, but must not read records.
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
