"""The states of a generator at the publisher and the transitions between them."""

from __future__ import annotations

import enum


class ReplicaState(enum.Enum):
    """A generator's state in the delivery of versions. Legal transitions:

    ABSENT     → IDLE        all ranks and the engine of one start have said hello and hold the same version of this
                             publisher, or none: what another publisher sent them does not count
    IDLE       → SENDING     it does not hold the newest version: one was published, it has joined, or failed before
    SENDING    → COMMITTING  every rank is Ready; Commit was sent
    SENDING    → READY       every rank is Ready, but the generator's version is pinned (pin.py)
    READY      → COMMITTING  the pin has ended; Commit was sent
    READY      → ABORTING    a newer version was published, which is sent in its place
    SENDING    → ABORTING    a rank failed, the transport broke, a rank did not answer in time, or a newer version is
                             waiting; Abort was sent
    ABORTING   → IDLE        every rank has released the version; a broken transport was replaced
    ABORTING   → STALLED     some have not by the deadline; Abort is repeated
    STALLED    → IDLE        they have released it later
    COMMITTING → IDLE        every rank has said RankSwapped, or the engine has said Committed
    COMMITTING → ABORTING    the engine refused and swapped nothing
    COMMITTING → UNSURE      no answer in time: it may hold either version; nothing is claimed, Commit is repeated
    UNSURE     → IDLE, ABORTING  one of these came later
    POISONED, INCOMPATIBLE → ABSENT  it was restarted: a hello of another incarnation
    any        → POISONED    a swap failed halfway: it may hold parts of two versions
    any other  → INCOMPATIBLE  its model does not fit the manifest (another shape or name), its size is not the
                             configured one, it holds a version that this publisher has not reached, or it was refused
    any other  → ABSENT      a member was lost, or a hello of another incarnation came; all must say hello then
    """

    ABSENT = enum.auto()
    IDLE = enum.auto()
    SENDING = enum.auto()
    READY = enum.auto()
    ABORTING = enum.auto()
    STALLED = enum.auto()
    COMMITTING = enum.auto()
    UNSURE = enum.auto()
    POISONED = enum.auto()
    INCOMPATIBLE = enum.auto()

    @property
    def settled(self) -> bool:
        """Whether no version is out whose outcome a deadline will decide. A version that waits for the end of a pin was
        delivered."""
        return self not in (ReplicaState.SENDING, ReplicaState.ABORTING, ReplicaState.COMMITTING)

    @property
    def present(self) -> bool:
        """Whether the generator is present."""
        return self not in _OUT

    @property
    def certain(self) -> bool:
        """Whether it is certain which version the engine stamps."""
        return self.present and self is not ReplicaState.UNSURE

    @property
    def routed(self) -> bool:
        """Whether it may get requests. STALLED and UNSURE are excluded: a generator that does not answer the publisher
        may not answer requests either."""
        return self.certain and self is not ReplicaState.STALLED


_OUT = {ReplicaState.ABSENT, ReplicaState.POISONED, ReplicaState.INCOMPATIBLE}
LEGAL = {
    ReplicaState.ABSENT: _OUT | {ReplicaState.IDLE},
    ReplicaState.IDLE: _OUT | {ReplicaState.SENDING},
    ReplicaState.SENDING: _OUT | {ReplicaState.READY, ReplicaState.COMMITTING, ReplicaState.ABORTING},
    ReplicaState.READY: _OUT | {ReplicaState.COMMITTING, ReplicaState.ABORTING},
    ReplicaState.ABORTING: _OUT | {ReplicaState.IDLE, ReplicaState.STALLED},
    ReplicaState.STALLED: _OUT | {ReplicaState.IDLE},
    ReplicaState.COMMITTING: _OUT | {ReplicaState.IDLE, ReplicaState.ABORTING, ReplicaState.UNSURE},
    ReplicaState.UNSURE: _OUT | {ReplicaState.IDLE, ReplicaState.ABORTING},
    ReplicaState.POISONED: {ReplicaState.POISONED, ReplicaState.ABSENT},
    ReplicaState.INCOMPATIBLE: {ReplicaState.INCOMPATIBLE, ReplicaState.POISONED, ReplicaState.ABSENT},
}
