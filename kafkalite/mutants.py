"""The rules of replication that a test may remove, to prove that their loss would be found.

``ACTIVE`` is empty outside such tests, and nothing in the product ever adds to it. Each name is a rule's
number and what is done wrong without it; the code asks for it at the one place where the rule stands.
"""

from __future__ import annotations

from typing import Final

MUTANTS: Final[dict[str, str]] = {
    "R13-no-cas": "an ISR change is accepted for an older partition epoch",
    "R16-no-elr": "the last in-sync replica is kept, and no eligible leader replicas are remembered",
    "R20-no-fencing": "a registration does not end the leaderships of the earlier incarnation",
    "R20-unclean-stays": "a broker that may have lost unsynced records stays eligible",
    "R31-no-epoch-bump": "the end of a transaction leaves the producer's epoch as it was",
    "R32-complete-early": "a transaction is complete before every partition has its marker",
    "R32-unretired-forgotten": "what was decided is forgotten of an application that may come back",
    "R32-opposite-accepted": "a repeated end of a transaction may decide the opposite",
    "R34-init-keeps-open": "a new producer of a transactional id leaves the open transaction open",
    "R34-timeout-no-bump": "a transaction is aborted by timeout without a new epoch",
    "R35-member-unchecked": "offsets join a transaction whoever sends them",
    "R35-visible-at-once": "offsets take effect before their transaction is committed",
    "R35-unstable-read": "a stable read of offsets ignores those of open transactions",
    "R38-hand-over-early": "a partition is given to a member before its owner has given it back",
    "R38-expelled-stays": "an expelled member's next heartbeat is taken",
    "R39-any-epoch": "offsets of a member's earlier epoch are committed",
    "R39-any-member": "offsets are committed whoever sends them",
}

ACTIVE: set[str] = set()
