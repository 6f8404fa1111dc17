"""The state of a coordinator that its records determine, for comparing two replays (R36)."""

from __future__ import annotations

from typing import Any

from kafkalite.groups.machine import GroupMachine
from kafkalite.transactions.machine import TransactionMachine


def durable_state(machine: GroupMachine | TransactionMachine | Any) -> Any:
    """Return the state that another coordinator must reach from the same records."""
    if isinstance(machine, TransactionMachine):
        table = machine._table
        groups = {name: (group.result, group.writers) for name, group in table.groups.items()}
        return table.transactions, groups
    pending = {
        producer_id: {key: packed for key, (_, packed) in offsets.items()}
        for producer_id, offsets in machine._pending._by_producer.items()
    }
    return {
        group_id: (
            group.state,
            group.members,
            group.owners,
            group.instances,
            group._events,
            {at: group.offsets._packed[at[0]][at[1]] for at in group.offsets},
        )
        for group_id, group in machine.groups.items()
    }, pending
