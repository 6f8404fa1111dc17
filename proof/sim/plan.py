"""The plan of a run, drawn from its seed: cluster size, settings, kinds and rates of faults.

Swarm testing: each run has only some kinds of faults, each with its own rate, so that rare combinations occur
together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kafkalite.broker.replication.near_reads import RACK_AWARE_SELECTOR
from kafkalite.rng import Rng, seeded_rng
from proof.sim.atlas import RARE
from proof.sim.nodes import rack_of
from proof.sim.workload import Load

#: {name of a method of Nemesis: (weight, whether a single broker can have the fault)}
FAULTS: Final[dict[str, tuple[int, bool]]] = {
    "kill": (4, True),
    "kill_all": (1, False),
    "power_loss": (3, True),
    "power_loss_all": (2, False),
    "pause": (3, True),
    "restart": (2, True),
    "cut_one_way": (3, False),
    "cut_pair": (2, False),
    "isolate": (3, False),
    "isolate_from_clients": (1, True),
    "reset": (3, True),
    "slow_links": (1, True),
    "slow_disk": (2, True),
    "replace_disk": (1, False),
    "full_disk": (1, True),
    "broken_disk": (1, True),
    "clock_jump": (1, True),
    "crash_client": (2, True),
    "pause_client": (2, True),
}

#: The probability that a run has one of the kinds in ``RARE``: two runs of ten have some.
RARE_PROBABILITY: Final = 0.03
#: Added to the seed for the draw of the fourth broker. The kept seeds have none with it.
SPARE_SALT: Final = 1 << 44

_CALM: Final = {"replace_disk", "full_disk", "broken_disk", "power_loss_all", "kill_all"}


@dataclass
class Plan:
    """The plan of one run, without the random choices during the run."""

    seed: int
    brokers: int = 3
    spares: int = 0  #: further brokers, which are no voters, and to which the administrator moves replicas
    controllers: int = 0  #: separate nodes; 0: the brokers are the controllers
    partitions: int = 2
    disks: int = 1  #: data directories of each broker
    replication_factor: int = 3
    min_insync_replicas: int = 2
    durability: str = "fsync"
    faults: dict[str, int] = field(default_factory=dict)  #: {name: weight}
    power_losses: int = 1_000  #: the maximum number of power losses
    disk_losses: int = 0  #: the maximum number of replaced disks
    mean_gap_s: float = 1.5  #: mean time between the starts of two faults
    mean_fault_s: float = 2.0
    fault_phase_s: float = 15.0
    broker_settings: dict[str, Any] = field(default_factory=dict)
    topic_configs: dict[str, str] = field(default_factory=dict)
    admin_pause_s: float = 0.0  #: mean time between two actions of an administrator; 0 means no administrator
    load: Load = field(default_factory=Load)
    compacts: bool = False  #: whether internal topics have small segments and are compacted often
    delay_s: float = 0.0003
    jitter_s: float = 0.0003
    spike_rate: float = 0.0
    split_rate: float = 0.0

    def kinds(self) -> list[str]:
        """Return the kinds of faults, clusters and programs in this plan, by the names of ``factors``."""
        others = {
            "page-cache": self.durability == "page-cache",
            "controllers": bool(self.controllers),
            "spare": bool(self.spares),
            "administrator": self.admin_pause_s > 0,
            "coordination": bool(self.load.group_readers + self.load.committed_readers),
            "compacts": self.compacts,
            "near": bool(self.load.racks),
            "disks": self.disks > 1,
        }
        return [*self.faults, *(name for name, is_there in others.items() if is_there)]

    def summary(self) -> str:
        faults = ",".join(self.faults) or "none"
        return (
            f"brokers={self.brokers + self.spares}{f'+{self.controllers}' if self.controllers else ''}"
            f" partitions={self.partitions} rf={self.replication_factor}"
            f" min={self.min_insync_replicas} {self.durability}"
            f"{' disks' if self.disks > 1 else ''}{' compacts' if self.compacts else ''}"
            f"{' near' if self.load.racks else ''} faults={faults}"
        )


_Chance = Callable[[str, float], bool]


def draw(
    seed: int, rng: Rng, *, brokers: int = 3, scale: float = 1.0, factors: Mapping[str, float] | None = None
) -> Plan:
    """Draw the plan of ``seed``. ``scale`` multiplies the duration of the faults, and ``factors`` the
    probabilities of kinds of faults and programs, by the names that ``Plan.kinds`` returns.
    """
    boosts = factors or {}

    def chance(kind: str, probability: float) -> bool:
        return rng.random() < min(probability * boosts.get(kind, 1.0), 0.95)

    plan = Plan(seed, brokers=brokers)
    plan.partitions = 1 + rng.randrange(3)
    plan.fault_phase_s = (8.0 + 10.0 * rng.random()) * scale
    plan.mean_gap_s = 0.4 + 2.5 * rng.random()
    plan.mean_fault_s = 0.3 + 4.0 * rng.random()
    if brokers == 1:
        plan.replication_factor = plan.min_insync_replicas = 1
    else:
        plan.replication_factor = 3
        plan.min_insync_replicas = 1 if rng.random() < 0.1 else 2
    page_cache = brokers > 1 and chance("page-cache", 0.35)
    plan.durability = "page-cache" if page_cache else "fsync"
    for name, (weight, alone) in FAULTS.items():
        if (brokers > 1 or alone) and chance(name, 0.15 if name in _CALM else 0.45):
            plan.faults[name] = weight * (1 + rng.randrange(4))
    apart = seeded_rng(seed)  # so that the other draws do not depend on these
    rare = [name for name in RARE if apart.random() < min(RARE_PROBABILITY * boosts.get(name, 1.0), 0.95)]
    damages = rare if brokers > 1 else []
    plan.faults |= dict.fromkeys(damages, 3)
    if brokers > 1 and apart.random() < min(0.5 * boosts.get("near", 1.0), 0.95):
        plan.broker_settings["replica_selector_class"] = RACK_AWARE_SELECTOR
        plan.load.racks = tuple(map(rack_of, range(1, brokers + 1)))
    if not rare and apart.random() < min(0.2 * boosts.get("disks", 1.0), 0.95):
        plan.disks = 2
        plan.faults["move_log"] = 6
        if brokers > 1 and not page_cache:
            plan.faults["replace_second_disk"] = 2
    own = seeded_rng(SPARE_SALT + seed)  # so that the draws above do not depend on it
    has_spare = brokers > 1 and plan.disks == 1 and own.random() < min(0.45 * boosts.get("spare", 1.0), 0.95)
    if page_cache:
        # Acknowledged records are in the memory of min.insync.replicas brokers, so fewer brokers may lose
        # power.
        plan.faults.pop("power_loss_all", None)
        plan.power_losses = plan.min_insync_replicas - 1
    plan.disk_losses = plan.min_insync_replicas - 1
    if page_cache and "replace_disk" in plan.faults:
        plan.faults.pop("power_loss", None)  # only one of the two kinds, since they add up
    if damages:  # the atlas: no other fault takes a sound copy
        plan.min_insync_replicas = 2
        plan.disk_losses = 0
        plan.faults.pop("replace_disk", None)
        plan.power_losses = 0 if page_cache else plan.power_losses
    if brokers > 1 and chance("controllers", 0.25):
        plan.controllers = 3
    if chance("administrator", 0.5):
        plan.admin_pause_s = 0.5 + 3.0 * rng.random()
        plan.spares = int(has_spare)
    _draw_settings(plan, rng)
    _draw_load(plan, rng)
    plan.load.changes_min_isr = plan.load.changes_min_isr and not damages
    if brokers > 1 and (plan.min_insync_replicas == 1 or plan.load.changes_min_isr):
        plan.faults.pop("broken_disk", None)  # if only one replica is in sync, an operator must choose
    if chance("coordination", 0.6):
        _draw_coordination(plan, rng, chance)
    plan.jitter_s = 0.0002 + (0.02 * rng.random() if rng.random() < 0.3 else 0.002 * rng.random())
    plan.spike_rate = 0.02 * rng.random() if rng.random() < 0.3 else 0.0
    plan.split_rate = 0.2 * rng.random() if rng.random() < 0.3 else 0.0
    return plan


def _draw_settings(plan: Plan, rng: Rng) -> None:
    """Draw small limits, which are reached in seconds rather than in days."""
    settings = plan.broker_settings
    plan.topic_configs = {
        "min.insync.replicas": str(plan.min_insync_replicas),
        "durability": plan.durability,
        "segment.bytes": str(1 << (12 + rng.randrange(8))),
        "retention.ms": "-1",
        "index.interval.bytes": str((0, 512, 4096)[rng.randrange(3)]),
    }
    settings["log_flush_offset_checkpoint_interval_ms"] = (500, 2_000, 60_000)[rng.randrange(3)]
    settings["log_initial_task_delay_ms"] = 1_000
    if rng.random() < 0.6:
        settings["metadata_log_max_record_bytes_between_snapshots"] = 1_024 << rng.randrange(4)
    settings["log_retention_check_interval_ms"] = 2_000
    if plan.brokers > 1:
        settings["broker_heartbeat_interval_ms"] = (100, 300, 500)[rng.randrange(3)]
        settings["controller_quorum_election_timeout_ms"] = (200, 500)[rng.randrange(2)]
        settings["broker_session_timeout_ms"] = 1_500 + rng.randrange(2_000)
        settings["replica_lag_time_max_ms"] = 700 + rng.randrange(3_000)
        settings["replica_high_watermark_checkpoint_interval_ms"] = (200, 1_000, 5_000)[rng.randrange(3)]
        if rng.random() < 0.25:
            settings["replica_fetch_max_bytes"] = 1_024
            settings["replica_fetch_response_max_bytes"] = 4_096


def _draw_load(plan: Plan, rng: Rng) -> None:
    load = plan.load
    load.producers = 1 + rng.randrange(2)
    load.consumers = 1 + rng.randrange(2)
    load.pause_s = 0.03 + 0.15 * rng.random()
    load.burst = 1 + rng.randrange(5)
    load.value_bytes = 24 + rng.randrange(100)
    if plan.admin_pause_s and rng.random() < 0.3:
        load.deletes_records = True
    if plan.admin_pause_s and rng.random() < 0.4 and plan.durability == "fsync" and plan.brokers > 1:
        load.changes_min_isr = True  # with one replica in sync, no disk may be lost
        plan.faults.pop("replace_disk", None)
    load.producer_settings = {"linger_ms": (0, 5, 20)[rng.randrange(3)]}
    if rng.random() < 0.15:
        load.producer_settings["acks"] = "1"
    if rng.random() < 0.3:
        load.producer_settings["batch_max_messages"] = 1 + rng.randrange(4)
    if rng.random() < 0.2:
        load.producer_settings["compression_type"] = "gzip"
    if rng.random() < 0.3:
        load.consumer_settings["max_partition_fetch_bytes"] = 64


def _draw_coordination(plan: Plan, rng: Rng, chance: _Chance) -> None:
    """Draw programs that use groups and transactions, and short timeouts of coordinators."""
    load, settings = plan.load, plan.broker_settings
    load.group_readers = rng.randrange(4)
    load.transformers = rng.randrange(3)
    load.transactors = rng.randrange(3)
    load.batch_teams = rng.randrange(2)
    load.watchers = rng.randrange(3) if plan.admin_pause_s else 0
    load.committed_readers = int(bool(load.transformers + load.transactors + load.batch_teams))
    settings["offsets_topic_num_partitions"] = settings["transaction_state_log_num_partitions"] = (
        1 + rng.randrange(2)
    )
    settings["group_consumer_session_timeout_ms"] = 1_000 + rng.randrange(2_000)
    settings["group_consumer_heartbeat_interval_ms"] = (100, 300)[rng.randrange(2)]
    if chance("compacts", 0.5):
        plan.compacts = True
        settings["offsets_topic_segment_bytes"] = 1_024 << rng.randrange(4)
        settings["transaction_state_log_segment_bytes"] = 1_024 << rng.randrange(4)
        settings["log_cleaner_backoff_ms"] = (500, 2_000)[rng.randrange(2)]
        settings["log_cleaner_min_cleanable_ratio"] = (0.1, 0.5)[rng.randrange(2)]
        settings["log_cleaner_delete_retention_ms"] = (5_000, 86_400_000)[rng.randrange(2)]
