from __future__ import annotations

from typing import Any

import pytest

from kafkalite.errors import ConfigError
from kafkalite.limits import MAX_SEGMENT_BYTES
from kafkalite.storage.log_config import LogConfig


def test_the_defaults_are_kafkas() -> None:
    config = LogConfig()
    assert config.segment_bytes == 1024**3
    assert config.index_interval_bytes == 4096
    assert config.retention_ms == 604_800_000
    assert config.retention_bytes == -1
    assert config.synced_only


@pytest.mark.parametrize(
    ("setting", "value", "key"),
    [
        ("segment_bytes", 1, "segment.bytes"),
        ("segment_bytes", MAX_SEGMENT_BYTES + 1, "segment.bytes"),
        ("segment_ms", 0, "segment.ms"),
        ("segment_jitter_ms", -1, "segment.jitter.ms"),
        ("segment_index_bytes", 7, "segment.index.bytes"),
        ("index_interval_bytes", -1, "index.interval.bytes"),
        ("retention_ms", -2, "retention.ms"),
        ("retention_bytes", -2, "retention.bytes"),
        ("max_message_bytes", -1, "max.message.bytes"),
        ("file_delete_delay_ms", -1, "file.delete.delay.ms"),
        ("preallocate_min_bytes", -1, "preallocate.min.bytes"),
        ("preallocate_max_bytes", 1, "preallocate.max.bytes"),
        ("durability", "maybe", "durability"),
        ("segment_ms", True, "segment.ms"),
        ("segment_ms", 1.5, "segment.ms"),
    ],
)
def test_the_error_for_a_bad_setting_has_its_value(setting: str, value: Any, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LogConfig(**{setting: value})
    assert caught.value.key == key
    assert caught.value.value == value


def test_page_cache_counts_unsynced_bytes() -> None:
    assert not LogConfig(durability="page-cache").synced_only
