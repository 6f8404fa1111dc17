"""The client's side of users' SCRAM credentials: mechanisms by name, and salted passwords."""

# Tests: tests/client/test_admin_security.py

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kafkalite.errors import ClientError, UnacceptableCredentialError
from kafkalite.security.scram import (
    MAX_ITERATIONS,
    MIN_ITERATIONS,
    MIN_SALT_BYTES,
    Mechanism,
    salted_password,
    saslprep,
)

MECHANISMS: Final = tuple(mechanism.label for mechanism in Mechanism)


class SaltedPassword(NamedTuple):
    """A new password in the form that is sent to the cluster. The fields are those of the request."""

    user: str
    mechanism: int
    iterations: int
    salt: bytes
    salted_password: bytes


def mechanism_number(label: str) -> int:
    """Return the number of a mechanism, such as ``SCRAM-SHA-256``. Raises ClientError for another name."""
    for mechanism in Mechanism:
        if mechanism.label == label:
            return int(mechanism)
    raise ClientError(f"{label!r} is no SCRAM mechanism", hint=f"one of {', '.join(MECHANISMS)}")


def mechanism_label(number: int) -> str:
    """Return the name of a mechanism, or its number as text if this client does not know it."""
    return Mechanism(number).label if number in set(Mechanism) else str(number)


def salted_passwords(
    user: str, password: str, mechanisms: Sequence[str], iterations: int
) -> Iterator[SaltedPassword]:
    """Yield the SaltedPassword of each of ``mechanisms``, with its own random salt.

    Raises UnacceptableCredentialError if ``iterations`` is not from MIN_ITERATIONS to MAX_ITERATIONS,
    ClientError for an unknown mechanism, and InvalidRequestError for a user or password that SASLprep
    refuses.
    """
    if not MIN_ITERATIONS <= iterations <= MAX_ITERATIONS:
        raise UnacceptableCredentialError(
            f"a SCRAM credential has {MIN_ITERATIONS} to {MAX_ITERATIONS} iterations, not {iterations}"
        )
    name = saslprep(user, "a user name")
    for label in mechanisms:
        mechanism = Mechanism(mechanism_number(label))
        salt = os.urandom(MIN_SALT_BYTES)
        salted = salted_password(mechanism, password, salt, iterations)
        yield SaltedPassword(name, int(mechanism), iterations, salt, salted)
