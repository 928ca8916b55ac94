"""What the publisher knows of one generator: who is there, what it holds, and how far a version has come.

No sockets, no threads, no clock of its own: the publisher calls in under its lock and does what follows from it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from inflight.messages import Ready
from inflight.weights.publish.channel import Channel


class State(enum.Enum):
    """How a generator stands to the versions that are published. Legal transitions:

    ABSENT     → IDLE        all ranks and the engine of one start have said hello and hold the same version of this
                             publisher, or none: what another publisher sent them does not count
    IDLE       → SENDING     it does not hold the newest version: one was published, it has joined, or failed before
    SENDING    → COMMITTING  every rank is Ready; Commit was sent
    SENDING    → ABORTING    a rank failed, the transport broke, a rank did not answer in time, or a newer version is
                             waiting; Abort was sent
    ABORTING   → IDLE        every rank has let go; a broken transport was replaced
    ABORTING   → STALLED     some have not by the deadline; Abort is repeated
    STALLED    → IDLE        they have, later
    COMMITTING → IDLE        Committed
    COMMITTING → ABORTING    the engine refused and swapped nothing
    COMMITTING → UNSURE      no answer in time: it may hold either version; nothing is claimed, Commit is repeated
    UNSURE     → IDLE, ABORTING  the answer came, later
    POISONED, INCOMPATIBLE → ABSENT  it was restarted: a hello of another incarnation
    any        → POISONED    a swap failed halfway: it may hold parts of two versions
    any other  → INCOMPATIBLE  its model has no use for what is published (another shape or name), its size is not the
                             configured one, it holds a version that this publisher has not reached, or it was refused
    any other  → ABSENT      a member was lost, or a hello of another incarnation came; all must say hello then
    """

    ABSENT = enum.auto()
    IDLE = enum.auto()
    SENDING = enum.auto()
    ABORTING = enum.auto()
    STALLED = enum.auto()
    COMMITTING = enum.auto()
    UNSURE = enum.auto()
    POISONED = enum.auto()
    INCOMPATIBLE = enum.auto()


_OUT = {State.ABSENT, State.POISONED, State.INCOMPATIBLE}
LEGAL = {
    State.ABSENT: _OUT | {State.IDLE},
    State.IDLE: _OUT | {State.SENDING},
    State.SENDING: _OUT | {State.COMMITTING, State.ABORTING},
    State.ABORTING: _OUT | {State.IDLE, State.STALLED},
    State.STALLED: _OUT | {State.IDLE},
    State.COMMITTING: _OUT | {State.IDLE, State.ABORTING, State.UNSURE},
    State.UNSURE: _OUT | {State.IDLE, State.ABORTING},
    State.POISONED: {State.POISONED, State.ABSENT},
    State.INCOMPATIBLE: {State.INCOMPATIBLE, State.POISONED, State.ABSENT},
}
UNSETTLED = (State.SENDING, State.ABORTING, State.COMMITTING)
"""States in which a version's outcome is open and will be decided by a deadline at the latest."""
GONE = (State.ABSENT, State.POISONED, State.INCOMPATIBLE)
"""States of a generator that takes no part."""
UNCERTAIN = (*GONE, State.UNSURE)
"""States in which nothing is claimed about what it holds."""


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
    """`absent` when it was not sent, `finite` when it holds NaN or Inf, `fit` when the engine has no use for what is
    published, else that of messages.Failed."""
    reason: str


@dataclass(frozen=True)
class Superseded:
    """A version that a generator was not sent, or not to its end, because it can have a newer one."""

    generator: str
    version: int
    reason: str


@dataclass(frozen=True)
class Left:
    """A version that a generator did not get because it was asked to end, by whoever stops or restarts it."""

    generator: str
    version: int
    reason: str


Event = Swap | Failure | Superseded | Left
"""What became of a version at a generator."""


