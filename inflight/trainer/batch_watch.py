"""Ends the wait for a batch when the trainer has to stop, or when no further batch is possible."""

from __future__ import annotations

import threading

from inflight.rollout.buffer import Buffer
from inflight.trainer.stop import StopFlag
from inflight.weights.publish.publisher import Publisher

LOOK_S = 0.2


class BatchWatch:
    """A thread that looks at the stop flag and at the generators, and finishes the buffer once there is a reason."""

    def __init__(self, stop: StopFlag, buffer: Buffer, publisher: Publisher) -> None:
        """Starts at once; a generator must have joined."""
        self._stop = stop
        self._buffer = buffer
        self._publisher = publisher
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batch watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(LOOK_S):
            reason = "the trainer was stopped" if self._stop.is_set() else deserted(self._publisher)
            if reason is not None:
                self._buffer.finish(reason, 0.0)
                return

    def __enter__(self) -> BatchWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(timeout=5)


def deserted(publisher: Publisher) -> str | None:
    """Why no further batch is possible: no generator has joined for `publish.join_timeout_s`. None: one is possible."""
    if publisher.deserted_s <= publisher.patience_s:
        return None
    states = "; ".join(f"{name} {state.name}: {why}" for name, (state, why) in publisher.states.items())
    return f"no generator is left since {publisher.deserted_s:.0f} s: {states}"
