"""The states of a worker rank's receiver and the transitions between them."""

from __future__ import annotations

import enum
import threading

from inflight.messages import Prepare


class ReceiverState(enum.Enum):
    """The state of a rank's receiver. Legal transitions; T is the receiver's thread, S the step loop's:

    JOINING   → IDLE       T: Welcome
    IDLE      → IDLE       T: Welcome again, with a new transport
    IDLE      → RECEIVING  T: Prepare
    RECEIVING → BUILDING   T: all bytes were received and verified
    BUILDING  → READY      T: the shadow is kernel-ready; Ready is sent
    RECEIVING, BUILDING → IDLE  T: something failed, or Abort came; the shadow was discarded first
    READY     → DISCARDING → IDLE  T: Abort, or a new Welcome
    READY     → SWAPPING   S: swap(version)
    SWAPPING  → IDLE       S: `version` is live; RankSwapped is sent
    SWAPPING  → POISONED   S: the swap raised: the live weights may be neither version; nothing more is received
    JOINING, IDLE, RECEIVING → POISONED  T: the last swap, which was deferred, turns out to have failed when the shadow
                           is to be filled or, for a new manifest, planned
    IDLE      → JOINING    T: the publisher was lost; hello is repeated, for one that restarts. (A READY rank repeats it
                           too but stays READY: the engine may have a Commit already.)
    any but SWAPPING, POISONED → FAILED  T: refused by the publisher, or an internal error; the live weights stay
    any       → CLOSED     close()

    While S is in SWAPPING, T waits: nothing else uses the shadow.
    """

    JOINING = enum.auto()
    IDLE = enum.auto()
    RECEIVING = enum.auto()
    BUILDING = enum.auto()
    READY = enum.auto()
    DISCARDING = enum.auto()
    SWAPPING = enum.auto()
    POISONED = enum.auto()
    FAILED = enum.auto()
    CLOSED = enum.auto()


LEGAL = {
    ReceiverState.JOINING: {ReceiverState.IDLE, ReceiverState.POISONED, ReceiverState.FAILED},
    ReceiverState.IDLE: {
        ReceiverState.IDLE,
        ReceiverState.RECEIVING,
        ReceiverState.JOINING,
        ReceiverState.POISONED,
        ReceiverState.FAILED,
    },
    ReceiverState.RECEIVING: {ReceiverState.BUILDING, ReceiverState.IDLE, ReceiverState.POISONED, ReceiverState.FAILED},
    ReceiverState.BUILDING: {ReceiverState.READY, ReceiverState.IDLE, ReceiverState.FAILED},
    ReceiverState.READY: {ReceiverState.DISCARDING, ReceiverState.SWAPPING, ReceiverState.FAILED},
    ReceiverState.DISCARDING: {ReceiverState.IDLE, ReceiverState.FAILED},
    ReceiverState.SWAPPING: {ReceiverState.IDLE, ReceiverState.POISONED},
    ReceiverState.POISONED: set(),
    ReceiverState.FAILED: set(),
    ReceiverState.CLOSED: set(),
}


class RankState:
    """State, live version and the version being received, under one lock that is never held during work.

    The step loop's thread calls `begin_swap`, `end_swap` and `poison`, the receiver's thread all methods.
    """

    def __init__(self, version: int | None, publisher: str) -> None:
        self.state = ReceiverState.JOINING
        self.version = version
        """Number of the live version, given by `publisher`; None: the weights that the engine was started with."""
        self.publisher = publisher
        self.hand: Prepare | None = None
        """The version being received or ready; None when there is none."""
        self.error: str | None = None
        """Why it is FAILED or POISONED."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def follows(self, message: Prepare) -> bool:
        """Whether a version may replace the live one: a higher number, or the same number of another publisher, whose
        weights may differ."""
        if self.version is None or message.version > self.version:
            return True
        return message.version == self.version and message.publisher != self.publisher

    def enter(self, state: ReceiverState, hand: Prepare | None = None) -> None:
        """Makes a transition of the receiver's thread; CLOSED and POISONED are never left."""
        with self._lock:
            if self.state in (ReceiverState.CLOSED, ReceiverState.POISONED):
                return
            if state not in LEGAL[self.state]:
                raise AssertionError(f"{self.state.name} → {state.name}")
            self.state = state
            if hand is not None:
                self.hand = hand
            elif state in (ReceiverState.IDLE, ReceiverState.JOINING, ReceiverState.FAILED):
                self.hand = None

    def await_swap(self) -> None:
        """Waits until the step loop is not in a swap. It can begin one only in READY, which only our caller enters."""
        with self._lock:
            self._await_swap()

    def take_ready(self) -> bool:
        """READY → DISCARDING, after which no swap can begin. False when no version is ready (any more)."""
        with self._lock:
            self._await_swap()
            if self.state is not ReceiverState.READY:
                return False
            self.state = ReceiverState.DISCARDING
            return True

    def fail(self, error: str) -> None:
        """→ FAILED, once no swap is in progress."""
        with self._lock:
            self._await_swap()
            self.error = error
            if self.state not in (ReceiverState.CLOSED, ReceiverState.POISONED):
                self.state = ReceiverState.FAILED
                self.hand = None

    def begin_swap(self, version: int) -> str | None:
        """READY → SWAPPING; or the reason why not, with nothing changed."""
        with self._lock:
            if self.state is ReceiverState.READY and self.hand is not None and self.hand.version == version:
                self.state = ReceiverState.SWAPPING
                return None
            held = f", version {self.hand.version} in hand" if self.hand is not None else ""
            return self.state.name + held + (f" ({self.error})" if self.error else "")

    def end_swap(self) -> Prepare:
        """SWAPPING → IDLE: the version in hand, which is returned, is live."""
        with self._lock:
            live = self.hand
            assert live is not None, "begin_swap requires one, and only the step loop's thread takes it from SWAPPING"
            self.publisher = live.publisher
            self.version = live.version
            self.hand = None
            if self.state is ReceiverState.SWAPPING:
                self.state = ReceiverState.IDLE
            self._changed.notify_all()
            return live

    def poison(self, error: str) -> None:
        """→ POISONED: nothing may be claimed about the live weights."""
        with self._lock:
            self.error = error
            if self.state is not ReceiverState.CLOSED:
                self.state = ReceiverState.POISONED
            self._changed.notify_all()

    def close(self) -> None:
        """→ CLOSED."""
        with self._lock:
            self.state = ReceiverState.CLOSED
            self._changed.notify_all()

    def _await_swap(self) -> None:
        while self.state is ReceiverState.SWAPPING:
            self._changed.wait(1.0)
