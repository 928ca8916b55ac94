"""The common part of the shadows on CUDA: a second set of weights, how it is filled, and the worker's interface to it.

| swap    | second set            | becomes live by                                  | the device is idle for      |
| graphs  | second physical set   | taking the other set's addresses and CUDA graphs | not at all                  |
| remap   | second physical set   | moving the live range beneath the CUDA graphs    | under a millisecond         |
| copy    | second buffer         | a copy in stream order                           | 2 x bytes / memory rate     |
| host    | pinned host memory    | a copy in stream order                           | bytes / PCIe rate           |

Each is a class behind the methods of CudaShadow, which is all that the worker knows, in a file of its own (`copy` and
`host` share copy.py). In all of them the parameters lie in one flat range, laid out once; in all but `graphs` their
addresses never change. A version is written into the shadow by a plan (cuda_plan.py): by the transport itself where it
can (see `accept`), else, for versions from files and in tests, from a receive buffer, a third copy of the weights.
"""

from __future__ import annotations

from typing import Any

import torch

from inflight.generator.shadow.arena import Arena
from inflight.generator.shadow.cuda_plan import LoadWeights, Plan, PlanError, make_plan, redirected
from inflight.generator.shadow.layout import Layout
from inflight.messages import BucketMeta, Manifest
from inflight.weights.receive.shadow import TornWeights
from inflight.weights.transport import cuda
from inflight.weights.transport.base import Receiver
from inflight.weights.transport.scatter import DirectReceiver, ScatterTarget


