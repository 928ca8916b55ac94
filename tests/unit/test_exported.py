"""Metrics for Prometheus: right values under documented names, on loopback or behind the key, found by their files."""

from __future__ import annotations

import dataclasses
import json
import re
import stat
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from inflight.actor.exported import registry_of
from inflight.config import RunConfig
from inflight.config.network import NetworkConfig
from inflight.evaluation import exported as evaluator
from inflight.generator.agent import Commits
from inflight.generator.api_key import OPEN_TO_HOSTS, ApiKey
from inflight.generator.exported import export
from inflight.launcher.compose import compose
from inflight.launcher.exported import LauncherMetrics
from inflight.messages import Commit
from inflight.prometheus.endpoint import MetricsEndpoint
from inflight.rollout.books import Counts
from inflight.trainer.exported import RankMetrics, TrainerMetrics
from inflight.weights.publish.events import Failure, Swap

DOCS = Path(__file__).parents[2] / "docs"
LINE = {
    "step": 3,
    "reward": 0.5,
    "reward_all": 0.25,
    "loss": 0.125,
    "entropy": 2.0,
    "kl": 0.01,
    "ess": 0.9,
    "grad_norm": 1.0,
    "learning_rate": 1e-3,
    "tokens_per_s": 50.0,
    "wait_s": 1.5,
    "train_s": 2.0,
    "tokens_trained": 100,
    "tokens_masked": 8,
    "lag_counts": {"0": 60, "3": 40},
    "tokens_masked_by_rule": {"too old": 8},
}
VALUES = {
    "in_flight": 4,
    "done": 9,
    "tokens": 120,
    "accepted.g0": 70,
    "accepted.g1": 50,
    "phase": "sampling",
    "scores": 18,
    "score_s": 4.5,
    "reward": 0.5,
    "started": 13,
    "failed": 0,
    "unacknowledged": 0,
    "aborted": 0,
    "retries": 0,
    "continued": 0,
}


@pytest.fixture(scope="module")
def composed() -> RunConfig:
    return compose("tiny", ["run_dir=night", "generator.count=2"])


