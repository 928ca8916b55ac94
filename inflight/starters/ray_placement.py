"""What the processes of a run take of a Ray cluster, and which of its nodes is meant by a name. Imports no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inflight.config import ConfigError, RunConfig


@dataclass(frozen=True)
class NodeShare:
    """What Ray reserves for a process on its node."""

    cpus: int
    gpus: int

    def bundle(self) -> dict[str, float]:
        """As Ray names resources."""
        bundle: dict[str, float] = {"CPU": self.cpus}
        return bundle | ({"GPU": self.gpus} if self.gpus else {})

    def options(self) -> dict[str, float]:
        """As Ray's actors take them."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus}


def share_of(config: RunConfig, kind: str, *, gpus: bool) -> NodeShare:
    """A generator takes the cores and, if the cluster has any, the GPUs of its ranks; an actor takes one core."""
    if kind != "generator":
        return NodeShare(1, 0)
    ranks = config.generator.tensor_parallel_size
    return NodeShare(ranks * config.generator.threads, ranks if gpus else 0)


def shares_of(config: RunConfig, *, gpus: bool) -> dict[str, NodeShare]:
    """Process name → its share, of all processes that Ray places; the order is that of the bundles."""
    generators = dict.fromkeys(config.generator_names(), share_of(config, "generator", gpus=gpus))
    return generators | dict.fromkeys(config.rollout.actor_names(), share_of(config, "actor", gpus=gpus))


def no_room(shares: Mapping[str, NodeShare], cluster: Mapping[str, float], within_s: float) -> ConfigError:
    """Says what was wanted and what there is."""
    wanted = {
        resource: sum(share.bundle().get(resource, 0) for share in shares.values()) for resource in ("CPU", "GPU")
    }
    lists = [
        ", ".join(f"{amount:g} {resource}" for resource, amount in resources.items() if amount) or "nothing"
        for resources in (wanted, {name: cluster.get(name, 0) for name in wanted})
    ]
    return ConfigError(
        f"Ray has not placed {', '.join(shares)} within {within_s:g} s (hosts.ray_placement_timeout_s): they take "
        f"{lists[0]}, and no process can be split over nodes; the cluster has {lists[1]}, other jobs included"
    )


def node_of(name: str, nodes: Sequence[Mapping[str, object]]) -> str | None:
    """The id of the living node with this id, address or host name, from Ray's list of nodes; None: there is none.

    Raises ConfigError when several have it.
    """
    keys = ("NodeID", "NodeManagerAddress", "NodeManagerHostname")
    found = [str(node["NodeID"]) for node in nodes if node["Alive"] and name in [node.get(key) for key in keys]]
    if len(found) > 1:
        raise ConfigError(f"{name!r} is the name of {len(found)} nodes of Ray's, use their ids: {', '.join(found)}")
    return found[0] if found else None


def described(nodes: Sequence[Mapping[str, object]]) -> str:
    """The living nodes, for a message."""
    return ", ".join(f"{node['NodeID']} ({node['NodeManagerAddress']})" for node in nodes if node["Alive"])


def require_reserved(reserved: Sequence[str], used: Sequence[str]) -> None:
    """Raises ConfigError when Ray has reserved other GPUs of this host for the trainer than it uses: a generator could
    get those."""
    if set(reserved) != set(used):
        chosen = ",".join(reserved)
        raise ConfigError(
            f"the trainer uses GPUs {','.join(used)}, of which Ray has given some to others: it reserves {chosen}; set "
            f"CUDA_VISIBLE_DEVICES={chosen} for the launcher"
        )
