"""The conversation with the generators: each version's way to each of them.

Every generator has a transport and a sending thread of its own, so one that is late, fails or dies holds up no other.
One lock guards all deliveries; messages are queued while it is held, so each peer sees them in the order of the states.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable

import torch

from inflight.bus import Listener, Lost, Received
from inflight.config import PublishConfig
from inflight.messages import (
    Abort,
    AnyMessage,
    Commit,
    Committed,
    EngineHello,
    Failed,
    Finish,
    Manifest,
    Prepare,
    RankHello,
    Ready,
)
from inflight.weights.channel import Channel
from inflight.weights.delivery import UNSETTLED, Delivery, State
from inflight.weights.pack import checksums, content_digest
from inflight.weights.roster import Roster
from inflight.weights.transport.base import Sender, TransportError

log = logging.getLogger(__name__)

POLL_S = 0.05
"""How late a deadline may be noticed; messages are handled at once."""
CLOSE_S = 5.0


class Dispatch:
    """Answers hellos and takes released versions to every generator that is IDLE. See `delivery.State`.

    `roster` may be read under `changed`, which is notified whenever anything happened.
    """

    def __init__(
        self,
        listener: Listener,
        config: PublishConfig,
        kind: str,
        manifest: Manifest,
        buffer: torch.Tensor,
        *,
        version: int,
        ranks: dict[str, int],
    ) -> None:
        self.version = version
        """The newest version that was released."""
        self.error: BaseException | None = None
        """What ended the thread; nothing is delivered any more."""
        self.changed = threading.Condition(threading.RLock())
        self.roster = Roster(listener, config, kind, manifest, ranks, self._channel_failed)
        self._listener, self._config = listener, config
        self._manifest, self._buffer = manifest, buffer
        self._content_digest = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def settled(self) -> bool:
        """Whether no version's outcome is open, so that nothing reads the send buffer for a version that counts."""
        return all(delivery.state not in UNSETTLED for delivery in self.roster.deliveries.values())

    def release(self, version: int, wait_packed: Callable[[], None]) -> None:
        """Takes what lies in the send buffer to every generator that is IDLE; for the others a failure is recorded.

        `wait_packed` returns when the bytes are there; a sending thread calls it before it reads them.
        """

        def packed_checksums() -> list[int]:
            wait_packed()
            return checksums(self._manifest, self._buffer)

        sums = _Once(packed_checksums)
        with self.changed:
            self.version = version
            for delivery in self.roster.deliveries.values():
                if delivery.state is not State.IDLE:
                    self.roster.record(delivery, version, "absent", f"{delivery.state.name}, {delivery.why}")
                    continue
                now = time.monotonic()
                delivery.begin(version, now, now + self._config.transfer_timeout_s)
                channel = delivery.channel
                assert channel is not None
                channel.submit(functools.partial(self._send, delivery, channel, version, sums))

    def finish(self, reason: str) -> None:
        """Tells the engines that the run is over."""
        with self.changed:
            engines = [delivery.engine for delivery in self.roster.deliveries.values()]
            self.roster.tell(engines, Finish(reason=reason))

    def close(self) -> None:
        """Aborts what is not being committed yet and ends all threads; waits for none longer than CLOSE_S."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(CLOSE_S)
        with self.changed:
            for delivery in self.roster.deliveries.values():
                if delivery.state is State.SENDING and delivery.version is not None:
                    self.roster.tell(delivery.ranks, Abort(version=delivery.version, reason="the publisher closes"))
                self.roster.drop_channel(delivery)
        deadline = time.monotonic() + CLOSE_S
        stuck = [c for c in self.roster.left_behind if not c.join(max(0.0, deadline - time.monotonic()))]
        if stuck:
            log.warning("%d transfers are still stuck in the transport", len(stuck))

    # --- sending: the channels' threads ------------------------------------------------------------------------------

    def _send(
        self, delivery: Delivery, channel: Channel, version: int, sums: Callable[[], list[int]], sender: Sender
    ) -> None:
        found = sums()
        with self.changed:
            if delivery.channel is not channel or delivery.version != version or delivery.state is not State.SENDING:
                return
            self._content_digest = content_digest(found)
            delivery.prepared = True
            delivery.deadline = time.monotonic() + self._config.transfer_timeout_s
            digest = self.roster.manifest_digest
            self.roster.tell(delivery.ranks, Prepare(version=version, manifest_digest=digest, checksums=found))
        sender.send(self._buffer, self._manifest.buckets)

    def _channel_failed(self, channel: Channel, error: TransportError) -> None:
        with self.changed:
            for delivery in self.roster.deliveries.values():
                if delivery.channel is not channel:
                    continue
                if delivery.state is State.SENDING:
                    self._abort(delivery, "receive", str(error), broken=True)
                elif delivery.state is State.IDLE:
                    self.roster.open(delivery)
                else:
                    delivery.broken = True
            self.changed.notify_all()

    # --- hearing: the dispatch's thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                got = self._listener.receive(POLL_S)
                with self.changed:
                    match got:
                        case Lost(peer=peer):
                            self.roster.lost(peer)
                        case Received(peer=peer, message=message):
                            self._handle(peer, message)
                    self._expire(time.monotonic())
                    self.changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - kept, and raised to the trainer by whatever it waits in
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def _handle(self, peer: str, message: AnyMessage) -> None:
        if isinstance(message, RankHello | EngineHello):
            self.roster.hello(peer, message, self.version)
            return
        delivery = self.roster.of(peer)
        if delivery is None or peer not in delivery.held:
            self.roster.ignore(peer, message, "not a member")
            return
        match message:
            case Failed(poisoned=True):
                self.roster.poison(delivery, peer, message.version, message.reason)
            case Ready() | Failed() if peer != delivery.engine:
                self._answer(delivery, peer, message)
            case Committed() | Failed() if peer == delivery.engine:
                self._outcome(delivery, peer, message)
            case _:
                self.roster.ignore(peer, message, "not for the publisher")

    def _answer(self, delivery: Delivery, peer: str, answer: Ready | Failed) -> None:
        """A rank's one answer to Prepare."""
        if answer.version != delivery.version or peer in delivery.answers:
            self.roster.ignore(peer, answer, f"the version that is out is {delivery.version}")
            return
        delivery.answers[peer] = answer if isinstance(answer, Ready) else None
        broken = isinstance(answer, Failed) and answer.phase in ("prepare", "receive")
        if delivery.state is not State.SENDING:
            delivery.broken |= broken
            self._rest_if_answered(delivery)
        elif isinstance(answer, Failed):
            self._abort(delivery, answer.phase, f"{peer}: {answer.reason}", broken=broken)
        elif answer.digest != self._content_digest:
            self._abort(delivery, "verify", f"{peer} is ready with other bytes than were sent", broken=False)
        elif delivery.all_ready():
            delivery.enter(State.COMMITTING, f"version {delivery.version} is being committed")
            delivery.commit_started = time.monotonic()
            delivery.deadline = delivery.commit_started + self._config.commit_timeout_s
            self.roster.tell([delivery.engine], Commit(version=answer.version))

    def _outcome(self, delivery: Delivery, peer: str, outcome: Committed | Failed) -> None:
        """The engine's answer to Commit, in time or late."""
        if outcome.version != delivery.version or delivery.state not in (State.COMMITTING, State.UNSURE):
            self.roster.ignore(peer, outcome, f"no commit of it is out ({delivery.state.name})")
            return
        if isinstance(outcome, Committed):
            self.roster.events.append(delivery.swap(outcome.gap_s, outcome.running, time.monotonic()))
            delivery.held = dict.fromkeys(delivery.held, outcome.version)
        else:
            self.roster.record(delivery, outcome.version, "commit", f"{peer}: {outcome.reason}")
            self.roster.tell(delivery.ranks, Abort(version=outcome.version, reason=outcome.reason))
        self.roster.committed[delivery.generator] = delivery.held[peer]
        self._rest(delivery)

    def _expire(self, now: float) -> None:
        for delivery in self.roster.deliveries.values():
            if delivery.deadline is None or now < delivery.deadline or delivery.version is None:
                continue
            if delivery.state is State.COMMITTING:
                reason = f"{delivery.engine} did not answer Commit within {self._config.commit_timeout_s:g} s"
                self.roster.record(delivery, delivery.version, "commit", reason)
                self.roster.committed.pop(delivery.generator, None)
                delivery.enter(State.UNSURE, reason)
                continue
            silent = f"no answer from {', '.join(delivery.silent)} within {self._config.transfer_timeout_s:g} s"
            if delivery.state is State.SENDING:
                self._abort(delivery, "receive", silent, broken=True)
            if delivery.state is State.ABORTING:
                delivery.enter(State.STALLED, silent)

    def _abort(self, delivery: Delivery, phase: str, reason: str, *, broken: bool) -> None:
        """SENDING → ABORTING, and on to IDLE when every rank has answered."""
        assert delivery.version is not None
        version = delivery.version
        self.roster.record(delivery, version, phase, reason)
        delivery.broken |= broken
        if broken and delivery.channel is not None:
            delivery.channel.close()  # lets the other ranks go at once
        if not delivery.prepared:
            delivery.answers.update(dict.fromkeys(delivery.ranks))
        delivery.enter(State.ABORTING, reason)
        self.roster.tell(delivery.ranks, Abort(version=version, reason=reason))
        self._rest_if_answered(delivery)

    def _rest_if_answered(self, delivery: Delivery) -> None:
        if not delivery.silent:
            self._rest(delivery)

    def _rest(self, delivery: Delivery) -> None:
        """→ IDLE, with a new transport if the old one broke: nobody is in it any more."""
        if not delivery.broken or self.roster.open(delivery):
            delivery.enter(State.IDLE)


class _Once:
    """A value that several threads want and the first of them computes."""

    def __init__(self, compute: Callable[[], list[int]]) -> None:
        self._compute = compute
        self._lock = threading.Lock()
        self._value: list[int] | None = None

    def __call__(self) -> list[int]:
        with self._lock:
            if self._value is None:
                self._value = self._compute()
            return self._value
