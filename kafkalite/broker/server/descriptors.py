"""How many file descriptors the process may open, and how many of them connections may use (R55).

Files and connections share the descriptors. Without a limit for connections, a client that opens many leaves
none for the log, and the node can neither roll a segment nor store a snapshot.
"""

# Tests: tests/broker/test_descriptors.py, tests/processes/test_descriptors.py

from __future__ import annotations

import logging
import resource
from typing import Final, NamedTuple

from kafkalite.log_fields import Fields

logger = logging.getLogger(__name__)

#: The number of descriptors that clients' connections cannot use; at most an eighth of the process's limit.
RESERVED_DESCRIPTORS: Final = 256


#: With fewer descriptors, a node of a cluster may not replicate a few dozen partitions.
FEW_DESCRIPTORS: Final = 1024


class DescriptorLimits(NamedTuple):
    """The limits of the connections of a process."""

    max_connections: int  #: of clients
    max_client_descriptor: int  #: a client's connection with this number or a greater one is refused
    max_peer_descriptor: int  #: the same for a connection to a controller's listener


def raise_limit() -> None:
    """Raise the process's limit of open files to its hard limit.

    Log a warning if that is less than FEW_DESCRIPTORS.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if 0 <= hard < FEW_DESCRIPTORS:
        logger.warning(
            "limit of open files is low %s",
            Fields(
                limit=hard,
                recommended=FEW_DESCRIPTORS,
                effect="connections are refused, and replicas may not get in sync",
                remedy="raise the hard limit: 'ulimit -Hn', LimitNOFILE=",
            ),
        )


def current_limits(max_connections: int) -> DescriptorLimits:
    """Return the limits of this process. ``max_connections`` is the configured number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limits_of(max_connections, 2**31 - 1 if soft == resource.RLIM_INFINITY else soft)


def limits_of(max_connections: int, limit: int) -> DescriptorLimits:
    """Return the limits of a process that may open ``limit`` descriptors.

    Clients get at most half of the descriptors. The others are for files and for connections between nodes.
    The descriptors with the highest numbers are a reserve for these: an eighth of ``limit``, at most
    RESERVED_DESCRIPTORS. A client's connection with a descriptor in the reserve is refused, and so is a
    connection to a controller's listener with one in the upper half of the reserve. The system assigns the
    lowest free number, so a descriptor in the reserve shows that all lower ones are in use.
    """
    reserve = min(limit // 8, RESERVED_DESCRIPTORS)
    return DescriptorLimits(min(max_connections, max(limit // 2, 1)), limit - reserve, limit - reserve // 2)
