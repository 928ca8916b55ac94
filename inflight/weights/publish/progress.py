"""How far a version is packed into the send buffer: on CUDA that takes milliseconds, and a sender may follow it."""

from __future__ import annotations

from collections.abc import Iterator

import torch


class PackingProgress:
    """Marks between the copies into the send buffer, which are queued in the order of its bytes.

    One thread marks, and when it has finished any threads may iterate. Without CUDA a copy is done when it is marked.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[int, torch.cuda.Event | None]] = []

    def mark(self, end: int, stream: torch.cuda.Stream | None) -> None:
        """The copies of all bytes before `end` are queued on `stream`; None: they are done."""
        event = None
        if stream is not None:
            event = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps
            event.record(stream)
        self._marks.append((end, event))

    def __iter__(self) -> Iterator[int]:
        """Waits, and yields how many of the buffer's first bytes are packed, until it is all of them."""
        for place, (end, event) in enumerate(self._marks):
            if self._is_done(place + 1):
                continue  # so this one is done too, and says less
            if event is not None:
                event.synchronize()
            yield end

    def _is_done(self, place: int) -> bool:
        if place == len(self._marks):
            return False
        event = self._marks[place][1]
        return event is None or event.query()
