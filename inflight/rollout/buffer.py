"""The bounded buffer between actors and the trainer: admission, acknowledgement and the gate at take time.

    actor --RoutesWanted-> buffer        an actor that starts asks where the generators are
    actor <----Routed---- buffer         where they are, also whenever that changes
    actor --ActorHello--> buffer         an actor joins, or reports that it is still there
    actor <----Grant----- buffer         slots: the questions that it is to answer
    actor --GroupDone---> buffer         validated, written to the run folder, buffered, GroupAck
    actor --GroupFailed-> buffer         counted by its reason, slot freed, GroupAck
    actor --ActorBye----> buffer         leaves; its unanswered questions are re-queued
                          buffer --take--> trainer      gated now, first in first out, slots freed

A slot is held from its grant until the trainer takes the group, the gate drops it or it fails, so that generation
waits when the trainer is behind. actors.py speaks with the actors and ledger.py does the accounting; this file has the
thread, the lock, and what the trainer takes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from inflight.bus import Listener, Lost, Received
from inflight.config import RunConfig
from inflight.groups import MAX_VOCABULARY
from inflight.rollout.actors import Actors
from inflight.rollout.books import NO_BOOKS, Books, Counts
from inflight.rollout.gate import GatedGroup
from inflight.rollout.ledger import Ledger
from inflight.rollout.stream import Writer
from inflight.rollout.waiting import StoredGroup
from inflight.types import Routes

ROLLOUTS_FILE = "rollouts/rollouts.msgpack"
_POLL_S = 0.1
log = logging.getLogger(__name__)


class BufferClosed(RuntimeError):
    """The buffer's thread has ended or the run was finished: there will be no batch."""


class DataEnded(RuntimeError):
    """The task has no more questions, and the rest does not make a batch: the text has the numbers."""


