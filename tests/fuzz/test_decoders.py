"""Each decoder takes its own whole inputs, and a few damaged ones as `make fuzz` makes them without end."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

import rounds
from decoders import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_whole_inputs_are_taken(name):
    for sample in TARGETS[name].samples:
        TARGETS[name].read(sample)


@pytest.mark.parametrize("name", TARGETS)
def test_damage_is_refused_as_declared(name, monkeypatch):
    monkeypatch.setattr(rounds, "EXAMPLES", 60)
    outcomes = Counter()
    rounds.round_of(TARGETS[name], 1, outcomes)
    assert outcomes["refused"] > 0
