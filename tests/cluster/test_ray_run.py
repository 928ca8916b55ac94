"""Whole runs on a Ray cluster of two nodes, which are real raylets of this machine."""

from __future__ import annotations

import pytest

from tests.cluster.run import hosted, living_nodes, none_left

pytestmark = pytest.mark.ray


def test_a_run_on_two_nodes_loses_one(cluster, started):
    run = started(cluster, "trainer.steps=150", "hosts.lease_s=10")
    run.until(run.both_routed, alive=True)
    nodes = run.placed()
    ids = set(living_nodes(cluster))
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


def test_a_run_by_names_of_nodes_ends_with_its_launcher(cluster, started):
    """A generator on each node by its id, the actor on the launcher's host; the launcher is killed."""
    head, other = sorted(living_nodes(cluster))
    run = started(cluster, "trainer.steps=1000", "hosts.lease_s=10", f"hosts.names=[{other},{head}]")
    run.until(run.both_routed, alive=True)
    assert run.placed() == {"g0": other, "g1": head}
    assert run.process("a0") is not None
    assert len(hosted()) >= 4, "a process of inflight.hosted and its child on each node"
    assert run.kill("launcher")
    run.wait()
    none_left()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["generator.threads=7", "hosts.ray_placement_timeout_s=2"],
            "they take 15 CPU, and no process can be split over nodes; the cluster has 8 CPU",
        ),
        (["hosts.names=[elsewhere]"], "'elsewhere' is no node of the cluster, which has "),
        (["hosts.ray='127.0.0.1:1'"], "hosts.ray='127.0.0.1:1' is not allowed: nothing answers there"),
    ],
)
def test_what_the_cluster_does_not_have_is_refused(cluster, started, options, said):
    run = started(cluster, *options)
    assert run.wait() == 2
    assert said in run.output
    assert not hosted()
