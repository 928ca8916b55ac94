"""What a publisher knows of its generators."""

from __future__ import annotations

from inflight.weights.publish.events import Event
from inflight.weights.publish.loop import PublisherLoop
from inflight.weights.publish.states import ReplicaState


class Observed:
    """The part of a Publisher that can be read at any time: states, versions, events and counters."""

    _loop: PublisherLoop

    @property
    def version(self) -> int:
        """The newest version that was published."""
        return self._loop.protocol.version

    @property
    def committed(self) -> dict[str, int]:
        """Generator → the version that its engine stamps, as its ranks or itself reported; absent when that is
        uncertain."""
        with self._loop.changed:
            held = {replica.generator: replica.committed for replica in self._loop.protocol.replicas}
        return {name: version for name, version in held.items() if version is not None}

    @property
    def behind(self) -> dict[str, int]:
        """Generator → how many published versions it is behind; absent when it is uncertain which one it holds."""
        with self._loop.changed:
            return {name: self.version - version for name, version in self.committed.items()}

    @property
    def deserted_s(self) -> float:
        """Seconds for which no generator was present; 0 while one is."""
        with self._loop.changed:
            return self._loop.protocol.membership.deserted_s()

    @property
    def events(self) -> list[Event]:
        """The outcomes of versions so far, in order."""
        return self.events_since(0)

    def events_since(self, cursor: int) -> list[Event]:
        """The events from number `cursor` on, counted from 0; the next cursor is `cursor` plus their count."""
        with self._loop.changed:
            return self._loop.session.events.since(cursor)

    @property
    def states(self) -> dict[str, tuple[ReplicaState, str]]:
        """Generator → its state and the reason for it."""
        with self._loop.changed:
            return {each.generator: (each.state, each.reason) for each in self._loop.protocol.replicas}

    @property
    def incompatible(self) -> dict[str, str]:
        """Generator → why it can take no version of this publisher: its model does not fit what is sent (another shape,
        more layers, names changed by a wrapper, a missing output layer), its size is not the configured one, it holds a
        newer version of another publisher, or it was refused (`refuse`)."""
        return {name: why for name, (state, why) in self.states.items() if state is ReplicaState.INCOMPATIBLE}

    @property
    def ignored(self) -> int:
        """Number of messages that did not fit the state."""
        with self._loop.changed:
            return self._loop.session.outbox.ignored.total()

    def stats(self) -> dict[str, float | int]:
        """Counters for metrics and status; `max_*` are the largest durations so far in seconds."""
        with self._loop.changed:
            return {**self._loop.session.events.totals(), "ignored": self.ignored}
