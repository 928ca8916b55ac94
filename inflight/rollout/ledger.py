"""The buffer's books: slots, queue and counters. No threads, no sockets, no clock: events in, verdicts out.

A group is in exactly one place, and at any moment

    granted  = in flight + failed + produced
    produced = trained + dropped + buffered
    in flight + buffered <= capacity
"""

from __future__ import annotations

import collections
import math
from dataclasses import dataclass

from inflight.config import GateConfig, RunConfig
from inflight.messages import GroupDone, GroupFailed
from inflight.rollout.gate import GatedGroup, gate_group
from inflight.types import Rollout, RolloutGroup, versions_of_tokens

ACTOR_LOST = "actor lost"
ACTOR_STOPPED = "actor stopped"
"""An actor that fails a group for this reason is leaving: it is granted no more."""
RUN_FINISHED = "run finished"
UNDELIVERED = "not delivered before the buffer closed"
MAX_REASONS = 64
"""Distinct reasons counted by name; further ones are counted as `other`."""


@dataclass(frozen=True)
class Counts:
    """Where every group is; a snapshot."""

    granted: int
    in_flight: int
    produced: int
    buffered: int
    trained: int
    dropped: dict[str, int]
    """Groups that the gate left out, by reason."""
    failed: dict[str, int]
    """Granted groups that never came or could not be used, by reason."""
    rollouts_dropped: dict[str, int]
    """Members left out of groups, whether the group was trained on or dropped, by reason."""
    ignored: dict[str, int]
    """Messages that changed nothing, by reason: repeats of settled groups, groups that nobody was granted."""

    def check(self) -> None:
        """Raises RuntimeError when a group was lost or counted twice."""
        failed, dropped = sum(self.failed.values()), sum(self.dropped.values())
        if self.granted != self.in_flight + failed + self.produced:
            raise RuntimeError(f"granted is not in flight + failed + produced: {self}")
        if self.produced != self.trained + dropped + self.buffered:
            raise RuntimeError(f"produced is not trained + dropped + buffered: {self}")


@dataclass
class _Account:
    """One actor's slots since its hello."""

    granted: int = 0
    settled: int = 0
    leaving: bool = False

    @property
    def in_flight(self) -> int:
        return self.granted - self.settled


def defect(group: RolloutGroup, group_size: int) -> str | None:
    """Why a received group can't be used, as a reason to count it by; None when it is sound."""
    rollouts = group.rollouts
    if len(rollouts) != group_size or len({rollout.rollout_id for rollout in rollouts}) != group_size:
        return "malformed: group size"
    if any(rollout.group_id != group.group_id for rollout in rollouts):
        return "malformed: group id"
    if any(rollout.prompt_ids != rollouts[0].prompt_ids for rollout in rollouts):
        return "malformed: prompts differ"
    for rollout in rollouts:
        turn = rollout.turn
        if len(turn.logprobs) != len(turn.token_ids) or not all(map(math.isfinite, turn.logprobs)):
            return "malformed: logprobs"
        if not math.isfinite(rollout.reward):
            return "malformed: reward"
        if not _evidence_fits(rollout):
            return "malformed: evidence"
        try:
            versions_of_tokens(turn.token_versions, len(turn.token_ids))
        except ValueError:
            return "malformed: versions"
    return None


def _evidence_fits(rollout: Rollout) -> bool:
    """Whether what was recorded beside the tokens has their number, and finite values."""
    length, turn = len(rollout.turn.token_ids), rollout.turn
    steps, teacher = rollout.step_rewards, rollout.teacher_logprobs
    return (
        (turn.kept is None or len(turn.kept) == length)
        and (turn.routed_experts is None or turn.routed_experts.shape[0] <= len(rollout.prompt_ids) + length)
        and all(step.index < length and math.isfinite(step.reward) for step in steps)
        and (teacher is None or (len(teacher) == length and all(map(math.isfinite, teacher))))
    )


