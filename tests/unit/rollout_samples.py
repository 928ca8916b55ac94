"""Made-up rollouts and configurations for the tests of rollout/ (not a test file)."""

from inflight.config import BusConfig, GateConfig, ModelConfig, RolloutConfig, RunConfig, TaskConfig, TrainerConfig
from inflight.types import PrefillSpan, Rollout, RolloutGroup, Turn, VersionSpan


def make_rollout(group_id="g", index=0, spans=((0, 0),), length=6, reward=0.5, **changes):
    """A rollout of `length` tokens whose versions are `spans`; `changes` go to its turn."""
    turn = {
        "token_ids": list(range(length)),
        "logprobs": [-0.5] * length,
        "token_versions": [VersionSpan(*span) for span in spans],
        "prefill_versions": [PrefillSpan(0, 0, spans[0][1] if spans else 0)],
        "finish_reason": "stop",
    }
    return Rollout(
        rollout_id=f"{group_id}/{index}",
        group_id=group_id,
        prompt_ids=[7, 8, 9],
        turn=Turn(**(turn | changes)),
        reward=reward,
        generator="g0",
        started=1.0,
        finished=2.0,
        first_token_s=0.0,
    )


def make_group(group_id="g", size=2, **kwargs):
    """A group of `size` equal members."""
    rollouts = [make_rollout(group_id, index, **kwargs) for index in range(size)]
    return RolloutGroup(group_id=group_id, prompt_key=f"key of {group_id}", rollouts=rollouts)


def make_config(
    run_dir,
    *,
    max_lag=1,
    step=2,
    size=2,
    concurrency=2,
    keep=False,
    max_token_lag=8,
    on_stale="retry",
    dead_after_s=30.0,
    steps=40,
    **rollout,
):
    """A run whose capacity is (max_lag + 1) * step groups, on a bus that is patient: a loaded machine may starve a
    thread for seconds. Tests of loss shorten `dead_after_s`."""
    return RunConfig(
        model=ModelConfig(name="tiny"),
        task=TaskConfig(name="addition"),
        run_dir=str(run_dir),
        gate=GateConfig(max_lag=max_lag, max_token_lag=max_token_lag, on_stale=on_stale),
        trainer=TrainerConfig(groups_per_step=step, steps=steps),
        rollout=RolloutConfig(group_size=size, concurrency=concurrency, keep=keep, **rollout),
        bus=BusConfig(heartbeat_s=0.05, dead_after_s=dead_after_s),
    )
