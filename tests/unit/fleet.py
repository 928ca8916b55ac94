"""A publisher's protocol with many generators of one rank each; no threads, no bytes (not a test file)."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import torch

from inflight.bus import BusError
from inflight.config import PublishConfig
from inflight.messages import Abort, Aborted, Commit, Committed, EngineHello, Failed, Place, Prepare, RankHello, Ready
from inflight.types import ParamMeta
from inflight.weights.pack import content_digest
from inflight.weights.plan import plan
from inflight.weights.publish.outbox import Outbox
from inflight.weights.publish.protocol import PublishProtocol
from inflight.weights.publish.session import Session
from inflight.weights.transport.choice import TransportChoice

MANIFEST = plan([ParamMeta(name="w", shape=(40,), dtype="float32")], {}, 4096, "none")
CONFIG = PublishConfig(transfer_timeout_s=10, commit_timeout_s=5, retry_after_s=1, max_behind=2)


class Fleet:
    """Generators of one rank each; each replies immediately unless configured to fail."""

    def __init__(self, count: int, *, elastic: bool, guest_ranks: int = 0) -> None:
        self.now = 0.0
        self.queued: list[tuple[str, object]] = []
        self.connected: set[str] = set()
        self.holds: dict[str, int] = {}
        self.incarnations: Counter[str] = Counter()
        self.failing: set[str] = set()
        self.attempts: list[SimpleNamespace] = []
        channels = SimpleNamespace(open=self._open, close=lambda _: None, join=lambda _: 0)
        choice = TransportChoice("gloo", torch.device("cpu"))
        self.session = Session(
            CONFIG, MANIFEST, Outbox(self), channels, choice, clock=lambda: self.now, elastic=elastic
        )
        names = [f"g{number}" for number in range(count)]
        self.protocol = PublishProtocol(self.session, dict.fromkeys(names, 1), self._offer(0), guest_ranks)

    def _offer(self, version: int) -> SimpleNamespace:
        known = {"unsound": None, "checked": True, "sums": lambda follow: []}
        return SimpleNamespace(version=version, manifest=MANIFEST, buffer=None, **known)

    def _open(self, generator: str, world_size: int, kind: str) -> SimpleNamespace:
        return SimpleNamespace(rendezvous=generator, error=None, submit=self.attempts.append, close=lambda: None)

    def send(self, peer: str, message: object) -> None:
        if peer not in self.connected:
            raise BusError(f"{peer} is not connected")
        self.queued.append((peer, message))

    def peers(self) -> set[str]:
        return set(self.connected)

    def come(self, name: str, place: Place | None = None) -> None:
        self.incarnations[name] += 1
        self.holds.pop(name, None)
        start = {"generator": name, "world_size": 1, "incarnation": f"{self.incarnations[name]:016x}"}
        self.connected |= {f"{name}.r0", f"{name}.engine"}
        self.protocol.hear(f"{name}.r0", RankHello(rank=0, place=place, **start))
        self.protocol.hear(f"{name}.engine", EngineHello(url="http://127.0.0.1:1", **start))

    def go(self, name: str) -> None:
        self.connected -= {f"{name}.r0", f"{name}.engine"}
        for member in ("r0", "engine"):
            self.protocol.lost(f"{name}.{member}")

    def publish(self) -> None:
        assert self.protocol.withdraw(supersede=False)
        self.protocol.release(self._offer(self.protocol.version + 1))

    def settle(self) -> None:
        """Until nobody has anything to say."""
        while self.attempts or self.queued:
            while self.attempts:
                self.attempts.pop().announce()
            batch, self.queued = self.queued, []
            for peer, message in batch:
                if peer in self.connected:
                    self._answer(peer, message)

    def _answer(self, peer: str, message: object) -> None:
        name = peer.partition(".")[0]
        match message:
            case Prepare(version=version, attempt=attempt) if name in self.failing:
                about = {"version": version, "attempt": attempt, "phase": "build", "reason": "no room"}
                self.protocol.hear(peer, Failed(poisoned=False, **about))
            case Prepare(version=version, attempt=attempt):
                digest = content_digest([])
                ready = Ready(version=version, attempt=attempt, digest=digest, receive_s=0.0, build_s=0.0)
                self.protocol.hear(peer, ready)
            case Abort(version=version, attempt=attempt):
                self.protocol.hear(peer, Aborted(version=version, attempt=attempt))
            case Commit(version=version):
                self.holds[name] = version
                about = {"version": version, "attempt": message.attempt, "publisher": message.publisher}
                self.protocol.hear(peer, Committed(**about, gap_s=0.0, running=0))

    def books(self) -> dict[str, int]:
        """What the publisher takes each generator to hold."""
        held = {each.generator: each.committed for each in self.protocol.replicas}
        return {name: version for name, version in held.items() if version is not None}
