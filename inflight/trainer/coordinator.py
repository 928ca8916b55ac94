"""Rank 0's side of the trainer's ranks: sends each collective step to the others, names a rank that does not answer.

    other rank --TrainerHello--> rank 0      once all have joined:
    other rank <-----Meet------- rank 0      the address at which to form the process group
    other rank <-----Piece------ rank 0      one micro-batch each, so that all take part in the same collectives
    other rank ------Took------> rank 0
    other rank <-----Learn------ rank 0      what to do with it
    other rank ----Learned-----> rank 0      or Scored, if only its log-probabilities are needed
    other rank <-----Order------ rank 0      update, step, gather, checkpoint, drop, compare
    other rank -----Done-------> rank 0
    other rank <-----Finish----- rank 0

Only rank 0 has the state of the run: it takes batches, stops, publishes and writes files. Other ranks obey its orders.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from inflight.bus import BusError, Listener, Lost, Received
from inflight.config import RunConfig
from inflight.messages import AnyMessage, Finish, Heartbeat
from inflight.messages.ranks import (
    PIECE_BYTES,
    Done,
    Learn,
    Learned,
    Meet,
    Order,
    RankFailed,
    Scored,
    TensorData,
    Took,
    TrainerHello,
)
from inflight.trainer.batch import Batch
from inflight.trainer.collective_timeout import bounded
from inflight.trainer.pieces import WINDOW, pieces

_POLL_S = 0.2
EXPLAIN_S = 2.0
"""Seconds for which a failed collective is investigated: the report of a lost rank may take that long."""


class CoordinatorError(RuntimeError):
    """A rank of the trainer is missing, has failed or does not answer; the text names it."""


class Coordinator:
    """The other ranks, as rank 0 sees them. If there are none, all methods return at once.

    Example:
        with coordinator.together("step"):
            optimizer.step()         # the others do the same, so that collectives inside match
    """

    def __init__(self, listener: Listener | None, config: RunConfig) -> None:
        """The caller closes the listener. None: this process is the only rank, or not rank 0."""
        self._listener = listener
        self._bound_s = config.trainer.rank_timeout_s
        names = config.rank_names()[1:] if listener is not None else []
        self._done = dict.fromkeys(names, -1)
        """Rank → number of the last order that it has carried out; -1 before its hello, 0 after."""
        self._told = 0
        self._learned: list[Learned] = []
        self._scored: dict[str, TensorData] = {}
        """Rank → log-probabilities of its newest micro-batch."""
        self._taken: dict[str, int] = {}
        """Rank → bytes that it has received of the micro-batch that is being sent to it."""
        self._gone: dict[str, str] = {}
        """Rank → why it takes no part any more."""

    def wait_joined(self, timeout_s: float, rendezvous: str) -> None:
        """Waits for all ranks and sends them the rendezvous. Raises CoordinatorError that names missing ranks."""
        self._wait(0, timeout_s, "has not joined")
        self._send_all(Meet(rendezvous=rendezvous))

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """All ranks carry out `what` inside, within the timeout. Raises CoordinatorError when a rank is known to be
        lost."""
        if self._done:
            self._told += 1
            self._send_all(Order(number=self._told, what=what))
        with self.within_bound(what):
            yield

    @contextmanager
    def learning(self, shares: Sequence[Batch], purpose: str = "learn") -> Iterator[None]:
        """Sends each of the others its micro-batch, to train on or to `score`; rank 0 processes its own inside."""
        if self._done:
            self._told += 1
        for name, share in zip(self._done, shares, strict=True):
            self._give(name, share)
            self._send(name, Learn(number=self._told, purpose=purpose))
        with self.within_bound(purpose):
            yield

    def learned(self) -> list[Learned]:
        """The results of the others' micro-batches since the last call. Raises CoordinatorError."""
        self._wait(self._told, self._bound_s, "has not learned")
        found, self._learned = self._learned, []
        return found

    def scored(self) -> list[TensorData]:
        """The log-probabilities of the others' micro-batches, by rank. Raises CoordinatorError."""
        self._wait(self._told, self._bound_s, "has not scored")
        missing = [name for name in self._done if name not in self._scored]
        if missing:
            raise CoordinatorError(f"{', '.join(missing)} has answered without log-probabilities")
        found = [self._scored[name] for name in self._done]
        self._scored = {}
        return found

    def within_bound(self, what: str) -> AbstractContextManager[None]:
        """Ends the process, naming the missing ranks, when the block takes longer than the timeout."""
        if not self._done:
            return contextlib.nullcontext()
        return bounded(self._bound_s, lambda: self._late(what))

    def finish(self, reason: str) -> None:
        """Sends Finish to the others."""
        for name in self._done:
            with contextlib.suppress(BusError):
                self._listen().send(name, Finish(reason=reason))

    def explain(self, error: BaseException) -> str:
        """The error of a collective, with the rank that caused it if one is lost."""
        deadline = time.monotonic() + (EXPLAIN_S if self._done else 0.0)
        while not self._gone and time.monotonic() < deadline:
            for name in self._done:  # sending to a lost rank fails, which the bus notices at once
                with contextlib.suppress(BusError):
                    self._listen().send(name, Heartbeat())
            self._hear(_POLL_S)
        return f"{self._missing()} ({error})" if self._gone else str(error)

    def _listen(self) -> Listener:
        assert self._listener is not None
        return self._listener

    def _send_all(self, message: AnyMessage) -> None:
        for name in self._done:
            self._send(name, message)

    def _send(self, name: str, message: AnyMessage) -> None:
        while self._hear(0.0):
            pass
        if self._gone:
            raise CoordinatorError(self._missing())
        try:
            self._listen().send(name, message)
        except BusError as error:
            raise CoordinatorError(str(error)) from None

    def _give(self, name: str, share: Batch) -> None:
        """Sends a micro-batch in pieces, as fast as the rank acknowledges them."""
        self._taken[name] = 0
        for piece in pieces(self._told, share):
            self._wait_taken(name, piece.offset - (WINDOW - 1) * PIECE_BYTES)
            self._send(name, piece)

    def _wait_taken(self, name: str, nbytes: int) -> None:
        deadline = time.monotonic() + self._bound_s
        while (before := self._taken[name]) < nbytes:
            self._hear(_POLL_S)
            if self._gone:
                raise CoordinatorError(self._missing())
            if self._taken[name] > before:
                deadline = time.monotonic() + self._bound_s
            if time.monotonic() > deadline:
                raise CoordinatorError(
                    f"{name} has taken {before} bytes of its micro-batch, no more in {self._bound_s:g} s"
                )

    def _wait(self, number: int, timeout_s: float, verb: str) -> None:
        deadline = time.monotonic() + timeout_s
        while late := [name for name, done in self._done.items() if done < number]:
            self._hear(_POLL_S)
            if self._gone:
                raise CoordinatorError(self._missing())
            if time.monotonic() > deadline:
                raise CoordinatorError(f"{', '.join(late)} {verb} after {timeout_s:g} s")

    def _hear(self, timeout_s: float) -> bool:
        """Handles one event; False when there was none."""
        event = self._listen().receive(timeout_s)
        match event:
            case Lost(peer=peer) if peer in self._done:
                self._gone.setdefault(peer, "is gone")
            case Received(peer=peer, message=RankFailed(reason=reason)) if peer in self._done:
                self._gone[peer] = f"has failed: {reason}"
            case Received(peer=peer, message=TrainerHello()) if peer in self._done:
                self._done[peer] = 0
            case Received(peer=peer, message=Took(number=number, nbytes=nbytes)) if peer in self._done:
                if number == self._told:
                    self._taken[peer] = nbytes
            case Received(peer=peer, message=Done() | Learned() | Scored() as message) if peer in self._done:
                self._done[peer] = message.number
                if isinstance(message, Learned):
                    self._learned.append(message)
                elif isinstance(message, Scored):
                    self._scored[peer] = message.logprobs
        return event is not None

    def _missing(self) -> str:
        return "; ".join(f"{name} {why}" for name, why in self._gone.items())

    def _late(self, what: str) -> str:
        while self._hear(0.0):
            pass
        late = [name for name, done in self._done.items() if done < self._told]
        who = self._missing() or f"no answer from {', '.join(late) or 'rank 0 itself'}"
        return f"{what}: not done by all ranks within {self._bound_s:g} s: {who}"
