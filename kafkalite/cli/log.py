"""``kl log``: inspects log files without a broker. ``accept-loss`` repairs them. ``dirs`` asks brokers.

A PATH is a data directory, the directory of a log or, for some commands, a file. Except by ``accept-loss``,
files are neither locked nor changed. Therefore the files of a running broker can be inspected, too. Their
last batch may be incomplete.
"""

# Long because every command of the group prints columns of its own.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kafkalite.cli import invocation
from kafkalite.cli.coordinator_records import GROUPS_TOPIC, TRANSACTIONS_TOPIC, as_text, read_record
from kafkalite.cli.exit_codes import CheckFailedError, NotFoundError, UsageError
from kafkalite.cli.invocation import debug_option, output_option
from kafkalite.cli.lazy_group import Group
from kafkalite.cli.output import Column, human_bytes, pick, plural, print_listing, rows_of
from kafkalite.cli.printers import Printer, make_printer
from kafkalite.cli.stdio import printing
from kafkalite.cli.times import format_time
from kafkalite.errors import CorruptBatchError, StorageError, WrongFileTypeError

if TYPE_CHECKING:
    from kafkalite.records.header import BatchHeader
    from kafkalite.storage.file_check import DirectoryVerdict
    from kafkalite.storage.inspect import LogVerdict
    from kafkalite.storage.lost_markers import TransactionRange

F = TypeVar("F", bound=Callable[..., Any])

_SEGMENT_COLUMNS: Final = (
    Column("topic", "TOPIC"),
    Column("partition", "PARTITION"),
    Column("base_offset", "BASE OFFSET"),
    Column("size_bytes", "SIZE", show=human_bytes),
    Column("index_bytes", "INDEX", show=human_bytes),
    Column("time_index_bytes", "TIMEINDEX", show=human_bytes),
    Column("file", "FILE", wide=True),
)


def _unless_none(number: int | None) -> str:
    """Return an id, epoch or sequence as text, or ``-`` if it is None or negative."""
    return "-" if number is None or number < 0 else str(number)


_BATCH_COLUMNS: Final = (
    Column("topic", "TOPIC"),
    Column("partition", "PARTITION"),
    Column("position", "POSITION"),
    Column("base_offset", "BASE OFFSET"),
    Column("last_offset", "LAST OFFSET"),
    Column("kind", "KIND"),
    Column("records", "RECORDS"),
    Column("bytes", "BYTES"),
    Column("codec", "CODEC"),
    Column("max_timestamp", "MAX TIMESTAMP"),
    Column("producer_id", "PRODUCER", show=_unless_none),
    Column("producer_epoch", "ITS EPOCH", show=_unless_none),
    Column("base_sequence", "SEQUENCE", show=_unless_none),
    Column("leader_epoch", "LEADER EPOCH", wide=True, show=_unless_none),
    Column("coordinator_epoch", "COORDINATOR EPOCH", wide=True, show=_unless_none),
    Column("crc", "CRC", wide=True),
    Column("problem", "PROBLEM", show=lambda problem: problem or ""),
)
_STATE_COLUMNS: Final = (
    Column("partition", "PARTITION"),
    Column("offset", "OFFSET"),
    Column("timestamp", "TIMESTAMP"),
    Column("producer_id", "PRODUCER", show=_unless_none),
    Column("kind", "KIND"),
    Column("key", "KEY", show=as_text),
    Column("value", "VALUE", show=as_text),
)
_INDEX_COLUMNS: Final = (
    Column("kind", "INDEX"),
    Column("base_offset", "BASE OFFSET"),
    Column("block", "BLOCK"),
    Column("key", "KEY"),
    Column("value", "VALUE"),
)


def _grade(verdict: LogVerdict | DirectoryVerdict) -> str:
    from kafkalite.storage import layout

    if verdict.is_damaged:
        return "damaged"
    if not verdict.findings:
        return "good"
    is_torn = any(one.path.endswith(layout.LOG_SUFFIX) for one in verdict.findings)
    return "torn tail" if is_torn else "repairable"


def _title(verdict: LogVerdict | DirectoryVerdict) -> str:
    """Return the topic of a log (its id if the name is unknown) or ``__cluster_metadata``.

    For the files of a data directory that belong to no log, return ``(node)``.
    """
    from kafkalite.storage import layout

    topic_id = getattr(verdict, "topic_id", None)
    if topic_id is not None:
        return str(getattr(verdict, "topic", None) or topic_id)
    is_metadata = layout.name_of(verdict.directory) == layout.METADATA_DIRECTORY
    return layout.METADATA_DIRECTORY if is_metadata else "(node)"


