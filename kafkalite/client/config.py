"""Options of producer, consumer and admin, and the configs that are parsed from them.

Options of Kafka's clients keep their names here. Each field of a config declares its option once:
type, default, bounds and documentation. The option registries are made from the fields; parsing,
documentation and error texts use the registries. An option has a dotted name, such as ``linger.ms``, and a
Python name, ``linger_ms``. Mappings may use either, keyword arguments only the Python name. The
``...Settings`` classes repeat the Python names for type checkers.
"""

# Long because it is the one list of the options of all clients.

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypedDict, TypeVar

from kafkalite.errors import ConfigError
from kafkalite.limits import KIB, MAX_PAYLOAD_BYTES, MAX_TRANSACTIONAL_ID_LENGTH, MIB
from kafkalite.model import HOST_WORDS, Acks, IsolationLevel, is_host_name
from kafkalite.options import OptionRegistry, option_field, options_of
from kafkalite.records.header import Codec
from kafkalite.suggestions import did_you_mean
from kafkalite.tls_options import (
    OAUTHBEARER,
    PLAINTEXT,
    SASL_MECHANISMS,
    SECURITY_PROTOCOLS,
    WITH_LOGIN,
    SecurityProtocol,
    check_versions,
    tls_field,
)

_MAX_INT: Final = 2**31 - 1
_MAX_LONG: Final = 2**63 - 1

