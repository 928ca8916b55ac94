"""What the processes that are placed on this host print: shown here as before, and its end kept for the launcher."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from typing import Self

KEPT_BYTES = 1 << 16
"""Bytes of the end that are kept."""
DRAINED_WITHIN_S = 1.0
"""Seconds within which the last output of a process that has ended is read: it lies in a pipe of at most 64 KiB."""
_STREAMS = (1, 2)


class KeptOutput:
    """As a context: standard output and error of this process, which its children inherit, go through a pipe each. A
    thread copies all of it to where it would have gone."""

    def __init__(self) -> None:
        self._end = bytearray()
        self._lock = threading.Lock()
        """Held from reading output until it is kept; not while it is written, which may block."""
        self._pipes: dict[int, int] = {}
        """End of a pipe to read from → where the output went before."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._copy, name="output", daemon=True)

    def __enter__(self) -> Self:
        for stream in _STREAMS:
            reading, writing = os.pipe()
            self._pipes[reading] = os.dup(stream)
            os.dup2(writing, stream)
            os.close(writing)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._drain()
        self._closing.set()
        self._thread.join(DRAINED_WITHIN_S)
        for stream, (reading, before) in zip(_STREAMS, self._pipes.items(), strict=True):
            os.dup2(before, stream)
            os.close(before)
            os.close(reading)

    def forget(self) -> None:
        """Another process begins."""
        self._drain()
        with self._lock:
            self._end.clear()

    def last(self) -> str:
        """The end of what was printed since then; at most KEPT_BYTES characters."""
        self._drain()
        with self._lock:
            return self._end.decode(errors="replace")

    def _drain(self) -> None:
        """Returns when all that was printed is kept, or in DRAINED_WITHIN_S, should something still print."""
        deadline = time.monotonic() + DRAINED_WITHIN_S
        while time.monotonic() < deadline:
            with self._lock:
                if not self._readable(0):
                    return
            time.sleep(0.001)

    def _readable(self, timeout_s: float) -> list[int]:
        return select.select(list(self._pipes), [], [], timeout_s)[0]

    def _copy(self) -> None:
        while not self._closing.is_set():
            for reading in self._readable(0.05):
                with self._lock:
                    more = os.read(reading, KEPT_BYTES)
                    self._end += more
                    del self._end[:-KEPT_BYTES]
                with contextlib.suppress(OSError):  # a terminal that is gone
                    while more:
                        more = more[os.write(self._pipes[reading], more) :]