def _of_log(name: str, otherwise: int | None = 0) -> Callable[[LogVerdict | DirectoryVerdict], Any]:
    return lambda verdict: getattr(verdict, name, otherwise)


def _damage_of(verdict: LogVerdict | DirectoryVerdict) -> dict[str, Any] | None:
    damage = getattr(verdict, "damage", None)
    return None if damage is None else asdict(damage)


_VERDICT_COLUMNS: Final = (
    Column("topic", "TOPIC", read=_title),
    Column("partition", "PARTITION", read=_of_log("partition", None)),
    Column("log_start_offset", "START", read=_of_log("log_start_offset")),
    Column("log_end_offset", "END", read=_of_log("log_end_offset")),
    Column("segments", "SEGMENTS", read=_of_log("segment_count")),
    Column("batches", "BATCHES", read=_of_log("batch_count")),
    Column("records", "RECORDS", read=_of_log("record_count")),
    Column("size_bytes", "SIZE", read=_of_log("size_bytes"), show=human_bytes),
    Column("files", "FILES", read=lambda verdict: len(verdict.files)),
    Column("verdict", "VERDICT", read=_grade),
    Column("directory", "DIRECTORY", wide=True),
    Column("findings", read=lambda verdict: [finding._asdict() for finding in verdict.findings]),
    Column("damage", read=lambda verdict: _damage_of(verdict)),
)
_FILE_COLUMNS: Final = (
    Column("file", "FILE", read="path"),
    Column("verdict", "VERDICT", read="state"),
    Column("reason", "REASON"),
)


_ACCEPTED_COLUMNS: Final = (
    Column("topic", "TOPIC"),
    Column("partition", "PARTITION"),
    Column("lost_records", "LOST", show=lambda count: "unknown" if count is None else str(count)),
    Column("unknown_transactions", "UNKNOWN TXNS", show=lambda found: str(len(found))),
    Column("corrected_batches", "CORRECTED"),
    Column("log_start_offset", "START"),
    Column("log_end_offset", "END"),
    Column("directory", "DIRECTORY", wide=True),
)


@click.group(cls=Group)
def log() -> None:
    """Inspect log files without a broker. Only accept-loss changes them."""


def _path_argument(function: F) -> F:
    return click.argument("paths", nargs=-1, required=True, metavar="PATH…", type=click.Path(path_type=Path))(
        function
    )


def _log_directories(path: Path) -> list[Path]:
    """Return [``path``] if its name is that of a log's directory, else the directories of the logs in it.

    The directories are in the order of topic ids and partitions. Raises NotFoundError if ``path`` does not
    exist, or is neither a data directory nor contains logs, and UsageError if it is not a directory.
    """
    from kafkalite.storage import layout

    if not path.exists():
        raise NotFoundError(f"{path}: there is no such file or directory", hint="give a data directory")
    if layout.parse_log_directory_name(path.resolve().name) is not None:
        return [path.resolve()]
    if not path.is_dir():
        raise UsageError(
            f"{path} is not a directory", hint="give a data directory, or the directory of a log"
        )
    named = [(layout.parse_log_directory_name(each.name), each) for each in path.iterdir()]
    found = [each for _, each in sorted((name, each) for name, each in named if name is not None)]
    if not found and not (path / layout.NODE_FILE).exists():
        raise NotFoundError(
            f"{path} holds no log",
            hint="a log's directory is named <topic id>-<partition>; give it, or its parent",
        )
    return found


