"""Exit codes of a run and of each of its processes. The launcher's code is that of the run (docs/operations.md)."""

from __future__ import annotations

import signal

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
