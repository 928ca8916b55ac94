"""Messages about rollouts: buffer (ROUTER) with actors (DEALER); see rollout/buffer.py."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from inflight.messages.base import Message
from inflight.types import Count, Name, RolloutGroup, Routes


class ActorHello(Message, tag=True):
    """An actor joins, and repeats this every few seconds; it may start no group before it gets a Grant.

    `incarnation` differs between processes: a new one under the same name comes from a restart.
    """

    actor: Name
    incarnation: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]


class RoutesWanted(Message, tag=True):
    """An actor that has not joined yet asks where the generators are. Answered by Routed, now and at each change."""


class Routed(Message, tag=True):
    """The generators that get requests now; all others get none."""

    routes: Routes


class Grant(Message, tag=True):
    """Questions that this actor is to answer, by their index in the task's stream, in addition to earlier grants.

    `attempts`: for questions whose earlier answers were too stale, how many there were; part of the group's name.
    """

    questions: Annotated[list[Count], Meta(min_length=1, max_length=1 << 16)]
    attempts: Annotated[dict[Count, Count], Meta(max_length=1 << 16)] = msgspec.field(default_factory=dict)


class GroupDone(Message, tag=True):
    """A finished group; sent again until acknowledged."""

    group: RolloutGroup

    @property
    def group_id(self) -> str:
        """The group's, as in GroupFailed."""
        return self.group.group_id


class GroupFailed(Message, tag=True):
    """A group that was started and will not be delivered, with the reason by which it is counted.

    `again`: the question is not at fault (a generator was), so it should be re-queued.
    """

    group_id: Name
    reason: Annotated[str, Meta(max_length=128)]
    again: bool
    lengths: Annotated[list[Count], Meta(max_length=4096)] = msgspec.field(default_factory=list)
    """Numbers of completion tokens of its samples, as far as they were received."""
    questions: Count | None = None
    """The task's number of questions, when this question is beyond its end; nothing has failed then."""


class GroupAck(Message, tag=True):
    """The buffer has the group (or has counted it as failed); the actor may forget it."""

    group_id: Name


class ActorBye(Message, tag=True):
    """The actor leaves; questions that it was granted and has not answered are to be re-queued."""

    reason: Annotated[str, Meta(max_length=128)]
