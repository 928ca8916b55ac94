"""Ray clusters whose nodes are real raylets of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.run import MARK, ROOT, Run
from tests.faults.run import free_port

ALWAYS = {
    "include_dashboard": True,  # it answers list_actors
    "_system_config": {"health_check_period_ms": 500, "health_check_failure_threshold": 4},
}
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture
def make_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Takes what Ray's books say of each node; the first is the head, on which the launcher is."""
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="make test-ray installs Ray")
    for name, value in (ENVIRONMENT | {MARK: str(os.getpid())}).items():
        monkeypatch.setenv(name, value)
    made = []

    def make(head: dict[str, Any], *others: dict[str, Any]) -> Any:
        port = free_port()  # another cluster of this machine may have Ray's own choices
        own = ALWAYS | {"dashboard_port": port, "dashboard_agent_listen_port": port + 1} | head
        made.append(cluster_utils.Cluster(initialize_head=True, head_node_args=own))
        for each in others:
            made[-1].add_node(**each)
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


@pytest.fixture
def cluster(make_cluster: Callable[..., Any]) -> Any:
    """Two nodes of 4 cores."""
    return make_cluster({"num_cpus": 4}, {"num_cpus": 4})


@pytest.fixture
def started(make_cluster: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs on a cluster, and ends them before it."""
    runs: list[Run] = []

    def start(cluster: Any, *overrides: str, vllm: bool = False) -> Run:
        runs.append(Run(cluster, tmp_path / f"run{len(runs)}", *overrides, vllm=vllm))
        return runs[-1]

    yield start
    for each in runs:
        each.end()
