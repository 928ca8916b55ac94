"""One attempt to deliver a version to a generator: what was sent of it, and which ranks have answered."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from inflight.messages import Abort, Commit, Committed, Prepare, RankSwapped, Ready
from inflight.messages.base import MAX_REASON
from inflight.weights.pack import content_digest
from inflight.weights.publish.events import Swap
from inflight.weights.publish.offer import Offer
from inflight.weights.publish.session import Session


class Attempt:
    """The delivery of a version to the ranks of one generator.

    `announce` runs in the channel's thread, all other methods in the loop's, under its lock. Both take the attempt's
    own lock, so that a rank never gets a Prepare after the Abort of the same attempt.
    """

    def __init__(self, offer: Offer, session: Session, ranks: Sequence[str]) -> None:
        """`ranks` are the peers that receive it."""
        self.offer = offer
        self.version = offer.version
        self.number = next(session.attempts)
        self._session = session
        self._ranks = ranks
        self.started = session.clock()
        self.ready_at: float | None = None
        """When the last rank was ready."""
        self.commit_started: float | None = None
        self.due = self.started + session.config.transfer_timeout_s
        """When all ranks must be ready; counted from the Prepare once that is sent."""
        self.digest: str | None = None
        """Digest of the bytes that Prepare announced; None: it was not sent, so no rank knows of this attempt."""
        self.ready: dict[str, Ready] = {}
        self.let_go: set[str] = set()
        """Ranks that have answered the Abort."""
        self.swapped: dict[str, float] = {}
        """Rank that computes with the version → for how many seconds its step loop stalled."""
        self.broken = False
        """The transport can't be used again."""
        self._lock = threading.Lock()
        self._over = False

    def announce(self, *, follow: bool = False) -> bool:
        """Sends Prepare to the ranks, after which the bytes follow; with `follow` while they are still being packed.
        Returns False without sending it when the attempt is over, or when the version is known not to be finite."""
        if self._over or self.offer.unsound is not None:
            return False
        sums = self.offer.sums(follow=follow)
        session = self._session
        with self._lock:
            if self._over:
                return False
            self.digest = content_digest(sums)
            self.due = session.clock() + session.config.transfer_timeout_s
            message = Prepare(
                version=self.version,
                attempt=self.number,
                manifest_digest=session.manifest_digest,
                checksums=sums,
                publisher=session.publisher,
            )
            session.outbox.send(self._ranks, message)
            return True

    def end(self) -> bool:
        """Prevents any later Prepare. True when one was sent: the ranks know of the attempt."""
        with self._lock:
            self._over = True
            return self.digest is not None

    def cancel(self, reason: str) -> bool:
        """Ends the attempt and sends Abort to the ranks that know of it. True when they do: they will answer."""
        announced = self.end()
        if announced:
            self.abort(self._ranks, reason)
        return announced

    def commit(self, engine: str) -> None:
        """Tells the engine that all ranks hold the version; also repeats it."""
        if self.commit_started is None:
            self.commit_started = self._session.clock()
        message = Commit(version=self.version, attempt=self.number, publisher=self._session.publisher)
        self._session.outbox.send([engine], message)

    def abort(self, peers: Sequence[str], reason: str) -> None:
        """Sends Abort to ranks; also repeats it."""
        message = Abort(version=self.version, attempt=self.number, reason=reason[:MAX_REASON])
        self._session.outbox.send(peers, message)

    def silent(self, *, ending: bool) -> list[str]:
        """Ranks that have not answered: the Abort when it is `ending`, else the Prepare."""
        answered = self.let_go if ending else self.ready
        return [peer for peer in self._ranks if peer not in answered]

    def hear(self, peer: str, answer: Ready) -> None:
        """Records that a rank holds the version."""
        self.ready[peer] = answer
        self.ready_at = self._session.clock()

    def is_of(self, message: RankSwapped | Committed) -> bool:
        """Whether a message is about this attempt."""
        named = (message.version, message.attempt, message.publisher)
        return named == (self.version, self.number, self._session.publisher)

    def swap(self, generator: str, now: float) -> Swap:
        """The record of the version, which was just committed, as far as the ranks have reported it."""
        committing = now if self.commit_started is None else self.commit_started
        ready = committing if self.ready_at is None else self.ready_at
        return Swap(
            generator=generator,
            version=self.version,
            transfer_s=max(answer.receive_s for answer in self.ready.values()),
            build_s=max(answer.build_s for answer in self.ready.values()),
            ready_s=ready - self.started,
            pinned_s=committing - ready,
            commit_s=now - committing,
            gap_s=max(self.swapped.values(), default=0.0),
            running=None,
        )
