"""The end of a process's log, with the error messages and without the frames of stack traces."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path


def last_lines(log: Path | None, count: int) -> list[str]:
    """The last `count` lines of a log; [] when there is none."""
    if log is None:
        return []
    try:
        with log.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=count)]
    except FileNotFoundError:
        return []


_PREFIX = re.compile(r"^\([^)]*\) [A-Z]+ \S+ \S+ \[[^]]*\] ?")
"""The prefix of each line of vLLM's logger, also within a stack trace."""
_FRAME = re.compile(r'\s{4}|  File "|Traceback \(most recent call last\):|\s*$')


def last_words(log: Path | None, count: int) -> list[str]:
    """The last `count` lines of a log that are no frames of stack traces; [] when there is none. Reads only the end of
    the log, long enough for a few deep traces."""
    return [line for line in last_lines(log, 50 * count) if not _FRAME.match(_PREFIX.sub("", line))][-count:]
