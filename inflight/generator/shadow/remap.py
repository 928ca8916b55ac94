"""The CUDA shadows: a second set of weights, and the ways in which it becomes live.

| swap    | second set            | becomes live by                                  | the device stands still for |
| graphs  | second physical set   | taking the other set's addresses and CUDA graphs | not at all                  |
| remap   | second physical set   | moving the live range beneath the CUDA graphs    | under a millisecond         |
| copy    | second buffer         | a copy in stream order                           | 2 x bytes / memory rate     |
| host    | pinned host memory    | a copy in stream order                           | bytes / PCIe rate           |

In all of them the parameters live in one flat range, laid out once; in all but `graphs` (graph_shadow.py) at addresses
that never change. What travels is put into the shadow by a plan (cuda_plan.py): with `direct` by the transport itself
(see `DirectTransport`), else from a receive buffer, which is a third copy of the weights (files and tests).
"""

from __future__ import annotations

import threading
import time

import torch

from inflight.generator.shadow.arena import Arena
from inflight.generator.shadow.cuda_plan import LoadWeights, Plan, PlanError, make_plan, redirected
from inflight.generator.shadow.layout import Layout
from inflight.generator.shadow.oneshot import Moved
from inflight.messages import BucketMeta, Manifest
from inflight.weights.receive.shadow import TornWeights
from inflight.weights.transport import cuda
from inflight.weights.transport.landing import DirectReceiver, Landing


class CudaShadow:
    """What the CUDA shadows share: plans, the receive buffer, building, and the landing for direct transports."""

    WAYS: tuple[str, ...]
    """How a swap can be done; the first is the way, the others are for comparison."""

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
        self._way = self.WAYS[0]
        self._swapped = torch.cuda.Event()
        """Recorded where `target` may be written once the device is there."""

    def swap_by(self, way: str | None) -> None:
        """From the next swap on. None: the first of `WAYS`. Raises ValueError for a way that is none of them."""
        if way is not None and way not in self.WAYS:
            raise ValueError(f"this shadow swaps by {', '.join(self.WAYS)}, not by {way!r}")
        self.settle()
        self._way = way or self.WAYS[0]

    def target(self) -> torch.Tensor:
        """uint8 `[nbytes]`: the set to be filled."""
        raise NotImplementedError

    def settle(self) -> None:
        """Waits until the last swap is done on the device, so that `target` may be written. Raises TornWeights when it
        turns out to have failed."""
        try:
            self._swapped.synchronize()
        except Exception as error:
            raise TornWeights(f"the swap before could not be done: {error}") from error

    def agree(self, manifest: Manifest) -> Plan:
        """The plan for a manifest, made and checked against vLLM's loader once. Raises PlanError."""
        if self._plan is None or manifest != self._manifest:
            cuda.bind(self.device)
            self.settle()
            regions, base = self._layout.regions, self.live.data_ptr()
            plan = make_plan(manifest, self._load_weights, regions, base, self.device, whole=self._whole)
            with torch.cuda.stream(self._stream):  # the current one is the engine's: its steps would wait
                self._check_against_loader(manifest, plan)
            self._stream.synchronize()
            self._plan, self._manifest, self._buffer = plan, manifest, None
        return self._plan

    def begin(self, manifest: Manifest) -> torch.Tensor:
        """The receive buffer `[total_bytes]`: on the device, or when `direct` one on the meta device."""
        self.agree(manifest)
        self.settle()
        if self.direct:
            if manifest.checksum == "crc32":
                raise PlanError("the publisher's checksums are of whole buckets, which a rank on CUDA does not keep")
            return torch.empty(manifest.total_bytes, dtype=torch.uint8, device="meta")
        if self._buffer is None:
            self._buffer = torch.empty(manifest.total_bytes, dtype=torch.uint8, device=self.device)
        return self._buffer

    def landing(self) -> Landing:
        """Where a direct transport puts the bytes, after `begin`."""
        assert self._plan is not None
        return Landing(self.target(), self.device, tuple(self._plan.all_strips))

    def build(self) -> None:
        """Puts the received bytes where they belong, on a stream of its own; returns when they are there."""
        if self.direct:
            return
        assert self._plan is not None
        assert self._buffer is not None
        cuda.bind(self.device)
        torch.cuda.current_stream(self.device).synchronize()
        cuda.copy(self._plan.all_strips, self._buffer.data_ptr(), self.target().data_ptr(), self._stream.cuda_stream)
        self._stream.synchronize()

    def discard(self) -> None:
        """Nothing is kept of a half-filled set: every version fills all of it."""

    def _check_against_loader(self, manifest: Manifest, plan: Plan) -> None:
        """Random bytes through vLLM's loader and through the plan must agree, parameter by parameter."""
        shadow = self.target()
        if shadow.device != self.device:
            return  # a host shadow: the loader would copy through the host; the trace alone has to do
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
                    raise PlanError(f"{meta.name}: the plan and vLLM's loader put it to different places")


