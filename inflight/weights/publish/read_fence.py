"""Lets parameters be read beside the trainer's own work, without the optimizer overwriting them too early."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ReadFence:
    """Reads parameters on a CUDA stream of its own, and makes the next optimizer step wait until they are read.

    Reading makes the trainer wait only there: forward and backward passes only read parameters as well.
    While no optimizer is held, `settle` waits instead, so that reading is always safe. On a CPU the work inside
    `reading` is complete when the block ends, and nothing ever waits.

    Example:
        fence = ReadFence(device)
        fence.hold(optimizer)
        with fence.reading():
            ...                  # copies of the parameters are queued here
        fence.settle()
        loss.backward()          # runs beside them
        optimizer.step()         # begins when they are done
    """

    def __init__(self, device: torch.device) -> None:
        """`device` is where the parameters are."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._read: torch.cuda.Event | None = None
        self._holds = False
        self._waited_s = 0.0

    def hold(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes this optimizer, which must be the only one that changes the parameters, wait before each later step."""
        optimizer.register_step_pre_hook(lambda *_: self._wait())
        self._holds = True

    @contextmanager
    def reading(self) -> Iterator[torch.cuda.Stream | None]:
        """Work queued inside runs on the fence's stream, which it gets, after all work that is queued on the current
        stream. Without a held optimizer `settle` has to be called before the parameters are changed."""
        if self._stream is None:
            yield None
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield self._stream
        self._read = self._stream.record_event()

    def settle(self) -> None:
        """Returns at once while an optimizer is held, otherwise when the reads queued in `reading` are done."""
        if not self._holds:
            self.wait_read()

    def wait_read(self) -> None:
        """Returns when the reads queued in `reading` are done; may be called from any thread."""
        if self._read is not None:
            self._read.synchronize()

    def take_waited_s(self) -> float:
        """Seconds that optimizer steps have waited since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def _wait(self) -> None:
        started = time.monotonic()
        self.wait_read()
        self._waited_s += time.monotonic() - started