def _files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return [``path``] if it is a segment file with one of ``suffixes``.

    If ``path`` is a directory, return all such files of the log or logs in it. Raises UsageError for any
    other file, and the errors of ``_log_directories``.
    """
    from kafkalite.storage import layout

    if path.is_file():
        name = layout.parse_segment_file_name(path.name)
        if name is None or name.suffix not in suffixes:
            raise UsageError(f"{path} is not a {' or '.join(suffixes)} file of a segment")
        return [path]
    return [
        each
        for directory in _log_directories(path)
        for each in sorted(directory.iterdir())
        if (name := layout.parse_segment_file_name(each.name)) is not None and name.suffix in suffixes
    ]


def _home(directory: Path) -> tuple[str, int]:
    """Return the topic and the partition of a log's directory.

    If partition.json is unreadable, the topic id in the directory's name replaces the topic. If that name is
    not the name of a log's directory, the partition is -1, and the whole name replaces the topic id.
    """
    from kafkalite.storage import layout
    from kafkalite.storage.checkpoints import decode_partition
    from kafkalite.storage.disk import RealFileSystem

    parsed = layout.parse_log_directory_name(directory.resolve().name)
    try:
        identity = decode_partition(RealFileSystem().read_bytes(str(directory / layout.PARTITION_FILE)))
    except OSError:
        identity = None
    topic = None if identity is None else identity.topic
    if parsed is None:
        return topic or directory.name, -1
    return topic or parsed.topic_id, parsed.partition


# --- segments --------------------------------------------------------------------------------------


@log.command()
@_path_argument
@output_option
@debug_option
def segments(paths: tuple[Path, ...]) -> None:
    """List segments: topic, partition, base offset, size."""
    from kafkalite.storage import layout

    rows: list[dict[str, Any]] = []
    for path in paths:
        for file in _files(path, (layout.LOG_SUFFIX,)):
            topic, partition = _home(file.parent)
            name = layout.parse_segment_file_name(file.name)
            assert name is not None, "only segment files are listed"
            rows.append(
                {
                    "name": str(file),
                    "topic": topic,
                    "partition": partition,
                    "base_offset": name.base_offset,
                    "size_bytes": file.stat().st_size,
                    "index_bytes": _size(file.with_suffix(layout.OFFSET_INDEX_SUFFIX)),
                    "time_index_bytes": _size(file.with_suffix(layout.TIME_INDEX_SUFFIX)),
                    "file": str(file),
                }
            )
    print_listing(rows, _SEGMENT_COLUMNS, invocation.current().output)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


# --- dump ------------------------------------------------------------------------------------------


@log.command(
    epilog="""\b
Examples:
  kl log dump data                               every batch of every log
  kl log dump data/0f…-0/00000000000000000000.log -o wide
  kl log dump data/0f…-0 --records -o jsonl      records in the format of 'kl produce -i jsonl'
  kl log dump data/0f…-0 -f '%o %k %s\\n'
  kl log dump data --decode                      the records of group and transaction coordinators

