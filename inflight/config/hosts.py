"""Options of the hosts on which the processes of a run are started."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

from inflight.config.checks import MAX_PROCESSES, require, require_fields, require_one_of
from inflight.config.network import parted

STARTERS = ("local", "ssh", "join", "ray")
ANYWHERE = "a host that joins"
HERE = "local"
CHOSEN_BY_RAY = "a node of Ray's"
DESTINATION = re.compile(r"[A-Za-z0-9_.@:%\[\]-]{1,255}")


@dataclass(frozen=True)
class HostsConfig:
    """Where generators and actors run. The launcher, the trainer and the evaluator are on one host."""

    starter: str = "local"
    """`local`: on the launcher's host. `ssh`: on `names` and `actors`, to which the launcher connects. `join`: wherever
    `inflight join` is run; `generator.count` is then the most generators that are waited for. `ray`: on nodes of a Ray
    cluster, those of `names` and `actors` or, without any, those that Ray chooses, for actors too."""
    names: list[str] = field(default_factory=list)
    """Destinations of ssh, [USER@]HOST, for generators in turn; `local` is the launcher's host. With several generators
    on one host, each gets GPUs of its own. With `ray`: nodes by id, address or host name."""
    actors: list[str] = field(default_factory=list)
    """The same for actors; empty: the launcher's host."""
    actors_join: bool = False
    """With `join`: actors run where `inflight join --kind actor` does, not on the launcher's host."""
    most_generators: int = 0
    """With `join`: as many generators may be there at once; those beyond `generator.count` are admitted as hosts offer
    themselves, and are no loss when they leave. 0: `generator.count`."""
    most_actors: int = 0
    """The same for actors, with `actors_join`. 0: `rollout.actors`."""
    python: str = ""
    """The command of Python on those hosts, split as a shell does it; empty: the path of the launcher's."""
    ssh: str = ""
    """Further arguments of ssh, such as `-p 2222`, split as a shell does it."""
    ray: str = "auto"
    """The cluster of `ray`: ADDRESS:PORT of its head, or `auto` for the one that this host is a node of."""
    ray_placement_timeout_s: float = 60.0
    """Seconds within which Ray must have room for all processes when the run begins."""
    lease_s: float = 30.0
    """Seconds without a sign of the launcher after which a process on another host ends."""

    def __post_init__(self) -> None:
        require_one_of(self, "hosts", "starter", STARTERS)
        for name, given in (("names", self.names), ("actors", self.actors)):
            for each in given:
                fits = DESTINATION.fullmatch(each) is not None and not each.startswith("-")
                require(fits, f"hosts.{name}", each, "[USER@]HOST")
        require_fields(self, "hosts", "lease_s ray_placement_timeout_s", least=1)
        require_fields(self, "hosts", "most_generators most_actors", least=0, most=MAX_PROCESSES)
        allowed = "auto, or the IP address and the port of a cluster that this host is a node of"
        require(self.ray == "auto" or _is_socket(self.ray), "hosts.ray", self.ray, allowed)
        for name, text in (("python", self.python), ("ssh", self.ssh)):
            require(_splits(text), f"hosts.{name}", text, "a command line, with its quotes closed")
        fits = self.starter != "ssh" or bool(self.names or self.actors)
        require(fits, "hosts.starter", "ssh", "together with hosts.names or hosts.actors")

    @property
    def elsewhere(self) -> bool:
        """Whether some process is not started on the launcher's host."""
        return self.starter != "local"

    @property
    def by_ray(self) -> bool:
        """Whether Ray chooses the nodes."""
        return self.starter == "ray" and not (self.names or self.actors)

    def of(self, kind: str, number: int) -> str:
        """The destination of an actor or a generator, counted from 0; empty: the launcher's host."""
        if self.starter == "join":
            return ANYWHERE if kind == "generator" or (kind == "actor" and self.actors_join) else ""
        if self.by_ray:
            return CHOSEN_BY_RAY if kind in ("generator", "actor") else ""
        given = {"generator": self.names, "actor": self.actors}.get(kind, []) if self.elsewhere else []
        place = given[number % len(given)] if given else HERE
        return "" if place == HERE else place

    def slot(self, number: int) -> int:
        """How many generators with lower numbers are on the host of this one."""
        host = self.of("generator", number)
        return sum(self.of("generator", before) == host for before in range(number))


def _is_socket(text: str) -> bool:
    try:
        parted(text)
    except ValueError:
        return False
    return True


def _splits(text: str) -> bool:
    try:
        shlex.split(text)
    except ValueError:
        return False
    return True
