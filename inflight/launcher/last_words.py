"""The end of a process's log, with the error messages and without the frames of stack traces, what vLLM prints while
it ends, and the warnings of a Python that was killed.

What a process prints may be anything: of it so much is read and shown, and nothing that controls the terminal.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from inflight.exits import explained
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
_NOISE = re.compile(r"dump_input|\[shutdown\]|resource_tracker|^\s*warnings\.warn\(")
"""Lines that follow from an end and name no cause: vLLM's dump of the last step, and what was left to be cleaned up."""
_CAUSE = re.compile(
    r"died unexpectedly|Fatal Python error|Segmentation fault|\bSIG(?:KILL|ILL|SEGV|BUS|FPE|ABRT)\b"
    r"|OutOfMemoryError|MemoryError|CUDA out of memory|(?i:oom[-_ ]?kill|out-of-memory|killed process)"
)
"""Lines that name what ended a process or its child. SIGTERM and SIGINT are not among them: they are asked for."""
CAUSES = 3
"""Most of them that are shown: each process of an engine may repeat one."""
_EXIT_CODE = re.compile(r"exit ?code[:=]? ?(-\d+)")


def last_words(log: Path | None, count: int) -> list[str]:
    """The last `count` lines of a log that are no frames of stack traces and no noise; [] when there is none. Looks
    only at the end of the log, long enough for a few deep traces."""
    return _words(log, count)[-count:]


def why_it_ended(log: Path | None, count: int) -> list[str]:
    """At most `count` lines of a log, with `count` above CAUSES: first the latest that name a cause, such as the signal
    that ended a worker, with negative exit codes in words, then the last words. A cause may be far above the end, which
    its consequences fill."""
    words = _words(log, count)
    causes = list(dict.fromkeys(line for line in reversed(words) if _CAUSE.search(line)))[:CAUSES][::-1]
    others = [line for line in words if line not in causes][-(count - len(causes)) :]
    return [_EXIT_CODE.sub(lambda found: f"{found[0]}, {explained(int(found[1]))}", line) for line in causes + others]


def _words(log: Path | None, count: int) -> list[str]:
    lines = last_lines(log, 50 * count)
    return [line for line in lines if not _FRAME.match(_PREFIX.sub("", line)) and not _NOISE.search(line)]