@dataclass
class Delivery:
    """One generator."""

    generator: str
    world_size: int
    state: State = State.ABSENT
    asked_to_end: bool = False
    """It has left for that reason, and is not back yet."""
    why: str = "no hello yet"
    """Why it is in a state other than IDLE, for people."""
    since: float = 0.0
    """When it entered its state."""
    due: float | None = 0.0
    """When the state's next step must be taken if nothing happens."""
    incarnation: str | None = None
    """Of the members that are heard. None before the first hello."""
    replaced: set[str] = field(default_factory=set)
    """Earlier incarnations: what they say does not count."""
    url: str = ""
    held: dict[str, int | None] = field(default_factory=dict)
    """Peer → the version of this publisher that it holds, None: it holds none; of those that said hello and are not
    lost."""
    caught_up: bool = False
    """Since it joined it has once held what was the newest version then."""
    owed: int | None = None
    """The newest version for which neither a Swap nor a Failure is recorded yet."""
    version: int | None = None
    """The version that is out, until it is decided and all ranks have let go."""
    attempt: int = 0
    """Number of the Prepare of `version`."""
    digest: str | None = None
    """Of the bytes that Prepare announced; None: it was not sent yet, so no rank knows of the attempt."""
    ready: dict[str, Ready] = field(default_factory=dict)
    let_go: set[str] = field(default_factory=set)
    """Ranks that have answered the Abort."""
    broken: bool = False
    """The transport can't be used again."""
    failures: int = 0
    """Attempts that failed since the last commit."""
    trouble: str = ""
    """Why the last of them failed."""
    retry_at: float = 0.0
    """When the newest version may be sent (again)."""
    released: float = 0.0
    commit_started: float = 0.0
    channel: Channel | None = None

    @property
    def reason(self) -> str:
        """Why it does not hold the newest version, for people; empty when nothing is known to keep it from that."""
        return self.why or self.trouble

    @property
    def ranks(self) -> list[str]:
        """Identities of the worker ranks."""
        return [f"{self.generator}.r{rank}" for rank in range(self.world_size)]

    @property
    def engine(self) -> str:
        """Identity of the engine."""
        return f"{self.generator}.engine"

    @property
    def members(self) -> list[str]:
        """Ranks and engine."""
        return [*self.ranks, self.engine]

    @property
    def missing(self) -> list[str]:
        """Members that have not said hello or were lost."""
        return [peer for peer in self.members if peer not in self.held]

    @property
    def silent(self) -> list[str]:
        """Ranks that owe an answer: to Abort when there was one, else to Prepare."""
        answered = self.let_go if self.state in (State.ABORTING, State.STALLED) else self.ready
        return [peer for peer in self.ranks if peer not in answered]

    @property
    def committed(self) -> int | None:
        """The version of this publisher that its engine stamps; None when it has none, or that is not certain."""
        return None if self.state in UNCERTAIN else self.held[self.engine]

    def enter(self, state: State, now: float, why: str = "", *, due: float | None = None) -> None:
        """The one place that changes `state`."""
        if state not in LEGAL[self.state]:
            raise AssertionError(f"{self.generator}: {self.state.name} → {state.name}")
        self.state, self.why, self.since, self.due = state, why, now, due
        if state in (State.IDLE, *GONE):
            self.version, self.digest, self.broken = None, None, False
            self.ready.clear()
            self.let_go.clear()

    def begin(self, version: int, attempt: int, now: float, due: float) -> None:
        """A version is out: IDLE → SENDING."""
        self.enter(State.SENDING, now, f"version {version} is being sent", due=due)
        self.version, self.attempt, self.released = version, attempt, now

    def commit(self, version: int) -> None:
        """Its engine has said that all its members hold `version`."""
        self.held = dict.fromkeys(self.held, version)
        self.caught_up, self.failures, self.trouble, self.retry_at = True, 0, "", 0.0

    def swap(self, gap_s: float, running: int, now: float) -> Swap:
        """The record of the version that was just committed."""
        assert self.version is not None
        return Swap(
            generator=self.generator,
            version=self.version,
            transfer_s=max(answer.receive_s for answer in self.ready.values()),
            build_s=max(answer.build_s for answer in self.ready.values()),
            ready_s=self.commit_started - self.released,
            commit_s=now - self.commit_started,
            gap_s=gap_s,
            running=running,
        )
