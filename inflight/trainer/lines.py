"""What a line of metrics.jsonl (one per step) and of swaps.jsonl (one per swap) holds.

metrics.jsonl, for figures whose name does not explain them: `log_ratio_*`, `tail_share`, `ess`, `kl` and `by_lag` are
described in stats.py; `reward` is that of the groups that were trained on, `reward_all` that of all groups that the
gate has judged since the step before; `unscored` counts rollouts of the step's groups whose score failed and counts as
0 (`rollout.on_reward_failure=zero`); if the run has its own rewards, `rewards` has the mean of each, before its
weight, over the rollouts that it applies to, and `rewards_applied` their share; `updates` is the number of optimizer
steps of the batch, `loss` and `grad_norm` are means over them, and `by_update` has a row for each if there are several,
including skipped ones; `updates_skipped` is the number of those whose gradient was not finite, in batches since the
last line; all other figures of tokens are of the first epoch, which has each token once; `tokens_trained` counts tokens
in the loss, `tokens_masked` the others of the batch, and `lag_*` those that the gate's rules accept, without rules on
log-ratios; `groups_*` and `rollouts_dropped` count since the run began; `wait_s` is the wait for a batch, `train_s` the
time from the loss to the end of the optimizer step, `publish_wait_s` the wait for the previous version; `guard_s`, a
part of `train_s`, is the time for which the optimizer step waited for the packing of the previous version;
`tokens_per_s` is sampled tokens of the batch divided by the time since the last step ended; `length_asked`,
`length_finished` and `length_trained` are mean completion tokens: of all samples requested since the process began, as
far as they were received; of those whose group was delivered; and of those in this step. A last one well below the
first shows that long answers are lost. `first_tokens_masked` is the share of this step's sequences whose first token
was too stale to be trained on; `questions` are the indices of those that were trained on, `left_out` names their
rollouts that the gate has dropped; `dropped` names the groups that were dropped since the line before, with the reason;
`compared` and `lag_0` are described in docs/operations.md.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Sequence

from inflight.groups import index_of
from inflight.rollout.books import Counts
from inflight.rollout.gate import GatedGroup
from inflight.trainer.batch import Batch
from inflight.trainer.stats import combine
from inflight.trainer.updates import Update
from inflight.types import Rollout
from inflight.weights.publish.events import Event, Failure, Left, Superseded, Swap
from inflight.weights.publish.publisher import Publisher, PublishReport

MAX_REASONS = 16


def rewards_and_lags(groups: Sequence[GatedGroup], judged: Sequence[float], batch: Batch) -> dict[str, object]:
    """The part of a step's line about its batch; `judged` are the rewards of all groups that it was selected from."""
    rewards = [reward for group in groups for reward in group.rewards]
    lags = batch.lag_counts()
    members = [member for group in groups for member in group.rollouts]
    return {
        "questions": [index_of(group.group.group_id) for group in groups],
        "left_out": [rollout.rollout_id for group in groups for rollout in group.left_out],
        "reward": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "reward_all": statistics.fmean(judged),
        "unscored": _unscored([rollout for group in groups for rollout in group.group.rollouts]),
        **_by_name([rollout for group in groups for rollout in group.group.rollouts]),
        "length_trained": statistics.fmean(len(member.mask) for member in members),
        "first_tokens_masked": statistics.fmean(not member.mask[0] for member in members),
        "lag_mean": sum(lag * count for lag, count in lags.items()) / max(sum(lags.values()), 1),
        "lag_max": max(lags, default=0),
        "lag_counts": lags,
        "tokens_masked_by_rule": dict(sum((Counter(group.masked) for group in groups), Counter())),
    }


def _unscored(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """Rollouts whose score failed and counts as 0, by reason; of many reasons the most frequent ones."""
    return dict(Counter(each.unscored for each in rollouts if each.unscored).most_common(MAX_REASONS))


def _by_name(rollouts: Sequence[Rollout]) -> dict[str, object]:
    """Of the run's rewards, by name: the mean where they apply, and the share of rollouts that they apply to."""
    names = sorted({name for rollout in rollouts for name in rollout.rewards})
    given = {name: [each.rewards[name] for each in rollouts if name in each.rewards] for name in names}
    if not given:
        return {}
    return {
        "rewards": {name: statistics.fmean(values) for name, values in given.items()},
        "rewards_applied": {name: len(values) / len(rollouts) for name, values in given.items()},
    }


def learning(updates: Sequence[Update], epochs: int, batch: Batch) -> dict[str, object]:
    """The part of a step's line about its updates, those of all `epochs`; at least one was taken."""
    taken = [each for each in updates if each.taken]
    first = [each for each in updates[: len(updates) // epochs] if each.taken] or taken[:1]
    stats = combine([each.stats for each in first])
    return {
        "updates": len(taken),
        "loss": statistics.fmean(each.loss for each in taken),
        "grad_norm": statistics.fmean(each.grad_norm for each in taken),
        "tokens_trained": stats.tokens,
        "tokens_masked": batch.completion_tokens - stats.tokens,
        **stats.values(),
        **({"by_update": [_row(each) for each in updates]} if len(updates) > 1 else {}),
    }


def _row(update: Update) -> dict[str, float]:
    figures = {name: update.stats.whole()[name] for name in ("clip_share", "drift", "tokens")}
    return {"loss": update.loss, "grad_norm": update.grad_norm, **figures}


def delivery(publisher: Publisher, report: PublishReport, counts: Counts) -> dict[str, object]:
    """The part of a step's line about publishing and the buffer, at this moment."""
    return {
        "publish_wait_s": report.wait_s,
        "pack_s": report.pack_s,
        "guard_s": report.guard_s,
        "committed": publisher.committed,
        "behind": publisher.behind,
        "swaps": publisher.stats()["swaps"],
        "buffer": counts.buffered,
        "groups_granted": counts.granted,
        "groups_in_flight": counts.in_flight,
        "groups_dropped": counts.dropped,
        "rollouts_dropped": counts.rollouts_dropped,
        "groups_failed": counts.failed,
    }


def swap_line(event: Event) -> dict[str, object]:
    """An event of the publisher as a line of swaps.jsonl."""
    kinds = {Swap: "committed", Failure: "failed", Superseded: "superseded", Left: "left"}
    return {"event": kinds[type(event)], "time": time.time(), **dataclasses.asdict(event)}
