"""Exit codes of a run, of each of its processes and of commands, and the line that says why one ends.

The launcher's code is that of the run (docs/operations.md).
"""

from __future__ import annotations

import signal
import sys

from inflight.error_line import one_line

DONE = 0
"""All steps are done; for other processes than the trainer: the trainer reported that the run is over."""
GIVEN_UP = 1
"""The run or process could not continue; its last line tells why."""
BAD_INPUT = 2
"""Some input is not allowed: a restart would fail in the same way."""
DATA_ENDED = 3
"""The task ran out of questions before all steps were done. The weights trained so far are kept."""
STOPPED = 128 + signal.SIGTERM
"""SIGTERM came before the end. An interrupted launcher exits with 128 plus the number of its signal."""


def heeded_signals() -> list[signal.Signals]:
    """SIGINT, SIGTERM and SIGHUP, without those that this process ignores: nohup has it ignore SIGHUP, a shell that
    starts it in the background SIGINT."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


FAULTS: dict[int, str] = {
    signal.SIGILL: "illegal instruction",
    signal.SIGABRT: "abort",
    signal.SIGBUS: "bus error",
    signal.SIGFPE: "arithmetic error",
    signal.SIGSEGV: "segmentation fault",
}
"""Signals that a process causes itself, in words: their names alone tell few people what happened."""


def in_words(code: int) -> str:
    """An exit code of a process: the signal's name where it is negative, else `code N`."""
    if code >= 0:
        return f"code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def explained(code: int) -> str:
    """As `in_words`, and what the signal means where it is a fault: `SIGILL (illegal instruction)`."""
    meaning = FAULTS.get(-code)
    return in_words(code) + (f" ({meaning})" if meaning else "")


def say_why(who: str, error: object, code: int) -> int:
    """Prints one line on stderr: why a process or command ends, with the notes of an exception (an error of vLLM's may
    have many lines); returns its exit `code`."""
    said = [one_line(error, 1000), *getattr(error, "__notes__", ())]
    print(f"inflight {who}: {one_line(' '.join(said), 1000)}", file=sys.stderr)
    return code
