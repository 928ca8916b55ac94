"""A run whose generators and actor are in a Ray cluster of this machine (not a test file)."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from tests.faults.run import Run as OneHost
from tests.faults.run import free_port

ROOT = Path(__file__).parents[2]
STAND_IN = f"{ROOT}/tests/hosts/hosted.py"
THERE = f"{sys.executable} {STAND_IN}"
MARK = "STARTED_BY_TEST"
"""Variable of all processes of a cluster: the process that runs the test."""
ENGINES_S = 900.0
"""Against hanging, where real engines start on few cores; no measure of speed."""


class Run(OneHost):
    """Started with the stand-ins of generators or with real engines; ended by the fixture `started`."""

    def __init__(self, cluster: Any, folder: Path, *overrides: str, vllm: bool = False) -> None:
        stand_ins = [] if vllm else [f"hosts.python='{THERE}'"]
        super().__init__(
            folder,
            "network.bind=127.0.0.1",
            f"bus.port={free_port()}",
            "generator.count=2",
            "hosts.starter=ray",
            f"hosts.ray={cluster.address}",
            *stand_ins,
            *overrides,
            vllm=vllm,
        )
        self._cluster = cluster
        self.start()

    def placed(self) -> dict[str, str]:
        """Name of each living actor of Ray's, without its number → the id of its node."""
        return {each.name.split(".")[0]: each.node_id for each in self.actors("ALIVE") if each.name}

    def actors(self, state: str) -> list[Any]:
        """Ray's actors in this state."""
        from ray.util.state import list_actors

        return list_actors(self._cluster.address, filters=[("state", "=", state)])

    def both_routed(self) -> bool:
        """Whether both generators get requests, and steps are done."""
        return self.steps() >= 3 and set(self.routed()) == {"g0", "g1"}


def living_nodes(cluster: Any) -> list[str]:
    """Their ids."""
    return [node["NodeID"] for node in cluster.global_state.node_table() if node["Alive"]]


def hosted() -> list[psutil.Process]:
    """Processes that a node of this test's clusters runs for a run, and their children."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        line = " ".join(process.info["cmdline"] or [])
        is_hosted = STAND_IN in line or ("--run-dir" in line and "/inflight-" in line)
        if is_hosted and (process.info["environ"] or {}).get(MARK) == str(os.getpid()):
            found.append(process)
    return found


def none_left() -> None:
    """At the latest when the leases are over."""
    deadline = time.monotonic() + 30
    while left := hosted():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
