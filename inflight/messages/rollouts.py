"""Messages about rollouts: buffer (ROUTER) with actors (DEALER); see rollout/buffer.py."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from inflight.messages.base import Message
from inflight.types import Count, Name, RolloutGroup


class ActorHello(Message, tag=True):
    """An actor joins, and says so again every few seconds; it may start no group before it is granted one.

    `incarnation` differs from process to process: a new one under the same name comes from a restart.
    """

    actor: Name
    incarnation: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]


class Grant(Message, tag=True):
    """Questions that this actor shall answer, by their index in the task's stream, beyond those of earlier grants.

    `attempts`: of those whose answers were too old before, how often they were; the group's name tells it.
    """

    questions: Annotated[list[Count], Meta(min_length=1, max_length=1 << 16)]
    attempts: Annotated[dict[Count, Count], Meta(max_length=1 << 16)] = msgspec.field(default_factory=dict)


class GroupDone(Message, tag=True):
    """A finished group; repeated until acknowledged."""

    group: RolloutGroup


class GroupFailed(Message, tag=True):
    """A started group that will not come, with the reason by which it is counted.

    `again`: the question is not at fault (a generator was), so it should be asked once more.
    """

    group_id: Name
    reason: Annotated[str, Meta(max_length=128)]
    again: bool
    lengths: Annotated[list[Count], Meta(max_length=4096)] = msgspec.field(default_factory=list)
    """Completion tokens of its samples, as far as they had come."""
    questions: Count | None = None
    """How many questions the task has, when this one is none of them: then nothing has failed."""


class GroupAck(Message, tag=True):
    """The buffer has the group (or has counted it as failed); the actor forgets it."""

    group_id: Name


class ActorBye(Message, tag=True):
    """The actor leaves; what it was granted and has not delivered is to be asked again."""

    reason: Annotated[str, Meta(max_length=128)]
