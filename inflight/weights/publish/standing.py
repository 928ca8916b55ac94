"""One generator's state, the reason for it, and the version whose outcome is still to be recorded."""

from __future__ import annotations

import dataclasses
import logging

from inflight.weights.publish.events import EventLog, Failure, Left, Superseded, Swap
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
        self.asked_to_end = False
        """It has left because it was asked to end, and has not come back."""
        self.due: float | None = now
        """Time at which the state's next step must be taken if no message comes before; None: never."""
        self._expected = expected
        self._owed: int | None = None
        """The newest version that has no outcome yet."""
        self.unreported: Swap | None = None
        """A version that was committed, and is recorded when the engine's answer with its figures comes."""
        self._report_due = 0.0
        self._events = events

    def enter(self, state: ReplicaState, now: float, why: str = "", *, due: float | None = None) -> None:
        """Changes `state`; nothing else does."""
        if state not in LEGAL[self.state]:
            raise AssertionError(f"{self.generator}: {self.state.name} → {state.name}")
        self.state = state
        self.why = why
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

    def swap(self, event: Swap, due: float) -> None:
        """A version was committed; an older one without an outcome is settled with it. It is recorded when `figures`
        come, and without them at `due`, in the clock's seconds."""
        self.report()
        self.unreported = event
        self._report_due = due
        if self._owed is not None and self._owed <= event.version:
            self._owed = None

    def figures(self, version: int, gap_s: float, running: int) -> bool:
        """Records a version with the engine's figures; False when it was recorded already, or never committed."""
        event = self.unreported
        if event is None or event.version != version:
            return False
        self.unreported = dataclasses.replace(event, gap_s=gap_s, running=running)
        self.report()
        return True

    def expire(self, now: float) -> None:
        """Records a version without the engine's figures when these are overdue; to be called often."""
        if self.unreported is not None and now >= self._report_due:
            version = self.unreported.version
            log.warning(
                "%s: all ranks have swapped to version %d, its engine has not answered", self.generator, version
            )
            self.report()

    def report(self) -> None:
        """Records a version that is still to be recorded, as far as it is known."""
        if self.unreported is not None:
            self._events.append(self.unreported)
        self.unreported = None

    def _note(self, event: Failure | Superseded | Left) -> None:
        self._events.append(event)
        if self._owed == event.version:
            self._owed = None