\b
KIND: data, transactional, gap (of compaction: RECORDS does not count its offsets);
commit and abort end the transaction of PRODUCER in this partition."""
)
@_path_argument
@click.option("--records", is_flag=True, help="Print the records in the batches.")
@click.option(
    "-f",
    "--format",
    "text_format",
    metavar="FORMAT",
    help="Print each record in this format (as kl consume -f).",
)
@click.option(
    "--decode", is_flag=True, help=f"Decode the records of {GROUPS_TOPIC} and {TRANSACTIONS_TOPIC}."
)
@click.option("--no-verify", is_flag=True, help="Do not check CRCs and offsets.")
@output_option
@debug_option
def dump(
    paths: tuple[Path, ...], records: bool, text_format: str | None, decode: bool, no_verify: bool
) -> None:
    """Print the batches of log files, or their records."""
    from kafkalite.storage import layout

    files = [file for path in paths for file in _files(path, (layout.LOG_SUFFIX,))]
    output = invocation.current().output
    if decode:
        if records or text_format is not None:
            raise UsageError("--decode has its own format: leave out --records and --format")
        print_listing(_state_rows(files), _STATE_COLUMNS, output, name_key="kind")
        return
    if records or text_format is not None:
        _dump_records(files, make_printer(output, text_format))
        return
    rows = [row for file in files for row in _batch_rows(file, verify=not no_verify)]
    print_listing(rows, _BATCH_COLUMNS, output, name_key="file")


def _batch_rows(file: Path, *, verify: bool) -> Iterator[dict[str, Any]]:
    from kafkalite.storage.disk import RealFileSystem
    from kafkalite.storage.inspect import iter_batches

    topic, partition = _home(file.parent)
    for position, header, problem, data in iter_batches(RealFileSystem(), str(file), verify=verify):
        row: dict[str, Any] = dict.fromkeys(column.key for column in _BATCH_COLUMNS)
        row |= {"topic": topic, "partition": partition}
        row |= {"file": str(file), "position": position, "problem": problem}
        if header is not None:
            kind, coordinator_epoch = _kind(header, data)
            row |= {
                "kind": kind,
                "coordinator_epoch": coordinator_epoch,
                "records": header.record_count if kind in _KINDS_OF_RECORDS else 0,
                "bytes": header.length_bytes,
                "codec": header.codec.name.lower(),
                "max_timestamp": format_time(header.max_timestamp_ms),
                "crc": f"{header.crc:08x}",
                **pick(header, *_OF_HEADER),
            }
        yield row


_OF_HEADER: Final = (
    "base_offset",
    "last_offset",
    "max_timestamp_ms",
    "leader_epoch",
    "producer_id",
    "producer_epoch",
    "base_sequence",
)
_KINDS_OF_RECORDS: Final = ("data", "transactional")


def _intact_batches(file: Path) -> Iterator[tuple[BatchHeader, memoryview]]:
    """Yield (header, bytes) of each intact batch of a file. Print the damage on stderr."""
    from kafkalite.storage.disk import RealFileSystem
    from kafkalite.storage.inspect import iter_batches

    for position, header, problem, data in iter_batches(RealFileSystem(), str(file)):
        if problem is not None or header is None:
            invocation.say(f"{file}: position {position}: {problem}")
        else:
            yield header, data


def _kind(header: BatchHeader, data: memoryview) -> tuple[str, int | None]:
    """Return (kind, coordinator epoch) of a batch. The epoch is None unless the kind is commit or abort.

    The other kinds are data, transactional, gap, and control for an unreadable transaction marker.
    """
    from kafkalite.records.control import parse_marker
    from kafkalite.records.gaps import is_gap

    if not header.is_control:
        return ("transactional" if header.is_transactional else "data"), None
    if is_gap(header):
        return "gap", None
    try:
        marker = parse_marker(data)
    except CorruptBatchError:
        return "control", None
    return ("commit" if marker.is_commit else "abort"), marker.coordinator_epoch


def _state_rows(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield a row for each record and each transaction marker in the files of the coordinators' topics.

    Files of other topics are skipped. Damaged batches, and records that cannot be decoded, are reported on
    stderr. Raises NotFoundError if no file belongs to a coordinators' topic.
    """
    from kafkalite.coordinator_types import StateRecord
    from kafkalite.records.batch import RecordBatch

    is_any = False
    for file in files:
        topic, partition = _home(file.parent)
        if topic not in (GROUPS_TOPIC, TRANSACTIONS_TOPIC):
            continue
        is_any = True
        for header, data in _intact_batches(file):
            place = {"topic": topic, "partition": partition, "producer_id": header.producer_id}
            kind, _ = _kind(header, data)
            if kind not in _KINDS_OF_RECORDS:
                if kind != "gap":
                    time = format_time(header.max_timestamp_ms)
                    row = {"offset": header.base_offset, "timestamp": time, "kind": kind}
                    yield place | row | {"key": {}, "value": {}}
                continue
            for record in RecordBatch(data, check_crc=False).records(topic, partition):
                row = {"offset": record.offset, "timestamp": format_time(record.timestamp_ms)}
                try:
                    entry = read_record(topic, StateRecord(record.key or b"", record.value))
                except StorageError as error:
                    invocation.say(f"{file}: offset {record.offset}: {error.message}")
                    continue
                yield place | row | entry._asdict()
    if not is_any:
        raise NotFoundError(
            f"there is no log of {GROUPS_TOPIC} or {TRANSACTIONS_TOPIC}",
            hint="--decode prints coordinators' records; --records prints the records of other topics",
        )


def _dump_records(files: Iterable[Path], printer: Printer) -> None:
    """Print the records of intact batches, except control records. Print the damage on stderr."""
    from kafkalite.records.batch import RecordBatch

    with printing(printer) as show:
        for file in files:
            topic, partition = _home(file.parent)
            for header, data in _intact_batches(file):
                if not header.is_control:
                    show(RecordBatch(data, check_crc=False).records(topic, partition))


# --- index -----------------------------------------------------------------------------------------


@log.command()
@_path_argument
@output_option
@debug_option
def index(paths: tuple[Path, ...]) -> None:
    """Print index entries: offset -> position (.index), timestamp -> offset (.timeindex)."""
    from kafkalite.storage import layout
    from kafkalite.storage.disk import RealFileSystem
    from kafkalite.storage.inspect import read_index

    rows: list[dict[str, Any]] = []
    for path in paths:
        for file in _files(path, (layout.OFFSET_INDEX_SUFFIX, layout.TIME_INDEX_SUFFIX)):
            name = layout.parse_segment_file_name(file.name)
            assert name is not None, "only index files are read"
            found = read_index(RealFileSystem(), str(file))
            if not found.is_whole:
                invocation.say(
                    f"{file}: no intact block from byte {found.valid_bytes} on; the index will be rebuilt"
                )
            kind = "offset" if name.suffix == layout.OFFSET_INDEX_SUFFIX else "time"
            rows += [
                {
                    "file": str(file),
                    "kind": kind,
                    "base_offset": name.base_offset,
                    **pick(entry, "block", "key", "value"),
                }
                for entry in found.entries
            ]
    print_listing(rows, _INDEX_COLUMNS, invocation.current().output, name_key="file")


