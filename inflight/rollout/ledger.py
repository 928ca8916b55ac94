"""The buffer's accounting: questions, slots, queue and counters. No threads, no sockets, no clock.

A grant is in exactly one place, and at any time

    granted  = in flight + failed + produced
    produced = trained + dropped + buffered
    in flight + buffered <= capacity                        (more only just after a resume)
    trained + in flight + buffered <= steps * groups_per_step

The last line ends a run without waste: questions that would not be trained on are not requested. Together with
`Questions` it makes a run that is killed and resumed train on the same questions as an undisturbed one.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterable, Sequence

from inflight.config import GateConfig, RunConfig
from inflight.groups import MAX_VOCABULARY, attempt_of, defect, index_of
from inflight.messages import GroupDone, GroupFailed
from inflight.messages.reasons import ACTOR_LOST, NO_GENERATOR
from inflight.rollout.accounts import Accounts
from inflight.rollout.books import NO_BOOKS, Books, Counts
from inflight.rollout.counters import GroupCounters
from inflight.rollout.drought import Drought
from inflight.rollout.gate import GatedGroup, GroupDrop, gate_group
from inflight.rollout.gate_tally import GateTally
from inflight.rollout.lengths import Lengths
from inflight.rollout.questions import Questions
from inflight.rollout.waiting import StoredGroup, Waiting, most_bytes

log = logging.getLogger(__name__)

UNDELIVERED = "not delivered before the buffer closed"
MAX_TRIES = 5
"""Failed attempts at a question, for reasons other than a missing generator, after which it is given up."""


class Ledger:
    """The accounting of one run; not thread-safe, its owner holds a lock.

    An actor is never granted more than its concurrency at once, so that every granted group is started.
    """

    def __init__(
        self,
        config: RunConfig,
        books: Books = NO_BOOKS,
        groups: Iterable[StoredGroup] = (),
        *,
        vocabulary: int = MAX_VOCABULARY,
    ) -> None:
        """Continues from `books`, with `groups` (of questions that are not settled there) buffered.

        `vocabulary`: number of token ids that the trained model can embed.
        """
        self.capacity = config.capacity
        self._wanted = books.trained + (config.trainer.steps - config.start_version) * config.trainer.groups_per_step
        self._concurrency = config.rollout.concurrency
        self._group_size = config.rollout.group_size
        self._vocabulary = vocabulary
        self._accounts = Accounts()
        self._queue = Waiting(groups, most_bytes(config))
        self._groups_per_step = config.trainer.groups_per_step
        self._max_bytes = int(config.rollout.buffer_mib * (1 << 20))
        self.drought = Drought(self._groups_per_step)
        """Detects that nothing passes the gate."""
        self.lengths = Lengths()
        self._questions = Questions(books.settled, self._queue.indices)
        self._tries: collections.Counter[int] = collections.Counter()
        self._too_old = collections.Counter(books.too_old)
        """Unsettled question → how many of its groups were too stale."""
        self.tally = GateTally()
        self._counters = GroupCounters(books, len(self._queue))

    @property
    def in_flight(self) -> dict[str, int]:
        """Groups granted and not settled, by actor."""
        return self._accounts.in_flight

    def books(self) -> Books:
        """The settled state. Buffered groups are not in it: they are in the run folder. Those in flight are
        re-queued."""
        return self._counters.books(self._questions.settled, self._too_old)

    def hello(self, actor: str, incarnation: str) -> None:
        """An actor joins, or is still there. With a new incarnation, the work of its predecessor is lost."""
        if not self._accounts.knows(actor, incarnation):
            self.leave(actor, ACTOR_LOST)
            self._accounts.open(actor, incarnation)

    def leave(self, actor: str, reason: str) -> None:
        """An actor is gone. Its groups in flight have failed and are re-queued, unless they killed it (suspects.py)."""
        for index in self._accounts.close(actor):
            self._counters.fail(reason)
            if reason == ACTOR_LOST and self._questions.killed(index):
                log.warning("question %d is given up: its actor died while it worked on nothing else", index)
                self._settled(index)
            else:
                self._questions.give_back(index)

    def grants(self) -> dict[str, list[int]]:
        """Grants every free slot to the actor with the fewest in flight; returns actor → new questions."""
        taken = sum(self.in_flight.values()) + len(self._queue)
        left = self._wanted - self._counters.trained - taken
        room = min(self.capacity, max(self._groups_per_step, self._fitting())) - taken
        granted: dict[str, list[int]] = {}
        while min(room, left) > 0:
            if (chosen := self._questions.take(self._accounts.held, self._concurrency, left)) is None:
                break
            name, index = chosen
            self._accounts.grant(name, index)
            self._counters.granted += 1
            granted.setdefault(name, []).append(index)
            room -= 1
            left -= 1
        return granted

    @property
    def data_ended(self) -> int | None:
        """The task's number of questions once all were asked and no group is in flight; None before."""
        left = not self._questions.exhausted or any(self.in_flight.values())
        return None if left else self._questions.number

    def attempts(self, questions: Iterable[int]) -> dict[int, int]:
        """Question → how many of its groups were too stale, for those where there were any."""
        return {index: self._too_old[index] for index in questions if index in self._too_old}

    def settle(self, actor: str, message: GroupDone | GroupFailed) -> StoredGroup | None:
        """Counts a group exactly once, however often it arrives; returns it when it is new and valid, now buffered.

        Accepts a complete group from any actor, even one presumed dead, unless another actor delivered it first. A
        failure counts only from the actor that the question is granted to now.
        """
        name = message.group_id
        index = index_of(name)
        if index is None:
            self.ignore("not granted")
        elif index in self._questions.settled or index in self._queue or attempt_of(name) < self._too_old[index]:
            self.ignore("repeat")
        elif attempt_of(name) > self._too_old[index]:
            self.ignore("not granted")
        elif isinstance(message, GroupFailed) and message.questions is not None:
            self._end(message.questions)
        elif isinstance(message, GroupFailed):
            self._fail(actor, index, message.reason, again=message.again, lengths=message.lengths)
        elif (reason := defect(message.group, self._group_size, self._vocabulary)) is not None:
            self._fail(actor, index, reason, again=True)
        elif not self._claim(index):
            self.ignore("not granted")
        else:
            self._queue.append(stored := StoredGroup.of(message.group))
            self._counters.produced += 1
            self.lengths.finished(message.group)
            return stored
        return None

    def ignore(self, reason: str) -> None:
        """Counts a message without effect."""
        self._counters.ignore(reason)

    def judge(self, usable: list[GatedGroup], wanted: int, version: int, gate: GateConfig) -> None:
        """Extends `usable`, the gate's results for the first groups of the queue, towards `wanted`; drops groups that
        fail the gate.

        The groups stay in the queue until `train`, so that an attempt that ends early loses nothing. The question of a
        group dropped as too stale is re-queued, a bounded number of times (`gate.on_stale`).
        """
        while len(usable) < min(wanted, len(self._queue)):
            gated = gate_group(self._queue[len(usable)].group(), version, gate)
            self.drought.judged(gated)
            if gated.dropped is None:
                usable.append(gated)
                continue
            index = self._leaves(len(usable), gated)
            retried = gated.stale and gate.on_stale == "retry" and self._too_old[index] < gate.stale_retries
            reason = GroupDrop.RETRIED.value if retried else str(gated.dropped)
            self._counters.drop(reason)
            self.tally.leave_out(gated, reason)
            if retried:
                self._too_old[index] += 1
                self._questions.give_back(index)
            else:
                self._settled(index)

    def train(self, usable: list[GatedGroup]) -> None:
        """The trainer takes the first groups of the queue, which `judge` found usable."""
        for gated in usable:
            self._settled(self._leaves(0, gated))
        self._counters.trained += len(usable)
        self.tally.train(usable)

    def reject(self, groups: Sequence[GatedGroup], reason: str) -> None:
        """Counts groups that the trainer took and could not train on; others are requested in their place."""
        self._counters.trained -= len(groups)
        self._counters.drop(reason, len(groups))
        self.tally.reject(groups, reason)

    def close(self) -> None:
        """Counts the groups that are still in flight as failed."""
        for actor in self._accounts.in_flight:
            self.leave(actor, UNDELIVERED)

    def ages(self, version: int) -> dict[int, int]:
        """See Waiting."""
        return self._queue.ages(version)

    def counts(self) -> Counts:
        """How many groups are where now."""
        return self._counters.counts(in_flight=sum(self.in_flight.values()), buffered=len(self._queue))

    def _claim(self, index: int) -> bool:
        """Ends all attempts at a question; False when it was never granted."""
        if any(self._accounts.returned(actor, index) for actor in self._accounts.in_flight):
            return True
        late = self._questions.claim(index)
        self._counters.granted += late  # its grant was already counted as failed
        return late

    def _end(self, questions: int) -> None:
        """The task has this many questions: those beyond count as never granted."""
        self._questions.end(questions)
        self._counters.granted -= self._accounts.end(questions)

    def _fail(self, actor: str, index: int, reason: str, *, again: bool, lengths: Iterable[int] = ()) -> None:
        if not self._accounts.returned(actor, index):
            self.ignore("not granted")
            return
        self._counters.fail(reason or "no reason given")
        self.lengths.lost(lengths)
        self._tries[index] += reason != NO_GENERATOR  # an outage, however long, is not the question's fault
        if again and self._tries[index] < MAX_TRIES:
            self._questions.give_back(index)
        else:
            self._settled(index)

    def _leaves(self, at: int, gated: GatedGroup) -> int:
        """Removes a group from the queue, to be trained on or dropped; returns its question."""
        stored = self._queue[at]
        if stored.name != gated.group.group_id or stored.index is None:
            raise RuntimeError(f"group {gated.group.group_id} is not where it was in the buffer: {stored.name} is")
        self._queue.pop(at)
        self._counters.judged(gated)
        return stored.index

    def _fitting(self) -> int:
        """How many groups may be in flight or buffered, given the memory that they take or are expected to take."""
        in_flight = sum(self.in_flight.values())
        left = self._max_bytes - self._queue.nbytes - in_flight * self._queue.typical
        return len(self._queue) + in_flight + int(max(left, 0.0) // self._queue.typical)

    def _settled(self, index: int) -> None:
        self._questions.settle(index)
        del self._tries[index], self._too_old[index]