@pytest.fixture
def config(composed, tmp_path) -> RunConfig:
    run = dataclasses.replace(composed, run_dir=f"{tmp_path}/night")
    (run.path / "bus").mkdir(parents=True)
    return run


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """`name{label=value}` → value."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def trainer(config: RunConfig) -> TrainerMetrics:
    counts = Counts(
        granted=20,
        in_flight=4,
        produced=16,
        buffered=2,
        trained=12,
        dropped={"too old": 2},
        failed={"reward timeout": 1},
        rollouts_dropped={},
        ignored={},
    )
    metrics = TrainerMetrics(config)
    publisher = SimpleNamespace(version=3, committed={"g0": 3, "g1": 1}, behind={"g0": 0, "g1": 2})
    metrics.follow(publisher, SimpleNamespace(counts=lambda: counts, ages=lambda version: {version - 2: 2}))
    for step in (1, 2, 3):
        metrics.step({**LINE, "step": step})
    for version, gap in ((1, 0.0002), (2, 0.0004), (3, 2.0)):
        metrics.event(Swap("g0", version, 0.5, 0.1, 0.7, 0.01, gap, 6))
    metrics.event(Failure("g1", 3, "receive", "late"))
    metrics.evaluation({"eval/reward": 0.75, "version": 2})
    return metrics


def test_the_trainer_counts_what_it_reports(config):
    found, own = samples(trainer(config).registry), "inflight_trainer_"
    expected = {
        "step": 3,
        "steps_total": 3,
        "version": 3,
        "reward": 0.5,
        "reward_judged": 0.25,
        "loss": 0.125,
        "held_out_reward": 0.75,
        "held_out_version": 2,
        "step_seconds_total{phase=wait}": 4.5,
        "tokens_total{use=trained}": 300,
        "tokens_masked_total{rule=too old}": 24,
        "token_lag_versions_bucket{le=0.0}": 180,
        "token_lag_versions_bucket{le=2.0}": 180,
        "token_lag_versions_bucket{le=4.0}": 300,
        "token_lag_versions_count": 300,
        "token_lag_versions_sum": 360,
        "swap_gap_seconds_bucket{generator=g0,le=0.0001}": 0,
        "swap_gap_seconds_bucket{generator=g0,le=0.0003}": 1,
        "swap_gap_seconds_bucket{generator=g0,le=0.001}": 2,
        "swap_gap_seconds_bucket{generator=g0,le=+Inf}": 3,
        "swap_gap_seconds_count{generator=g0}": 3,
        "swap_gap_seconds_sum{generator=g0}": 2.0006,
        "publish_seconds_count{phase=transfer}": 3,
        "publish_seconds_sum{phase=ready}": 2.1,
        "swaps_total{generator=g0}": 3,
        "versions_missed_total{outcome=failure}": 1,
        "generator_version{generator=g1}": 1,
        "generator_behind_versions{generator=g1}": 2,
        "buffer_groups": 2,
        "buffer_groups_by_age{age=1}": 2,
        "buffer_capacity_groups": config.capacity,
        "groups_in_flight": 4,
        "groups_granted_total": 20,
        "groups_trained_total": 12,
        "groups_dropped_total{reason=too old}": 2,
        "groups_failed_total{reason=reward timeout}": 1,
    }
    assert {name: found.get(own + name) for name in expected} == pytest.approx(expected)


def generator() -> CollectorRegistry:
    commits, registry = Commits(None, ""), CollectorRegistry()
    export(commits, "rebind", registry)
    assert "inflight_generator_version" not in samples(registry), "no version is live yet"
    for version, gap in ((1, 0.0002), (2, 0.02)):
        commits.add(Commit(version=version, publisher="0" * 16), gap)
    return registry


def test_a_generator_counts_its_swaps():
    found = samples(generator())
    assert found["inflight_generator_version"] == 2
    assert found["inflight_generator_swaps_total"] == 2
    assert found["inflight_generator_swap_gap_seconds_bucket{le=0.0003,way=rebind}"] == 1
    assert found["inflight_generator_swap_gap_seconds_count{way=rebind}"] == 2


def test_actor_and_launcher_tell_their_values():
    found = samples(registry_of(lambda: VALUES))
    assert found["inflight_actor_groups_in_flight"] == 4
    assert found["inflight_actor_tokens_accepted_total{generator=g1}"] == 50
    assert found["inflight_actor_score_seconds_total"] == 4.5
    launcher = LauncherMetrics(["trainer", "g0"])
    launcher.running = ["trainer"]
    launcher.failures["g0"] += 1
    found = samples(launcher.registry)
    running, failures = "inflight_launcher_process_running", "inflight_launcher_process_failures_total"
    assert (found[f"{running}{{name=trainer}}"], found[f"{running}{{name=g0}}"]) == (1, 0)
    assert (found[f"{failures}{{name=trainer}}"], found[f"{failures}{{name=g0}}"]) == (0, 1)


EVALUATED = {"evaluations": 3, "late": 1, "answers": 5, "wanted": 12}


def rank() -> CollectorRegistry:
    metrics = RankMetrics()
    for order, seconds in (("learn", 0.5), ("learn", 0.25), ("gather", 2.0)):
        metrics.obeyed(order, seconds)
    return metrics.registry


def test_evaluator_and_further_ranks_tell_their_work():
    found = samples(evaluator.registry_of(lambda: EVALUATED))
    own = "inflight_evaluator_"
    assert {name.removeprefix(own): value for name, value in found.items()} == {
        "evaluations_total": 3,
        "evaluations_late_total": 1,
        "answers": 5,
        "answers_wanted": 12,
    }
    found, own = samples(rank()), "inflight_trainer_rank_order"
    assert (found[f"{own}s_total{{order=learn}}"], found[f"{own}_seconds_total{{order=learn}}"]) == (2, 0.75)
    assert (found[f"{own}s_total{{order=gather}}"], found[f"{own}_seconds_total{{order=gather}}"]) == (1, 2)


def test_the_page_names_every_metric_and_the_dashboard_no_other(config):
    """Names follow Prometheus's conventions, and are the ones of docs/metrics.md and docs/grafana.json."""
    both = [trainer(config).registry, LauncherMetrics(["g0"]).registry, rank()]
    both.append(evaluator.registry_of(lambda: EVALUATED))
    exported = {
        family.name + ("_total" if family.type == "counter" else "")
        for registry in (*both, generator(), registry_of(lambda: VALUES))
        for family in registry.collect()
    }
    page = (DOCS / "metrics.md").read_text()
    section = page[page.index("## Prometheus") : page.index("## Trackers")]
    for name in exported:
        assert re.fullmatch(r"inflight_(trainer|generator|actor|evaluator|launcher)_[a-z_]+", name)
        suffix = re.sub(r"^inflight_[a-z]+?(?=_)", "", name)
        assert name in section or f"`{suffix}`" in section or f"`{suffix}{{" in section, f"{name} is not documented"
    queries = re.findall(r"(?:inflight|vllm)[a-z_:]+", json.dumps(_queries()))
    series = {re.sub(r"_(bucket|sum|count)$", "", name) for name in queries}
    assert {name for name in series if not name.startswith("vllm:")} <= exported


