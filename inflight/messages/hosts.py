"""Messages between the launcher (ROUTER) and hosts that join its run (DEALER); see starters/joining.py."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from inflight.messages.base import Message
from inflight.types import Count

MOST_SLOT = 1024
"""Highest number of a generator on its host."""


class Join(Message, tag=True):
    """A host offers to run a process of a kind; repeated, with the same `number`, until there is one. The numbers
    ascend with each process that it has run."""

    number: Count
    kind: Annotated[str, Meta(pattern="^(generator|actor)$")]
    slot: Annotated[int, Meta(ge=0, le=MOST_SLOT)]
    """Which of the generators of this host it would be, counted from 0: it decides the GPUs."""
    host: Annotated[str, Meta(max_length=255)]
    """Its name, for messages."""


class Placed(Message, tag=True):
    """The process that the host is to run, for its offer of this number: a Parcel (starters/parcel.py), in JSON."""

    number: Count
    parcel: Annotated[bytes, Meta(max_length=1 << 20)]


class Vacated(Message, tag=True):
    """The process that was placed for the offer of this number has ended."""

    number: Count
    code: Annotated[int, Meta(ge=-255, le=255)]
    output: Annotated[str, Meta(max_length=1 << 16)] = ""
    """The end of what it has printed."""
