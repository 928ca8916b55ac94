"""The end of a process's log, with the error messages and without the frames of stack traces.

What a process prints may be anything: of it so much is read and shown, and nothing that controls the terminal.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from inflight.report.visible import visible

END_BYTES = 1 << 20
"""Bytes of a log's end that are read: it may have any size."""
LINE_CHARACTERS = 1000
"""Most characters of a line that are shown."""


def last_lines(log: Path | None, count: int) -> list[str]:
    """The last `count` lines of a log's last END_BYTES; [] when there is none."""
    if log is None:
        return []
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - END_BYTES))
            end = file.read(END_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return []
    return [visible(line.expandtabs()[:LINE_CHARACTERS]) for line in end.splitlines()[-count:]]


_PREFIX = re.compile(r"^\([^)]*\) [A-Z]+ \S+ \S+ \[[^]]*\] ?")
"""The prefix of each line of vLLM's logger, also within a stack trace."""
_FRAME = re.compile(r'\s{4}|  File "|Traceback \(most recent call last\):|\s*$')


def last_words(log: Path | None, count: int) -> list[str]:
    """The last `count` lines of a log that are no frames of stack traces; [] when there is none. Looks only at the
    end of the log, long enough for a few deep traces."""
    return [line for line in last_lines(log, 50 * count) if not _FRAME.match(_PREFIX.sub("", line))][-count:]
