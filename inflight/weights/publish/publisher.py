"""The trainer's side: waits for a free send buffer and packs a version into it; sending overlaps with training."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from inflight.bus import Listener
from inflight.config import PublishConfig
from inflight.config.network import NetworkConfig
from inflight.messages import Manifest
from inflight.weights.pack import Packer
from inflight.weights.plan import plan
from inflight.weights.publish.channel import ChannelSource
from inflight.weights.publish.finite import NotFinite
from inflight.weights.publish.loop import PublisherLoop
from inflight.weights.publish.observed import Observed
from inflight.weights.publish.offer import Offer
from inflight.weights.publish.outbox import Outbox
from inflight.weights.publish.progress import PackingProgress
from inflight.weights.publish.protocol import PublishProtocol
from inflight.weights.publish.read_fence import ReadFence
from inflight.weights.publish.routes import RoutesFile
from inflight.weights.publish.served import Served
from inflight.weights.publish.session import Session
from inflight.weights.source import WeightSource
from inflight.weights.transport import checksum_of, make_buffer
from inflight.weights.transport.choice import TransportChoice
from inflight.weights.transport.rendezvous import HERE
from inflight.weights.transport.sums import warm_up

GRACE_S = 30.0
"""Seconds beyond the timeouts of the phases (covers checksums); reached only if the publisher's thread has a bug."""


class PublishError(RuntimeError):
    """Publishing can't continue, or a timeout has passed; the text names the generators and their states."""


@dataclass(frozen=True)
class PublishReport:
    """How long a publish blocked the trainer, in seconds, and which generators it can never reach."""

    version: int
    wait_s: float
    """Until no generator was receiving the previous version: each had it, or it had failed or was superseded there."""
    pack_s: float
    """Casting and copying into the send buffer; on CUDA with a fence that holds an optimizer: queueing these copies."""
    guard_s: float
    """Time that the optimizer steps since the previous publish waited until the parameters were read
    (read_fence.py)."""
    incompatible: dict[str, str]
    """Generators that can take no version of this publisher, with the reason; see Publisher.incompatible."""


