"""A worker rank's end of publishing: a thread that fills the shadow while the step loop decodes, and the swap."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable

from inflight.bus import BusError, Link, PeerLost
from inflight.messages import Abort, AnyMessage, Failed, Manifest, Prepare, RankHello, Ready, Refused, Welcome
from inflight.weights import plan
from inflight.weights.pack import verify
from inflight.weights.rank_state import LEGAL, State
from inflight.weights.shadow import Shadow
from inflight.weights.transport import make_receiver
from inflight.weights.transport.base import Receiver

log = logging.getLogger(__name__)

POLL_S = 0.25
"""How often the thread looks whether it is to close; messages wake it at once."""
JOIN_S = 5.0
MAX_REASON = 1000


class SwapRefused(RuntimeError):
    """A swap to a version that this rank has not got ready; the live weights are untouched."""


class _Fatal(RuntimeError):
    """Ends the receiver; the engine goes on with the weights it has."""


class WeightReceiver:
    """Receives versions into `shadow` in a thread of its own; `swap` makes one live from the step loop's thread.

    The lock guards `state` and the versions alone and is never held over work: `swap` waits for no transfer. All
    messages are handled in order by one thread, which during a transfer is in the transport; an Abort that comes
    meanwhile takes effect when the transfer has ended, which the publisher can bring about by closing its end.
    """

    def __init__(
        self,
        link: Link,
        shadow: Shadow,
        *,
        generator: str,
        rank: int,
        world_size: int,
        version: int,
        connect: Callable[[Welcome], Receiver] = make_receiver,
    ) -> None:
        """`version` is what the engine loaded. The receiver owns `link` and closes it."""
        self.version = version
        """What is live."""
        self.state = State.JOINING
        self.error: str | None = None
        """Why the receiver FAILED or was POISONED."""
        self._hand: int | None = None
        """The version being received or ready; None when there is none."""
        self._link, self._shadow, self._connect = link, shadow, connect
        self._generator, self._rank, self._world_size = generator, rank, world_size
        self._manifest: Manifest | None = None
        self._manifest_digest = ""
        self._transport: Receiver | None = None
        self._pending: collections.deque[AnyMessage] = collections.deque()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"weights {generator}.r{rank}", daemon=True)

    def start(self) -> None:
        """Says hello to the publisher and begins to listen; returns at once."""
        self._thread.start()

    def swap(self, version: int) -> float:
        """Makes `version` live; seconds that it took. Called by the step loop's thread, between two forward passes.

        Raises SwapRefused, having touched nothing, unless exactly `version` is ready. What the shadow's swap raises is
        passed on: the rank is then poisoned, has told the publisher so and must not be used before it is restarted.
        """
        with self._lock:
            if self.state is not State.READY or self._hand != version:
                held = f", version {self._hand} in hand" if self._hand is not None else ""
                why = f" ({self.error})" if self.error else ""
                raise SwapRefused(
                    f"version {version} is not ready on {self._generator}.r{self._rank}: {self.state.name}{held}{why}"
                )
            self.state = State.SWAPPING
        try:
            seconds = self._shadow.swap()
        except BaseException as error:
            with self._lock:
                self.error = _text(error)
                if self.state is not State.CLOSED:
                    self.state = State.POISONED
            self._tell(Failed(version=version, phase="commit", reason=self.error, poisoned=True))
            raise
        with self._lock:
            self.version, self._hand = version, None
            if self.state is State.SWAPPING:
                self.state = State.IDLE
        return seconds

    def close(self) -> None:
        """Ends the thread, the transport and the link; bounded. The live weights stay. A second call does nothing."""
        self._closing.set()
        with self._lock:
            self.state = State.CLOSED
        if (transport := self._transport) is not None:
            transport.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)
        self._link.close()

    # --- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._hello()
            while not self._closing.is_set():
                try:
                    message = self._pending.popleft() if self._pending else self._link.receive(POLL_S)
                except PeerLost as error:
                    self._rejoin(error)
                else:
                    if message is not None:
                        self._handle(message)
        except Exception as error:  # noqa: BLE001 - nobody above: kept for swap's text, logged, and the engine lives on
            if not self._closing.is_set():
                self.error = _text(error)
                self._enter(State.FAILED)
                log.error("%s.r%d receives no more weights: %s", self._generator, self._rank, self.error)
        finally:
            self._drop_transport()
            self._link.close()  # the publisher finds this rank lost

    def _handle(self, message: AnyMessage) -> None:
        match message:
            case Welcome():
                self._join(message)
            case Prepare():
                self._prepare(message)
            case Abort():
                self._abort(message)
            case Refused():
                raise _Fatal(f"the publisher refused this rank: {message.reason}")
            case _:
                log.warning("%s.r%d ignores %s", self._generator, self._rank, type(message).__name__)

    def _hello(self) -> None:
        self._link.send(
            RankHello(generator=self._generator, rank=self._rank, world_size=self._world_size, version=self.version)
        )

    def _rejoin(self, error: PeerLost) -> None:
        """The publisher is gone: forgets what it began, and says hello once, for the one that comes next."""
        if self.state in (State.JOINING, State.SWAPPING, State.POISONED, State.CLOSED):
            self._closing.wait(POLL_S)
            return
        log.warning("%s.r%d: %s; the live version %d stays", self._generator, self._rank, error, self.version)
        self._discard_ready()
        self._drop_transport()
        self._enter(State.JOINING)
        self._hello()

    def _join(self, welcome: Welcome) -> None:
        """Takes manifest and transport from the publisher. Raises for one that can't be trusted."""
        plan.check(welcome.manifest)
        if plan.digest(welcome.manifest) != welcome.manifest_digest:
            raise _Fatal("the publisher's manifest does not have the digest that it names")
        if welcome.transport_rank >= welcome.transport_size:
            raise _Fatal(f"transport rank {welcome.transport_rank} of {welcome.transport_size}")
        self._discard_ready()
        self._drop_transport()
        self._manifest, self._manifest_digest = welcome.manifest, welcome.manifest_digest
        self._transport = self._connect(welcome)
        self._enter(State.IDLE)

    def _prepare(self, message: Prepare) -> None:
        """Receives, verifies and builds a version. Every Prepare is answered once, with Ready or Failed: the publisher
        counts on it to know when a rank has left a transfer."""
        phase = "prepare"
        try:
            manifest, transport = self._require(message)
            self._enter(State.RECEIVING, message.version)
            started = time.monotonic()
            buffer = self._shadow.begin(manifest)
            phase = "receive"
            transport.receive(buffer, manifest.buckets)
            phase = "verify"
            digest = verify(manifest, buffer, message.checksums)
            received = time.monotonic()
            if self._was_aborted(message.version):
                raise RuntimeError("aborted by the publisher")
            phase = "build"
            self._enter(State.BUILDING)
            self._shadow.build()
        except Exception as error:  # noqa: BLE001 - whatever it is, the publisher must hear of it and decoding goes on
            self._fail(message.version, phase, error)
            return
        built = time.monotonic()
        self._enter(State.READY)
        self._tell(
            Ready(version=message.version, digest=digest, receive_s=received - started, build_s=built - received)
        )

    def _require(self, message: Prepare) -> tuple[Manifest, Receiver]:
        if self.state is not State.IDLE or self._manifest is None or self._transport is None:
            held = f" with version {self._hand}" if self._hand is not None else ""
            transport = "" if self._transport else ", no transport"
            raise RuntimeError(f"can't begin version {message.version}: {self.state.name}{held}{transport}")
        if message.manifest_digest != self._manifest_digest:
            raise RuntimeError(f"version {message.version} has another manifest than this rank was welcomed with")
        if message.version <= self.version:
            raise RuntimeError(f"version {message.version} is not newer than the live version {self.version}")
        return self._manifest, self._transport

    def _fail(self, version: int, phase: str, error: Exception) -> None:
        """Discards, then reports. Before verification the other ranks and the publisher may wait for us in the
        transport: closing it lets them go at once, and the publisher answers with a new Welcome."""
        if self._closing.is_set():
            return
        log.warning("%s.r%d: version %d failed in %s: %s", self._generator, self._rank, version, phase, _text(error))
        if phase in ("prepare", "receive"):
            self._drop_transport()
        if self._hand == version and self.state in (State.RECEIVING, State.BUILDING):
            self._forget()
        self._tell(Failed(version=version, phase=phase, reason=_text(error), poisoned=False))

    def _abort(self, message: Abort) -> None:
        if self._hand == message.version and self._discard_ready():
            log.info("%s.r%d: version %d aborted: %s", self._generator, self._rank, message.version, message.reason)

    def _was_aborted(self, version: int) -> bool:
        """Whether an Abort of `version` is among what came during the transfer; keeps all of it, in order."""
        while (message := self._link.receive(0)) is not None:
            self._pending.append(message)
        return any(isinstance(message, Abort) and message.version == version for message in self._pending)

    def _discard_ready(self) -> bool:
        """Takes a ready version out of reach of `swap`, then discards it. False when none was ready."""
        with self._lock:
            if self.state is not State.READY:
                return False
            self.state = State.DISCARDING
        self._forget()
        return True

    def _forget(self) -> None:
        self._shadow.discard()
        self._enter(State.IDLE)

    def _drop_transport(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def _enter(self, state: State, version: int | None = None) -> None:
        """The one place that changes state outside of `swap` and `_discard_ready`."""
        with self._lock:
            if self.state in (State.CLOSED, State.POISONED):
                return
            if state is not State.FAILED and state not in LEGAL[self.state]:
                raise AssertionError(f"{self.state.name} → {state.name}")
            self.state = state
            if version is not None:
                self._hand = version
            elif state in (State.IDLE, State.JOINING, State.FAILED):
                self._hand = None

    def _tell(self, message: AnyMessage) -> None:
        """Sends; a link that is closed or gone is the publisher's to notice."""
        try:
            self._link.send(message)
        except BusError as error:
            log.warning("%s.r%d: %s not sent: %s", self._generator, self._rank, type(message).__name__, error)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_REASON]
