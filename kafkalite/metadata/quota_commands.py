"""Decisions about the quotas of clients (KIP-546), and the conversion of entities and filters of requests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from ipaddress import IPv6Address, ip_address
from typing import Final

from kafkalite.errors import BrokerError, ConfigError, InvalidRequestError
from kafkalite.limits import MAX_CLIENT_ID_LENGTH
from kafkalite.metadata.client_quotas import CLIENT_KEYS, IP_KEYS
from kafkalite.metadata.decision import Decision, outcome, parse_configs, too_many
from kafkalite.metadata.image import ClusterImage
from kafkalite.metadata.records import ClientQuotaRecord, MetadataRecord
from kafkalite.model import DEFAULT_ENTITY, QuotaEntity
from kafkalite.protocol.messages.admin import (
    AlterClientQuotasRequest,
    AlterClientQuotasResponse,
    AlteredClientQuota,
    ClientQuotaAlteration,
    DescribeClientQuotasRequest,
    DescribedClientQuota,
    QuotaEntityName,
)
from kafkalite.suggestions import did_you_mean

#: {entity type on the wire: field of QuotaEntity}
_FIELDS: Final = {"user": "user", "client-id": "client_id", "ip": "ip"}
_MAX_USER_LENGTH: Final = 1_024  #: a distinguished name may be long
#: Bounds of a quota. Beyond them, a throttle time or the bytes of a response would not fit in 64 bits.
MIN_QUOTA: Final = 0.001
MAX_QUOTA: Final = 2**63
_EXACT, _DEFAULT, _ANY = range(3)  # match types


def alter_client_quotas(image: ClusterImage, command: AlterClientQuotasRequest) -> Decision:
    """Set and remove quotas. The changes of one entity are applied together or not at all.

    The reply has one result for each entry, in the order of the request. Errors: INVALID_REQUEST (an invalid
    entity, or an entity for the second time), INVALID_CONFIG (unknown or repeated key, bad value); of the
    whole request INVALID_REQUEST (too many changes).
    """
    problem = too_many(sum(max(1, len(entry.changes)) for entry in command.entries), "changes")
    if problem is not None:
        return Decision(AlterClientQuotasResponse(*outcome(problem), []))
    records: list[MetadataRecord] = []
    results: list[AlteredClientQuota] = []
    seen: set[QuotaEntity] = set()
    for entry in command.entries:
        try:
            entity = parse_entity(entry.entity)
            if entity in seen:
                raise InvalidRequestError("the request names this entity twice")
            seen.add(entity)
            changes = _changes(image, entity, entry)
        except BrokerError as error:
            results.append(AlteredClientQuota(entry.entity, *outcome(error)))
            continue
        if not command.validate_only:
            records += changes
        results.append(AlteredClientQuota(entry.entity, 0, None))
    return Decision(AlterClientQuotasResponse(0, None, results), records)


def _changes(image: ClusterImage, entity: QuotaEntity, entry: ClientQuotaAlteration) -> list[MetadataRecord]:
    """Return the records for one entity, without changes that have no effect. Raises INVALID_CONFIG."""
    keys = CLIENT_KEYS if entity.ip is None else IP_KEYS

    def parse(key: str, text: str | None) -> tuple[str, str | None]:
        if key not in keys:
            hint = did_you_mean(key, keys, otherwise=f"these are: {', '.join(keys)}", cutoff=0.8)
            raise ConfigError(key=key, value=None, allowed=f"no quota of this entity; {hint}")
        if text is not None:
            _number(key, text)
        return key, text

    present = image.client_quotas.get(entity, {})
    records: list[MetadataRecord] = []
    for key, text in parse_configs(parse, ((change.key, change.value) for change in entry.changes)).items():
        value = None if text is None else _number(key, text)
        if present.get(key) != value:
            records.append(ClientQuotaRecord(*entity, key, value))
    return records


def _number(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not MIN_QUOTA <= value <= MAX_QUOTA:
        raise ConfigError(key=key, value=text, allowed=f"a number from {MIN_QUOTA} to {MAX_QUOTA}")
    return value


def parse_entity(parts: Iterable[QuotaEntityName]) -> QuotaEntity:
    """Return the entity with these parts. Raises INVALID_REQUEST if they are invalid or do not form an
    entity."""
    names: dict[str, str] = {}
    for kind, name in parts:
        field = _field(kind)
        if field in names:
            raise InvalidRequestError(f"the entity has two parts of type {kind!r}")
        if name == DEFAULT_ENTITY:
            raise InvalidRequestError(f"a name of type {kind!r} is empty; nil is the default")
        names[field] = DEFAULT_ENTITY if name is None else _checked(field, name)
    entity = QuotaEntity(**names)
    if not names or (entity.ip is not None and len(names) > 1):
        raise InvalidRequestError("an entity is a user, a client-id, both, or an ip")
    return entity


def _field(kind: str) -> str:
    if kind not in _FIELDS:
        raise InvalidRequestError(f"entity type must be one of {', '.join(_FIELDS)}; it is {kind!r}")
    return _FIELDS[kind]


def _checked(field: str, name: str) -> str:
    if field == "ip":
        try:
            address = ip_address(name)
        except ValueError:
            raise InvalidRequestError(f"{name!r} is no IP address") from None
        mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        return str(address if mapped is None else mapped)
    limit = _MAX_USER_LENGTH if field == "user" else MAX_CLIENT_ID_LENGTH
    if len(name) > limit:
        raise InvalidRequestError(f"a name has at most {limit} characters, this one {len(name)}")
    return name


def find_quotas(
    quotas: Mapping[QuotaEntity, Mapping[str, float]], request: DescribeClientQuotasRequest
) -> list[DescribedClientQuota]:
    """Return the quotas of the entities that the filters of ``request`` select, sorted. Raises
    INVALID_REQUEST for an invalid filter."""
    filters: dict[str, tuple[int, str | None]] = {}
    for kind, name, match_type in request.components:
        field = _field(kind)
        if field in filters:
            raise InvalidRequestError(f"two filters of type {kind!r}")
        if match_type not in (_EXACT, _DEFAULT, _ANY) or (name is None) != (match_type != _EXACT):
            raise InvalidRequestError("match_type is 0 with a name, or 1 (default) or 2 (any) without one")
        filters[field] = (match_type, name)
    found = [
        DescribedClientQuota(entity_parts(entity), {key: number_text(bound) for key, bound in values.items()})
        for entity, values in quotas.items()
        if _is_selected(entity, filters, request.strict)
    ]
    return sorted(found, key=lambda one: [(kind, name or "") for kind, name in one.entity])


def _is_selected(entity: QuotaEntity, filters: Mapping[str, tuple[int, str | None]], strict: bool) -> bool:
    for field, name in entity._asdict().items():
        if field not in filters:
            if strict and name is not None:
                return False
            continue
        match_type, wanted = filters[field]
        if match_type != _EXACT:
            wanted = DEFAULT_ENTITY if match_type == _DEFAULT else name
        if name is None or name != wanted:
            return False
    return True


def entity_parts(entity: QuotaEntity) -> list[QuotaEntityName]:
    """Return the parts of an entity as in requests."""
    names = ((kind, getattr(entity, field)) for kind, field in _FIELDS.items())
    return [QuotaEntityName(kind, name or None) for kind, name in names if name is not None]


def number_text(value: float) -> str:
    """Return the text of a quota, without a decimal point if it is a whole number."""
    return str(int(value)) if value.is_integer() else repr(value)