class Publisher(Observed, Served):
    """Publishes the versions of a module to generators, each with a transport of its own.

    There is one send buffer, as large as the model in its wire dtype (`model.dtype`), and it holds the newest version:
    a generator that joins, rejoins or failed before is sent that one. `publish` waits until no generator receives the
    previous version, and packs over it. A second buffer would let packing begin earlier, but the next version could
    still not be sent before the previous one is swapped in, since a rank has one shadow (only what waits there for the
    end of a pin is replaced). So it would only shorten the wait of a trainer whose steps are shorter than a transfer,
    for the memory of a whole model.

    Life of a version: `ReplicaState`. The version that the module holds at the start is sent like any other: a number
    identifies weights that this publisher has sent, so a generator that joins holds none of its versions, whatever it
    was started with. A generator that is late, fails or dies is skipped; the others get the version. Failures are in
    `events` and in the log. `publish` and `flush` raise only when nothing can be sent any more: a version holds NaN or
    Inf, or no generator's model fits the published parameters.

    Example:
        with Listener(endpoint, bus) as listener:
            publisher = Publisher(WeightSource(model, "bfloat16"), listener, config, version=0, ranks={"g0": 1})
            publisher.wait_joined(300)
            for version in range(1, 41):
                optimizer.step()
                publisher.publish(version)
            publisher.flush(60)
            publisher.close()
    """

    def __init__(
        self,
        source: WeightSource,
        listener: Listener,
        config: PublishConfig,
        *,
        version: int,
        ranks: dict[str, int],
        fence: ReadFence | None = None,
        routes_file: Path | None = None,
        network: NetworkConfig = HERE,
        elastic: bool = False,
        guest_ranks: int = 0,
    ) -> None:
        """Begins to listen. `version` is that of the module's current weights, `ranks` generator name → world size.

        With a `fence` that holds the optimizer, packing on CUDA overlaps with the trainer's next forward and backward
        pass; otherwise `publish` returns when all is packed. `routes_file` lists the generators that may get requests;
        transports listen on `network`. `elastic`: what a generator misses before it comes is no failure. `guest_ranks`:
        world size of generators that may join although `ranks` does not name them, and are forgotten when they leave;
        0: none may.

        Raises NotFinite when the module holds NaN or Inf already, in the wire dtypes.
        """
        self._source = source
        self._config = config
        self._listener = listener
        self._fence = fence or ReadFence(source.device)
        choice = TransportChoice(config.transport, source.device)
        self.transport = choice.usual
        """gloo, nccl or ipc, to generators on this host; to others: transport/choice.py."""
        checksum = checksum_of(self.transport, config.checksum)
        self.manifest: Manifest = plan(source.metas, source.tied, config.bucket_bytes, checksum, base=source.base)
        if checksum == "sum64":
            warm_up(source.device)
        self._buffer = make_buffer(self.transport, self.manifest.total_bytes, source.device)
        self._packer = Packer(self.manifest, self._buffer)
        self._channels = ChannelSource(config.transfer_timeout_s, network)
        self._offer = self._pack(version)  # loads kernels that the first packing needs, before any step
        self._fence.settle()
        self.require_sound()
        session = Session(config, self.manifest, Outbox(listener), self._channels, choice, elastic=elastic)
        routes = RoutesFile(routes_file) if routes_file is not None else None
        self._loop = PublisherLoop(listener, session, ranks, self._offer, routes, guest_ranks)

    @property
    def refused(self) -> Counter[str]:
        """Frames and connections that its socket refused, by reason."""
        return Counter(self._listener.refusals.counts)

    @property
    def patience_s(self) -> float:
        """How long a run may continue without any generator, in seconds."""
        return self._config.join_timeout_s

    def wait_joined(self, timeout_s: float, *, at_least: int | None = None) -> None:
        """Returns when `at_least` generators (all, without it) have committed the newest version.

        Raises PublishError in one line: at once when too few generators are left that can take it, with each one's
        reason, else after `timeout_s`, naming the missing ones and their states.
        """

        def joined(_: PublishProtocol) -> bool:
            held = self.committed.values()
            needed = at_least or len(self.states)
            if len(self.states) - len(self.incompatible) < needed:
                raise PublishError(self._says_who_can_not())
            return sum(version == self.version for version in held) >= needed

        self._wait(joined, timeout_s, f"not {'all' if at_least is None else 'enough'} generators have joined")

    def publish(self, version: int) -> PublishReport:
        """Packs the module's parameters and begins to send them as `version`; blocks only for packing and a free
        buffer.

        While generators still receive the previous version it waits for them (`wait_s`), but at most
        `supersede_after_s` if others have it: the late ones are skipped and are sent the new one. One caller at a time.

        Raises ValueError for a version that is not newer, SourceError for a module that has changed, PublishError when
        publishing has ended, in particular because the previous version holds NaN or Inf, and when no generator can
        take the published parameters. One that can't while others can is in the report's `incompatible`.
        """
        if version <= self.version:
            raise ValueError(f"version {version} is not newer than {self.version}, which was published before")
        started = time.monotonic()
        self._require_taker()
        self._wait_for_buffer(started)
        waited = time.monotonic()
        self._offer = self._pack(version)
        self._loop.release(self._offer)  # it may be sent while it is packed
        self._fence.settle()
        packed = time.monotonic()
        return PublishReport(
            version,
            wait_s=waited - started,
            pack_s=packed - waited,
            guard_s=self._fence.take_waited_s(),
            incompatible=self.incompatible,
        )

    def require_sound(self) -> None:
        """Returns when the newest version is known to hold neither NaN nor Inf; waits for its check.

        Raises NotFinite naming the parameter. Does nothing without `finite_check`.
        """
        if self._config.finite_check:
            self._offer.check()

    def _pack(self, version: int) -> Offer:
        packed = PackingProgress()
        with self._fence.reading() as stream:
            self._packer.pack(self._source, lambda end: packed.mark(end, stream))
        return Offer(
            version,
            self.manifest,
            self._buffer,
            self._packer.views,
            self._fence,
            packed,
            self._channels.buffer_sums,
            finite_check=self._config.finite_check,
        )

    def _wait_for_buffer(self, started: float) -> None:
        patient_until = started + self._config.supersede_after_s
        self._wait(
            lambda protocol: protocol.withdraw(supersede=time.monotonic() >= patient_until),
            self._config.transfer_timeout_s + GRACE_S,
            f"version {self.version} has no outcome",
        )

    def flush(self, timeout_s: float) -> dict[str, str]:
        """Waits until the last version is committed or has failed everywhere.

        Returns generator → why it does not hold that version; empty when all do. Raises PublishError when the version
        has no outcome in time, and when no generator can take the published parameters.
        """
        self._wait(PublishProtocol.settled, timeout_s, f"version {self.version} has no outcome")
        self._require_taker()
        with self._loop.changed:
            committed = self.committed
            states = self.states
        missed = [name for name in states if committed.get(name) != self.version]
        return {name: f"{states[name][0].name}: {states[name][1]}" for name in missed}

    def _require_taker(self) -> None:
        if self.states and len(self.incompatible) == len(self.states):
            raise PublishError(self._says_who_can_not())

    def _says_who_can_not(self) -> str:
        reasons = "; ".join(f"{name}: {why}" for name, why in self.incompatible.items())
        return f"what is published can't be taken by {reasons}"

    def finish(self, reason: str) -> None:
        """Tells the generators' engines that the run is over, and the reason."""
        self._loop.finish(reason)

    def close(self) -> None:
        """Aborts transfers and ends all threads, within a timeout. A second call does nothing."""
        self._loop.close()

    def _wait(self, condition: Callable[[PublishProtocol], bool], timeout_s: float, problem: str) -> None:
        came = self._loop.wait(condition, timeout_s)
        if (error := self._loop.error) is not None:
            text = str(error) if isinstance(error, NotFinite) else f"publishing has ended: {error!r}"
            raise PublishError(text) from error
        if not came:
            states = "; ".join(f"{name} {state.name}: {why}" for name, (state, why) in self.states.items())
            raise PublishError(f"{problem} after {timeout_s:g} s ({states})")
