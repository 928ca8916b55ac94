"""The end of a process's log, with the error messages and without the frames of stack traces.

What a process prints may be anything: of it so much is read and shown, and nothing that controls the terminal.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from inflight.launcher.log_files import older_of
from inflight.report.visible import visible

END_BYTES = 1 << 20
"""Bytes of a log's end that are read: it may have any size."""
LINE_CHARACTERS = 1000
"""Most characters of a line that are shown."""


def last_lines(log: Path | None, count: int) -> list[str]:
    """The last `count` lines of a log's last END_BYTES, some of which may be in the file that is kept of it from before
    it began anew; [] when there is none."""
    if log is None:
        return []
    end = _end_of(log, END_BYTES)
    end = _end_of(older_of(log), END_BYTES - len(end)) + end
    lines = end.decode(errors="replace").splitlines()
    return [visible(line.expandtabs()[:LINE_CHARACTERS]) for line in lines[-count:]]


def _end_of(file: Path, most: int) -> bytes:
    """At most `most` bytes; none of a file that does not exist."""
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - most))
            return opened.read(most)
    except FileNotFoundError:
        return b""


_PREFIX = re.compile(r"^(?:\([^)]*\) [A-Z]+ \S+ \S+ \[[^]]*\] ?|\[[^]]*\] )")
"""The prefix of each line of vLLM's logger, also within a stack trace, or of what an actor's children print."""
_FRAME = re.compile(r'\s{4}|  File "|Traceback \(most recent call last\):|\s*$')


def last_words(log: Path | None, count: int) -> list[str]:
    """The last `count` lines of a log that are no frames of stack traces; [] when there is none. Looks only at the
    end of the log, long enough for a few deep traces."""
    return [line for line in last_lines(log, 50 * count) if not _FRAME.match(_PREFIX.sub("", line))][-count:]
