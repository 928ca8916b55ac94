"""What the bench reports of its arms, computed from what each recorded."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Arm = Mapping[str, Any]
"""One arm under one seed, as in results.json."""


def figures_of(lines: Sequence[Mapping[str, Any]], seconds: float, activity: Mapping[str, float]) -> dict[str, Any]:
    """Of the lines of an arm's metrics, of the `seconds` that it trained, and of what its engine did meanwhile.

    `*_share` are shares of these seconds: the trainer waits for a batch, or for a publication (its wait, its packing
    and what an optimizer step waits for it); the generator is idle without a request, or paused.
    """
    lasted = seconds or 1.0
    engine = sum(activity[name] for name in ("idle_s", "paused_s", "working_s")) or 1.0
    tokens = sum(line["tokens_trained"] + line["tokens_masked"] for line in lines)
    trained = sum(line["tokens_trained"] for line in lines)
    publishing = sum(line["publish_wait_s"] + line["pack_s"] + line["guard_s"] for line in lines)
    judged = [line["lag_0"]["agrees"] for line in lines if "lag_0" in line]
    return {
        "seconds": seconds,
        "steps": len(lines),
        "tokens_per_s": tokens / lasted,
        "trainer_waits_share": sum(line["wait_s"] for line in lines) / lasted,
        "publishing_share": publishing / lasted,
        "generator_idle_share": activity["idle_s"] / engine,
        "generator_paused_share": activity["paused_s"] / engine,
        "sequences": activity["sequences"],
        "lag_mean": sum(line["lag_mean"] * line["tokens_trained"] for line in lines) / max(trained, 1),
        "masked_share": (tokens - trained) / max(tokens, 1),
        "dropped": dict(lines[-1]["groups_dropped"]) if lines else {},
        "failed": dict(lines[-1]["groups_failed"]) if lines else {},
        "lag_0_agrees": [sum(judged), len(judged)],
        "compared": [line["compared"] for line in lines if "compared" in line],
    }


def reached(curve: Sequence[Sequence[float]], reward: float) -> float | None:
    """Seconds until a curve of (seconds, reward) first is at `reward`, on straight lines between its points; None when
    it never is."""
    before: Sequence[float] | None = None
    for point in curve:
        at, got = point
        if got >= reward:
            if before is None or got == before[1]:
                return float(at)
            return float(before[0] + (at - before[0]) * (reward - before[1]) / (got - before[1]))
        before = point
    return None


def best_shared_reward(arms: Sequence[Arm]) -> float:
    """The highest held-out reward that all of these arms have reached."""
    return min(max(reward for _, reward in arm["held_out"]) for arm in arms)


def with_times(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """The arms with the seconds to the reward that all arms of their seed reach. Seeds without all arms have none."""
    whole = {arm["arm"] for arm in arms}
    found = []
    for arm in arms:
        peers = [each for each in arms if each["seed"] == arm["seed"]]
        complete = {each["arm"] for each in peers} == whole
        target = best_shared_reward(peers) if complete else None
        times = {"target": target, "to_target_s": reached(arm["held_out"], target) if target is not None else None}
        found.append({**arm, **times})
    return found


COLUMNS: dict[str, tuple[Callable[[Arm], float | None], int]] = {
    "tokens/s": (lambda arm: arm["tokens_per_s"], 0),
    "steps": (lambda arm: arm["steps"], 0),
    "trainer waits, %": (lambda arm: 100 * arm["trainer_waits_share"], 1),
    "trainer publishes, %": (lambda arm: 100 * arm["publishing_share"], 1),
    "generator idle, %": (lambda arm: 100 * arm["generator_idle_share"], 1),
    "generator paused, %": (lambda arm: 100 * arm["generator_paused_share"], 1),
    "publish, ms": (lambda arm: arm["publish_ms"], 1),
    "mean lag": (lambda arm: arm["lag_mean"], 2),
    "held-out reward at the end": (lambda arm: arm["held_out"][-1][1], 3),
    "s to the reward that all reach": (lambda arm: arm["to_target_s"], 1),
}


def table(arms: Sequence[Arm]) -> str:
    """Markdown: a row for each arm, means over seeds with the range in brackets."""
    timed = with_times(arms)
    rows = ["| arm | seeds | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name in dict.fromkeys(arm["arm"] for arm in timed):
        own = [arm for arm in timed if arm["arm"] == name]
        values = [([of(arm) for arm in own], digits) for of, digits in COLUMNS.values()]
        cells = [_band([each for each in found if each is not None], digits) for found, digits in values]
        rows.append(f"| {name} | {len(own)} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _band(values: Sequence[float], digits: int) -> str:
    if not values:
        return "–"
    spread = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def rotated(arms: Sequence[str], by: int) -> list[str]:
    """The same arms, beginning with another one: none has the first place under every seed."""
    at = by % len(arms)
    return [*arms[at:], *arms[:at]]
