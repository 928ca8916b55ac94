"""What vLLM loads into each of its processes, as its plugin: that a generator's end with the generator, how often
Python's lock changes hands there, and that this package's warnings are heard.

The engine core does not notice that the server which has started it is gone, and its workers live as long as it does. A
generator that is killed can't end them, so the kernel does, which needs no help of a process that hangs.

In every process of vLLM one thread computes, or waits for the next step by asking for it all the time, while another
hands tokens on: the worker's output thread, the engine core's, the client's. A thread that wants Python's lock asks for
it after `sys.getswitchinterval()`, 5 ms by default, which is about as long as a step. Mostly it gets the lock sooner,
when the other thread happens to let go, but a swap changes that rhythm: tokens then come up to some milliseconds early
or late. With a short interval they come alike.

The engine core and the workers are children of vLLM's own, so the interval reaches them by an environment variable,
which vLLM's plugin mechanism (entry point `vllm.general_plugins`) lets us read there.

A library that vLLM's server imports sets the level of Python's root logger to ERROR. Before vLLM 0.30 it does so before
the engine core and the workers are forked, so nobody heard why a rank did not take a version.
"""

from __future__ import annotations

import logging
import os
import sys

from inflight.lifeline import end_with_parent

INCARNATION = "INFLIGHT_INCARNATION"
"""Environment variable by which the processes of one start of a generator know each other. Not among the settings: vLLM
keys its compilation cache by those."""
VARIABLE = "INFLIGHT_SWITCH_INTERVAL"
"""Seconds; absent: Python's own."""
INTERVAL_S = 1e-4
LONGEST_S = 1.0


def hand_over_often() -> None:
    """Sets the interval in this process and in those that it starts, unless the user has set one. And has those that
    wait for a step do so outside of Python. To be called before vLLM's engine is imported, which reads it then."""
    os.environ.setdefault(VARIABLE, str(INTERVAL_S))
    os.environ.setdefault("VLLM_USE_SPINLOOP_EXT", "1")
    register()


def register() -> None:
    """vLLM calls it in each process, possibly more than once. Raises ValueError for a variable that is no interval."""
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
