"""A generator without vLLM: a shadow that records what happens to it, and an engine that commits on order."""

import secrets
import threading
import time

import torch

from inflight.bus import Link, PeerLost
from inflight.config import BusConfig
from inflight.messages import Commit, Committed, EngineHello, Enquire, Failed, RankHello
from inflight.weights.pack import unpack
from inflight.weights.receive.receiver import WeightReceiver
from inflight.weights.transport import make_receiver

BUS = BusConfig(heartbeat_s=0.05, dead_after_s=3.0)


def eventually(condition, what="it", timeout_s=60.0):
    """Polls until `condition()` holds; a bound against hanging, not a measure of speed."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.005)


class FakeShadow:
    """Implements Shadow over two dictionaries of tensors. `events` is what was called, in order."""

    def __init__(self):
        self.events = []
        self.live = {}
        self.built = None
        self.fail = {}
        """Phase → exception to raise there."""
        self.hold = {}
        """Phase → Event to wait for there."""

    def _at(self, phase):
        """Notes the call, then waits and raises as the test wants."""
        self.events.append(phase)
        if phase in self.hold:
            assert self.hold[phase].wait(30)
        if phase in self.fail:
            raise self.fail[phase]

    def begin(self, manifest):
        self._at("begin")
        self.manifest = manifest
        self.buffer = torch.full((manifest.total_bytes,), 255, dtype=torch.uint8)
        return self.buffer

    def build(self):
        self._at("build")
        self.built = {name: view.clone() for name, view in unpack(self.manifest, self.buffer).items()}

    def swap(self):
        self._at("swap")
        assert self.built is not None
        self.live, self.built = self.built, None
        return 0.001

    def discard(self):
        self._at("discard")
        self.built = None


class FakeGenerator:
    """Ranks with fake shadows and an engine, over the real bus."""

    def __init__(
        self,
        endpoint,
        name="g0",
        world_size=1,
        version=None,
        publisher="",
        connect=make_receiver,
        bus=BUS,
        url="http://127.0.0.1:1",
        place=None,
    ):
        """`version` of `publisher` is what it holds; None: none of anyone's."""
        self.url = url
        self.name, self.endpoint, self.bus = name, endpoint, bus
        self.incarnation = incarnation = secrets.token_hex(8)
        self.shadows = [FakeShadow() for _ in range(world_size)]
        self.receivers = [
            WeightReceiver(
                Link(endpoint, f"{name}.r{rank}", bus),
                shadow,
                RankHello(
                    generator=name,
                    rank=rank,
                    world_size=world_size,
                    version=version,
                    publisher=publisher,
                    incarnation=incarnation,
                    place=place,
                ),
                connect=connect,
            )
            for rank, shadow in enumerate(self.shadows)
        ]
        self.version, self.publisher, self.world_size = version, publisher, world_size
        self.heard = []
        """The messages to the engine, in order."""
        self.mute = threading.Event()
        """Set: the engine carries out its orders but does not answer."""
        self.unanswered = []
        self.answered = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def commits(self):
        """The versions that the engine got a Commit for, in order."""
        return [message.version for message in self.heard if isinstance(message, Commit)]

    def start(self):
        for receiver in self.receivers:
            receiver.start()
        self.engine = Link(self.endpoint, f"{self.name}.engine", self.bus)
        self._hello()
        self._thread.start()
        return self

    def _hello(self):
        hello = EngineHello(
            generator=self.name,
            world_size=self.world_size,
            version=self.version,
            publisher=self.publisher,
            url=self.url,
            incarnation=self.incarnation,
        )
        self.engine.send(hello)

    def _run(self):
        while not self._closing.is_set():
            try:
                message = self.engine.receive(0.05)
            except PeerLost:
                self._closing.wait(0.05)
                continue
            if isinstance(message, Enquire):
                self._hello()
            elif message is not None:
                self.heard.append(message)
            if isinstance(message, Commit):
                self._commit(message)

    def _commit(self, commit):
        version, publisher = commit.version, commit.publisher
        if self.answered is not None and (self.answered.version, self.answered.publisher) == (version, publisher):
            if not self.mute.is_set():
                self.engine.send(self.answered)
            return
        try:
            gaps = [receiver.swap(version) for receiver in self.receivers]
        except Exception as error:  # noqa: BLE001 - as the engine's agent does
            answer = Failed(version=version, phase="commit", reason=str(error), poisoned=True)
        else:
            self.version, self.publisher = version, publisher
            about = {"version": version, "attempt": commit.attempt, "publisher": publisher}
            answer = Committed(**about, gap_s=max(gaps), running=3)
            self.answered = answer
        self.unanswered.append(answer) if self.mute.is_set() else self.engine.send(answer)

    def answer(self):
        """Sends what was held back."""
        self.mute.clear()
        while self.unanswered:
            self.engine.send(self.unanswered.pop(0))

    def close(self):
        self._closing.set()
        for receiver in self.receivers:
            receiver.close()
        self._thread.join(5)
        self.engine.close()
