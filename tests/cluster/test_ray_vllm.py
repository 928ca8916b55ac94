"""Real vLLM engines on the nodes of a Ray cluster of this machine, and the audit of their tags."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Reader
from tests.cluster.run import ENGINES_S, ROOT, Run, living_nodes, none_left

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.vllm]

SLOW_MACHINE = ("publish.join_timeout_s=600", "generator.start_timeout_s=600", "bus.dead_after_s=30")


def test_real_engines_on_two_nodes_and_the_audit_of_their_tags(cluster, started) -> None:
    run: Run = started(cluster, "trainer.steps=6", *SLOW_MACHINE, vllm=True)
    run.until(lambda: run.steps() >= 2, alive=True, bound_s=ENGINES_S)
    placed = run.placed()
    assert placed["g0"] != placed["g1"]
    assert set(placed.values()) == set(living_nodes(cluster))
    assert run.wait(ENGINES_S) == 0, run.logs()
    assert run.steps() == 6
    run.account()
    groups = Reader(run.folder / ROLLOUTS_FILE)
    samplers = Counter(rollout.generator for group in groups for rollout in group.rollouts)
    assert set(samplers) == {"g0", "g1"}
    none_left()
    command = [sys.executable, "-m", "inflight.cli", "audit", str(run.folder)]
    audit = subprocess.run(command, capture_output=True, text=True, timeout=ENGINES_S, check=False)
    assert audit.returncode == 0, audit.stdout + audit.stderr


def test_commits_keep_their_place_among_steps_in_vllms_own_ray_executor(make_cluster, tmp_path, monkeypatch) -> None:
    """Not supported (docs/scale.md), but not for the order in which ranks execute."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/tests/cpu")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    cluster = make_cluster({"num_cpus": 2, "resources": {"rank": 1}}, {"num_cpus": 2, "resources": {"rank": 1}})
    program = f"from tests.cluster.ray_engine import main; main({cluster.address!r}, {str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=ENGINES_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
