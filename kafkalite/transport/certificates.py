"""Reads the subject's distinguished name and the validity of an X.509 certificate, without verifying it.

Python's ``ssl`` module returns a subject without the types of its values. Principals are compared as text, so
two different names must never have the same text (S6).
"""

from __future__ import annotations

import base64
import binascii
import re
from datetime import UTC, datetime
from typing import Final, NamedTuple

from kafkalite.errors import KafkaliteError

_INTEGER: Final = 0x02
_OBJECT_IDENTIFIER: Final = 0x06
_SEQUENCE: Final = 0x30
_SET: Final = 0x31
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_GENERALIZED_TIME: Final = 0x18
#: UTF8String, PrintableString, T61String and IA5String. Values of other types are shown in hexadecimal.
_TEXT_TAGS: Final = frozenset({0x0C, 0x13, 0x14, 0x16})

#: The attributes that RFC 2253 names; others are shown by their number and in hexadecimal, as in Java.
_KEYWORDS: Final = {
    "2.5.4.3": "CN",
    "2.5.4.6": "C",
    "2.5.4.7": "L",
    "2.5.4.8": "ST",
    "2.5.4.9": "STREET",
    "2.5.4.10": "O",
    "2.5.4.11": "OU",
    "0.9.2342.19200300.100.1.1": "UID",
    "0.9.2342.19200300.100.1.25": "DC",
}
_ESCAPED: Final = str.maketrans({char: f"\\{char}" for char in ',=+<>#;"\\'} | {"\0": "\\00"})
_PEM: Final = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)


class CertificateError(KafkaliteError):
    """The bytes are not an X.509 certificate."""


class Certificate(NamedTuple):
    subject: str  #: as in RFC 2253, the most specific part first: ``CN=writer,O=Example,C=CH``
    not_before: datetime  #: inclusive, UTC
    not_after: datetime  #: inclusive, UTC


def pem_certificates(pem: bytes) -> list[bytes]:
    """Return the certificates in ``pem`` as DER, in their order. Raises CertificateError."""
    try:
        return [base64.b64decode(body, validate=False) for body in _PEM.findall(pem)]
    except binascii.Error as error:
        raise CertificateError(f"a certificate is not base64: {error}") from None


def parse_certificate(der: bytes) -> Certificate:
    """Return subject and validity of a certificate in DER. Raises CertificateError."""
    try:
        _, certificate, _ = _element(der, 0, _SEQUENCE)
        _, signed, _ = _element(certificate, 0, _SEQUENCE)
        position = _element(signed, 0, _VERSION)[2] if signed[0] == _VERSION else 0
        for tag in (_INTEGER, _SEQUENCE, _SEQUENCE):  # serial number, signature algorithm, issuer
            position = _element(signed, position, tag)[2]
        _, validity, position = _element(signed, position, _SEQUENCE)
        start_tag, start, middle = _element(validity, 0)
        end_tag, end, _ = _element(validity, middle)
        _, name, _ = _element(signed, position, _SEQUENCE)
        return Certificate(_name(name), _instant(start_tag, start), _instant(end_tag, end))
    except (IndexError, ValueError) as error:
        raise CertificateError(f"not an X.509 certificate: {error}") from None


def _element(data: bytes, start: int, expected_tag: int | None = None) -> tuple[int, bytes, int]:
    """Return (tag, content, end) of the DER element at ``start``. Raises ValueError and IndexError."""
    tag, length = data[start], data[start + 1]
    position = start + 2
    if length >= 0x80:
        size = length & 0x7F
        length = int.from_bytes(data[position : position + size], "big")
        position += size
    end = position + length
    if expected_tag is not None and tag != expected_tag:
        raise ValueError(f"tag {tag:#x} at byte {start}, expected {expected_tag:#x}")
    if end > len(data):
        raise ValueError(f"{length} bytes are announced at byte {start}, and {len(data) - position} are left")
    return tag, data[position:end], end


def _elements(data: bytes) -> list[tuple[int, bytes, bytes]]:
    """Return (tag, content, whole element) of each element in ``data``."""
    found, start = [], 0
    while start < len(data):
        tag, content, end = _element(data, start)
        found.append((tag, content, data[start:end]))
        start = end
    return found


def _name(name: bytes) -> str:
    """Return a distinguished name as in RFC 2253: the relative names in reverse order, joined by commas."""
    return ",".join(
        "+".join(_attribute(pair) for _, pair, _ in _elements(relative))
        for _, relative, _ in reversed(_elements(name))
    )


def _attribute(pair: bytes) -> str:
    _, oid, position = _element(pair, 0, _OBJECT_IDENTIFIER)
    tag, content, _ = _element(pair, position)
    number = _dotted(oid)
    keyword = _KEYWORDS.get(number)
    if keyword is None or tag not in _TEXT_TAGS:
        return f"{keyword or number}=#{pair[position:].hex()}"
    try:
        return f"{keyword}={_escaped(content.decode())}"
    except UnicodeDecodeError:
        return f"{keyword}=#{pair[position:].hex()}"


def _escaped(value: str) -> str:
    middle = value.strip(" \r")
    lead = value[: len(value) - len(value.lstrip(" \r"))]
    trail = value[len(lead) + len(middle) :]
    return "".join(f"\\{c}" for c in lead) + middle.translate(_ESCAPED) + "".join(f"\\{c}" for c in trail)


def _dotted(oid: bytes) -> str:
    numbers: list[int] = []
    value = 0
    for byte in oid:
        value = value << 7 | byte & 0x7F
        if not byte & 0x80:
            numbers.append(value)
            value = 0
    first = min(numbers[0] // 40, 2)
    return ".".join(map(str, (first, numbers[0] - 40 * first, *numbers[1:])))


def _instant(tag: int, content: bytes) -> datetime:
    """Parse a UTCTime, whose years are 1950 to 2049 (RFC 5280), or a GeneralizedTime. Raises ValueError."""
    text = content.decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError(f"a time has tag {tag:#x}")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
