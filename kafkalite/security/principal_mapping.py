"""Derives a client's principal from the name in its certificate by ``ssl.principal.mapping.rules``.

The rules are Kafka's (KIP-371), separated by commas::

    RULE:^CN=(.*?),OU=Apps.*$/$1/L,RULE:^CN=(.*?),.*$/$1@other/,DEFAULT

The first rule whose pattern matches the whole distinguished name decides. ``$1`` is the first group of the
pattern, and ``L`` and ``U`` change the result to lower and upper case. DEFAULT matches every name and returns
it unchanged. The name is written as in RFC 2253, the most specific part first. A backslash before ``/`` or
``$`` makes it literal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from kafkalite.errors import ConfigError
from kafkalite.security.acls import ANONYMOUS, RESERVED, USER_PREFIX

KEY: Final = "ssl.principal.mapping.rules"
DEFAULT_RULES: Final = "DEFAULT"

_PART: Final = r"((?:\\.|[^\\/])*)"
_RULE: Final = re.compile(rf"\s*(?:(DEFAULT)|RULE:{_PART}/{_PART}/([LU]?))\s*(?:,|$)", re.DOTALL)
_REFERENCE: Final = re.compile(r"\\(.)|\$(\d)", re.DOTALL)
_CASES: Final[dict[str, Callable[[str], str]]] = {"L": str.lower, "U": str.upper, "": str}


@dataclass(frozen=True, slots=True)
class _Rule:
    pattern: re.Pattern[str]
    replacement: str
    case: str

    def apply(self, name: str) -> str | None:
        """Return the principal's name, or None if the pattern does not match all of ``name``."""
        match = self.pattern.fullmatch(name)
        if match is None:
            return None
        text = _REFERENCE.sub(lambda part: part[1] or match[int(part[2])] or "", self.replacement)
        return _CASES[self.case](text)


class PrincipalMapping:
    """The parsed rules. Raises ConfigError if they are malformed."""

    def __init__(self, rules: str = DEFAULT_RULES) -> None:
        self._rules = _parse(rules)

    def principal(self, subject: str | None) -> str | None:
        """Return the principal, such as ``User:alice``, of a client whose certificate has ``subject``.

        Return ANONYMOUS if ``subject`` is None: the client has no certificate. Return None if the client must
        be refused, because no rule matches, or the first matching rule yields an empty name or a RESERVED
        principal.
        """
        if subject is None:
            return ANONYMOUS
        for rule in self._rules:
            name = rule.apply(subject)
            if name is not None:
                principal = f"{USER_PREFIX}{name}"
                return principal if name and principal not in RESERVED else None
        return None


@lru_cache(maxsize=16)
def _parse(rules: str) -> tuple[_Rule, ...]:
    parsed: list[_Rule] = []
    position = 0
    while position < len(rules):
        found = _RULE.match(rules, position)
        if found is None:
            raise _malformed(rules[position:], "rules RULE:pattern/replacement/[LU] or DEFAULT, in commas")
        default, pattern, replacement, case = found.groups()
        if default:
            parsed.append(_Rule(re.compile("(.*)", re.DOTALL), "$1", ""))
        else:
            parsed.append(_rule(pattern, replacement, case))
        position = found.end()
    if not parsed:
        raise _malformed(rules, "at least one rule, such as DEFAULT")
    return tuple(parsed)


def _rule(pattern: str, replacement: str, case: str) -> _Rule:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise _malformed(pattern, f"a regular expression: {error}") from None
    for reference in _REFERENCE.finditer(replacement):
        if reference[2] and int(reference[2]) > compiled.groups:
            raise _malformed(replacement, f"references to the {compiled.groups} groups of {pattern}")
    return _Rule(compiled, replacement, case)


def _malformed(value: str, allowed: str) -> ConfigError:
    return ConfigError(key=KEY, value=value, allowed=allowed)