class Buffer:
    """Holds finished groups until the trainer takes them; runs a thread over the listener.

    The listener is not closed with the buffer: the caller closes it afterwards.

    Example:
        with Listener(config.endpoint("rollouts"), config.bus) as listener, Buffer(listener, config) as buffer:
            groups = buffer.take(4, version=0, timeout_s=600)
    """

    def __init__(
        self,
        listener: Listener,
        config: RunConfig,
        books: Books = NO_BOOKS,
        groups: Sequence[StoredGroup] = (),
        *,
        vocabulary: int = MAX_VOCABULARY,
        routes: Callable[[], Routes] = lambda: Routes(version=0, generators={}),
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        """Starts at once. For a resumed run: `books` of its checkpoint, and the groups still to be trained on.

        Refuses groups with token ids of `vocabulary` and above. Actors get the `routes`, which are read every
        0.1 s. Calls `warn` with a line when the gate drops everything.

        Raises OSError or StreamError when the run folder's rollout file can't be written.
        """
        self._listener = listener
        self._gate = config.gate
        self._warn = warn
        size = int(config.rollout.file_mib * (1 << 20))
        self._writer = Writer(config.path / ROLLOUTS_FILE, size) if config.rollout.keep else None
        self._ledger = Ledger(config, books, groups, vocabulary=vocabulary)
        self._changed = threading.Condition()
        self._taking = threading.Lock()
        self._synchronous = self._held_back = config.trainer.synchronous
        """No group is started until the trainer waits for some."""
        self._actors = Actors(listener, self._ledger, self._writer, routes)
        self._broken: BaseException | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollout buffer", daemon=True)
        self._thread.start()

    def take(self, n_groups: int, version: int, timeout_s: float) -> list[GatedGroup]:
        """The oldest `n_groups` that pass the gate at `version`; older ones that don't are dropped and counted.

        `version` must be the newest one published. Raises TimeoutError that says what is missing (usable groups stay
        buffered), BufferClosed when there can be no further batch, DataEnded when the task has no more questions, and
        ValueError for more groups than may ever be buffered.
        """
        if not 1 <= n_groups <= self._ledger.capacity:
            raise ValueError(f"can't take {n_groups} groups at once: the capacity is {self._ledger.capacity}")
        deadline = time.monotonic() + timeout_s
        usable: list[GatedGroup] = []
        with self._taking, self._changed:
            self._held_back = False
            while True:
                self._check_open()
                self._ledger.judge(usable, n_groups, version, self._gate)
                if (news := self._ledger.drought.news()) is not None:
                    self._warn(news)
                if len(usable) == n_groups:
                    self._ledger.train(usable)
                    self._held_back = self._synchronous
                    self._grant()
                    return usable
                self._grant()  # groups that the gate dropped have freed slots
                if (questions := self._ledger.data_ended) is not None:
                    rest = f"{len(usable)} groups are left, fewer than the {n_groups} of a step"
                    lost = "".join(f"{text}, " for text in self._ledger.counts().lost)
                    raise DataEnded(f"all {questions} questions were asked, {lost}and {rest}")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(self._missing(len(usable), n_groups, timeout_s))
                self._changed.wait(left)

    def reject(self, groups: Sequence[GatedGroup], reason: str) -> None:
        """Counts groups of the last batch as dropped: they could not be trained on."""
        with self._changed:
            self._ledger.reject(groups, reason)
            self._grant()

    def finish(self, reason: str, timeout_s: float = 10.0) -> bool:
        """Sends Finish to all actors and waits until nothing is in flight; False when some did not answer in time."""
        with self._changed:
            self._actors.finish(reason)
            self._changed.notify_all()
            return self._changed.wait_for(
                lambda: not any(self._ledger.in_flight.values()) or self._broken is not None, timeout_s
            )

    def counts(self) -> Counts:
        """How many groups are where now."""
        with self._changed:
            return self._ledger.counts()

    def ages(self, version: int) -> dict[int, int]:
        """Of the groups that wait, by how many versions their oldest token is older than `version`."""
        with self._changed:
            return self._ledger.ages(version)

    def lengths(self) -> dict[str, float]:
        """Mean lengths of completions, for metrics."""
        with self._changed:
            return self._ledger.lengths.values()

    @property
    def rewards(self) -> list[float]:
        """Rewards of all rollouts from which the last batch was selected: its own, and those that the gate has dropped
        since the batch before."""
        with self._changed:
            return self._ledger.tally.of_batch

    def dropped(self) -> dict[str, str]:
        """Group → why it was dropped, of those since the last call."""
        with self._changed:
            return self._ledger.tally.reasons()

    @property
    def refused(self) -> Counter[str]:
        """Input that its socket has refused, by reason."""
        return Counter(self._listener.refusals.counts)

    def books(self) -> Books:
        """The part that a checkpoint keeps: the questions whose groups were taken, dropped or given up so far."""
        with self._changed:
            return self._ledger.books()

    def close(self) -> None:
        """Stops the thread and closes the rollout file; groups still in flight are counted as failed."""
        self._closing.set()
        self._thread.join(timeout=5)
        with self._changed:
            self._ledger.close()
            if self._writer is not None:
                self._writer.close()
            self._changed.notify_all()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._broken is not None:
            raise BufferClosed(f"the rollout buffer has stopped: {self._broken}") from self._broken
        if self._closing.is_set() or self._actors.finished:
            raise BufferClosed("the rollout buffer is closed: the run was finished")

    def _missing(self, usable: int, wanted: int, timeout_s: float) -> str:
        counts = self._ledger.counts()
        drought = f"; {self._ledger.drought}" if self._ledger.drought.groups else ""
        return (
            f"no batch within {timeout_s:.0f} s: {usable} of {wanted} groups buffered, {counts.in_flight} in flight; "
            f"actors alive: {self._actors}; failed: {counts.failed or 'none'}; dropped: {counts.dropped or 'none'}"
            f"{drought}"
        )

    def _grant(self) -> None:
        if not self._held_back:
            self._actors.grant()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                event = self._listener.receive(_POLL_S)
                if event is not None:
                    self._step(event)
                self._actors.send_routes()
        except BaseException as error:  # noqa: BLE001 - stored, and raised by `take`
            with self._changed:
                self._broken = self._broken or error
                self._changed.notify_all()

    def _step(self, event: Received | Lost) -> None:
        """Handles one event under the lock; an error in the middle is stored before the lock is released."""
        with self._changed:
            try:
                self._actors.hear(event)
                self._grant()
            except BaseException as error:
                self._broken = error
                raise
            finally:
                self._changed.notify_all()
