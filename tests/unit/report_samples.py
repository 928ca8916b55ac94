"""Run folders for the tests of the HTML report (not a test file)."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rollout_samples import make_config, make_rollout
from tokenizers import Tokenizer, decoders, models

from inflight import config as configuration
from inflight.config import ModelConfig
from inflight.metrics import EVAL_FILE, METRICS_FILE, SWAPS_FILE, JsonLines
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Writer
from inflight.types import RolloutGroup

HOSTILE = [
    "</script><script>window.hurt=1</script>",
    "<img src=x onerror=window.hurt=2>",
    "<!--",
    "]]>",
    "&lt;",
    "\u2028",
    "\u202e",
    "\x1b[31m",
    "'\"`",
    "%%SCRIPT%%",
    "a",
    "b",
    "\n",
]
STEP = {
    "reward": 0.5,
    "reward_all": 0.4,
    "loss": 0.1,
    "wait_s": 1.0,
    "train_s": 2.0,
    "publish_wait_s": 0.25,
    "pack_s": 0.05,
    "guard_s": 0.1,
    "tokens_trained": 100,
    "tokens_masked": 10,
    "lag_mean": 1.0,
    "lag_max": 2,
    "lag_counts": {"0": 60, "2": 40},
    "buffer": 1,
    "groups_in_flight": 2,
    "tokens_per_s": 50.0,
    "groups_dropped": {"too old": 3},
    "groups_failed": {},
    "rollouts_dropped": {},
    "tokens_masked_by_rule": {"too old": 10},
}


def make_model(folder: Path) -> Path:
    """A model whose tokens' texts are HOSTILE."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(HOSTILE)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make_run(
    folder: Path, *, groups: int = 4, size: int = 2, steps: int = 3, length: int = 12, of_steps: int = 3
) -> Path:
    """A run of `steps` steps; sequence i begins i * 0.1 s after 1000, takes 2 s, and is swapped to the next version
    1 s after its begin."""
    model = make_model(folder.parent / f"model of {folder.name}")
    made = make_config(folder, steps=of_steps)
    options = {"api_key": "s3cret-value", "url": "https://user:pa55@host/x", "note": "</script>"}
    task = configuration.TaskConfig(name="addition", options=options)
    configuration.save(
        configuration.RunConfig(
            model=ModelConfig(name=str(model)),
            task=task,
            run_dir=str(folder),
            trainer=made.trainer,
            gate=made.gate,
            rollout=made.rollout,
        )
    )
    with JsonLines(folder / METRICS_FILE) as metrics:
        for step in range(1, steps + 1):
            metrics.write(STEP | {"step": step, "version": step, "time_s": 10.0 * step, "questions": [step - 1]})
    with JsonLines(folder / SWAPS_FILE) as swaps:
        for version in range(1, 6):
            line = {"gap_s": 0.001 * version, "transfer_s": 0.1, "ready_s": 0.2, "commit_s": 0.01, "running": version}
            swaps.write({"event": "committed", "time": 1000.0 + version, "generator": "g0", "version": version} | line)
        swaps.write({"event": "failed", "time": 1009.0, "generator": "g0", "version": 6, "reason": "<b>late</b>"})
    if steps:
        with JsonLines(folder / EVAL_FILE) as evaluations:
            figures = {"eval/reward": 0.25, "eval/reward_stderr": 0.05, "eval/questions": 8, "eval/best": True}
            evaluations.write({"step": 2, "version": 2, "eval/seconds": 1.5, "eval/tokens": 9.5, **figures})
            evaluations.write({"step": 3, "version": 3, "eval/given_up": HOSTILE[0]})
    with Writer(folder / ROLLOUTS_FILE) as writer:
        for index in range(groups):
            writer.append(make_one(index, size, length))
    return folder


def make_one(index: int, size: int, length: int) -> RolloutGroup:
    """Group `q{index}`: its sequences begin with version i // 10 and end with the next."""
    rollouts = []
    for member in range(size):
        spans = [(0, index // 10), (length // 2, index // 10 + 1)] if length > 1 else [(0, 0)]
        ids = [(index + member + at) % len(HOSTILE) for at in range(length)]
        rollout = make_rollout(f"q{index}", member, spans=spans, length=length, reward=float(member), token_ids=ids)
        began = 1000.0 + (index * size + member) * 0.1
        times = {"started": began, "finished": began + 2.0, "first_token_s": 0.2, "score_s": 0.25}
        rollouts.append(msgspec.structs.replace(rollout, **times))
    return RolloutGroup(group_id=f"q{index}", prompt_key=f"key {index}", rollouts=rollouts)
