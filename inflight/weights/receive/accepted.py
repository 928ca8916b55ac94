"""What a rank and its publisher agreed on at the Welcome: the publisher, and the manifest of its versions."""

from __future__ import annotations

from inflight.messages import Prepare, Welcome
from inflight.weights import plan


class AcceptedWelcome:
    """The part of a Welcome that every later Prepare is checked against."""

    def __init__(self, welcome: Welcome) -> None:
        """Raises ValueError for an inconsistent Welcome."""
        plan.check(welcome.manifest)
        if plan.digest(welcome.manifest) != welcome.manifest_digest:
            raise ValueError("the publisher's manifest does not have the digest that it names")
        if welcome.transport_rank >= welcome.transport_size:
            raise ValueError(f"transport rank {welcome.transport_rank} of {welcome.transport_size}")
        self.manifest = welcome.manifest
        self._manifest_digest = welcome.manifest_digest
        self._publisher = welcome.publisher

    def require(self, message: Prepare) -> None:
        """Raises RuntimeError for a version of another publisher or manifest."""
        if message.publisher != self._publisher:
            raise RuntimeError(f"version {message.version} is of another publisher than this rank was welcomed by")
        if message.manifest_digest != self._manifest_digest:
            raise RuntimeError(f"version {message.version} has another manifest than this rank was welcomed with")
