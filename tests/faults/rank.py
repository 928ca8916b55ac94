"""Ranks and engine of one generator as a process, with a fake shadow: `python rank.py ENDPOINT g0 WORLD [FAULT]`.

FAULT is `PHASE:kill` or `PHASE:stop`: the signal that the process sends itself when a rank reaches that phase of
version 2. With `PHASE:kill:PID` or `PHASE:stop:PID` it signals that process instead, and awaits its end or stop before
it continues. Phases: `begin`, `receive`, `build`, `ready`, `swap` and `answer` (after the swap, before the engine says
so). Whatever it holds is written to standard output, one line per swap: `VERSION VALUE…`, one value per rank; and when
it gets SIGUSR1: `live VERSION SHA-256`, of all bytes of all ranks (not a test file).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

import fake_generator
import psutil
import torch
from fake_generator import FakeGenerator, FakeShadow, eventually

from inflight.messages import AnyMessage, Commit, RankSwapped, Ready, Refused
from inflight.weights.transport import make_receiver

VICTIM = 2
endpoint, name, world, *faults = sys.argv[1:]
harmed: list[str] = []
phase, what, whom = (*(faults[0] if faults else "").split(":"), "", "")[:3]
DONE = {"kill": (signal.SIGKILL, psutil.STATUS_ZOMBIE), "stop": (signal.SIGSTOP, psutil.STATUS_STOPPED)}


def status(pid: int) -> str:
    """Of a process; its parent may have taken note of its death by now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status()
    return psutil.STATUS_ZOMBIE


def at(reached: str) -> None:
    """Does the harm, once."""
    held = VICTIM if reached == "answer" else VICTIM - 1
    if reached == phase and generator.version == held and not harmed:
        harmed.append(reached)
        sent, then = DONE[what]
        os.kill(int(whom or os.getpid()), sent)
        if whom:
            eventually(lambda: status(int(whom)) == then, f"{then} of {whom}")


class Shadow(FakeShadow):
    """Tells where it is."""

    def _at(self, reached: str) -> None:
        super()._at(reached)
        at(reached)


class Halfway:
    """A transport that comes to harm after its first bucket."""

    def __init__(self, welcome):
        self._inner = make_receiver(welcome)

    def receive(self, buffer, buckets):
        if phase == "receive" and generator.version == VICTIM - 1:
            self._inner.receive(buffer, buckets[:1])
            at("receive")
            self._inner.receive(buffer, buckets[1:])
        else:
            self._inner.receive(buffer, buckets)

    def close(self):
        self._inner.close()


class Generator(FakeGenerator):
    """Tells what it holds."""

    told: tuple[int, str] = (0, "")
    """The last version that was printed, and its publisher."""

    def _commit(self, commit: Commit) -> None:
        named = (commit.version, commit.publisher)
        if self.answered is None or (self.answered.version, self.answered.publisher) != named:
            fake_send = self.engine.send
            self.engine.send = lambda message: (at("answer"), self.tell_held(*named), fake_send(message))
            super()._commit(commit)
            self.engine.send = fake_send
        else:
            super()._commit(commit)

    def tell_held(self, version: int, publisher: str) -> None:
        """Once, before all ranks or the engine have reported it: the test may look as soon as it is committed."""
        if self.told == (version, publisher):
            return
        self.told = (version, publisher)
        held = [sorted({float(v) for t in shadow.live.values() for v in t.unique()[:9]}) for shadow in self.shadows]
        say(f"{version} {held}")


def say(line: str) -> None:
    """In one piece: what ranks log comes from other threads, into the same file."""
    os.write(1, f"{line}\n".encode())


def tell_live(*_: object) -> None:
    """All that is live, byte by byte."""
    tensors = [tensor for shadow in generator.shadows for _, tensor in sorted(shadow.live.items())]
    digest = hashlib.sha256(b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors))
    say(f"live {generator.told[0]} {digest.hexdigest()}")


fake_generator.FakeShadow = Shadow
generator = Generator(endpoint, name, int(world), connect=Halfway)


def before(message: AnyMessage, rank: int) -> None:
    """What happens before a rank says something."""
    match message:
        case Ready():
            at("ready")
        case RankSwapped() if rank == len(generator.receivers) - 1:
            generator.tell_held(message.version, message.publisher)


for rank, receiver in enumerate(generator.receivers):
    tell = receiver._publisher.tell
    receiver._publisher.tell = lambda message, tell=tell, rank=rank: (before(message, rank), tell(message))
signal.signal(signal.SIGUSR1, tell_live)
generator.start()
while not any(isinstance(message, Refused) for message in generator.heard):  # else a generator ends
    time.sleep(0.05)  # signals are handled between
os._exit(1)
