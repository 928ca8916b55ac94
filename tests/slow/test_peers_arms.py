"""The bench of ways to update a generator, with the tiny model on a CPU: every way delivers what the trainer holds."""

from __future__ import annotations

import json
import queue
import subprocess
import sys

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

pytestmark = pytest.mark.slow

ARMS = ["inflight", "abort_resume", "synchronous"]


def test_every_arm_trains_and_delivers_the_trainers_weights(tmp_path):
    command = [
        sys.executable,
        "-m",
        "bench.peers",
        "--config-name",
        "peers_cpu",
        f"out={tmp_path}",
        f"arms=[{','.join(ARMS)}]",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    arms = {arm["arm"]: arm for arm in json.loads((tmp_path / "results.json").read_text())["arms"]}
    assert list(arms) == ARMS
    for name, arm in arms.items():
        compared = [each["g0"] for each in arm["compared"]]
        assert arm["steps"] >= 2, name
        assert [each["agrees"] for each in compared] == [True, True], f"{name}: the engine holds other weights"
        assert compared[1]["version"] == compared[0]["version"] + 1, "of which its own way has delivered the second"
        assert arm["delivered_equal_share"] == 1.0, f"{name}: inflight's transfer of the same weights answers otherwise"
        # A sequence that is aborted several times before it has a further token is given up.
        assert set(arm["failed"]) <= {"run finished"} | ({"aborted"} if name == "abort_resume" else set()), name
        assert arm["to_target_s"] is not None
    assert arms["synchronous"]["lag_mean"] == 0.0
    assert arms["inflight"]["generator_paused_share"] == 0.0
    assert arms["abort_resume"]["generator_paused_share"] > 0.0
    table = (tmp_path / "table.md").read_text()
    assert all(f"| {name} | 1 |" in table for name in ARMS)


class Rollouts:
    """Finished samples in the place of TRL's rollout process."""

    def __init__(self):
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        random = np.random.default_rng(0)
        for number in range(400):
            tokens = np.concatenate([[3, 4, 5], random.integers(3, 16, 20)])
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=tokens,
                    completion_mask=np.array([0] * 3 + [1] * 20),
                    old_log_probs=np.array([0.0] * 3 + [-2.8] * 20),
                    advantage=number % 4 - 1.5,
                    model_version=1 << 20,
                    group_id=number // 4,
                    metrics={"reward": 0.5},
                )
            )

    def start(self): ...
    def stop(self): ...
    def check_health(self): ...
    def update_model_version(self, version): ...


class Transfer:
    """Counts the weights that TRL sends."""

    def __init__(self):
        self.sent = []

    def init_weight_transfer(self): ...
    def pause(self): ...
    def resume(self): ...
    def destroy(self): ...
    def send_weights(self, weights):
        self.sent.append(sum(1 for _ in weights))


def test_trls_trainer_trains_with_torchs_attention_and_its_time_is_kept(tmp_path, monkeypatch):
    from bench.peers.async_grpo import evaluate, train
    from inflight.launcher.compose import compose
    from inflight.models import prepare

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "none")  # TRL asks for it without CUDA too
    common = OmegaConf.load("bench/configs/peers_cpu.yaml").common
    run = compose("tiny", [*common, f"run_dir={tmp_path}"])
    config = OmegaConf.create({"device": "cpu", "arm_s": 2.0, "snapshot_s": 0.5})
    transfer, directory = Transfer(), prepare("tiny")
    parts = {"rollout_worker": Rollouts(), "weight_transfer": transfer}
    trainer, clock = train(config, run, directory, "http://127.0.0.1:1", tmp_path, **parts)
    history = [entry for entry in trainer.state.log_history if "perf/rollout_wait_s" in entry]
    figures = clock.figures(history)
    assert figures["steps"] == len(history) >= 1
    assert len(transfer.sent) == 1 + len(history), "the start weights, and those of each step"
    assert set(transfer.sent) == {len(list(trainer.model.named_parameters()))}
    assert figures["tokens_per_s"] == pytest.approx(160 * len(history) / clock.lasted_s), "8 samples of 20 tokens"
    assert 0 < figures["publishing_share"] < 1
    rewards = evaluate(run, directory, "cpu", clock.snapshots[-1:])
    assert [at for at, _ in rewards] == [0.0, clock.snapshots[-1][0]]