# --- verify ----------------------------------------------------------------------------------------


@log.command()
@_path_argument
@click.option("--files", "by_file", is_flag=True, help="One line per file, with the reason.")
@output_option
@debug_option
def verify(paths: tuple[Path, ...], by_file: bool) -> None:
    """Check every file: batches, indexes, small files, metadata; exit code 9 if there is damage.

    A torn tail at the end of a log and a short index are reported but are not damage: the next start of the
    broker repairs them. --files lists every file with its verdict, also those without a checksum.
    """
    from kafkalite.raft.verify import verify_metadata
    from kafkalite.storage import layout
    from kafkalite.storage.disk import RealFileSystem
    from kafkalite.storage.inspect import verify_data_dir, verify_log

    filesystem = RealFileSystem()
    verdicts: list[LogVerdict | DirectoryVerdict] = []
    for path in paths:
        metadata = path / layout.METADATA_DIRECTORY
        if path.resolve().name == layout.METADATA_DIRECTORY:
            verdicts.append(verify_metadata(filesystem, str(path)))
        elif filesystem.exists(str(path / layout.NODE_FILE)):
            of_directory, of_logs = verify_data_dir(filesystem, str(path))
            verdicts.append(of_directory)
            if filesystem.exists(str(metadata)):
                verdicts.append(verify_metadata(filesystem, str(metadata)))
            in_order = sorted(of_logs, key=lambda each: (each.topic or each.topic_id, each.partition))
            verdicts += in_order
        else:
            verdicts += [verify_log(filesystem, str(directory)) for directory in _log_directories(path)]
    findings = [finding for verdict in verdicts for finding in verdict.findings]
    output = invocation.current().output
    if by_file:
        files = [file for verdict in verdicts for file in verdict.files]
        print_listing(rows_of(files, _FILE_COLUMNS), _FILE_COLUMNS, output, name_key="file")
    else:
        print_listing(rows_of(verdicts, _VERDICT_COLUMNS), _VERDICT_COLUMNS, output, name_key="directory")
    for finding in findings:
        invocation.say(f"{finding.path}: position {finding.position}: {finding.problem} ({finding.state})")
    damaged = sum(finding.is_damage for finding in findings)
    for verdict in verdicts:
        if (damage := getattr(verdict, "damage", None)) is not None:
            invocation.say(str(damage))
            damaged += not any(finding.is_damage for finding in verdict.findings)
    if damaged:
        checked = sum(len(verdict.files) for verdict in verdicts)
        raise CheckFailedError(f"{plural(damaged, 'problem')} in {plural(checked, 'file')}")


# --- accept-loss -----------------------------------------------------------------------------------


