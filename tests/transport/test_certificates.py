"""The text of a distinguished name is that of Java's X500Principal, on which Kafka's ACLs are written."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from kafkalite.transport.certificates import CertificateError, parse_certificate, pem_certificates
from proof.certificates import DevCertificates

START = datetime(2026, 1, 1, tzinfo=UTC)


def certificate(*relative_names: dict[str, Any], until: datetime = datetime(2060, 5, 6, tzinfo=UTC)) -> bytes:
    """Return a certificate in DER. Each argument is a relative name: {attribute: value or (value, type)}."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.name import _ASN1Type

    def attribute(name: str, value: Any) -> Any:
        text, *types = value if isinstance(value, tuple) else (value,)
        return x509.NameAttribute(getattr(x509.NameOID, name), text, *(_ASN1Type[each] for each in types))

    name = x509.Name(
        [
            x509.RelativeDistinguishedName([attribute(*pair) for pair in relative.items()])
            for relative in relative_names
        ]
    )
    key = ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateBuilder(name, name, key.public_key(), 5, START, until)
    der: bytes = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)
    return der


@pytest.mark.parametrize(
    ("names", "subject"),
    [  # the right side is what Java 17 printed
        (
            [
                {"COUNTRY_NAME": "CH"},
                {"STATE_OR_PROVINCE_NAME": "Zürich"},
                {"LOCALITY_NAME": "Z"},
                {"ORGANIZATION_NAME": 'A, B+C="x" <y>;#\\'},
                {"ORGANIZATIONAL_UNIT_NAME": " #lead trail "},
                {"COMMON_NAME": "writer1"},
            ],
            r"CN=writer1,OU=\ \#lead trail\ ,O=A\, B\+C\=\"x\" \<y\>\;\#\\,L=Z,ST=Zürich,C=CH",
        ),
        (
            [{"DOMAIN_COMPONENT": "com"}, {"USER_ID": "u1", "COMMON_NAME": "multi"}, {"STREET_ADDRESS": "s"}],
            "STREET=s,CN=multi+UID=u1,DC=com",
        ),
        (
            [
                {"EMAIL_ADDRESS": ("a@b.c", "IA5String")},
                {"SERIAL_NUMBER": "12"},
                {"TITLE": "T"},
                {"COMMON_NAME": "x\0y"},
            ],
            r"CN=x\00y,2.5.4.12=#0c0154,2.5.4.5=#13023132,1.2.840.113549.1.9.1=#16056140622e63",
        ),
        ([{"COMMON_NAME": ("t61", "T61String")}, {"COMMON_NAME": "  "}], r"CN=\ \ ,CN=t61"),
        ([{"COMMON_NAME": ("vis", "VisibleString")}], "CN=#1a03766973"),
    ],
)
def test_subjects_as_java_prints_them(names: list[dict[str, Any]], subject: str) -> None:
    assert parse_certificate(certificate(*names)).subject == subject


def test_look_alikes_have_different_subjects() -> None:
    """S6: reordered names, joined names, separators inside a value, and other types of text."""
    alike = [
        [{"ORGANIZATION_NAME": "x"}, {"COMMON_NAME": "admin"}],
        [{"COMMON_NAME": "admin"}, {"ORGANIZATION_NAME": "x"}],
        [{"ORGANIZATION_NAME": "x", "COMMON_NAME": "admin"}],
        [{"COMMON_NAME": "admin,O=x"}],
        [{"ORGANIZATION_NAME": "x"}, {"COMMON_NAME": "admin "}],
        [{"ORGANIZATION_NAME": "x"}, {"COMMON_NAME": "admin\0"}],
        [{"ORGANIZATION_NAME": "x"}, {"COMMON_NAME": ("admin", "BMPString")}],
    ]
    subjects = [parse_certificate(certificate(*names)).subject for names in alike]
    assert len(set(subjects)) == len(alike), subjects


def test_validity_before_and_after_2050() -> None:
    for until in (datetime(2049, 12, 31, 23, 59, 59, tzinfo=UTC), datetime(2050, 1, 1, tzinfo=UTC)):
        parsed = parse_certificate(certificate({"COMMON_NAME": "x"}, until=until))
        assert (parsed.not_before, parsed.not_after) == (START, until)


def test_a_damaged_certificate_raises_only_its_named_error(dev_certificates: DevCertificates) -> None:
    """S20: cut at every byte, and every byte of the first part changed."""
    whole = pem_certificates((dev_certificates / "broker.pem").read_bytes())[0]
    for end in range(len(whole)):
        with pytest.raises(CertificateError):
            parse_certificate(whole[:end])
    for position in range(200):
        for value in (0x00, 0x30, 0x80, 0xFF):
            changed = whole[:position] + bytes([value]) + whole[position + 1 :]
            try:
                parse_certificate(changed)
            except CertificateError:
                continue


def test_the_certificates_of_a_pem_file_in_their_order(dev_certificates: DevCertificates) -> None:
    leaf, authority = pem_certificates((dev_certificates / "broker.pem").read_bytes())
    assert parse_certificate(leaf).subject == "CN=broker,O=kafkalite development"
    assert parse_certificate(authority).subject.startswith("CN=kafkalite development CA ")
    assert pem_certificates(b"nothing") == []
    with pytest.raises(CertificateError, match="not base64"):
        pem_certificates(b"-----BEGIN CERTIFICATE-----\nabcde\n-----END CERTIFICATE-----")
