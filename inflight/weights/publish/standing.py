"""One generator's state, the reason for it, and the version whose outcome is still to be recorded."""

from __future__ import annotations

import logging

from inflight.weights.publish.events import Event, EventLog, Failure, Left, Superseded
from inflight.weights.publish.states import LEGAL, ReplicaState

log = logging.getLogger(__name__)


class Standing:
    """Changes of state are checked against LEGAL; each version gets one outcome in the event log."""

    def __init__(self, generator: str, events: EventLog, now: float, *, expected: bool = True) -> None:
        """`expected`: versions that it does not get are recorded before it has joined for the first time, too."""
        self.generator = generator
        self.state = ReplicaState.ABSENT
        self.why = "no hello yet"
        """The reason for a state other than IDLE, as text."""
        self.since = now
        """When it entered its state, in the clock's seconds."""
        self.asked_to_end = False
        """It has left because it was asked to end, and has not come back."""
        self.due: float | None = now
        """Time at which the state's next step must be taken if no message comes before; None: never."""
        self._expected = expected
        self._owed: int | None = None
        """The newest version for which no event is recorded yet."""
        self._events = events

    def enter(self, state: ReplicaState, now: float, why: str = "", *, due: float | None = None) -> None:
        """Changes `state`; nothing else does."""
        if state not in LEGAL[self.state]:
            raise AssertionError(f"{self.generator}: {self.state.name} → {state.name}")
        self.state = state
        self.why = why
        self.since = now
        self.due = due
        self._expected = True

    def owe(self, version: int, out: int | None) -> None:
        """A version was released; `out` is the one that is being sent or committed, None: there is none."""
        if not self._expected:
            return
        committing = self.state is ReplicaState.COMMITTING and self._owed == out
        if self._owed is not None and not committing:
            self.pass_over(self._owed, f"{self.state.name}, {self.why}")
        self._owed = version
        if not self.state.routed:
            self.miss()

    def miss(self) -> None:
        """Records that the version it was to get is missed because of its state."""
        if self._owed is not None:
            self.fail(self._owed, "absent", f"{self.state.name}, {self.why}")

    def fail(self, version: int, phase: str, reason: str) -> None:
        """Records a version that the generator does not get (now: it may catch up)."""
        level = logging.INFO if self.asked_to_end else logging.WARNING
        log.log(level, "%s does not get version %d (%s): %s", self.generator, version, phase, reason)
        left = Left(self.generator, version, reason) if self.asked_to_end else None
        self._note(left or Failure(self.generator, version, phase, reason))

    def pass_over(self, version: int, reason: str) -> None:
        """Records a version that the generator does not get because there is a newer one."""
        log.info("%s is not sent version %d: superseded, %s", self.generator, version, reason)
        self._note(Superseded(self.generator, version, reason))

    def swap(self, event: Event) -> None:
        """Records a commit; an older version without an outcome is settled with it."""
        self._events.append(event)
        if self._owed is not None and self._owed <= event.version:
            self._owed = None

    def _note(self, event: Failure | Superseded | Left) -> None:
        self._events.append(event)
        if self._owed == event.version:
            self._owed = None
