"""What a user may want to do when partitions come and go."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from kafkalite.model import TopicPartition


class RebalanceListener:
    """Overwrite what you need; each may be an ordinary or an ``async`` method.

    They are called in the turn of whoever asks the consumer for records, never beside it, and only with the
    partitions that come or go: reading goes on with all others. They may commit and seek, but not ask for
    records. What they raise, the call for records raises.
    """

    def on_assigned(self, partitions: Sequence[TopicPartition]) -> Awaitable[None] | None:
        """These are ours from now on; their positions are known, and may be moved by ``seek``."""
        return None

    def on_revoked(self, partitions: Sequence[TopicPartition]) -> Awaitable[None] | None:
        """These are to be given back, and are ours until this returns: the last moment to commit them.

        Called also when the consumer closes.
        """
        return None

    def on_lost(self, partitions: Sequence[TopicPartition]) -> Awaitable[None] | None:
        """These are gone: we were expelled, and another member may read them already. Nothing of them can be
        committed. Unless overwritten this is ``on_revoked``, where a commit then raises CommitFailedError.
        """
        return self.on_revoked(partitions)
