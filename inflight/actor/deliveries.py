"""Deliveries of an actor: each finished group, or its failure, is sent until the buffer acknowledges it."""

from __future__ import annotations

import collections
import logging
import time

from inflight.bus import BusError, Link
from inflight.messages import GroupDone, GroupFailed, WireError

log = logging.getLogger(__name__)


class Deliveries:
    """Sent and not acknowledged yet, by group; its length is their number."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._unacknowledged: dict[str, tuple[GroupDone | GroupFailed, float]] = {}
        """Group id → delivery, and when it was last sent (monotonic seconds)."""
        self.accepted: collections.Counter[str] = collections.Counter()
        """Generator → tokens of its groups that the buffer has accepted."""

    def __len__(self) -> int:
        return len(self._unacknowledged)

    def __contains__(self, name: str) -> bool:
        return name in self._unacknowledged

    def add(self, message: GroupDone | GroupFailed) -> None:
        """Sends a delivery, and keeps it until it is acknowledged."""
        self._unacknowledged[message.group_id] = (message, time.monotonic())
        self._send(message)

    def acknowledged(self, name: str) -> None:
        """The buffer has it; a second acknowledgement has no effect."""
        message, _ = self._unacknowledged.pop(name, (None, 0.0))
        if isinstance(message, GroupDone):
            for rollout in message.group.rollouts:
                self.accepted[rollout.generator] += len(rollout.turn.token_ids)

    def repeat(self, after_s: float) -> None:
        """Sends those again that were last sent longer than `after_s` seconds ago."""
        now = time.monotonic()
        for name, (message, sent) in list(self._unacknowledged.items()):
            if now - sent > after_s:
                self._unacknowledged[name] = (message, now)
                self._send(message)

    def _send(self, message: GroupDone | GroupFailed) -> None:
        """A link that can't queue it now loses nothing: it is sent again."""
        try:
            self._link.send(message)
        except BusError:
            pass
        except WireError as error:  # larger than a frame may be
            log.warning("group %s can't be sent: %s", message.group_id, error)
            self.add(GroupFailed(group_id=message.group_id, reason="too large for a message", again=False))
