"""The cost of the death and return of a broker with 3,000 partitions, for the controller and all brokers."""

from __future__ import annotations

import gc
import sys
import time

import pytest

from kafkalite.metadata import record_codec
from kafkalite.metadata.broker_commands import FenceBroker
from kafkalite.metadata.controller import decide
from kafkalite.metadata.delta import Delta
from kafkalite.metadata.features import SUPPORTED
from kafkalite.protocol.messages.cluster import RegisterBrokerRequestV1

LIMIT_MS = 200


def cpu_ms(call):
    """Return the call's own cost, without garbage collection of other tests' objects."""
    gc.collect()
    gc.disable()
    try:
        started = time.process_time()
        result = call()
        return (time.process_time() - started) * 1_000, result
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer multiplies the cost")
@pytest.mark.parametrize(("topics", "partitions"), [(1, 3_000), (300, 10)])
def test_fencing_and_registering_are_cheap(new_metadata, topics, partitions, capsys):
    metadata = new_metadata(brokers=0)
    for node_id in (1, 2, 3):
        metadata.register(node_id)
        metadata.unfence(node_id)
    for number in range(topics):
        metadata.create(f"t{number}", partitions=partitions, factor=3, configs={"min.insync.replicas": "2"})
    fence = FenceBroker(1, metadata.epoch(1))
    register = RegisterBrokerRequestV1(
        2, "f" * 32, f"{2:032x}", ["a:1"], None, -1, True, [], 0, list(SUPPORTED)
    )
    for command in (fence, register):
        image = metadata.image
        decide_ms, step = cpu_ms(
            lambda command=command: decide(
                metadata.image, command, now_ms=1, rng=metadata.rng, settings=metadata.settings
            )
        )
        encode_ms, data = cpu_ms(lambda step=step: record_codec.to_bytes(step.records))
        decode_ms, records = cpu_ms(lambda data=data: record_codec.from_bytes(data))
        delta = Delta(image)
        replay_ms, after = cpu_ms(
            lambda delta=delta, records=records, image=image: delta.replay_all(records).apply(
                image.metadata_offset + 1
            )
        )
        local_ms, _ = cpu_ms(lambda delta=delta: delta.local_changes(3))
        with capsys.disabled():
            print(
                f"\n  {topics} x {partitions} {type(command).__name__}: {len(records)} records,"
                f" {len(data):,} bytes; decide {decide_ms:.0f}, encode {encode_ms:.0f},"
                f" decode {decode_ms:.0f}, replay {replay_ms:.0f}, local changes {local_ms:.0f} ms of CPU"
            )
        assert len(records) == 3_001
        assert decide_ms + replay_ms < LIMIT_MS
        metadata.image = after
