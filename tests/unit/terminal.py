"""A terminal of a given size, on a real pty, that remembers what it shows (not a test file)."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
import threading
from types import TracebackType
from typing import IO

import pyte
from rich.console import Console


class Terminal:
    """Interprets what is written to its pty as xterm would."""

    def __init__(self, columns: int, rows: int) -> None:
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._file: IO[str] | None = None
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.master, 1 << 16)
            except OSError:  # the other end is closed
                return
            if not data:
                return
            self.raw += data
            self._stream.feed(data)

    def console(self) -> Console:
        """A console of rich's on this terminal."""
        self._file = os.fdopen(os.dup(self.slave), "w", encoding="utf-8")
        size = {"width": self.screen.columns, "height": self.screen.lines}  # rich asks stdin's terminal, not this one
        kind = {"TERM": "xterm-256color"}  # not that of the terminal in which the tests run, which may be none or dumb
        return Console(file=self._file, force_terminal=True, color_system="256", _environ=kind, **size)

    @property
    def text(self) -> str:
        """What it shows, without empty lines at the end."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def release(self) -> None:
        """Closes this process's own end, so that the end of the last other one is noticed; waits for it."""
        if self._file is not None:
            self._file.close()
        if self.slave >= 0:
            os.close(self.slave)
            self.slave = -1
        self._thread.join(timeout=20)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
        os.close(self.master)
