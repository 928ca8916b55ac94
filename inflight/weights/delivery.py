"""What the publisher knows of one generator: who is there, what it holds, and how far a version has come.

No sockets, no threads, no clock of its own: the publisher calls in under its lock and does what follows from it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from inflight.messages import Ready
from inflight.weights.channel import Channel


class State(enum.Enum):
    """How a generator stands to the version that is out. Legal transitions:

    ABSENT     → IDLE        all ranks and the engine have said hello and hold the same version
    IDLE       → SENDING     a version was published
    SENDING    → COMMITTING  every rank is Ready; Commit was sent
    SENDING    → ABORTING    a rank failed, the transport broke, or a rank did not answer in time; Abort was sent
    ABORTING   → IDLE        every rank has answered; a broken transport was replaced
    ABORTING   → STALLED     some have not by the deadline: publishing goes on without this generator
    STALLED    → IDLE        they have, later
    COMMITTING → IDLE        Committed, or the engine refused and swapped nothing
    COMMITTING → UNSURE      no answer in time: it may hold either version; nothing is claimed, nothing is sent
    UNSURE     → IDLE        the answer came, later
    any        → POISONED    a swap failed halfway: it may hold parts of two versions
    any        → ABSENT      a member was lost or said hello again (a restarted process does); all must say it then
    """

    ABSENT = enum.auto()
    IDLE = enum.auto()
    SENDING = enum.auto()
    ABORTING = enum.auto()
    STALLED = enum.auto()
    COMMITTING = enum.auto()
    UNSURE = enum.auto()
    POISONED = enum.auto()


_LEGAL = {
    State.ABSENT: {State.IDLE},
    State.IDLE: {State.SENDING},
    State.SENDING: {State.COMMITTING, State.ABORTING},
    State.ABORTING: {State.IDLE, State.STALLED},
    State.STALLED: {State.IDLE},
    State.COMMITTING: {State.IDLE, State.UNSURE},
    State.UNSURE: {State.IDLE},
    State.POISONED: set(),
}
UNSETTLED = (State.SENDING, State.ABORTING, State.COMMITTING)
"""States in which a version's outcome is open and will be decided by a deadline at the latest."""


@dataclass(frozen=True)
class Swap:
    """A version that a generator has committed."""

    generator: str
    version: int
    transfer_s: float
    """Slowest rank: Prepare's arrival to all bytes verified."""
    build_s: float
    """Slowest rank: bytes to kernel-ready shadow."""
    ready_s: float
    """Packed to the last rank's Ready: the publisher's checksums, transfer and build."""
    commit_s: float
    """Commit sent to Committed."""
    gap_s: float
    """The longest time that a rank's step loop stood still."""
    running: int
    """Sequences that were unfinished at the swap."""


@dataclass(frozen=True)
class Failure:
    """A version that a generator did not get (or may have half: phase `commit`)."""

    generator: str
    version: int
    phase: str
    """`absent` when it was not sent at all, else that of messages.Failed."""
    reason: str


@dataclass
class Delivery:
    """One generator."""

    generator: str
    world_size: int
    state: State = State.ABSENT
    why: str = "no hello yet"
    """Why it is in a state other than IDLE, for people."""
    held: dict[str, int] = field(default_factory=dict)
    """Peer → the version it holds, of those that said hello and are not lost."""
    version: int | None = None
    """The version that is out, until it is decided and all ranks have answered."""
    answers: dict[str, Ready | None] = field(default_factory=dict)
    """Rank → its Ready for `version`, None for Failed."""
    broken: bool = False
    """The transport can't be used again."""
    deadline: float | None = None
    prepared: bool = False
    """Prepare was sent, so every rank owes an answer."""
    released: float = 0.0
    commit_started: float = 0.0
    channel: Channel | None = None

    @property
    def ranks(self) -> list[str]:
        """Identities of the worker ranks."""
        return [f"{self.generator}.r{rank}" for rank in range(self.world_size)]

    @property
    def engine(self) -> str:
        """Identity of the engine."""
        return f"{self.generator}.engine"

    @property
    def missing(self) -> list[str]:
        """Members that have not said hello or were lost."""
        return [peer for peer in (*self.ranks, self.engine) if peer not in self.held]

    @property
    def silent(self) -> list[str]:
        """Ranks that have not answered the Prepare of `version`."""
        return [peer for peer in self.ranks if peer not in self.answers]

    def enter(self, state: State, why: str = "") -> None:
        """The one place that changes `state`."""
        if state not in (State.ABSENT, State.POISONED) and state not in _LEGAL[self.state]:
            raise AssertionError(f"{self.generator}: {self.state.name} → {state.name}")
        self.state, self.why = state, why
        if state in (State.IDLE, State.ABSENT, State.POISONED):
            self.version, self.broken = None, False
            self.answers.clear()
        if state not in UNSETTLED:
            self.deadline = None

    def begin(self, version: int, now: float, deadline: float) -> None:
        """A version is out: IDLE → SENDING."""
        self.enter(State.SENDING, f"version {version} is being sent")
        self.version, self.released, self.deadline, self.prepared = version, now, deadline, False

    def all_ready(self) -> bool:
        """Whether every rank holds the version in its shadow, verified."""
        return not self.silent and all(self.answers.values())

    def swap(self, gap_s: float, running: int, now: float) -> Swap:
        """The record of the version that was just committed."""
        ready = [answer for answer in self.answers.values() if answer is not None]
        assert self.version is not None
        return Swap(
            generator=self.generator,
            version=self.version,
            transfer_s=max(answer.receive_s for answer in ready),
            build_s=max(answer.build_s for answer in ready),
            ready_s=self.commit_started - self.released,
            commit_s=now - self.commit_started,
            gap_s=gap_s,
            running=running,
        )
