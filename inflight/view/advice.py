"""What a person should know about a run that is not as it could be, in plain words, and what to do about it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from inflight.types import FIRST_FAILED
from inflight.view.figures import finite, number, whole
from inflight.view.progress import Progress

STEPS = 5
"""Last steps that are judged together: a single slow one is no news."""
WAITS = 0.5
"""Share of its time for which a trainer waits for rollouts from which on the buffer is called empty."""
BEHIND = 3
"""Versions that a generator is behind from which on it is named: one is on its way, and the next may wait for it."""
SLOW_START_S = 60.0
"""Since the launcher began, from which on the start of the generators is explained."""


def advice(progress: Progress) -> list[str]:
    """One sentence or two for each thing that is wrong, the most harmful first."""
    return [
        *_numbers(progress),
        *_rewards(progress),
        *_gate(progress),
        *_generators(progress),
        *_start(progress),
        *_buffer(progress),
    ]


def _numbers(progress: Progress) -> Iterator[str]:
    judged = next((row["lag_0"] for row in reversed(progress.record.steps) if row.get("lag_0")), None)
    if isinstance(judged, dict) and judged.get("agrees") is False:
        yield (
            f"At lag 0 generator and trainer disagree (median {number(finite(judged.get('median')))} nats): they do "
            "not compute the same. See docs/operations.md, and compare dtypes and sampling options."
        )


def _rewards(progress: Progress) -> Iterator[str]:
    failed = progress.counted("failed/", "groups_failed")
    for reason, count in failed.items():
        if reason.startswith("reward timeout"):
            limit = f"rollout.reward_timeout_s={progress.config.rollout.reward_timeout_s:g}"
            yield f"A reward times out ({count} groups lost): raise {limit}, or make the reward faster."
        elif reason.startswith("reward"):
            yield f"A reward fails: {reason} ({count} groups lost). {_first(progress, reason)}"


def _first(progress: Progress, reason: str) -> str:
    """The first failure, as an actor has reported it, and the log that has it with its traceback."""
    for name in progress.sources():
        if detail := progress.of(name).get(f"{FIRST_FAILED}{reason}"):
            return f"The first, in logs/{name}.log: {detail}"
    return "The actor's log (logs/a*.log) has the first one."


def _gate(progress: Progress) -> Iterator[str]:
    dropped = progress.counted("dropped/", "groups_dropped")
    lost = sum(dropped.values())
    trained = (whole(progress.step) or 0) * progress.config.trainer.groups_per_step
    if lost > max(trained, 2 * progress.config.trainer.groups_per_step):
        reason, count = max(dropped.items(), key=lambda each: each[1])
        yield (
            f"The gate drops more groups than are trained on ({lost} of {lost + trained}; {reason}: {count}). Easier "
            "or harder questions, or a larger gate.max_token_lag, would waste fewer."
        )


def _generators(progress: Progress) -> Iterator[str]:
    trainer = progress.of("trainer")
    for name in progress.generators():
        behind = whole(trainer.get(f"behind_{name}"))
        state = str(trainer.get(f"state_{name}", ""))
        if state == "POISONED":
            yield f"{name} may hold parts of two versions and gets no requests. End it: the launcher starts another."
        elif state == "INCOMPATIBLE":
            yield f"{name} is refused: its model does not fit the trainer's. Its log and the trainer's say why."
        elif behind is not None and behind >= BEHIND:
            yield (
                f"{name} is {behind} versions behind: its transfers take longer than steps, or fail. Its log says "
                "which; longer steps or fewer generators on its link help."
            )


def _start(progress: Progress) -> Iterator[str]:
    if progress.elapsed_s > SLOW_START_S and progress.of("trainer").get("phase") == "waiting for generators":
        log = "logs/g0.log" if len(progress.generators()) == 1 else "logs/g*.log"
        yield (
            f"vLLM is still starting: {log} has its progress. When no generator is ready "
            f"{progress.config.publish.join_timeout_s:g} s after the trainer (publish.join_timeout_s), the run ends: "
            "raise that on a slow machine."
        )


def _buffer(progress: Progress) -> Iterator[str]:
    rows = list(progress.record.steps)[-STEPS:]
    waited = [finite(row.get("wait_s")) or 0.0 for row in rows]
    worked = [finite(row.get("train_s")) or 0.0 for row in rows]
    share = sum(waited) / max(sum(waited) + sum(worked), 1e-9)
    if len(rows) == STEPS and share > WAITS and statistics.median(waited) > 0:
        yield (
            f"The buffer is empty too often: the trainer waits for rollouts {share:.0%} of its time. More generators, "
            "shorter answers or a larger gate.max_lag keep it busy."
        )
    capacity = progress.config.capacity
    buffered = whole(progress.of("trainer").get("buffer"))
    if len(rows) == STEPS and buffered is not None and buffered >= capacity and _both_work(progress):
        fewer = "Fewer generators or a faster trainer" if len(progress.generators()) > 1 else "A faster trainer"
        yield (
            f"The buffer is full ({buffered} of {capacity} groups): generators wait for the trainer. {fewer} would "
            "make tokens younger."
        )


def _both_work(progress: Progress) -> bool:
    """Whether trainer and generators work at the same time: not while a resumed trainer waits for generators that
    start, though the buffer may hold the groups of the start before."""
    serves = any("version" in progress.of(name) for name in progress.generators())
    trains = progress.of("trainer").get("phase", "training") == "training"
    return serves and trains and not progress.config.trainer.synchronous