@log.command(
    "accept-loss",
    epilog="""\b
Examples:
  kl log accept-loss data/0f…-0        asks, and shows what would be lost
  kl log accept-loss data/0f…-0 --yes""",
)
@_path_argument
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option(
    "--leader-epoch",
    type=click.IntRange(min=0),
    help="The partition's leader epoch, if the broker's message names it: later ones in batches are damaged.",
)
@output_option
@debug_option
def accept_loss(paths: tuple[Path, ...], yes: bool, leader_epoch: int | None) -> None:
    """Repair damaged logs that have no sound replica, and lose the records that cannot be read.

    Stop the broker first. PATH is the directory of a log. Intact records keep their offsets, consumers skip
    the lost records, and the damaged files are kept as *.damaged-N. A transaction whose marker is lost counts
    as aborted, and the command names it. If the broker was killed and the end of the log is lost, the offsets
    of its last second may be used again.

    PATH may also be the __cluster_metadata of a node without peers, if the node does not start because its
    metadata is damaged, missing or an older copy. The intact part of the metadata is kept, topics that it
    lacks are created from their logs, and leader epochs and producer ids are skipped.
    """
    from kafkalite.raft.older_metadata import accept_older_metadata, expected_metadata_loss
    from kafkalite.rng import system_rng
    from kafkalite.storage.accept_loss import accept_loss as repair  # R45
    from kafkalite.storage.accept_loss import expected_loss
    from kafkalite.storage.disk import RealFileSystem
    from kafkalite.storage.inspect import verify_log
    from kafkalite.storage.layout import name_of, parse_log_directory_name
    from kafkalite.storage.log_store import METADATA_POINT

    filesystem = RealFileSystem()
    directories = [str(path.absolute()) for path in paths]
    for directory in directories:
        if parse_log_directory_name(name_of(directory)) is None and name_of(directory) != METADATA_POINT:
            raise UsageError(
                f"{directory} is not the directory of a log",
                hint="its name is <topic id>-<partition>; 'kl log verify DATA' shows the damaged ones",
            )
    for directory in directories:
        if name_of(directory) == METADATA_POINT:
            for note in expected_metadata_loss(filesystem, directory).notes:
                invocation.say(note)
            continue
        try:
            filesystem.list_dir(directory)
        except (FileNotFoundError, WrongFileTypeError) as error:
            cause = error.message if isinstance(error, WrongFileTypeError) else f"{directory} is missing"
            invocation.say(f"{cause}: all records of the log are lost")
            continue
        verdict = verify_log(filesystem, directory)
        found = [each for each in verdict.findings if each.is_damage]
        if verdict.damage is not None or not found:
            summary = "no damage was found" if verdict.damage is None else verdict.damage.summary
            invocation.say(f"{directory}: {summary}")
        expected = expected_loss(filesystem, directory, leader_epoch)
        for unused in expected.unused:
            invocation.say(f"{unused}: none of its batches is kept, because they belong to another log")
        for each in found:
            if each.path in expected.unused:
                continue
            invocation.say(f"{each.path}: position {each.position}: {each.problem}; {each.outcome}")
        if not yes:
            invocation.say(f"{directory}: {plural(expected.lost_records, 'record')} would be lost")
            _say_outcomes(Path(directory), expected.unknown_transactions, expected.open_transactions)
    if not yes:
        invocation.confirm(f"Accept the loss in {plural(len(directories), 'log')}?", "nothing was changed")
    rows, damages = [], []
    for directory in directories:
        if name_of(directory) == METADATA_POINT:
            accepted = accept_older_metadata(filesystem, directory, system_rng())
            rows.append(
                dict.fromkeys(column.key for column in _ACCEPTED_COLUMNS)
                | {"topic": METADATA_POINT, "unknown_transactions": [], "open_transactions": []}
                | {"log_end_offset": accepted.known_offset}
                | pick(accepted, "lost_records", "created", "directory", "kept")
            )
            continue
        done = repair(filesystem, directory, leader_epoch)
        damages += [done.damage] if done.damage is not None else []
        _say_outcomes(Path(directory), done.unknown_transactions, done.open_transactions)
        topic, partition = _home(Path(directory))
        rows.append(
            {
                "topic": topic,
                "partition": partition,
                "lost_records": done.lost_records,
                "unknown_transactions": [each._asdict() for each in done.unknown_transactions],
                "open_transactions": [each._asdict() for each in done.open_transactions],
                **pick(done, "corrected_batches", "log_start_offset", "log_end_offset", "directory", "kept"),
            }
        )
    print_listing(rows, _ACCEPTED_COLUMNS, invocation.current().output, name_key="directory")
    for damage in damages:
        invocation.say(damage.summary)
    if damages:
        raise CheckFailedError(f"{plural(len(damages), 'log')} still damaged")


def _say_outcomes(
    directory: Path, unknown: Sequence[TransactionRange], still_open: Sequence[TransactionRange]
) -> None:
    """Print the transactions without a marker: ``unknown`` count as aborted, ``still_open`` stay open."""
    if unknown:
        outcomes = f"{plural(len(unknown), 'transaction')} of unknown outcome, because the marker is lost"
        invocation.say(f"{directory}: {outcomes}: read_committed readers skip the records, even if committed")
    for each in unknown:
        invocation.say(f"{directory}: unknown outcome: {_records_of(each)}")
    topic, partition = _home(directory)
    for each in still_open:
        invocation.say(
            f"{directory}: no marker at the end of the log: {_records_of(each)}. If 'kl txn find-hanging"
            f" {topic}' lists the transaction later, its marker is lost, and read_committed readers stop"
            f" there until: kl txn abort --hanging {topic}-{partition} --producer {each.producer_id}"
            f" --start-offset {each.first_offset}"
        )


def _records_of(one: TransactionRange) -> str:
    records = plural(one.record_count, "record")
    return f"offsets {one.first_offset} to {one.last_offset} ({records}) of producer {one.producer_id}"
