"""How a run and each of its processes end, as exit codes. The launcher's are those of the run (docs/operations.md)."""

from __future__ import annotations

import signal

DONE = 0
"""All steps are done; of a process other than the trainer: the trainer reported that the run is over."""
GIVEN_UP = 1
"""The run or process could not go on; the last line says why."""
BAD_INPUT = 2
"""Something that was given is not allowed: it would fail in the same way again."""
DATA_ENDED = 3
"""The task has no question left, before all steps were done. What was learnt is kept."""
STOPPED = 128 + signal.SIGTERM
"""SIGTERM came before the end. A launcher that is interrupted ends with 128 and the number of its signal."""
