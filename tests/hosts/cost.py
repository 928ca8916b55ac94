"""Seconds until G generators on hosts of their own have a version, over a link of the trainer's with a known rate,
beside the cost model of docs/scale.md: `python -m tests.hosts.cost` (root; not a test file)."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from inflight.config.network import NetworkConfig
from inflight.messages import BucketMeta
from inflight.weights.transport.gloo import GlooReceiver, GlooSender
from tests.hosts.namespaces import Hosts

MIB = 8
RATE_MBIT = 200
GENERATORS = (1, 2, 4)
TIMES = 3
LIMIT_S = 120.0


def buckets() -> list[BucketMeta]:
    return [BucketMeta(offset=at << 20, nbytes=1 << 20) for at in range(MIB)]


def send(address: str, count: int) -> None:
    """The trainer's process: prints a rendezvous for each generator, then the seconds of each version."""
    buffer = torch.randint(0, 256, (MIB << 20,), dtype=torch.uint8)
    senders = [GlooSender(2, LIMIT_S, NetworkConfig(bind=address)) for _ in range(count)]
    print(json.dumps([sender.rendezvous for sender in senders]), flush=True)
    taken = []
    for _ in range(TIMES + 1):
        began = time.monotonic()
        sending = [threading.Thread(target=sender.send, args=(buffer, buckets())) for sender in senders]
        for thread in sending:
            thread.start()
        for thread in sending:
            thread.join()
        taken.append(time.monotonic() - began)
    print(json.dumps(taken[1:]), flush=True)  # the first one forms the groups


def receive(address: str, rendezvous: str) -> None:
    """A generator's process."""
    buffer = torch.zeros(MIB << 20, dtype=torch.uint8)
    receiver = GlooReceiver(rendezvous, 1, 2, LIMIT_S, NetworkConfig(bind=address))
    for _ in range(TIMES + 1):
        receiver.receive(buffer, buckets())


def measure() -> None:
    me = [sys.executable, "-m", "tests.hosts.cost"]
    with tempfile.TemporaryDirectory() as folder, Hosts(max(GENERATORS) + 1, Path(folder)) as hosts:
        shape = ["tbf", "rate", f"{RATE_MBIT}mbit", "burst", "128kb", "latency", "500ms"]
        limit = ["ip", "netns", "exec", hosts.names[0], "tc", "qdisc", "add", "dev", "eth0", "root", *shape]
        subprocess.run(limit, check=True)
        for count in GENERATORS:
            trainer = hosts.within(0, *me, "send", hosts.address(0), str(count), stdout=subprocess.PIPE)
            places = json.loads(trainer.stdout.readline())
            generators = [
                hosts.within(number, *me, "receive", hosts.address(number), place)
                for number, place in enumerate(places, start=1)
            ]
            taken = sorted(json.loads(trainer.stdout.readline()))
            model = count * MIB * 8 * 1.048576 / RATE_MBIT
            print(f"G={count}: {taken[len(taken) // 2]:.2f} s ({taken[0]:.2f} to {taken[-1]:.2f}), model {model:.2f} s")
            for process in [trainer, *generators]:
                process.wait(LIMIT_S)


if __name__ == "__main__":
    if sys.argv[1:2] == ["send"]:
        send(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1:2] == ["receive"]:
        receive(sys.argv[2], sys.argv[3])
    else:
        measure()
