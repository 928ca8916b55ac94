"""The ways to give a running generator the trainer's weights, behind the interface of inflight's publisher."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from bench.native_sender import form, update_info, worker_info
from bench.peers.control import Caller
from inflight.types import Route
from inflight.weights.publish.events import Event
from inflight.weights.publish.publisher import Publisher, PublishReport
from inflight.weights.source import WIRE_DTYPES, WeightSource

ANSWER_S = 120.0


@dataclass(frozen=True)
class Way:
    """How an arm of the bench updates the generator's weights, and whether it trains synchronously."""

    pause: str = ""
    """The mode of vLLM's pause; empty: inflight's own publication, without one."""
    packed: bool = True
    """Parameters are sent many at a time, else each by itself."""
    synchronous: bool = False
    """A batch is generated, trained on and published before the next one is begun."""


WAYS = {
    "inflight": Way(),
    "keep_packed": Way("keep"),
    "keep_each": Way("keep", packed=False),
    "abort_resume": Way("abort"),
    "synchronous": Way("keep", synchronous=True),
}
"""`keep_packed` is what NeMo-RL, prime-rl and TRL do, `keep_each` PipelineRL, `abort_resume` verl."""


class Transfer(Protocol):
    """Moves weights into a paused engine."""

    def send(self, version: int, *, packed: bool) -> None:
        """Returns when the engine holds the source's current weights, which it is to stamp as `version`."""


class NcclTransfer:
    """vLLM's own: its trainer's side here, its workers' side by its RPCs."""

    def __init__(self, source: WeightSource, caller: Caller) -> None:
        """Forms the communicator, of this process and one worker. Raises ControlError or what vLLM raises."""
        self._source = source
        self._caller = caller
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="engine call")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        info = worker_info(port, 1, packed=True)
        joined = self._pool.submit(caller.call, "rpc", "init_weight_transfer_engine", info)
        self._sender = form(port, 1, self._wire, packed=True)  # by call where vLLM allows it
        joined.result(ANSWER_S)
        metas = source.metas
        self._info = {
            "names": [meta.name for meta in metas],
            "dtype_names": [meta.dtype for meta in metas],
            "shapes": [list(meta.shape) for meta in metas],
        }

    def send(self, version: int, *, packed: bool) -> None:
        torch.cuda.synchronize()  # vLLM's producer reads on streams of its own
        self._caller.call("rpc", "start_weight_update")
        received = self._pool.submit(self._caller.call, "rpc", "update_weights", update_info(self._info, packed=packed))
        self._sender.send(packed=packed)
        received.result(ANSWER_S)
        torch.cuda.synchronize()
        self._caller.call("rpc", "finish_weight_update")

    def _wire(self) -> Iterator[tuple[str, torch.Tensor]]:
        dtypes = {meta.name: WIRE_DTYPES[meta.dtype] for meta in self._source.metas}
        return ((name, tensor.to(dtypes[name])) for name, tensor in self._source)


class FileTransfer:
    """A file in the place of a transfer, on CPU."""

    def __init__(self, source: WeightSource, caller: Caller, folder: Path) -> None:
        self._source = source
        self._caller = caller
        self._file = folder / "weights.safetensors"

    def send(self, version: int, *, packed: bool) -> None:
        from safetensors.torch import save_file

        save_file(snapshot(self._source), self._file)
        self._caller.call("rpc", "peers_load", str(self._file), version)


def snapshot(source: WeightSource) -> dict[str, torch.Tensor]:
    """A copy of the weights as they are sent, on the same device."""
    dtypes = {meta.name: WIRE_DTYPES[meta.dtype] for meta in source.metas}
    return {name: tensor.detach().to(dtypes[name], copy=True) for name, tensor in source}


class ArmPublisher:
    """inflight's publisher as one arm's trainer sees it: versions go the arm's way, and its end ends no generator.

    What is not defined here is that of the publisher that all arms share.
    """

    def __init__(self, inner: Publisher, way: Way, caller: Caller, transfer: Transfer | None) -> None:
        self._inner = inner
        self._way = way
        self._caller = caller
        self._transfer = transfer
        self.version = inner.version
        self._first = len(inner.events)
        self.blocked_s: list[float] = []
        """Seconds that each publication kept the trainer from its next step."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def committed(self) -> dict[str, int]:
        """As the publisher's; a generator that another way has updated holds the newest version."""
        return self._inner.committed if not self._way.pause else dict.fromkeys(self._inner.committed, self.version)

    @property
    def behind(self) -> dict[str, int]:
        """As the publisher's."""
        return {name: self.version - version for name, version in self.committed.items()}

    @property
    def served(self) -> dict[str, Route]:
        """As the publisher's."""
        held = self.committed
        return {
            name: Route(url=route.url, version=held.get(name, route.version), incarnation=route.incarnation)
            for name, route in self._inner.served.items()
        }

    def events_since(self, cursor: int) -> list[Event]:
        """Those of this arm."""
        return self._inner.events_since(self._first + cursor)

    def publish(self, version: int) -> PublishReport:
        """Returns when the trainer may continue, as the way has it."""
        started = time.monotonic()
        report = self._inner.publish(version) if not self._way.pause else self._update(version)
        self.version = version
        self.blocked_s.append(time.monotonic() - started)
        return report

    def _update(self, version: int) -> PublishReport:
        assert self._transfer is not None
        started = time.monotonic()
        self._caller.call("pause", self._way.pause)
        self._transfer.send(version, packed=self._way.packed)
        errors = [rank["error"] for rank in self._caller.call("commit_weights", version) if "error" in rank]
        if errors:
            raise RuntimeError(f"version {version}: {errors[0]}")
        self._caller.call("resume")
        return PublishReport(version, wait_s=time.monotonic() - started, pack_s=0.0, guard_s=0.0, incompatible={})

    def finish(self, reason: str) -> None:
        """Nothing: the generator serves the next arm."""


def synchronous(config: Any) -> Any:
    """The configuration of an arm that trains synchronously."""
    trainer = replace(config.trainer, synchronous=True)
    gate = replace(config.gate, max_lag=0)
    return replace(config, trainer=trainer, gate=gate)
