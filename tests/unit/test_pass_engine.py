"""A CPU on which a row's result depends on the size of its batch is not taken for one on which it does not."""

from __future__ import annotations

import pytest
import torch

from inflight.generator.pass_engine import PROBE_ROWS, ROUNDS_BY_BATCH, EngineMissing, PassEngine

FAULTY_LENGTH = 30


class Kernels(PassEngine):
    """Passes whose logits are their tokens; with five or more rows one of them rounds otherwise once, as with AMX."""

    def __init__(self, differ):
        self._differ = differ
        self.taken = 0

    def take(self, tokens):
        self.taken += 1
        return [tokens]

    def give_back(self, blocks):
        self.taken -= 1

    def run(self, passes, *, alone=False):
        logits = [torch.tensor([float(sum(each.tokens)), 1.0]) for each in passes]
        if self._differ and len(passes) >= 5:
            logits[4][1] += 1e-3 * (len(passes[4].tokens) == FAULTY_LENGTH)
        return logits


def test_rows_that_depend_on_their_batch_are_refused_however_few():
    kernels = Kernels(differ=True)
    with pytest.raises(EngineMissing, match=ROUNDS_BY_BATCH):
        kernels._require_rows_alike()
    assert kernels.taken == 0, "the blocks of the probe are free again"


def test_rows_that_do_not_depend_on_it_are_taken():
    kernels = Kernels(differ=False)
    kernels._require_rows_alike()
    assert kernels.taken == 0
    assert PROBE_ROWS >= 5