class CudaShadow:
    """The shadow of a worker on CUDA: plans, the receive buffer, building, and the target for direct transports.

    A subclass has `target` and `swap`. It can hook into vLLM's start: `plan_graphs` is called when the model is loaded,
    `measured` when vLLM has profiled a step, `ready` after warm-up.
    """

    name: str
    """The value of `generator.swap` that selects it."""
    last_gap_s = 0.0
    """Seconds of the last swap that was done after its commit was answered; 0 if there is none."""

    def __init__(self, live: torch.Tensor, layout: Layout, load_weights: LoadWeights, *, whole: bool) -> None:
        self.live = live
        self.device = live.device
        self._layout = layout
        self._load_weights = load_weights
        self._whole = whole
        self._stream = torch.cuda.Stream(self.device)
        self._manifest: Manifest | None = None
        self._plan: Plan | None = None
        self._buffer: torch.Tensor | None = None
        self.direct = False
        """The transport fills the shadow itself: `begin` returns a buffer without memory."""
        self._swapped = torch.cuda.Event()
        """An event; once the device has reached it, `target` may be written."""

    def plan_graphs(self, runner: Any) -> None:
        """Called when the model is loaded, before vLLM's `runner` plans its memory or captures graphs."""

    def measured(self, step_bytes: int) -> None:
        """Called after vLLM's profiling. `step_bytes`: most memory of a step beside weights and KV cache, in bytes."""

    def ready(self, runner: Any) -> CudaShadow:
        """Called after warm-up. Returns the shadow to use from now on: this one, or another over the same memory."""
        return self

    def accept(self, receiver: Receiver) -> Receiver:
        """The receiver to use: one that fills the shadow directly if `receiver` can scatter, else `receiver` itself."""
        self.direct = hasattr(receiver, "receive_into")
        return DirectTransport(receiver, self) if self.direct else receiver  # type: ignore[arg-type]

    def target(self) -> torch.Tensor:
        """uint8 `[nbytes]`: the set to be filled."""
        raise NotImplementedError

    def swap(self) -> float:
        """Makes the target live between two forward passes. Returns the seconds for which the step loop stalled."""
        raise NotImplementedError

    def settle(self) -> None:
        """Waits until the last swap is done on the device, so that `target` may be written. Raises TornWeights when
        that swap failed."""
        try:
            self._swapped.synchronize()
        except Exception as error:
            raise TornWeights(f"the previous swap failed: {error}") from error

    def agree(self, manifest: Manifest) -> Plan:
        """The plan for a manifest, made once and checked against vLLM's loader. Raises PlanError."""
        if self._plan is None or manifest != self._manifest:
            cuda.bind(self.device)
            self.settle()
            regions = self._layout.regions
            base = self.live.data_ptr()
            plan = make_plan(manifest, self._load_weights, regions, base, self.device, whole=self._whole)
            with torch.cuda.stream(self._stream):  # on the engine's own stream its steps would wait for this
                self._check_against_loader(manifest, plan)
            self._stream.synchronize()
            self._plan = plan
            self._manifest = manifest
            self._buffer = None
        return self._plan

    def begin(self, manifest: Manifest) -> torch.Tensor:
        """The receive buffer `[total_bytes]`: on the device, or on the meta device when the transport writes directly.
        Raises PlanError."""
        self.agree(manifest)
        self.settle()
        if self.direct:
            if manifest.checksum == "crc32":
                raise PlanError("the publisher's checksums are of whole buckets, which a rank on CUDA does not keep")
            return torch.empty(manifest.total_bytes, dtype=torch.uint8, device="meta")
        if self._buffer is None:
            self._buffer = torch.empty(manifest.total_bytes, dtype=torch.uint8, device=self.device)
        return self._buffer

    def scatter_target(self) -> ScatterTarget:
        """The addresses that a direct transport writes to; valid after `begin`."""
        assert self._plan is not None
        return ScatterTarget(self.target(), self.device, tuple(self._plan.all_strips))

    def build(self) -> None:
        """Copies the received bytes to their places, on a stream of its own; returns when the copies are done."""
        if self.direct:
            return
        assert self._plan is not None
        assert self._buffer is not None
        cuda.bind(self.device)
        torch.cuda.current_stream(self.device).synchronize()
        cuda.copy(self._plan.all_strips, self._buffer.data_ptr(), self.target().data_ptr(), self._stream.cuda_stream)
        self._stream.synchronize()

    def discard(self) -> None:
        """Does nothing: every version overwrites the whole set."""

    def _check_against_loader(self, manifest: Manifest, plan: Plan) -> None:
        """Raises PlanError unless random bytes through vLLM's loader and through the plan agree for each parameter."""
        shadow = self.target()
        if shadow.device != self.device:
            return  # a host shadow: the loader would copy through the host; only the trace checks the plan
        for slot in manifest.slots:
            meta = slot.meta
            raw = torch.randint(0, 120, (meta.nbytes,), dtype=torch.uint8, device=self.device)
            tensor = raw.view(getattr(torch, meta.dtype)).view(meta.shape)
            with redirected(self.live[: self._layout.nbytes], shadow):
                self._load_weights([(meta.name, tensor)])
            for strip in plan.strips.get(meta.name, ()):
                got = shadow.as_strided((strip.rows, strip.width), (strip.target_pitch, 1), strip.target)
                sent = raw.as_strided((strip.rows, strip.width), (strip.source_pitch, 1), strip.source - slot.offset)
                if not torch.equal(got, sent):
                    raise PlanError(f"{meta.name}: the plan and vLLM's loader write it to different places")


class DirectTransport:
    """A receiver whose transport writes straight into the shadow; see Receiver in weights/transport/base.py."""

    def __init__(self, inner: DirectReceiver, shadow: CudaShadow) -> None:
        self._inner = inner
        self._shadow = shadow

    def receive(self, buffer: torch.Tensor, buckets: list[BucketMeta]) -> None:
        """`buffer` is the meta tensor that `begin` returned and has no memory."""
        self._inner.receive_into(self._shadow.scatter_target(), buckets)

    def close(self) -> None:
        self._inner.close()


class ArenaShadow(CudaShadow):
    """A second physical set in the arena of the live one."""

    def __init__(self, arena: Arena, layout: Layout, load_weights: LoadWeights, *, whole: bool) -> None:
        super().__init__(arena.live, layout, load_weights, whole=whole)
        arena.add_shadow()
        arena.shadow.copy_(arena.live)  # padding and other constants are the same in both sets
        torch.cuda.synchronize(self.device)
        self._arena = arena
