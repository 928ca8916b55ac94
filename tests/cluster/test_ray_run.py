"""Whole runs on a Ray cluster of two nodes, which are real raylets of this machine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.run import ALWAYS, LAUNCHER, free_port
from tests.faults.run import Run as OneHost

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
THERE = f"{sys.executable} {ROOT}/tests/hosts/hosted.py"
HEAD = {
    "num_cpus": 4,
    "include_dashboard": True,  # it answers list_actors
    "_system_config": {"health_check_period_ms": 500, "health_check_failure_threshold": 4},
}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Two nodes of 4 cores in Ray's books; the launcher is on the head."""
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="make test-ray installs Ray")
    for name, value in {
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    made = cluster_utils.Cluster(initialize_head=True, head_node_args=HEAD)
    try:
        made.add_node(num_cpus=4)
        yield made
    finally:
        made.shutdown()


class Run(OneHost):
    """A run whose generators and actor are in the cluster."""

    def __init__(self, cluster: object, folder: Path, *overrides: str) -> None:
        super().__init__(folder)
        self._cluster = cluster
        self._launcher = subprocess.Popen(
            [
                sys.executable,
                str(LAUNCHER),
                *ALWAYS,
                f"run_dir={folder}",
                "network.bind=127.0.0.1",
                f"bus.port={free_port()}",
                "generator.count=2",
                "hosts.starter=ray",
                f"hosts.ray={cluster.address}",
                f"hosts.python='{THERE}'",
                *overrides,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def placed(self) -> dict[str, str]:
        """Name of each living actor of Ray's, without its number → the id of its node."""
        from ray.util.state import list_actors

        actors = list_actors(self._cluster.address, filters=[("state", "=", "ALIVE")])
        return {each.name.split(".")[0]: each.node_id for each in actors if each.name}


def hosted() -> list[psutil.Process]:
    """Processes that a node of the cluster runs for a run, and their children."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(ROOT / "tests" / "hosts" / "hosted.py") in line or ("--run-dir" in line and "/inflight-" in line):
            found.append(process)
    return found


def none_left() -> None:
    deadline = time.monotonic() + 30
    while left := hosted():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_a_run_on_two_nodes_loses_one(cluster, tmp_path):
    run = Run(cluster, tmp_path / "run", "trainer.steps=150", "launch.restart_delay_s=0.2", "hosts.lease_s=10")
    try:
        run.until(lambda: run.steps() >= 3 and set(run.routed()) == {"g0", "g1"}, alive=True)
        nodes = run.placed()
        ids = {node["NodeID"] for node in cluster_nodes(cluster)}
        assert set(nodes) == {"g0", "g1", "a0"}
        assert nodes["g0"] != nodes["g1"]
        assert set(nodes.values()) == ids
        gone = next(iter(cluster.worker_nodes))
        lost = {name for name, node in nodes.items() if node == gone.node_id}
        before = run.steps()
        cluster.remove_node(gone, allow_graceful=False)
        run.until(lambda: run.steps() >= before + 5, alive=True)
        head = next(node for node in ids if node != gone.node_id)
        run.until(lambda: run.placed() == dict.fromkeys(["g0", "g1", "a0"], head), alive=True)
        assert run.wait() == 0, run.logs()
        assert run.steps() == 150
        run.account()
        assert {name for name in ("g0", "g1", "a0") if f"{name} is restarted" in run.output} == lost
        none_left()
    finally:
        run.end()


def cluster_nodes(cluster):
    return [node for node in cluster.global_state.node_table() if node["Alive"]]


def test_a_run_by_names_of_nodes_ends_with_its_launcher(cluster, tmp_path):
    """A generator on each node by its id, the actor on the launcher's host; the launcher is killed."""
    head, other = sorted(node["NodeID"] for node in cluster_nodes(cluster))
    names = f"hosts.names=[{other},{head}]"
    run = Run(cluster, tmp_path / "run", "trainer.steps=1000", "hosts.lease_s=10", names)
    try:
        run.until(lambda: run.steps() >= 3 and set(run.routed()) == {"g0", "g1"}, alive=True)
        assert run.placed() == {"g0": other, "g1": head}
        assert run.process("a0") is not None
        assert len(hosted()) >= 4, "a process of inflight.hosted and its child on each node"
        assert run.kill("launcher")
        run.wait()
        none_left()
    finally:
        run.end()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["generator.threads=7"], "they take 15 CPU, and no process can be split over nodes; the cluster has 8 CPU"),
        (["hosts.names=[elsewhere]"], "'elsewhere' is no node of the cluster, which has "),
        (["hosts.ray='127.0.0.1:1'"], "hosts.ray='127.0.0.1:1' is not allowed: nothing answers there"),
    ],
)
def test_what_the_cluster_does_not_have_is_refused(cluster, tmp_path, options, said):
    if options[0].startswith("generator"):
        options = [*options, "hosts.ray_placement_timeout_s=2"]
    run = Run(cluster, tmp_path / "run", *options)
    try:
        assert run.wait() == 2
        assert said in run.output
        assert not hosted()
    finally:
        run.end()