def _queries() -> list[str]:
    board = json.loads((DOCS / "grafana.json").read_text())
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def get(port: int, key: str = "") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20) as reply:
        return reply.read().decode()


def test_an_endpoint_is_on_loopback_and_announced_while_it_lives(config):
    target = config.path / "bus" / "targets" / "trainer.json"
    with MetricsEndpoint(config, "trainer", trainer(config).registry) as endpoint:
        assert "inflight_trainer_step 3.0" in get(endpoint.port)
        announced = json.loads(target.read_text())
        assert stat.S_IMODE(target.parent.stat().st_mode) == 0o700
    assert announced == [
        {
            "targets": [f"127.0.0.1:{announced[0]['targets'][0].split(':')[1]}"],
            "labels": {"process": "trainer", "run": "night"},
        }
    ]
    assert not target.exists()


def test_other_hosts_need_the_key(config, caplog):
    """On an address that other hosts reach there is no answer without the run's key, and no endpoint without one."""
    reachable = dataclasses.replace(config, network=NetworkConfig(bind="127.0.0.1"))
    with MetricsEndpoint(reachable, "trainer", trainer(config).registry) as endpoint:
        assert endpoint.port == 0
    assert "no metrics are served: network.bind=127.0.0.1, and the run has no key" in caplog.text
    key = "k" * 43
    reachable.api_key_file.write_text(key + "\n")
    with MetricsEndpoint(reachable, "trainer", trainer(config).registry) as endpoint:
        for wrong in ("", "k" * 42, key + "k"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                get(endpoint.port, wrong)
            assert refused.value.code == 401
        assert "inflight_trainer_step 3.0" in get(endpoint.port, key)
    assert not ApiKey(None, key, OPEN_TO_HOSTS)._open.count("/metrics")


def test_metrics_can_be_switched_off_and_cost_no_run(config, caplog):
    off = dataclasses.replace(config, launch=dataclasses.replace(config.launch, metrics=False))
    with MetricsEndpoint(off, "trainer", trainer(config).registry) as endpoint:
        assert endpoint.port == 0
    (config.path / "bus" / "targets").write_text("in the way")
    with MetricsEndpoint(config, "trainer", trainer(config).registry) as endpoint:
        assert endpoint.port == 0
    assert "no metrics are served" in caplog.text
