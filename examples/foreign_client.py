"""A client that shares no code with kafkalite: only docs/protocol.md, msgpack, crc32c and a blocking socket.

It sends ApiVersions, creates a topic, appends a batch of three records, reads it back and checks it:

    python examples/foreign_client.py 127.0.0.1:9092
"""

import itertools
import socket
import struct
import sys
import time

import crc32c
import msgpack

FRAME = struct.Struct(">II")  # envelope length, payload length
HEADER = struct.Struct(">qiibIhiqqqhii")  # the 61-byte header of every record batch
API_VERSIONS, METADATA, PRODUCE, FETCH, CREATE_TOPICS = 18, 3, 0, 1, 19
OK, TOPIC_ALREADY_EXISTS = 0, 36


class Connection:
    def __init__(self, address):
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host.strip("[]"), int(port)), timeout=30)
        self.numbers = itertools.count()
        apis = self.ask(API_VERSIONS, ["foreign", "1"])[0][4]
        self.versions = {key: range(lowest, highest + 1) for key, lowest, highest in apis}

    def ask(self, api, body, payload=b""):
        """Send one request and return the response as (body, payload). All requests have version 0."""
        number = next(self.numbers)
        envelope = msgpack.packb([api, 0, number, "foreign-client", body])
        self.socket.sendall(FRAME.pack(len(envelope), len(payload)) + envelope + payload)
        envelope_length, payload_length = FRAME.unpack(self.receive(FRAME.size))
        answered, _throttle_ms, body = msgpack.unpackb(self.receive(envelope_length))
        assert answered == number
        assert body[0] == OK, f"api {api} failed: error {body[0]}, {body[1]}"
        return body, self.receive(payload_length)

    def receive(self, length):
        data = b""
        while len(data) < length:
            piece = self.socket.recv(length - len(data))
            assert piece, "the broker closed the connection"
            data += piece
        return data


def column(cells):
    """Return Arrow's layout: offsets, the joined bytes, and the bitmap of values that are not null."""
    if all(cell is None for cell in cells):
        return None
    ends = itertools.accumulate((len(cell or b"") for cell in cells), initial=0)
    valid = sum(1 << i for i, cell in enumerate(cells) if cell is not None)
    bitmap = None if None not in cells else valid.to_bytes((len(cells) + 7) // 8, "little")
    offsets = struct.pack(f"<{len(cells) + 1}i", *ends)
    return [offsets, b"".join(cell or b"" for cell in cells), bitmap]


def cells(column, count):
    if column is None:
        return [None] * count
    offsets, data, bitmap = column
    ends = struct.unpack(f"<{count + 1}i", offsets)
    valid = -1 if bitmap is None else int.from_bytes(bitmap, "little")
    return [data[ends[i] : ends[i + 1]] if valid >> i & 1 else None for i in range(count)]


def build_batch(records):
    """Return the records [(timestamp in ms, key, value)] as a columnar batch without compression."""
    times, keys, values = zip(*records, strict=True)
    deltas = struct.pack(f"<{len(times)}q", *(each - times[0] for each in times))
    body = msgpack.packb([deltas, column(keys), column(values), None])
    count = len(records)
    attributes = 7  # columnar, no compression, timestamps set by the producer
    fields = [0, HEADER.size - 12 + len(body), -1, 2, 0, attributes, count - 1]
    fields += [times[0], max(times), -1, -1, -1, count]
    fields[4] = crc32c.crc32c(HEADER.pack(*fields)[21:] + body)
    return HEADER.pack(*fields) + body


def read_batches(data):
    """Return [(offset, timestamp in ms, key, value)] of consecutive batches."""
    records = []
    while data:
        header = HEADER.unpack_from(data)
        base_offset, length, _epoch, magic, crc, attributes, _last, base_time, max_time, *_, count = header
        batch, data = data[: length + 12], data[length + 12 :]
        assert magic == 2 and crc == crc32c.crc32c(batch[21:]), "damaged"
        if attributes & 32:  # a control batch has no data
            continue
        assert attributes & 7 == 7 and attributes >> 8 & 7 == 0, "compressed, or rows of Kafka"
        deltas, keys, values, _headers = msgpack.unpackb(batch[HEADER.size :])
        width = "iq"[len(deltas) == 8 * count] if deltas else "x"
        times = (
            [base_time + d for d in struct.unpack(f"<{count}{width}", deltas)]
            if deltas
            else [base_time] * count
        )
        if attributes & 8:  # log append time applies to all records
            times = [max_time] * count
        offsets = range(base_offset, base_offset + count)
        records += zip(offsets, times, cells(keys, count), cells(values, count), strict=True)
    return records


def main(address, topic="foreign"):
    connection = Connection(address)
    created = connection.ask(CREATE_TOPICS, [30_000, False, [[topic, 1, -1, {}]]])[0][2][0]
    assert created[1] in (OK, TOPIC_ALREADY_EXISTS), created
    brokers, topics = connection.ask(METADATA, [[topic], False])[0][4:6]
    leader = topics[0][5][0][2]
    leader_address = next(address for node, address, _rack in brokers if node == leader)
    leading = connection if len(brokers) == 1 else Connection(leader_address)
    now = int(time.time() * 1000)
    sent = [(now, b"CA", b"maple"), (now + 1, None, b"glazed"), (now + 2, b"US", None)]
    batch = build_batch(sent)
    produced = leading.ask(PRODUCE, [-1, 30_000, None, [[topic, 0, len(batch)]]], batch)[0][2][0]
    assert produced[2] == OK, produced
    base_offset = produced[4]
    body, payload = leading.ask(FETCH, [500, 1, 1 << 20, 0, [[topic, 0, -1, base_offset, 1 << 20]]])
    assert body[2][0][2] == OK and body[2][0][7] == len(payload), body
    received = read_batches(payload)
    assert [record[1:] for record in received[:3]] == sent and received[0][0] == base_offset
    for offset, timestamp, key, value in received:
        print(f"{topic}-0-{offset}", timestamp, key, value)


if __name__ == "__main__":
    main(*sys.argv[1:])
