"""Signals that come while one is being handled."""

from __future__ import annotations

import subprocess
import sys

INTERRUPTED = """
import signal, sys
from inflight.trainer.stop import StopFlag

stop, left = StopFlag(), [200]

def interrupting(frame, event, argument):
    if left[0]:
        left[0] -= 1
        signal.raise_signal(signal.SIGTERM)
    return interrupting

signal.signal(signal.SIGTERM, lambda *_: stop.set())
sys.settrace(interrupting)
stop.set()
sys.settrace(None)
print(stop.is_set())
"""


def test_a_signal_at_any_place_of_the_handler_leaves_it_set():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "True\n"