class DirectTransport:
    """A receiver that puts bytes into the shadow itself; see Receiver in weights/transport/base.py."""

    def __init__(self, inner: DirectReceiver, shadow: CudaShadow) -> None:
        self._inner = inner
        self._shadow = shadow

    def receive(self, buffer: torch.Tensor, buckets: list[BucketMeta]) -> None:
        """`buffer` is what `begin` returned and holds nothing."""
        self._inner.receive_into(self._shadow.landing(), buckets)

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


class RemapShadow(ArenaShadow):
    """A second physical set, which the live range is moved to.

    With `late=True` a swap only arms: `launch`, called at the head of the next forward pass, does it. Inputs of that
    pass are prepared by then while the step before still runs, so the device waits for the remap alone. And for less
    than that: what a step does after its last use of weights (`used`), sampling and copies, goes on beside the remap.
    """

    WAYS = ("remap", "calls", "idle", "copy")
    """In one call (oneshot.py), in several, of an idle device; or the other set is copied over the live one."""

    def __init__(self, arena: Arena, layout: Layout, load_weights: LoadWeights, *, whole: bool) -> None:
        super().__init__(arena, layout, load_weights, whole=whole)
        self._lock = threading.Lock()
        self._armed = False
        self._last_use = torch.cuda.Event()
        self._last_use_known = False
        self.late = False
        self.last_gap_s = 0.0
        """Seconds of the last remap that was done."""
        self.swaps: list[Moved] = []
        """Each swap since they were last taken."""

    def target(self) -> torch.Tensor:
        return self._arena.shadow

    def swap(self) -> float:
        """Seconds that the step loop stood still; 0 when it is armed only."""
        started = time.perf_counter()
        if self._way == "copy":
            self.live.copy_(self._arena.shadow, non_blocking=True)
            self._swapped.record(torch.cuda.current_stream(self.device))
            return time.perf_counter() - started
        with self._lock:
            self._armed = True
            # An idle device has nothing to hide the remap behind, and perhaps no next step.
            if self.late and not torch.cuda.current_stream(self.device).query():
                return 0.0
            self._remap()
        return time.perf_counter() - started

    def launch(self) -> None:
        """Does an armed swap. The step loop's thread, right before a forward pass is launched."""
        if self._armed:
            with self._lock:
                if self._armed:
                    self._remap(behind=self._last_use if self._last_use_known and self._way != "idle" else None)
        self._last_use_known = False

    def used(self) -> None:
        """All that uses the weights in this step is queued on the current stream. The step loop's thread."""
        self._last_use.record(torch.cuda.current_stream(self.device))
        self._last_use_known = True

    def settle(self) -> None:
        """Does a swap that no forward pass came to do (the engine is idle). Background thread."""
        try:
            if self._armed:
                cuda.bind(self.device)
                with self._lock:
                    if self._armed:
                        self._remap()
        except Exception as error:
            raise TornWeights(f"the swap before could not be done: {error}") from error
        super().settle()

    def _remap(self, behind: torch.cuda.Event | None = None) -> None:
        self.swaps.append(self._arena.remap(behind=behind, in_one=self._way != "calls"))
        self._armed = False
        self.last_gap_s = self.swaps[-1].move


class CopyShadow(CudaShadow):
    """A second buffer, on the device or in pinned host memory, copied over the live one in stream order."""

    WAYS = ("copy",)

    def __init__(
        self, live: torch.Tensor, layout: Layout, load_weights: LoadWeights, *, whole: bool, host: bool
    ) -> None:
        super().__init__(live, layout, load_weights, whole=whole)
        self._second = torch.empty(live.numel(), dtype=torch.uint8, pin_memory=True) if host else torch.empty_like(live)
        self._second.copy_(live)

    def target(self) -> torch.Tensor:
        return self._second

    def swap(self) -> float:
        """Seconds that queueing took: the copy runs between two steps on the device, the step loop goes on."""
        started = time.perf_counter()
        self.live.copy_(self._second, non_blocking=True)
        self._swapped.record(torch.cuda.current_stream(self.device))
        return time.perf_counter() - started
