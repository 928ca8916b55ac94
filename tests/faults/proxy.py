"""A relay between the publisher's control socket and those who connect, that loses, repeats, swaps and cuts frames."""

from __future__ import annotations

import random
import threading
from collections import Counter

import zmq

from inflight.messages import Heartbeat, WireError, decode


class Proxy:
    """Listens on `front` and speaks for each peer, under its own identity, with `back`.

    `harm(frame, down)` gives the frames that are passed on instead of one (heartbeats aside). `cut` stops everything.
    """

    def __init__(self, front: str, back: str, harm=lambda frame, down: [frame]) -> None:
        self._back, self._harm = back, harm
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._front.bind(front)
        self._peers: dict[bytes, zmq.Socket] = {}
        self.cut = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.is_set():
            poller = zmq.Poller()
            for each in (self._front, *self._peers.values()):
                poller.register(each, zmq.POLLIN)
            for ready, _ in poller.poll(20):
                if ready is self._front:
                    peer, frame = ready.recv_multipart()
                    for passed in self._passed(frame, down=False):
                        self._peer(peer).send(passed)
                else:
                    peer = next(name for name, back in self._peers.items() if back is ready)
                    for passed in self._passed(ready.recv(), down=True):
                        self._front.send_multipart([peer, passed])
        for each in (self._front, *self._peers.values()):
            each.close(0)

    def _peer(self, peer: bytes) -> zmq.Socket:
        if peer not in self._peers:
            self._peers[peer] = self._context.socket(zmq.DEALER)
            self._peers[peer].setsockopt(zmq.IDENTITY, peer)
            self._peers[peer].connect(self._back)
        return self._peers[peer]

    def _passed(self, frame: bytes, *, down: bool) -> list[bytes]:
        if self.cut.is_set():
            return []
        try:
            if isinstance(decode(frame), Heartbeat):
                return [frame]
        except WireError:
            return [frame]
        return self._harm(frame, down)

    def close(self) -> None:
        self._closing.set()
        self._thread.join(5)
        self._context.destroy(0)


class Harm:
    """One kind of harm to a share of the frames, by a seed."""

    def __init__(self, kind: str, share: float, seed: int = 0) -> None:
        self._kind, self._share, self._chance = kind, share, random.Random(seed)
        self._kept: dict[bool, bytes] = {}
        self.done: Counter[str] = Counter()

    def __call__(self, frame: bytes, down: bool) -> list[bytes]:
        late = [self._kept.pop(down)] if down in self._kept else []
        if self._chance.random() >= self._share:
            return [frame, *late]
        self.done[self._kind] += 1
        if self._kind == "drop":
            return late
        if self._kind == "duplicate":
            return [frame, frame, *late]
        if self._kind == "truncate":
            return [frame[: len(frame) // 2], *late]
        if self._kind == "corrupt":
            at = self._chance.randrange(len(frame))
            return [frame[:at] + bytes([frame[at] ^ 1 << self._chance.randrange(8)]) + frame[at + 1 :], *late]
        self._kept[down] = frame  # reorder: after the next one
        return late
