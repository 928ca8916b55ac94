"""The output of a child process that runs foreign code: copied to this process's log, up to a bound, each line behind
what the child is for.

Foreign code that prints without end would else fill the disk, which ends the run.
"""

from __future__ import annotations

import asyncio
import os
import time

BURST_BYTES = 1 << 20
"""Most bytes that are copied at once."""
BYTES_PER_S = 4096
"""What is added to that per second."""
_READ_BYTES = 1 << 16
_LAST_READS = 64
"""Most reads of what a child has left in the pipe: as much as a pipe holds."""


class Allowance:
    """How much output may be copied: of one child at a time, and then of the one that replaces it, so that a child
    that crashes and is replaced again and again can't print more than one that lives on."""

    def __init__(self) -> None:
        self._left = float(BURST_BYTES)
        self._at: float | None = None

    def take(self, nbytes: int, now: float) -> bool:
        """Whether so many bytes may be copied at the time `now`, in seconds; if so, they are taken off."""
        since = 0.0 if self._at is None else now - self._at
        self._at = now
        self._left = min(self._left + since * BYTES_PER_S, BURST_BYTES)
        if nbytes > self._left:
            return False
        self._left -= nbytes
        return True


class ChildOutput:
    """A pipe for a child's stdout and stderr; to be used in an event loop. Give `write_end` to the child, then call
    `started`; `close` in any case."""

    def __init__(self, allowance: Allowance, source: str, target: int = 2) -> None:
        """`source` is put before each line; `target`: the file descriptor that the output is copied to. Raises
        OSError."""
        self._source = f"[{source}] ".encode()
        self._line_ended = True
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_end, False)
        self._target = target
        self._allowance = allowance
        self._dropped = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_end, self._copy)

    def started(self) -> None:
        """The child has its own end of the pipe."""
        os.close(self.write_end)
        self.write_end = -1

    def close(self) -> None:
        """Copies what is left; a process that still holds the other end is not waited for."""
        if self._read_end < 0:
            return
        for _ in range(_LAST_READS):
            if not self._copy():
                break
        self._say_dropped()
        if not self._line_ended:
            self._write(b"\n")
        self._loop.remove_reader(self._read_end)
        for end in (self._read_end, self.write_end):
            if end >= 0:
                os.close(end)
        self._read_end = self.write_end = -1

    def _copy(self) -> bool:
        """One read; False at the end of the output, or when there is none now."""
        try:
            text = os.read(self._read_end, _READ_BYTES)
        except BlockingIOError:
            return False
        if not text:
            self._loop.remove_reader(self._read_end)
            return False
        said = self._with_source(text, begins=self._line_ended or bool(self._dropped))
        if not self._allowance.take(len(said), time.monotonic()):
            self._dropped += len(text)
            return True
        self._say_dropped()
        self._write(said)
        self._line_ended = said.endswith(b"\n")
        return True

    def _with_source(self, text: bytes, *, begins: bool) -> bytes:
        """`begins`: whether the text begins a line."""
        ended = text.endswith(b"\n")
        said = text.removesuffix(b"\n").replace(b"\n", b"\n" + self._source)
        return (self._source if begins else b"") + said + (b"\n" if ended else b"")

    def _say_dropped(self) -> None:
        if self._dropped:
            before = b"" if self._line_ended else b"\n"
            self._write(before + self._source + f"{self._dropped} bytes of a child's output were left out\n".encode())
            self._dropped = 0
            self._line_ended = True

    def _write(self, text: bytes) -> None:
        try:
            while text:
                text = text[os.write(self._target, text) :]
        except OSError:  # a full disk; the log is not worth the run
            self._dropped += len(text)
