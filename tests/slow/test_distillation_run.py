"""A whole run with a teacher: launcher, actor that asks it, real vLLM, trainer. The student comes to speak like it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from inflight.models import prepare
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Reader
from inflight.types import Rollout

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

STEPS = 20
NEARER = 0.75
"""The largest share of the divergence that may be left; about a half is, and without a teacher's word all of it."""
TIMEOUT_S = 600
COMMON = (
    f"trainer.steps={STEPS}",
    "task.name=distillation",
    "task.options={teacher: tiny-untied, task: addition}",
    "gate.max_lag=0",
    "audit.keep_versions=false",
)
ROUTES = {
    "reward": ("trainer.advantage.name=distillation",),
    # k2, since its gradient is that of the divergence itself on the student's own tokens
    "loss": ("trainer.objective={kl: 1.0, kl_estimator: k2, kl_reference: teacher}",),
}


@pytest.mark.parametrize("route", ROUTES)
def test_the_student_comes_closer_to_its_teacher(tmp_path, route):
    """By the tokens that the engine has drawn and the teacher has scored, and by whole distributions."""
    run_dir = tmp_path / "run"
    launch(run_dir, *COMMON, *ROUTES[route])
    rollouts = [rollout for group in Reader(run_dir / ROLLOUTS_FILE) for rollout in group.rollouts]
    teacher = load(prepare("tiny-untied"))
    one = rollouts[0]
    assert one.teacher_logprobs == pytest.approx(drawn(teacher, one).tolist(), abs=1e-4)

    tenth = len(rollouts) // 10
    assert estimate(rollouts[-tenth:]) < NEARER * estimate(rollouts[:tenth])
    student = load(run_dir / "checkpoints" / f"step-{STEPS:06d}")
    before = divergence(load(prepare("tiny")), teacher, rollouts[:tenth])
    assert divergence(student, teacher, rollouts[:tenth]) < NEARER * before


def launch(run_dir: Path, *overrides: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    command = [sys.executable, "-m", "inflight.launcher", "--config-name", "tiny", f"run_dir={run_dir}", *overrides]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**environment, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def load(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.no_grad()
def distributions(model: PreTrainedModel, rollout: Rollout) -> torch.Tensor:
    """[T, V] log-probabilities at each token of the completion."""
    ids = [*rollout.prompt_ids, *rollout.turn.token_ids]
    return model(torch.tensor([ids[:-1]])).logits[0, len(rollout.prompt_ids) - 1 :].log_softmax(dim=-1)


def drawn(model: PreTrainedModel, rollout: Rollout) -> torch.Tensor:
    return distributions(model, rollout).gather(1, torch.tensor(rollout.turn.token_ids)[:, None])[:, 0]


def divergence(student: PreTrainedModel, teacher: PreTrainedModel, rollouts: list[Rollout]) -> float:
    """Mean over tokens of KL(student || teacher), nats."""
    found = []
    for rollout in rollouts:
        ours, theirs = distributions(student, rollout), distributions(teacher, rollout)
        found.append((ours.exp() * (ours - theirs)).sum(dim=-1))
    return float(torch.cat(found).mean())


def estimate(rollouts: list[Rollout]) -> float:
    """The same of what was recorded: the mean of log p_behave - log p_teacher over tokens."""
    pairs = [
        ours - theirs
        for rollout in rollouts
        for ours, theirs in zip(rollout.turn.logprobs, rollout.teacher_logprobs or (), strict=True)
    ]
    return sum(pairs) / len(pairs)
