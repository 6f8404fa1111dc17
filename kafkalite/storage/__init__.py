"""One partition's log on disk: segments, indexes, recovery, retention; and the data directory of many.

Pure modules decide (layout, offset_index, time_index, index_block, leader_epochs, retention, log_config);
segment, log, recovery and log_store do what they say, through the FileSystem seam and nothing else.
``docs/storage-format.md`` is the specification of every file.
"""
