"""The listener for assigned and revoked partitions."""

# Tests: tests/client/test_session.py

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from kafkalite.model import TopicPartition


class RebalanceListener:
    """Receives changes of the assignment. Override methods as needed; they may be ordinary or ``async``.

    The consumer calls these methods while the user's code waits in a call that reads records, or in
    ``start``, ``unsubscribe`` or ``close``. That call raises their exceptions. The methods receive only the
    partitions that change; other partitions are not interrupted. The methods may commit and seek, but must
    not read records.
    """

    def on_assigned(self, partitions: Sequence[TopicPartition]) -> Awaitable[None] | None:
        """Called when partitions are assigned.

        They start at their committed offsets, if they have any, unless this method calls ``seek``.
        """
        return None

    def on_revoked(self, partitions: Sequence[TopicPartition]) -> Awaitable[None] | None:
        """Called before partitions are revoked. This is the last chance to commit their offsets.

        Also called when the consumer unsubscribes or closes.
        """
        return None

    def on_lost(self, partitions: Sequence[TopicPartition]) -> Awaitable[None] | None:
        """Called when partitions are lost because this consumer is no longer a member of the group.

        For example, it was expelled, or left because it read no records for max.poll.interval.ms. Other
        members may already read the partitions, so their offsets cannot be committed. By default calls
        ``on_revoked``, in which a commit then raises CommitFailedError.
        """
        return self.on_revoked(partitions)
