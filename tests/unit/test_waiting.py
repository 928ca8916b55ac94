"""What groups that wait for the trainer take of memory, as the machine sees it."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest
from rollout_samples import make_config, make_rollout

from inflight.groups import group_id
from inflight.messages import GroupDone, decode, encode
from inflight.rollout.ledger import Ledger
from inflight.rollout.waiting import REMEMBERED, StoredGroup, Waiting
from inflight.types import RolloutGroup

LENGTH = 240
BUFFER_MIB = 1.0
ALLOWED = 1.5


def from_the_wire(index: int, kept: int) -> GroupDone:
    """As it comes: each number an object of its own."""
    source, name = random.Random(index), group_id(index)
    sets = {"kept": [[source.randrange(150_000) for _ in range(kept)] for _ in range(LENGTH)]} if kept else {}
    members = [
        make_rollout(
            name,
            member,
            length=LENGTH,
            reward=float(member),
            **sets,
            token_ids=[source.randrange(150_000) for _ in range(LENGTH)],
            logprobs=[-source.random() for _ in range(LENGTH)],
        )
        for member in range(2)
    ]
    message = decode(encode(GroupDone(group=RolloutGroup(group_id=name, prompt_key=name, rollouts=members))))
    assert isinstance(message, GroupDone)
    return message


@pytest.mark.parametrize("kept", [0, 19])
def test_groups_that_wait_take_no_more_memory_than_they_may(kept):
    """The actors answer as fast as they are asked, and the trainer takes nothing."""
    config = make_config("unused", max_lag=500, step=2, concurrency=500, buffer_mib=BUFFER_MIB, steps=1000, top_k=kept)
    ledger = Ledger(config)
    ledger.hello("a0", "x")
    from_the_wire(0, kept)  # what is made but once
    gc.collect()
    tracemalloc.start()
    while granted := ledger.grants():
        for index in granted["a0"]:
            assert ledger.settle("a0", from_the_wire(index, kept)) is not None
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0] / 2**20
    tracemalloc.stop()
    assert BUFFER_MIB / ALLOWED < taken < BUFFER_MIB * ALLOWED, f"{taken:.2f} MiB for {ledger.counts().buffered} groups"
    usable = []
    ledger.judge(usable, 1, 0, config.gate)
    assert usable[0].group == from_the_wire(0, kept).group


def test_the_next_group_is_taken_to_be_like_the_last_ones():
    waiting = Waiting([], typical=1000.0)
    assert waiting.typical == 1000.0, "nothing has arrived"
    for size in (10, 30):
        waiting.append(StoredGroup("q1", b"x" * size))
    assert (waiting.typical, waiting.nbytes) == (20.0, 40)
    assert waiting.pop(0).frame == b"x" * 10
    assert (waiting.typical, waiting.nbytes) == (20.0, 30)
    for _ in range(REMEMBERED):
        waiting.append(StoredGroup("q2", b"x" * 50))
    assert waiting.typical == 50.0