class Ledger:
    """Books of one run; not thread-safe, its owner holds a lock.

    An actor is never granted more than its concurrency at once, so that a granted group is a started one.
    """

    def __init__(self, config: RunConfig) -> None:
        self.capacity = config.capacity
        self._concurrency = config.rollout.concurrency
        self._group_size = config.rollout.group_size
        self._accounts: dict[str, _Account] = {}
        self._queue: collections.deque[RolloutGroup] = collections.deque()
        self._settled: set[str] = set()
        """Ids of all groups that were delivered or failed: what makes deliveries idempotent."""
        self._granted = self._produced = self._trained = 0
        self._dropped: collections.Counter[str] = collections.Counter()
        self._failed: collections.Counter[str] = collections.Counter()
        self._rollouts_dropped: collections.Counter[str] = collections.Counter()
        self._ignored: collections.Counter[str] = collections.Counter()

    @property
    def in_flight(self) -> dict[str, int]:
        """Groups granted and not settled, by actor."""
        return {name: account.in_flight for name, account in self._accounts.items()}

    @property
    def buffered(self) -> int:
        """Groups delivered and neither taken nor dropped."""
        return len(self._queue)

    def hello(self, actor: str) -> None:
        """An actor joins. A second hello comes from a restarted process: what its predecessor had is lost."""
        self.lost(actor)
        self._accounts[actor] = _Account()

    def lost(self, actor: str) -> None:
        """An actor is gone: what it had in flight has failed. Nothing happens for an unknown one."""
        account = self._accounts.pop(actor, None)
        if account is not None:
            self._fail(account, ACTOR_LOST, account.in_flight)

    def grants(self) -> dict[str, int]:
        """Hands every free slot to the actor with the fewest in flight; the new cumulative grants by actor."""
        room = self.capacity - sum(self.in_flight.values()) - len(self._queue)
        told: dict[str, int] = {}
        while room > 0:
            free = [
                (account.in_flight, name)
                for name, account in self._accounts.items()
                if account.in_flight < self._concurrency and not account.leaving
            ]
            if not free:
                break
            _, name = min(free)
            self._accounts[name].granted += 1
            self._granted += 1
            told[name] = self._accounts[name].granted
            room -= 1
        return told

    def settle(self, actor: str, message: GroupDone | GroupFailed) -> RolloutGroup | None:
        """Counts a group exactly once, however often it comes; returns it when it is new and sound, now buffered.

        Raises KeyError for an actor that did not say hello (see `knows`).
        """
        account = self._accounts[actor]
        group_id = message.group.group_id if isinstance(message, GroupDone) else message.group_id
        if group_id in self._settled:
            self.ignore("repeat")
            return None
        reason = message.reason if isinstance(message, GroupFailed) else defect(message.group, self._group_size)
        account.leaving = account.leaving or reason == ACTOR_STOPPED
        if account.in_flight == 0:
            self.ignore("not granted")
            return None
        self._settled.add(group_id)
        if isinstance(message, GroupDone) and reason is None:
            account.settled += 1
            self._queue.append(message.group)
            self._produced += 1
            return message.group
        self._fail(account, reason or "no reason given", 1)
        return None

    def knows(self, actor: str) -> bool:
        """Whether the actor said hello and was not lost since."""
        return actor in self._accounts

    def ignore(self, reason: str) -> None:
        """Counts a message that changes nothing."""
        self._ignored[reason] += 1

    def judge(self, usable: list[GatedGroup], wanted: int, version: int, gate: GateConfig) -> None:
        """Extends `usable`, the verdicts on the first groups of the queue, towards `wanted`; drops what fails the gate.

        The groups stay in the queue until `train`, so that an attempt that ends early loses nothing.
        """
        while len(usable) < min(wanted, len(self._queue)):
            gated = gate_group(self._queue[len(usable)], version, gate)
            if gated.dropped is None:
                usable.append(gated)
                continue
            del self._queue[len(usable)]
            self._dropped[str(gated.dropped)] += 1
            self._count_members(gated)

    def train(self, usable: list[GatedGroup]) -> None:
        """The trainer takes the first groups of the queue, those that `judge` found usable."""
        for gated in usable:
            if self._queue.popleft() is not gated.group:
                raise RuntimeError(f"group {gated.group.group_id} is not the oldest of the buffer")
            self._count_members(gated)
        self._trained += len(usable)

    def close(self) -> None:
        """Counts what is still in flight as failed."""
        for account in self._accounts.values():
            self._fail(account, UNDELIVERED, account.in_flight)

    def counts(self) -> Counts:
        """Where every group is now."""
        return Counts(
            granted=self._granted,
            in_flight=sum(self.in_flight.values()),
            produced=self._produced,
            buffered=len(self._queue),
            trained=self._trained,
            dropped=dict(self._dropped),
            failed=dict(self._failed),
            rollouts_dropped=dict(self._rollouts_dropped),
            ignored=dict(self._ignored),
        )

    def _count_members(self, gated: GatedGroup) -> None:
        self._rollouts_dropped.update({str(why): count for why, count in gated.members_dropped.items()})

    def _fail(self, account: _Account, reason: str, groups: int) -> None:
        if groups:
            known = reason in self._failed or len(self._failed) < MAX_REASONS
            self._failed[reason if known else "other"] += groups
            account.settled += groups
