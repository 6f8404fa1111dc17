"""The partitions that this broker hosts: roles, syncs, waiters, retention and compaction."""
