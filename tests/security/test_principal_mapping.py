"""Rules that derive principals from distinguished names, as Kafka applies them (KIP-371, S6)."""

from __future__ import annotations

import pytest

from kafkalite.errors import ConfigError
from kafkalite.security.acls import ANONYMOUS
from kafkalite.security.principal_mapping import PrincipalMapping

ADUSER = "CN=adminUser,OU=admin,O=Unknown,L=Unknown,ST=Unknown,C=Unknown"
SERVICE = "CN=kafka-server1,OU=KAFKA,O=Unknown"

#: The rules and results in Kafka's documentation of the option and in its own tests.
KAFKAS = (
    r"RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/,"
    r"RULE:^CN=(.*?),OU=(.*?),O=(.*?),L=(.*?),ST=(.*?),C=(.*?)$/$1@$2/L,"
    r"RULE:^cn=(.*?),ou=(.*?),dc=(.*?),dc=(.*?)$/$1@$2/U,"
    r"RULE:^.*[Cc][Nn]=([a-zA-Z0-9.]*).*$/$1/L,"
    r"DEFAULT"
)


@pytest.mark.parametrize(
    ("name", "principal"),
    [
        ("CN=Duke,OU=ServiceUsers,O=Org,C=US", "User:Duke"),
        ("CN=Duke,OU=SME,O=mycp,L=Fulton,ST=MD,C=US", "User:duke@sme"),
        ("cn=duke,ou=sme,dc=mycp,dc=com", "User:DUKE@SME"),
        ("O=org,CN=Duke.1", "User:duke.1"),
        ("OU=JavaSoft,O=Sun Microsystems,C=US", "User:OU=JavaSoft,O=Sun Microsystems,C=US"),
    ],
)
def test_the_rules_of_kafkas_documentation(name: str, principal: str) -> None:
    assert PrincipalMapping(KAFKAS).principal(name) == principal


@pytest.mark.parametrize(
    ("rules", "name", "principal"),
    [
        ("DEFAULT", ADUSER, f"User:{ADUSER}"),
        ("RULE:^CN=(.*?),.*$/$1/", ADUSER, "User:adminUser"),
        (" RULE:^CN=(.*?),.*$/$1/L , DEFAULT ", ADUSER, "User:adminuser"),
        ("RULE:CN=(.*?)/$1/", ADUSER, "User:adminUser,OU=admin,O=Unknown,L=Unknown,ST=Unknown,C=Unknown"),
        ("RULE:CN=admin/admin/", ADUSER, None),  # a part of the name is not enough
        ("RULE:^CN=(.*?),OU=KAFKA.*$/$1/U", ADUSER, None),
        ("RULE:^CN=(.*?),OU=KAFKA.*$/$1/U", SERVICE, "User:KAFKA-SERVER1"),
        (r"RULE:^CN=(a\/b),.*$/\$1\/$1/", "CN=a/b,O=x", "User:$1/a/b"),
        ("RULE:^CN=(x)?.*$/$1/", "CN=admin", None),  # an empty name is not a principal
        ("DEFAULT", "", None),  # a certificate without a subject is not one without a certificate
        ("RULE:^CN=(.*)$/$1/", "CN=admin\n", None),
        ("RULE:^CN=(.*)$/$1/", "CN=ANONYMOUS", None),  # reserved
        ("RULE:^CN=(.*)$/$1/", "CN=*", None),
        ("RULE:^CN=(.*)$/$1/,DEFAULT", "CN=a\nb", "User:CN=a\nb"),
        ("RULE:^CN=(\\d{1,3}),.*$/n$1/", "CN=12,O=x", "User:n12"),
    ],
)
def test_what_a_rule_matches(rules: str, name: str, principal: str | None) -> None:
    assert PrincipalMapping(rules).principal(name) == principal


def test_a_client_without_a_certificate_is_anonymous() -> None:
    assert PrincipalMapping("RULE:^CN=(.*)$/$1/").principal(None) == ANONYMOUS == "User:ANONYMOUS"


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ("", "at least one rule"),
        ("default", "RULE:pattern/replacement"),
        ("RULE:a/b", "RULE:pattern/replacement"),
        ("RULE:a/b/X", "RULE:pattern/replacement"),
        ("RULE:a/b/LU", "RULE:pattern/replacement"),
        ("DEFAULT;DEFAULT", "RULE:pattern/replacement"),
        ("RULE:(a/b/", "a regular expression"),
        ("RULE:(a)/$2/", "references to the 1 groups"),
    ],
)
def test_malformed_rules_are_refused(rules: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"ssl\.principal\.mapping\.rules") as refused:
        PrincipalMapping(rules)
    assert words in refused.value.allowed
