"""A client that shares no code with kafkalite: only docs/protocol.md, docs/protocol.json and a socket.

Its requests and responses are named tuples, which are generated from the schema at the start. It sends
ApiVersions, creates a topic, appends a batch of three records, reads it back and checks it:

    python examples/foreign_client.py 127.0.0.1:9092
"""

import collections
import itertools
import json
import pathlib
import socket
import struct
import sys
import time

import crc32c
import msgpack

FRAME = struct.Struct(">II")  # envelope length, payload length
HEADER = struct.Struct(">qiibIhiqqqhii")  # the 61-byte header of every record batch
SCHEMA = json.loads((pathlib.Path(__file__).resolve().parent.parent / "docs" / "protocol.json").read_text())
FIELDS = SCHEMA["structs"]
STRUCTS = {
    name: collections.namedtuple(name, [field["name"] for field in fields]) for name, fields in FIELDS.items()
}
APIS = {api["request"]: api for api in SCHEMA["apis"]}
ERRORS = {error["code"]: error["name"] for error in SCHEMA["errors"]}


def typed(notation, value):
    """Return a decoded value as the type of the schema: a struct becomes its named tuple."""
    if value is None:
        assert notation.endswith("?"), f"nil, where {notation} was expected"
        return None
    notation = notation.removesuffix("?")
    if notation.startswith("["):
        return [typed(notation[1:-1], each) for each in value]
    if notation not in STRUCTS:
        return value
    pairs = zip(FIELDS[notation], value, strict=True)
    return STRUCTS[notation]._make(typed(field["type"], each) for field, each in pairs)


class Connection:
    def __init__(self, address):
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host.strip("[]"), int(port)), timeout=30)
        self.numbers = itertools.count()
        apis = self.ask(STRUCTS["ApiVersionsRequest"]("foreign", "1"))[0].apis
        self.versions = {api.api_key: range(api.min_version, api.max_version + 1) for api in apis}

    def ask(self, request, payload=b""):
        """Send one request and return the response as (struct, payload). All requests have version 0."""
        number, api = next(self.numbers), APIS[type(request).__name__]
        envelope = msgpack.packb([api["key"], 0, number, "foreign-client", request])
        self.socket.sendall(FRAME.pack(len(envelope), len(payload)) + envelope + payload)
        envelope_length, payload_length = FRAME.unpack(self.receive(FRAME.size))
        answered, _throttle_ms, body = msgpack.unpackb(self.receive(envelope_length))
        assert answered == number
        assert ERRORS[body[0]] == "NONE", f"{api['name']} failed: {ERRORS[body[0]]}, {body[1]}"
        return typed(api["response"], body), self.receive(payload_length)

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


def ask_the_leader(connection, topic, request, payload=b""):
    """Send a request about partition 0, and send it again to the new leader after NOT_LEADER_OR_FOLLOWER."""
    for pause in (0.1, 0.2, 0.4, 0.8, 1):
        metadata = connection.ask(STRUCTS["MetadataRequest"]([topic], False))[0]
        leader = metadata.topics[0].partitions[0].leader_id
        addresses = {broker.node_id: broker.address for broker in metadata.brokers}
        if leader in addresses:
            leading = connection if len(addresses) == 1 else Connection(addresses[leader])
            response, received = leading.ask(request, payload)
            result = response.partitions[0]
            if ERRORS[result.error_code] == "NONE":
                return result, received
            assert ERRORS[result.error_code] == "NOT_LEADER_OR_FOLLOWER", result
        time.sleep(pause)
    sys.exit(f"{topic}-0 has no leader")


def main(address, topic="foreign"):
    connection = Connection(address)
    new = STRUCTS["NewTopic"](topic, 1, -1, {})
    created = connection.ask(STRUCTS["CreateTopicsRequest"](30_000, False, [new]))[0].topics[0]
    assert ERRORS[created.error_code] in ("NONE", "TOPIC_ALREADY_EXISTS"), created
    now = int(time.time() * 1000)
    sent = [(now, b"CA", b"maple"), (now + 1, None, b"glazed"), (now + 2, b"US", None)]
    batch = build_batch(sent)
    part = STRUCTS["ProducePartition"](topic, 0, len(batch))
    request = STRUCTS["ProduceRequest"](-1, 30_000, None, [part])
    produced, _ = ask_the_leader(connection, topic, request, batch)
    part = STRUCTS["FetchPartition"](topic, 0, -1, produced.base_offset, 1 << 20)
    fetched, payload = ask_the_leader(connection, topic, STRUCTS["FetchRequest"](500, 1, 1 << 20, 0, [part]))
    assert fetched.length_bytes == len(payload), fetched
    received = read_batches(payload)
    assert [record[1:] for record in received[:3]] == sent and received[0][0] == produced.base_offset
    for offset, timestamp, key, value in received:
        print(f"{topic}-0-{offset}", timestamp, key, value)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or not sys.argv[1].rpartition(":")[2].isdecimal():
        sys.exit("usage: foreign_client.py HOST:PORT [TOPIC]")
    try:
        main(*sys.argv[1:])
    except OSError as error:
        sys.exit(f"usage: foreign_client.py HOST:PORT [TOPIC]; the broker at {sys.argv[1]}: {error}")
