"""The states of a worker rank's receiver and the transitions between them."""

from __future__ import annotations

import enum


class State(enum.Enum):
    """What a rank is doing. Legal transitions; T is the receiver's thread, S the step loop's:

    JOINING   → IDLE       T: Welcome
    IDLE      → IDLE       T: Welcome again, with a new transport
    IDLE      → RECEIVING  T: Prepare
    RECEIVING → BUILDING   T: all bytes came and are those that were sent
    BUILDING  → READY      T: the shadow is kernel-ready; Ready is sent
    RECEIVING, BUILDING → IDLE  T: something failed, or Abort came; the shadow was discarded first
    READY     → DISCARDING → IDLE  T: Abort, or a new Welcome
    READY     → SWAPPING   S: swap(version)
    SWAPPING  → IDLE       S: `version` is live
    SWAPPING  → POISONED   S: the swap raised: the live weights may be neither version; nothing more is received
    any but SWAPPING, POISONED → JOINING  T: the publisher was lost; hello is said again, for one that restarts
    any but POISONED → FAILED  T: refused by the publisher, or an error of our own; the live weights stay
    any       → CLOSED     close()
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
    State.JOINING: {State.IDLE},
    State.IDLE: {State.IDLE, State.RECEIVING, State.JOINING},
    State.RECEIVING: {State.BUILDING, State.IDLE, State.JOINING},
    State.BUILDING: {State.READY, State.IDLE, State.JOINING},
    State.READY: {State.DISCARDING, State.SWAPPING},
    State.DISCARDING: {State.IDLE, State.JOINING},
    State.SWAPPING: {State.IDLE, State.POISONED},
    State.POISONED: set(),
    State.FAILED: set(),
    State.CLOSED: set(),
}
