"""vLLM's plugin in each of its processes: ends them with the generator, sets the GIL switch interval, and makes this
package's warnings visible.

The engine core does not notice when the server that started it has died, and its workers live as long as it does. A
killed generator can't end them, so the kernel does (lifeline.py), which works for a hanging process too.

In every process of vLLM one thread computes, or busy-waits for the next step, while another one passes tokens on: the
output thread of the worker, of the engine core and of the client. A thread that wants the GIL requests it after
`sys.getswitchinterval()`, 5 ms by default, which is about as long as a step. Usually it gets the GIL sooner, when the
other thread happens to release it, but a swap changes that rhythm: tokens then arrive up to some milliseconds early or
late. With a short interval they arrive evenly.

The engine core and the workers are children of vLLM's own, so the interval reaches them by an environment variable,
which vLLM's plugin mechanism (entry point `vllm.general_plugins`) lets us read there.

A library that vLLM's server imports sets the level of Python's root logger to ERROR. Before vLLM 0.30 it does so before
the engine core and the workers are forked, which hid the reasons why a rank rejected a version.
"""

from __future__ import annotations

import logging
import os
import sys

from inflight.lifeline import end_with_parent

INCARNATION = "INFLIGHT_INCARNATION"
"""Environment variable that identifies the processes of one start of a generator. It is not among the settings, because
vLLM includes those in the key of its compilation cache."""
VARIABLE = "INFLIGHT_SWITCH_INTERVAL"
"""GIL switch interval in seconds; absent: Python's default."""
INTERVAL_S = 1e-4
LONGEST_S = 1.0


def hand_over_often() -> None:
    """Sets the GIL switch interval in this process and in its children, unless the user has set one. Also makes
    processes that wait for a step do so without holding the GIL. Must be called before vLLM's engine is imported."""
    os.environ.setdefault(VARIABLE, str(INTERVAL_S))
    os.environ.setdefault("VLLM_USE_SPINLOOP_EXT", "1")
    register()


def register() -> None:
    """The plugin's entry point: vLLM calls it in each process, possibly more than once. Raises ValueError when VARIABLE
    is not a valid interval."""
    logging.getLogger("inflight").setLevel(logging.INFO)
    if INCARNATION in os.environ:
        end_with_parent()
    text = os.environ.get(VARIABLE)
    if not text:
        return
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST_S:
        raise ValueError(f"{VARIABLE}={text} is not allowed: seconds above 0, at most {LONGEST_S:g}")
    sys.setswitchinterval(seconds)
