"""Nodes that are full, come back, or have GPUs, in runs on a Ray cluster of this machine."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from inflight.metrics import METRICS_FILE, read_lines
from tests.cluster.run import THERE, Run, hosted, living_nodes, none_left
from tests.faults.run import ALWAYS, BOUND_S, LAUNCHER, free_port

pytestmark = pytest.mark.ray

ENDLESS = ("trainer.steps=100000", "hosts.lease_s=10")
ADDRESS = "127.0.0.2"


@pytest.mark.parametrize(
    ("head", "other", "options"),
    [
        # There is no room for a generator beside the other one: it waits for a node.
        ({"num_cpus": 3}, {"num_cpus": 2}, ["generator.threads=2"]),
        ({"num_cpus": 2}, {"num_cpus": 2, "node_ip_address": ADDRESS}, [f"hosts.names=[local,{ADDRESS}]"]),
    ],
    ids=["placed", "named"],
)
def test_a_node_that_is_back_gets_its_process_again(make_cluster, started, head, other, options) -> None:
    cluster = make_cluster(head, other)
    run: Run = started(cluster, *ENDLESS, *options)
    run.until(run.both_routed, alive=True)
    gone = next(iter(cluster.worker_nodes))
    (lost,) = [name for name, node in run.placed().items() if node == gone.node_id]
    assert lost in ("g0", "g1")
    cluster.remove_node(gone, allow_graceful=False)
    run.until(lambda: lost not in run.routed() and lost not in run.placed(), alive=True)
    before = run.steps()
    run.until(lambda: run.steps() >= before + 3, alive=True)
    back = cluster.add_node(**other)
    assert back.node_id != gone.node_id, "Ray takes it for a new node"
    run.until(lambda: lost in run.routed(), alive=True)
    assert run.placed()[lost] == back.node_id
    before = run.steps()
    run.until(lambda: run.steps() >= before + 3, alive=True)
    run.end()
    none_left()


@pytest.fixture
def occupied(make_cluster) -> Iterator[tuple[Any, Callable[[], None]]]:
    """A cluster of two nodes that another job has reserved, and what frees them."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    cluster = make_cluster({"num_cpus": 2}, {"num_cpus": 2})
    ray.init(cluster.address, log_to_driver=False)
    group = placement_group([{"CPU": 2}, {"CPU": 2}])
    assert group.wait(60)
    yield cluster, lambda: remove_placement_group(group)
    ray.shutdown()


def test_room_in_a_full_cluster_is_waited_for_before_the_start(occupied, started) -> None:
    from ray.util.placement_group import placement_group_table

    cluster, free = occupied
    run: Run = started(cluster, "trainer.steps=3")
    run.until(lambda: any(group["state"] == "PENDING" for group in placement_group_table().values()), alive=True)
    assert not run.placed()
    free()
    assert run.wait() == 0, run.logs()
    assert run.steps() == 3


def test_a_process_waits_for_room_on_the_full_node_of_its_name(occupied, started) -> None:
    cluster, free = occupied
    run: Run = started(cluster, "trainer.steps=3", f"hosts.names=[{','.join(living_nodes(cluster))}]")
    run.until(lambda: len(run.actors("PENDING_CREATION")) == 2, alive=True)
    free()
    assert run.wait() == 0, run.logs()
    assert run.steps() == 3


def gpus_of(generator: str) -> set[str]:
    """CUDA_VISIBLE_DEVICES of its processes."""
    own = [each for each in hosted() if each.cmdline()[-2:] == ["--name", generator]]
    return {each.environ()["CUDA_VISIBLE_DEVICES"] for each in own}


GPUS = ({"num_cpus": 4, "num_gpus": 2}, {"num_cpus": 4, "num_gpus": 1})
"""In Ray's books: no process here computes on them."""


def test_the_trainers_gpu_is_reserved_and_no_generator_gets_it(make_cluster, started, monkeypatch) -> None:
    cluster = make_cluster(*GPUS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    run: Run = started(cluster, *ENDLESS)
    run.until(run.both_routed, alive=True)
    placed = run.placed()
    head = cluster.head_node.node_id
    assert placed["trainer"] == head
    assert placed["g0"] != placed["g1"], "each node has one GPU left"
    (beside,) = [name for name in ("g0", "g1") if placed[name] == head]
    assert gpus_of(beside) == {"1"}
    assert run.process("trainer").environ()["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_trainers_gpu_that_ray_would_give_to_others_is_refused(make_cluster, started, monkeypatch) -> None:
    cluster = make_cluster(*GPUS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    run: Run = started(cluster)
    assert run.wait() == 2
    assert "it reserves 0; set CUDA_VISIBLE_DEVICES=0 for the launcher" in run.output


def takes_jobs(jobs: Any) -> bool:
    """Some seconds after its nodes are there, a cluster does."""
    with contextlib.suppress(RuntimeError):
        return bool(jobs.submit_job(entrypoint="true"))
    return False


def test_a_job_that_has_the_trainers_gpu_places_launcher_and_trainer(make_cluster, tmp_path) -> None:
    """The head has no GPU, so Ray runs the launcher on the other node."""
    from ray.job_submission import JobStatus, JobSubmissionClient

    cluster = make_cluster({"num_cpus": 4, "num_gpus": 0}, {"num_cpus": 4, "num_gpus": 2})
    jobs = JobSubmissionClient(f"http://{cluster.webui_url}")
    options = (
        f"run_dir={tmp_path}/run",
        *ALWAYS,
        "trainer.steps=4",
        "network.bind=127.0.0.1",
        f"bus.port={free_port()}",
        "hosts.starter=ray",
        f"hosts.ray={cluster.address}",
        f"hosts.python='{THERE}'",
    )
    deadline = time.monotonic() + BOUND_S
    while not takes_jobs(jobs):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    job = jobs.submit_job(entrypoint=shlex.join([sys.executable, str(LAUNCHER), *options]), entrypoint_num_gpus=1)
    try:
        while not (status := jobs.get_job_status(job)).is_terminal():
            assert time.monotonic() < deadline, jobs.get_job_logs(job)
            time.sleep(0.2)
        assert status == JobStatus.SUCCEEDED, jobs.get_job_logs(job)
        assert jobs.get_job_info(job).driver_node_id == next(iter(cluster.worker_nodes)).node_id
    finally:
        jobs.stop_job(job)
    assert len(read_lines(tmp_path / "run" / METRICS_FILE)) == 4
    none_left()
