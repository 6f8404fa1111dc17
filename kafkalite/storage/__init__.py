"""One partition's log on disk: segments, indexes, recovery, retention, compaction; and the data directory.

Pure modules decide (layout, offset_index, time_index, index_block, leader_epochs, producer_state, retention,
compaction, log_config). ``log.Log`` owns the state of one log: its segments, ``SyncState``,
``CompactionState`` and ``ProducerSnapshots``. Only the ``FileSystem`` interface touches files.
``docs/storage-format.md`` specifies every file.
"""
