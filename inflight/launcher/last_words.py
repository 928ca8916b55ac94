"""The end of a process's log, with the errors themselves and without the frames of stack traces."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path


def last_lines(log: Path, count: int) -> list[str]:
    """The end of a log; [] when there is none."""
    try:
        with log.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=count)]
    except FileNotFoundError:
        return []


_PREFIX = re.compile(r"^\([^)]*\) [A-Z]+ \S+ \S+ \[[^]]*\] ?")
"""What vLLM's logger puts before each line, also within a stack trace."""
_FRAME = re.compile(r'\s{4}|  File "|Traceback \(most recent call last\):|\s*$')


def last_words(log: Path, count: int) -> list[str]:
    """The end of a log without the frames of stack traces, so that the errors themselves are there; [] when there is
    none. It looks at so many lines as a few deep traces have."""
    return [line for line in last_lines(log, 50 * count) if not _FRAME.match(_PREFIX.sub("", line))][-count:]
