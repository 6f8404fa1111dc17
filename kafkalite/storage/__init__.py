"""One partition's log on disk: segments, indexes, recovery, retention, compaction. Also the data directory.

The pure modules make decisions: layout, offset_index, time_index, index_block, leader_epochs, producer_state,
retention, compaction and log_config. ``log.Log`` owns the state of one log: its segments, ``SyncState``,
``CompactionState`` and ``ProducerSnapshots``. All file access uses the ``FileSystem`` interface.
``docs/storage-format.md`` specifies every file.
"""
