"""The trainer of the interruption bench: a process that owns random weights and sends them on order.

Speaks JSON lines over stdin and stdout; everything else goes to stderr. Orders: `join`, `publish`, `native_init`,
`native`, `randomize`, `swaps`, `quit`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from bench.gpu_shapes import random_adapter, random_model, randomize
from bench.native_sender import NativeSender, form
from inflight.bus import Listener
from inflight.config import BusConfig, PublishConfig
from inflight.weights.publish.events import Swap
from inflight.weights.publish.publisher import Publisher
from inflight.weights.source import WeightSource


class Trainer:
    """Random weights on a device, the publisher, and vLLM's own sender for comparison."""

    def __init__(self, options: dict[str, Any], reply: Any) -> None:
        self._options = options
        self._reply = reply
        self._cuda = options["device"].startswith("cuda")
        rank = options.get("adapter_rank", 0)
        make = partial(random_adapter, options["shape"], rank) if rank else partial(random_model, options["shape"])
        self._model = make(device=options["device"], seed=1)
        self._listener = Listener(options["endpoint"], BusConfig())
        config = PublishConfig(
            transport=options["transport"],
            bucket_bytes=options["bucket_mb"] << 20,
            checksum=options["checksum"],
            transfer_timeout_s=options["transfer_timeout_s"],
        )
        source = WeightSource(self._model, "bfloat16")
        self._publisher = Publisher(source, self._listener, config, version=0, ranks={"g0": options["ranks"]})
        self._native: NativeSender

    def join(self, _: dict[str, Any]) -> dict[str, Any]:
        """Waits for the engine's ranks."""
        self._publisher.wait_joined(300.0)
        return {}

    def publish(self, order: dict[str, Any]) -> dict[str, Any]:
        """One version; what the trainer waited for. Returns when it is committed, if `commit_within_s` is given."""
        report = self._publisher.publish(order["version"])
        if "commit_within_s" in order:
            self._publisher.wait_joined(order["commit_within_s"])
        return {"version": order["version"], "wait_s": report.wait_s, "pack_s": report.pack_s}

    def swaps(self, _: dict[str, Any]) -> dict[str, Any]:
        """How long each version's phases took, in seconds."""
        return {"swaps": [dataclasses.asdict(each) for each in self._publisher.events if isinstance(each, Swap)]}

    def randomize(self, order: dict[str, Any]) -> dict[str, Any]:
        """Other weights."""
        randomize(self._model, order["seed"])
        self._wait()
        return {}

    def native_init(self, order: dict[str, Any]) -> dict[str, Any]:
        """vLLM's own communicator. Answers before it waits: the engine has to join at the same time."""
        self._reply({"op": "native_init", "began": True})
        self._native = form(order["port"], self._options["ranks"], self._weights, packed=order["packed"])
        return {}

    def native(self, order: dict[str, Any]) -> dict[str, Any]:
        """vLLM's own sender, packed or tensor by tensor."""
        started = time.perf_counter()
        self._native.send(packed=order["packed"])
        self._wait()
        return {"send_s": time.perf_counter() - started}

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter([(name, parameter.data) for name, parameter in self._model.named_parameters()])

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def close(self) -> None:
        """Ends the publisher."""
        self._publisher.close()
        self._listener.close()


def main() -> None:
    """Reads orders until `quit` or the end of the input."""
    out = sys.stdout
    sys.stdout = sys.stderr  # libraries print

    def reply(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    trainer = Trainer(options, reply)
    reply({"op": "ready"})
    for line in sys.stdin:
        order = json.loads(line)
        if order["op"] == "quit":
            break
        try:
            reply({"op": order["op"], **getattr(trainer, order["op"])(order)})
        except Exception as error:  # noqa: BLE001 - the bench decides
            reply({"op": order["op"], "error": f"{type(error).__name__}: {error}"})
    trainer.close()


if __name__ == "__main__":
    main()