TokenProvider = Callable[[], str | Awaitable[str]]
"""Returns the token of a login with OAUTHBEARER, or awaits it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonConfig:
    """Options of every client. An admin has no other options."""

    bootstrap_servers: tuple[str, ...] = option_field(
        ("localhost:9092",),
        "Brokers to connect to first: host:port pairs, or inproc://name for a broker in this process.",
    )
    client_id: str = option_field("kafkalite", "A name for this client in the broker's logs.")
    request_timeout_ms: int = option_field(
        30_000, "How long to wait for the response to a request.", minimum=1, maximum=_MAX_INT
    )
    default_api_timeout_ms: int = option_field(
        60_000,
        "The time limit of a call, including retries, if the call sets no timeout.",
        minimum=1,
        maximum=_MAX_INT,
    )
    retry_backoff_ms: int = option_field(
        100, "The pause before the first retry. It doubles with each retry.", minimum=0
    )
    retry_backoff_max_ms: int = option_field(1_000, "The longest pause between retries.", minimum=0)
    reconnect_backoff_ms: int = option_field(
        50, "The pause before the first reconnect. It doubles with each attempt.", minimum=0
    )
    reconnect_backoff_max_ms: int = option_field(1_000, "The longest pause between reconnects.", minimum=0)
    socket_connection_setup_timeout_ms: int = option_field(
        10_000,
        "How long setting up a connection may take, including the version handshake; and opening a client if"
        " no broker accepts a connection.",
        minimum=1,
    )
    metadata_max_age_ms: int = option_field(300_000, "Metadata older than this is fetched again.", minimum=1)
    security_protocol: str = option_field(
        PLAINTEXT,
        "How to talk to brokers: PLAINTEXT, SSL (TLS), SASL_PLAINTEXT (with a login), or SASL_SSL (both). The"
        " listeners of the brokers decide which.",
        choices=SECURITY_PROTOCOLS,
    )
    ssl_keystore_location: str | None = tls_field("ssl.keystore.location")
    ssl_keystore_type: str = tls_field("ssl.keystore.type")
    ssl_key_password: str | None = tls_field("ssl.key.password")
    ssl_truststore_location: str | None = tls_field("ssl.truststore.location")
    ssl_truststore_type: str = tls_field("ssl.truststore.type")
    ssl_enabled_protocols: tuple[str, ...] = tls_field("ssl.enabled.protocols")
    ssl_endpoint_identification_algorithm: str = tls_field("ssl.endpoint.identification.algorithm")
    sasl_mechanism: str = option_field(
        "SCRAM-SHA-512",
        "How to log in with security.protocol=SASL_…. PLAIN sends the password itself and OAUTHBEARER a"
        " token, so they need SASL_SSL.",
        choices=SASL_MECHANISMS,
        aliases=("sasl.mechanisms",),
    )
    sasl_username: str | None = option_field(None, "The user to log in as.", aliases=("sasl.plain.username",))
    sasl_password: str | None = option_field(
        None, "The password of sasl.username. Never shown.", is_secret=True, aliases=("sasl.plain.password",)
    )
    sasl_oauth_token_provider: TokenProvider | None = option_field(  # noqa: RUF009
        None,
        "For OAUTHBEARER: a function that returns a token (JWT), or awaits it. It is called for each login; a"
        " function that is not async runs in a thread.",
        kind="callable",
    )
    sasl_oauthbearer_token_endpoint_url: str | None = option_field(
        None,
        "For OAUTHBEARER without sasl.oauth.token.provider: the path or file: URL of a file with a token. It"
        " is read for each login.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerConfig(CommonConfig):
    """Options of a producer.

    ``producer_config`` ensures: batch_size <= max_request_size <= buffer_memory; linger_ms <
    delivery_timeout_ms; with a transactional_id, enable_idempotence is True; with enable_idempotence, acks is
    all and retries is at least 1.
    """

    acks: Acks = option_field(  # noqa: RUF009
        "all",
        "When a record counts as acknowledged: 0 when sent, 1 when the leader has it, all (-1) when every "
        "in-sync replica has it.",
        choices=("0", "1", "all", "-1"),
        aliases=("request.required.acks",),
    )
    linger_ms: int = option_field(5, "How long a batch waits for more records. 0 sends at once.", minimum=0)
    batch_size: int = option_field(
        16 * KIB,
        "A partition's batch closes at this many bytes. Closed batches that wait for an earlier request are "
        "sent together, up to max.request.size.",
        minimum=0,
        maximum=MAX_PAYLOAD_BYTES,
    )
    batch_max_messages: int = option_field(0, "The most records of a batch. 0 is no limit.", minimum=0)
    buffer_memory: int = option_field(
        32 * MIB,
        "The most bytes of unacknowledged records. Above it, send() waits and send_nowait() raises "
        "BufferFullError.",
        minimum=1,
        maximum=_MAX_LONG,
    )
    max_block_ms: int = option_field(
        60_000,
        "How long send() may wait for room in the buffer, and a record for its topic's metadata.",
        minimum=0,
    )
    max_request_size: int = option_field(
        MIB,
        "The most bytes of records in one request or batch, before compression.",
        minimum=1,
        maximum=MAX_PAYLOAD_BYTES,
    )
    enable_idempotence: bool = option_field(
        None,
        "Whether brokers recognise a batch that is sent again, so that a retry never makes a duplicate. "
        "If unset, it is on with acks=all and retries above 0.",
        kind="bool",
    )
    transactional_id: str | None = option_field(
        None,
        "Identifies this producer to its transaction coordinator across restarts. A new producer with the "
        "same id aborts the open transaction of the previous one and fences it.",
    )
    transaction_timeout_ms: int = option_field(
        60_000,
        "The coordinator aborts a transaction that is open for longer, and fences its producer. At most "
        "transaction.max.timeout.ms of the brokers.",
        minimum=1,
        maximum=_MAX_INT,
    )
    max_in_flight_requests_per_connection: int = option_field(
        5,
        "The most produce requests without a response. At most 5 of them are for one partition; without "
        "idempotence only one, so that retries keep the order.",
        minimum=1,
        maximum=256,
    )
    codec: Codec = option_field(  # noqa: RUF009
        "none",
        "The codec that compresses record batches.",
        name="compression.type",
        choices=("none", "gzip", "snappy", "lz4", "zstd"),
    )
    compression_level: int | None = option_field(
        None, "The codec's level. If unset, the codec's default.", kind="int"
    )
    partitioner: str = option_field(
        "roundrobin",
        "How to choose a record's partition if send() names none.",
        choices=("roundrobin", "sticky", "random", "timed", "hash", "ring"),
    )
    partitioner_switch_ms: int = option_field(
        600_000,
        "How long partitioner=timed sends records without a key to one partition before it takes another.",
        minimum=1,
    )
    retries: int = option_field(_MAX_INT, "How often a batch may be sent again.", minimum=0, maximum=_MAX_INT)
    delivery_timeout_ms: int = option_field(
        120_000,
        "The time limit from send() until the record is acknowledged or its error is reported.",
        minimum=1,
        maximum=_MAX_INT,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerConfig(CommonConfig):
    """Options of a consumer.

    ``consumer_config`` ensures: group_instance_id and group_remote_assignor are set only with a group_id;
    processing_guarantee is at_most_once only with a group_id and with enable_auto_commit.
    """

    auto_offset_reset: str = option_field(
        "latest",
        "Where to start without a valid position: earliest, latest, or none (raise an error).",
        choices=("earliest", "latest", "none"),
    )
    fetch_min_bytes: int = option_field(
        1, "The broker responds to a fetch as soon as it has at least this many bytes.", minimum=0
    )
    fetch_max_wait_ms: int = option_field(
        500, "The broker responds to a fetch after this time at the latest.", minimum=0
    )
    fetch_max_bytes: int = option_field(
        50 * MIB,
        "The most bytes of one response, and of prefetched records. The first batch is always complete.",
        minimum=1,
    )
    max_partition_fetch_bytes: int = option_field(
        MIB, "The most bytes of one partition in one response, and among prefetched records.", minimum=1
    )
    max_poll_records: int = option_field(500, "The most records that one get_many() returns.", minimum=1)
    check_crcs: bool = option_field(True, "Whether to check the CRC-32C of each batch.")
    isolation_level: IsolationLevel = option_field(  # noqa: RUF009
        "read_uncommitted",
        "Whether records of open and aborted transactions are returned.",
        choices=("read_uncommitted", "read_committed"),
    )
    allow_auto_create_topics: bool = option_field(
        True, "Whether subscribing to an unknown topic may create it. The broker must allow it, too."
    )
    client_rack: str | None = option_field(
        None,
        "This client's rack, as in broker.rack: with RackAwareReplicaSelector, read from replicas in it.",
    )
    group_id: str | None = option_field(
        None, "The consumer group. Its members share the partitions, and it stores their committed offsets."
    )
    group_instance_id: str | None = option_field(
        None,
        "Identifies a static member across restarts. A member that returns within the session timeout gets "
        "its partitions back without a rebalance.",
    )
    group_remote_assignor: str | None = option_field(
        None, "How partitions are assigned: uniform or range. If unset, the broker's first choice."
    )
    enable_auto_commit: bool = option_field(
        True, "Whether a group member commits the offsets of processed records automatically."
    )
    auto_commit_interval_ms: int = option_field(
        5_000,
        "The interval of auto-commit, which also commits at every rebalance and on close().",
        minimum=0,
        maximum=_MAX_INT,
    )
    max_poll_interval_ms: int = option_field(
        300_000,
        "A member that does not read records for this long leaves its group.",
        minimum=1,
        maximum=_MAX_INT,
    )
    processing_guarantee: str = option_field(
        "at_least_once",
        "When auto-commit commits a record: with at_least_once after it was processed, with at_most_once "
        "before it is returned.",
        choices=("at_least_once", "at_most_once"),
    )

    @property
    def is_at_most_once(self) -> bool:
        return self.processing_guarantee == "at_most_once"


ADMIN_OPTIONS: Final = options_of(CommonConfig)
PRODUCER_OPTIONS: Final = options_of(ProducerConfig)
CONSUMER_OPTIONS: Final = options_of(ConsumerConfig)


class CommonSettings(TypedDict, total=False):
    """Keyword arguments of every client. ``ADMIN_OPTIONS`` documents them."""

    client_id: str
    request_timeout_ms: int
    default_api_timeout_ms: int
    retry_backoff_ms: int
    retry_backoff_max_ms: int
    reconnect_backoff_ms: int
    reconnect_backoff_max_ms: int
    socket_connection_setup_timeout_ms: int
    metadata_max_age_ms: int
    security_protocol: SecurityProtocol
    ssl_keystore_location: str | None
    ssl_keystore_type: Literal["PEM"]
    ssl_key_password: str | None
    ssl_truststore_location: str | None
    ssl_truststore_type: Literal["PEM"]
    ssl_enabled_protocols: str | Sequence[str]
    ssl_endpoint_identification_algorithm: Literal["https", ""]
    sasl_mechanism: Literal["SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN", "OAUTHBEARER"]
    sasl_username: str | None
    sasl_password: str | None
    sasl_oauth_token_provider: TokenProvider | None
    sasl_oauthbearer_token_endpoint_url: str | None


class ProducerSettings(CommonSettings, total=False):
    """Keyword arguments of Producer. ``PRODUCER_OPTIONS`` documents them."""

    acks: int | Literal["0", "1", "all", "-1"]
    enable_idempotence: bool
    transactional_id: str
    transaction_timeout_ms: int
    linger_ms: int
    batch_size: int
    batch_max_messages: int
    buffer_memory: int
    max_block_ms: int
    max_request_size: int
    max_in_flight_requests_per_connection: int
    compression_type: str | None
    compression_level: int | None
    partitioner_switch_ms: int
    retries: int
    delivery_timeout_ms: int


class ConsumerSettings(CommonSettings, total=False):
    """Keyword arguments of Consumer. ``CONSUMER_OPTIONS`` documents them."""

    auto_offset_reset: Literal["earliest", "latest", "none"]
    fetch_min_bytes: int
    fetch_max_wait_ms: int
    fetch_max_bytes: int
    max_partition_fetch_bytes: int
    max_poll_records: int
    check_crcs: bool
    isolation_level: Literal["read_uncommitted", "read_committed"]
    allow_auto_create_topics: bool
    client_rack: str | None
    group_id: str | None
    group_instance_id: str | None
    group_remote_assignor: Literal["uniform", "range"] | None
    enable_auto_commit: bool
    auto_commit_interval_ms: int
    max_poll_interval_ms: int
    processing_guarantee: Literal["at_least_once", "at_most_once"]


BootstrapServers = str | Sequence[str]
"""``"host:port,host:port"``, ``"inproc://name"``, or a list of these."""

ConfigSource = Mapping[str, Any] | Literal["environment"]
"""Settings by dotted names or Python names, or "environment": the variables ``KAFKALITE_CLIENT_…``."""

CLIENT_VARIABLES: Final = "KAFKALITE_CLIENT_"
_ANY_VARIABLES: Final = "KAFKALITE_"  #: begins variables of brokers and of tools, too

#: Arguments of the clients' constructors that are not options. Errors suggest them for misspelt names.
_ARGUMENTS: Final = (
    "config",
    "interceptors",
    "key_deserializer",
    "key_serializer",
    "listener",
    "on_delivery",
    "pattern",
    "value_deserializer",
    "value_serializer",
)

#: Options of other clients that no client has here, and what to set instead. Since KIP-848 the brokers set
#: the time-outs of group members, for all members of all groups.
_ELSEWHERE: Final = {
    "brokers": "set bootstrap.servers",
    "servers": "set bootstrap.servers",
    "sasl.jaas.config": "set sasl.username and sasl.password",
    "sasl.login.callback.handler.class": "set sasl.oauth.token.provider",
    "session.timeout.ms": "the brokers set it for all members (KIP-848); change "
    "group.consumer.session.timeout.ms in the settings of the brokers, by default 45 s",
    "heartbeat.interval.ms": "the brokers set it for all members (KIP-848); change "
    "group.consumer.heartbeat.interval.ms in the settings of the brokers, by default 5 s",
    "partition.assignment.strategy": "the brokers assign the partitions (KIP-848); "
    "set group.remote.assignor to uniform or range",
}

C = TypeVar("C", bound=CommonConfig)


def elsewhere(name: str) -> str:
    """Return the hint for ``name`` if it is a known option of other libraries only; otherwise ""."""
    return _ELSEWHERE.get(name.replace("_", "."), "")


def admin_config(settings: Mapping[str, Any], *, source: str = "") -> CommonConfig:
    """Return the config for ``settings``, {dotted name or Python name: value}. Raises ConfigError.

    ``source`` names the origin of the settings in errors.
    """
    return CommonConfig(**_by_python_name(ADMIN_OPTIONS, settings, source))


def producer_config(settings: Mapping[str, Any], *, source: str = "") -> ProducerConfig:
    """Return the config for ``settings``. Raises ConfigError, also if settings contradict each other.

    ``settings`` and ``source`` are as in ``admin_config``. A ``batch.size`` above ``max.request.size`` is
    lowered to that value, because a batch must fit in a request.
    """
    values = _by_python_name(PRODUCER_OPTIONS, settings, source)
    values["acks"] = Acks.ALL if values["acks"] == "all" else Acks(int(values["acks"]))
    values["enable_idempotence"] = _idempotence(values, source)
    values["codec"] = Codec.parse(values.pop("compression_type") or "none")
    values["batch_size"] = min(values["batch_size"], values["max_request_size"])
    buffer, request = values["buffer_memory"], values["max_request_size"]
    allowed = f"max.request.size ({request}) or more, because a request must fit"
    _check(buffer >= request, "buffer.memory", buffer, allowed, source)
    linger, timeout = values["linger_ms"], values["delivery_timeout_ms"]
    _check(linger < timeout, "linger.ms", linger, f"less than delivery.timeout.ms ({timeout})", source)
    return ProducerConfig(**values)


def _idempotence(values: Mapping[str, Any], source: str) -> bool:
    """Return whether the producer is idempotent. Raises ConfigError if settings contradict each other.

    Without enable.idempotence and transactional.id, the producer is idempotent if acks is all and retries is
    above 0.
    """
    asked: bool | None = values["enable_idempotence"]
    because = "enable.idempotence=true"
    if values["transactional_id"] is not None:
        given, limit = values["transactional_id"], MAX_TRANSACTIONAL_ID_LENGTH
        is_fit = 1 <= len(given) <= limit
        _check(is_fit, "transactional.id", given[:50], f"a name of 1 to {limit} characters", source)
        because = "transactional.id"
        _check(asked is not False, "enable.idempotence", asked, f"true with {because}", source)
        asked = True
    for key, value, is_fit, allowed in (
        ("acks", int(values["acks"]), values["acks"] is Acks.ALL, "all"),
        ("retries", values["retries"], values["retries"] > 0, "1 or more"),
    ):
        if not is_fit:
            _check(not asked, key, value, f"{allowed} with {because}", source)
            return False
    return True if asked is None else asked


def _check(is_met: bool, key: str, value: Any, allowed: str, source: str) -> None:
    """Raise ConfigError for the option ``key`` unless ``is_met``. ``allowed`` describes valid values."""
    if not is_met:
        raise ConfigError(key=key, value=value, allowed=allowed, source=source)


def consumer_config(settings: Mapping[str, Any], *, source: str = "") -> ConsumerConfig:
    """Return the config for ``settings``. Raises ConfigError, also if settings contradict each other.

    ``settings`` and ``source`` are as in ``admin_config``.
    """
    values = _by_python_name(CONSUMER_OPTIONS, settings, source)
    values["isolation_level"] = IsolationLevel[values["isolation_level"].upper()]
    config = ConsumerConfig(**values)
    _check(config.group_id != "", "group.id", "", "a name, or unset for no group", source)
    allowed = "true with processing.guarantee=at_most_once, which commits before it returns records"
    is_met = config.enable_auto_commit or not config.is_at_most_once
    _check(is_met, "enable.auto.commit", False, allowed, source)
    if config.group_id is None:
        for key in ("group.instance.id", "group.remote.assignor"):
            is_unset = getattr(config, key.replace(".", "_")) is None
            _check(is_unset, key, None, "needs group.id", source)
        allowed = "at_most_once needs group.id, because the group stores the committed offsets"
        _check(not config.is_at_most_once, "processing.guarantee", None, allowed, source)
    return config


def merged(
    config: ConfigSource | None, arguments: Mapping[str, Any], registry: OptionRegistry
) -> dict[str, Any]:
    """Return ``config`` with dotted names, overridden by each argument that is not None.

    If ``config`` is "environment", the result of ``environment_settings`` takes its place, with its errors;
    None means no settings. Raises ConfigError for any other ``config`` that is not a mapping, and for a
    mapping as ``bootstrap_servers``. An argument that is None is dropped, so its name is checked here. Other
    names, and all values, are left to the caller to check.
    """
    if isinstance(config, str):
        if config != "environment":
            raise ConfigError(key="config", value=config, allowed='a mapping, or "environment"')
        config = environment_settings(os.environ, registry)
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(key="config", value=config, allowed='a mapping, or "environment"')
    if isinstance(arguments.get("bootstrap_servers"), Mapping):
        allowed = "host:port; the settings are a keyword argument: config={...}"
        raise ConfigError(key="bootstrap.servers", value="a dict", allowed=allowed)
    _check_known((name for name, value in arguments.items() if value is None), registry, "")
    settings = {name.replace("_", "."): value for name, value in (config or {}).items()}
    settings.update((name.replace("_", "."), value) for name, value in arguments.items() if value is not None)
    return settings


def environment_settings(environment: Mapping[str, str], registry: OptionRegistry) -> dict[str, Any]:
    """Return the options of ``registry`` among the variables ``KAFKALITE_CLIENT_…``, as {dotted name: value}.

    Options that only another kind of client has are skipped. Raises ConfigError for an option that no client
    has, and for an invalid value. Also raises it for a variable without ``CLIENT_`` that resembles
    security.protocol or an option ``sasl.…``, such as ``KAFKALITE_SECURITY_PROTOCOL``: a client that ignored
    it would connect without TLS or a login.
    """
    settings: dict[str, Any] = {}
    secured = [name for name in ADMIN_OPTIONS.defaults() if name.startswith(("security.", "sasl."))]
    for variable, text in environment.items():
        if variable.startswith(CLIENT_VARIABLES):
            name = variable.removeprefix(CLIENT_VARIABLES).lower()
            if name in registry:
                settings[registry.get(name).name] = registry.get(name).parse(text, source=variable)
            elif name not in PRODUCER_OPTIONS and name not in CONSUMER_OPTIONS:
                names = [option.python_name for option in (*PRODUCER_OPTIONS, *CONSUMER_OPTIONS)]
                hint = elsewhere(name) or did_you_mean(name, names, shown=_variable)
                allowed = "; ".join(filter(None, ("no client has such an option", hint)))
                raise ConfigError(key=variable, value=None, allowed=allowed)
        elif variable.startswith(_ANY_VARIABLES):
            dotted = variable.removeprefix(_ANY_VARIABLES).lower().replace("_", ".")
            hint = did_you_mean(dotted, secured, shown=_variable, cutoff=0.9)
            if hint:
                raise ConfigError(key=variable, value=None, allowed=f"no client reads this variable; {hint}")
    return settings


def _variable(name: str) -> str:
    return CLIENT_VARIABLES + name.upper().replace(".", "_")


def _check_known(names: Iterable[str], registry: OptionRegistry, source: str) -> None:
    """Raise ConfigError for the first of the ``names`` that is not in ``registry``."""
    for name in names:
        if name in registry:
            continue
        if hint := elsewhere(name):
            raise ConfigError(key=name, value=None, allowed=f"no option of a client; {hint}", source=source)
        hint = did_you_mean(name.replace(".", "_"), _ARGUMENTS, shown="the argument {}".format, cutoff=0.8)
        if hint:
            raise ConfigError(key=name, value=None, allowed=f"unknown option; {hint}", source=source)
        registry.get(name, source=source)


def _by_python_name(registry: OptionRegistry, settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    _check_known(settings, registry, source)
    given = {name: value for name, value in settings.items() if value is not None}
    parsed = registry.defaults() | registry.parse(given, source=source)
    check_versions(parsed["ssl.enabled.protocols"], source=source)
    if parsed["security.protocol"] in WITH_LOGIN:
        _check_login(parsed, source)
    allowed = "at least one host:port or inproc://name"
    _check(bool(parsed["bootstrap.servers"]), "bootstrap.servers", "", allowed, source)
    for address in parsed["bootstrap.servers"]:
        _check_address(address, source)
    return {registry.get(name).python_name: value for name, value in parsed.items()}


def _check_login(parsed: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError if a setting that a login needs is missing.

    Also raises it if sasl.oauthbearer.token.endpoint.url is neither a path nor a file URL.
    """
    if parsed["sasl.mechanism"] == OAUTHBEARER:
        key, file = "sasl.oauth.token.provider", parsed["sasl.oauthbearer.token.endpoint.url"]
        allowed = "required with sasl.mechanism=OAUTHBEARER, or sasl.oauthbearer.token.endpoint.url"
        _check(bool(parsed[key] or file), key, None, allowed, source)
        allowed = "the path or file: URL of a file; sasl.oauth.token.provider may ask an issuer for tokens"
        is_file = not file or file.startswith("file:") or "://" not in file
        _check(is_file, "sasl.oauthbearer.token.endpoint.url", file, allowed, source)
        return
    for key in ("sasl.username", "sasl.password"):
        allowed = f"required with security.protocol={parsed['security.protocol']}"
        _check(bool(parsed[key]), key, None, allowed, source)


def _check_address(address: str, source: str) -> None:
    """Raise ConfigError if ``address`` does not have the form of an address."""
    # They import asyncio, which neither 'kl --help' nor a task of Spark needs.
    from kafkalite.transport import has_own_name

    if not has_own_name(address):
        from kafkalite.transport.tcp import parse_address

        try:
            host, _ = parse_address(address)
        except ConfigError as error:
            raise ConfigError(
                key="bootstrap.servers", value=address, allowed=error.allowed, source=source
            ) from None
        _check(is_host_name(host), "bootstrap.servers", address, f"host:port with {HOST_WORDS}", source)
