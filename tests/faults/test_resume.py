"""Runs that are killed and resumed: they train on the very questions of an undisturbed run."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter

import pytest

pytestmark = pytest.mark.faults

VICTIMS = ("launcher", "trainer", "a0", "g0")
REFUSED = 2
"""Exit code of a launcher that can't start a run."""


def kill_and_go_on(run, kills, seed):
    """Kills a random process, `kills` times, and starts the launcher again whenever it has ended."""
    source = random.Random(seed)
    run.start()
    told, ends = [], 0
    while len(told) < kills:
        begun = run.steps()
        run.until(lambda begun=begun: run.steps() > begun + 1)
        time.sleep(source.random() * 0.8)
        victim = source.choice(VICTIMS)
        if not run.ended() and run.kill(victim):
            told.append((victim, run.steps()))
            if victim in ("launcher", "trainer"):
                run.wait()
        if run.ended():
            ends += 1
            assert run.wait() != REFUSED, run.output
            assert ends <= 3 * kills, f"{told}\n{run.logs()}"
            run.resume()
    while run.wait() != 0:
        told.append(("ended", run.output[-300:]))
        assert len(told) < 3 * kills, f"{told}\n{run.logs()}"
        run.resume()
    return told


def check(run, undisturbed, told):
    """The multisets of the questions that both were trained on are the same, step numbers and books fit."""
    mine, theirs = Counter(run.trained()), Counter(undisturbed.trained())
    told_of = Counter(victim for victim, _ in told)
    print(f"killed {dict(told_of)}: {mine.total()} groups of {len(mine)} questions were trained on,")
    print(f"undisturbed {theirs.total()} of {len(theirs)};", end=" ")
    print(f"in one run and not in the other: {(mine - theirs).total()} and {(theirs - mine).total()}")
    assert mine == theirs, told
    assert {"launcher", "trainer"} <= told_of.keys(), "it was resumed after both ends"
    assert [line["step"] for line in run.lines()] == [line["step"] for line in undisturbed.lines()]
    books = run.account()
    assert (books.settled_below, books.settled_beyond, books.dropped) == (len(run.trained()), [], {})


def test_two_kills(make_run):
    undisturbed, run = (make_run("trainer.steps=10", "gate.max_token_lag=1000") for _ in range(2))
    assert undisturbed.start().wait() == 0, undisturbed.logs()
    assert undisturbed.trained() == list(range(20))
    check(run, undisturbed, kill_and_go_on(run, 2, seed=7))


def test_a_launcher_that_is_killed_before_anything_was_written(make_run):
    run = make_run("trainer.steps=2").start()
    run.until(lambda: (run.folder / "lock").exists())
    run.kill("launcher")
    run.wait()
    assert run.resume().wait() == 0, run.logs()
    assert run.trained() == [0, 1, 2, 3]


@pytest.mark.slow
def test_ten_kills(make_run):
    undisturbed, run = (make_run("trainer.steps=60", "gate.max_token_lag=1000") for _ in range(2))
    assert undisturbed.start().wait() == 0, undisturbed.logs()
    told = kill_and_go_on(run, 10, seed=1)
    assert len(told) >= 10
    check(run, undisturbed, told)


def test_a_second_start_in_the_same_folder_is_refused(make_run):
    run = make_run("trainer.steps=100000").start()
    run.until(lambda: run.steps() >= 1)
    other = type(run)(run.folder)
    assert other.start().wait() == 2
    assert "holds a run already" in other.output
    assert run.kill("launcher", signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM
    assert "resume=true" in run.output
