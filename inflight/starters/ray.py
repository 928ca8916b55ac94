"""Starts processes on the nodes of a Ray cluster. Ray chooses nodes and reserves cores and GPUs; nothing else goes
through it but the parcel, the output and the exit code: no weights, no rollouts.

Each process has an actor of Ray's (ray_node.py) beside it, on its node, whose child it is. Without `hosts.names` and
`hosts.actors` the actors are in one placement group, spread over the nodes, that stays for the whole run: a process
that is restarted has its share still, and when a node is gone, Ray reserves the share on another one as soon as there
is room. With names, actors have an affinity to their nodes. Restarts are the launcher's, none are Ray's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from inflight.config import ConfigError, RunConfig
from inflight.config.hosts import HERE
from inflight.config.network import parted
from inflight.error_line import one_line
from inflight.starters.base import Command
from inflight.starters.parcel import packed, parcel_of
from inflight.starters.ray_handle import NodeGone, RayHandle, RayLeases
from inflight.starters.ray_node import RayNodeProcess
from inflight.starters.ray_placement import described, no_room, node_of, require_reserved, share_of, shares_of

CONNECT_S = 10.0
NEVER = {"max_restarts": 0, "max_task_retries": 0}
"""What Ray does about an actor that has ended."""
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable of the entrypoint of a Ray job: a JSON object that names the job."""


class RayCalls:
    """See NodeCalls."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._asked: Any = None

    def ask(self) -> None:
        """See NodeCalls."""
        self._asked = self._actor.exchange.remote()

    def answer(self) -> tuple[bytes, int | None] | None:
        """See NodeCalls."""
        if not ray.wait([self._asked], timeout=0)[0]:
            return None
        try:
            output, code = ray.get(self._asked, timeout=CONNECT_S)
            return output, code
        except ActorUnavailableError as error:
            raise ConnectionError(one_line(error)) from None
        except RayError as error:
            raise NodeGone(one_line(error)) from None

    def stop(self) -> None:
        """See NodeCalls."""
        self._actor.stop.remote()

    def end(self) -> None:
        """See NodeCalls."""
        with contextlib.suppress(RayError, ValueError):  # it has ended
            ray.kill(self._actor, no_restart=True)


class NoCalls:
    """See NodeCalls: in place of an actor whose node is not there."""

    def __init__(self, why: str) -> None:
        self._why = why

    def ask(self) -> None:
        """See NodeCalls."""

    def answer(self) -> tuple[bytes, int | None] | None:
        """See NodeCalls."""
        raise NodeGone(self._why)

    def stop(self) -> None:
        """See NodeCalls."""

    def end(self) -> None:
        """See NodeCalls."""


class RayStarter:
    """For the processes of one run; this process is a driver of the cluster until `close`."""

    def __init__(self, config: RunConfig, trainer_gpus: Sequence[str] = ()) -> None:
        """Connects, reserves the GPUs of this host that the trainer uses, and has Ray place what has no node of its
        own. Raises ConfigError when there is no such cluster, or it has no such node or no room."""
        self._config = config
        self._numbers = itertools.count()
        _connect(config.hosts.ray)
        try:
            self._gpus = ray.cluster_resources().get("GPU", 0) > 0
            self._reservation = _reserve(trainer_gpus) if self._gpus and trainer_gpus and not _job_has_gpus() else None
            for name in [*config.hosts.names, *config.hosts.actors]:
                if name != HERE and node_of(name, ray.nodes()) is None:
                    raise ConfigError(f"{name!r} is no node of the cluster, which has {described(ray.nodes())}")
            self._shares = shares_of(config, gpus=self._gpus)
            self._group = self._placed() if config.hosts.by_ray else None
        except BaseException:
            ray.shutdown()
            raise
        self._leases = RayLeases()

    def start(self, command: Command) -> RayHandle:
        """See Starter. A process that Ray has no room for waits."""
        lease_s = self._config.hosts.lease_s
        strategy = self._strategy(command)
        if strategy is None:
            return RayHandle(command, NoCalls(f"Ray knows no living node {command.host}"), lease_s)
        share = share_of(self._config, command.kind, gpus=self._gpus)
        # The node's GPUs are those of this process alone: Ray sets CUDA_VISIBLE_DEVICES for its actor.
        own = dataclasses.replace(command, slot=0) if share.gpus else command
        actor = ray.remote(RayNodeProcess).options(
            name=f"{command.name}.{next(self._numbers)}", scheduling_strategy=strategy, **share.options(), **NEVER
        )
        made = actor.remote(packed(parcel_of(self._config, own)), self._config.hosts.python)
        return self._leases.add(RayHandle(command, RayCalls(made), lease_s))

    def close(self) -> None:
        """See Starter. Ray ends what is left of this driver's actors."""
        self._leases.close()
        with contextlib.suppress(RayError):
            if self._group is not None:
                remove_placement_group(self._group)
        ray.shutdown()

    def _strategy(self, command: Command) -> object | None:
        """None: its node is gone."""
        if self._group is not None:
            index = list(self._shares).index(command.name)
            return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        node = node_of(command.host, ray.nodes())
        return None if node is None else NodeAffinitySchedulingStrategy(node, soft=False)

    def _placed(self) -> PlacementGroup:
        within_s = self._config.hosts.ray_placement_timeout_s
        group = placement_group([share.bundle() for share in self._shares.values()], strategy="SPREAD")
        if not group.wait(within_s):
            remove_placement_group(group)
            raise no_room(self._shares, ray.cluster_resources(), within_s)
        return group


def _job_has_gpus() -> bool:
    """Whether this process is the entrypoint of a Ray job that has GPUs (`--entrypoint-num-gpus`): it sees these alone,
    and Ray has reserved them already."""
    job = json.loads(os.environ.get(JOB, "{}")).get("metadata", {}).get("job_submission_id")
    if not job:
        return False
    from ray.util.state import list_actors  # slow to import

    supervisors = list_actors(filters=[("name", "=", f"_ray_internal_job_actor_{job}")], detail=True)
    return any((each.required_resources or {}).get("GPU") for each in supervisors)


class Reservation:
    """Holds GPUs of the launcher's node, for its trainer."""

    def devices(self) -> list[str]:
        """Which ones."""
        return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]


def _reserve(trainer_gpus: Sequence[str]) -> object:
    """What holds the reservation. Raises ConfigError when Ray has given these GPUs to others."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    made = ray.remote(Reservation).options(
        name="trainer", num_cpus=0, num_gpus=len(trainer_gpus), scheduling_strategy=here, **NEVER
    )
    holder: Any = made.remote()
    try:
        require_reserved(ray.get(holder.devices.remote(), timeout=CONNECT_S * 3), trainer_gpus)
    except (GetTimeoutError, RayError) as error:
        raise ConfigError(f"Ray can't reserve {len(trainer_gpus)} GPUs of this host: {one_line(error)}") from None
    return holder


def _connect(address: str) -> None:
    """Raises ConfigError when there is no such cluster, or one of another version of Ray or Python."""
    if address != "auto":
        try:
            socket.create_connection(parted(address), CONNECT_S).close()
        except (OSError, ValueError) as error:
            why = f"nothing answers there ({one_line(error)})"
            raise ConfigError(f"hosts.ray={address!r} is not allowed: {why}") from None
    logging.getLogger("ray").setLevel(logging.ERROR)  # its lines would be in the middle of the view
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        allowed = f"a cluster of Ray {ray.__version__} with Python {sys.version.split()[0]}"
        raise ConfigError(f"hosts.ray={address!r} is not allowed: {allowed} ({one_line(error)})") from None
