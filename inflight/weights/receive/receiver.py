"""A worker rank's side of publishing: a thread that fills the shadow while the step loop decodes, and the swap."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from inflight.bus import Link, PeerLost
from inflight.messages import (
    Abort,
    Aborted,
    AnyMessage,
    Enquire,
    Failed,
    Manifest,
    Prepare,
    RankHello,
    RankSwapped,
    Ready,
    Refused,
    Welcome,
)
from inflight.messages.base import reason_of
from inflight.weights.pack import ChecksumError, verify
from inflight.weights.receive.accepted import AcceptedWelcome
from inflight.weights.receive.publisher_link import PublisherLink
from inflight.weights.receive.rank_state import RankState, ReceiverState
from inflight.weights.receive.shadow import ManifestMismatch, Shadow, SwapRefused, TornWeights
from inflight.weights.transport import make_receiver
from inflight.weights.transport.base import Receiver, TransportError

log = logging.getLogger(__name__)

POLL_S = 0.25
"""Seconds between checks whether the thread has to end; messages wake it at once."""
JOIN_S = 5.0


class _Fatal(RuntimeError):
    """Ends the receiver; the engine keeps its weights."""


class WeightReceiver:
    """Receives versions into `shadow` in a thread of its own; `swap` makes one live from the step loop's thread.

    `swap` waits for no transfer. All messages are handled in order by one thread, which waits during a swap and blocks
    in the transport during a transfer; an Abort received meanwhile takes effect when the transfer has ended, which the
    publisher can cause by closing its side.
    """

    def __init__(
        self, link: Link, shadow: Shadow, hello: RankHello, *, connect: Callable[[Welcome], Receiver] = make_receiver
    ) -> None:
        """`hello` names this rank and the version that it holds. The receiver owns `link` and closes it."""
        self._rank_state = RankState(hello.version, hello.publisher)
        self._attempt = 0
        """The newest attempt that was begun or aborted since the Welcome: earlier ones are ignored."""
        self._alone = False
        """The publisher was lost and has not been heard since."""
        self._publisher = PublisherLink(link, hello)
        self._name = self._publisher.name
        self._shadow = shadow
        self._connect = connect
        self._agreement: AcceptedWelcome | None = None
        self._transport: Receiver | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"weights {self._name}", daemon=True)

    def start(self) -> None:
        """Says hello to the publisher and begins to listen; returns at once."""
        self._thread.start()

    @property
    def state(self) -> ReceiverState:
        """The receiver's state."""
        return self._rank_state.state

    @property
    def version(self) -> int | None:
        """The live version; None: the weights that the engine was started with, which no publisher has sent."""
        return self._rank_state.version

    @property
    def error(self) -> str | None:
        """Why the receiver is FAILED or POISONED."""
        return self._rank_state.error

    def swap(self, version: int) -> float:
        """Makes `version` live and reports that; returns the seconds that the swap took. Called by the step loop's
        thread, between two forward passes.

        Raises SwapRefused, with nothing changed, unless exactly `version` is ready. Errors of the shadow's swap are
        passed on: the rank is then poisoned, has reported that and must not be used before it is restarted.
        """
        if (why := self._rank_state.begin_swap(version)) is not None:
            raise SwapRefused(f"version {version} is not ready on {self._name}: {why}")
        before = self.version
        try:
            seconds = self._shadow.swap()
        except BaseException as error:
            self._poison(version, error)
            raise
        live = self._rank_state.end_swap()
        if before is not None and version > before:  # else the engine has more to do before the version may be used
            message = RankSwapped(version=version, attempt=live.attempt, publisher=live.publisher, gap_s=seconds)
            self._publisher.tell(message)
        return seconds

    def close(self) -> None:
        """Ends the thread, the transport and the link, within timeouts. The live weights stay. A second call does
        nothing."""
        self._closing.set()
        self._rank_state.close()
        if (transport := self._transport) is not None:
            with contextlib.suppress(TransportError):
                transport.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)
        self._publisher.close()

    # --- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._hello()
            while not self._closing.is_set():
                self._step()
        except Exception as error:  # noqa: BLE001 - end of the thread: stored for `swap`, logged; the engine continues
            if not self._closing.is_set():
                self._rank_state.fail(reason_of(error))
                log.error("%s receives no more weights: %s", self._name, self.error)
        finally:
            with contextlib.suppress(TransportError):
                self._drop_transport()
            self._publisher.close()

    def _step(self) -> None:
        """Handles the next message or the publisher's loss."""
        try:
            message = self._publisher.receive(POLL_S)
        except PeerLost as error:
            self._lose(error)
            return
        if message is not None:
            self._alone = False
            self._rank_state.await_swap()
            self._handle(message)

    def _handle(self, message: AnyMessage) -> None:
        match message:
            case _ if self.state is ReceiverState.POISONED:
                self._tell_poisoned(self.version)
            case Welcome():
                self._join(message)
            case Prepare():
                self._prepare(message)
            case Abort():
                self._abort(message)
            case Enquire():
                self._hello()
            case Refused():
                raise _Fatal(f"the publisher refused this rank: {message.reason}")
            case _:
                log.warning("%s ignores %s", self._name, type(message).__name__)

    def _hello(self) -> None:
        self._publisher.hello(self._rank_state.version, self._rank_state.publisher)

    def _lose(self, error: PeerLost) -> None:
        """The publisher is lost: says hello once, for its successor."""
        if self._alone:
            self._closing.wait(POLL_S)
            return
        self._alone = True
        log.warning("%s: %s; the live version %s stays", self._name, error, self.version)
        if self.state is ReceiverState.IDLE:
            self._drop_transport()
            self._rank_state.enter(ReceiverState.JOINING)
        if self.state is not ReceiverState.POISONED:
            self._hello()

    def _join(self, welcome: Welcome) -> None:
        """Takes manifest and transport from the publisher. Raises for an inconsistent Welcome."""
        agreement = AcceptedWelcome(welcome)
        self._discard_ready()
        self._drop_transport()
        self._agreement = agreement
        self._attempt = 0
        try:
            self._transport = self._connect(welcome)
        except TransportError as error:  # reported when a version comes: the publisher then sends another Welcome
            log.warning("%s: %s", self._name, error)
        except TornWeights as error:
            self._poison(self.version, error)
        self._rank_state.enter(ReceiverState.IDLE)  # no effect when POISONED

    def _prepare(self, message: Prepare) -> None:
        """Receives, verifies and builds a version, and answers with Ready or Failed."""
        if message.attempt <= self._attempt:
            log.warning("%s: attempt %d comes too late", self._name, message.attempt)
            return
        self._attempt = message.attempt
        phase = "prepare"
        try:
            manifest, transport = self._require(message)
            self._rank_state.enter(ReceiverState.RECEIVING, message)
            started = time.monotonic()
            buffer = self._shadow.begin(manifest)
            phase = "receive"
            transport.receive(buffer, manifest.buckets)
            phase = "verify"
            digest = verify(manifest, buffer, message.checksums)
            received = time.monotonic()
            if self._publisher.was_aborted(message):
                raise RuntimeError("aborted by the publisher")
            phase = "build"
            self._rank_state.enter(ReceiverState.BUILDING)
            self._shadow.build()
        except Exception as error:  # noqa: BLE001 - any error: it is reported to the publisher, and decoding continues
            # A transport that verifies by itself can be used again: its transfer succeeded.
            phase = "verify" if isinstance(error, ChecksumError) else phase
            self._fail(message, "fit" if isinstance(error, ManifestMismatch) else phase, error)
            return
        times = {"receive_s": received - started, "build_s": time.monotonic() - received}
        self._rank_state.enter(ReceiverState.READY)
        self._publisher.tell(Ready(version=message.version, attempt=message.attempt, digest=digest, **times))

    def _require(self, message: Prepare) -> tuple[Manifest, Receiver]:
        if self.state is not ReceiverState.IDLE or self._agreement is None or self._transport is None:
            held = f" with version {hand.version}" if (hand := self._rank_state.hand) is not None else ""
            transport = "" if self._transport else ", no transport"
            raise RuntimeError(f"can't begin version {message.version}: {self.state.name}{held}{transport}")
        self._agreement.require(message)
        if not self._rank_state.follows(message):
            raise RuntimeError(f"version {message.version} is not newer than the live version {self.version}")
        return self._agreement.manifest, self._transport

    def _fail(self, message: Prepare, phase: str, error: Exception) -> None:
        """Discards and reports. Before verification the other ranks and the publisher may wait for this rank in the
        transport: closing it releases them at once, and the publisher answers with a new Welcome. If no transfer is in
        progress the reason is sent first, or the publisher might only notice a broken transport."""
        if self._closing.is_set():
            return
        reason = reason_of(error)
        log.warning("%s: version %d failed in %s: %s", self._name, message.version, phase, reason)
        if phase == "receive":
            self._drop_transport()
        if isinstance(error, TornWeights):
            self._poison(message.version, error)
        else:
            if self._rank_state.hand is message and self.state in (ReceiverState.RECEIVING, ReceiverState.BUILDING):
                self._forget()
            about = {"version": message.version, "attempt": message.attempt}
            self._publisher.tell(Failed(**about, phase=phase, reason=reason, poisoned=False))
        if phase in ("prepare", "fit"):
            self._drop_transport()

    def _abort(self, message: Abort) -> None:
        """Releases that attempt and any before it, and always answers: the publisher waits for the answer."""
        self._attempt = max(self._attempt, message.attempt)
        hand = self._rank_state.hand
        if hand is not None and hand.attempt <= message.attempt and self._discard_ready():
            log.info("%s: version %d aborted: %s", self._name, message.version, message.reason)
        self._publisher.tell(Aborted(version=message.version, attempt=message.attempt))

    def _discard_ready(self) -> bool:
        """Discards a ready version, after which `swap` refuses it. False when none was ready (any more)."""
        if ready := self._rank_state.take_ready():
            self._forget()
        return ready

    def _forget(self) -> None:
        self._shadow.discard()
        self._rank_state.enter(ReceiverState.IDLE)

    def _poison(self, version: int | None, error: BaseException) -> None:
        self._rank_state.poison(reason_of(error))
        self._tell_poisoned(version)

    def _tell_poisoned(self, version: int | None) -> None:
        version = version or 0  # a failed swap has corrupted the weights, so there is a version
        self._publisher.tell(
            Failed(version=version, phase="commit", reason=self.error or "torn weights", poisoned=True)
        )

    def _drop_transport(self) -> None:
        """Raises TransportError when the old one may still write: the rank then receives nothing more."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
