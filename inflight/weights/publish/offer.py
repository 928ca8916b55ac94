"""A version in the send buffer, which is checked once, while the ranks receive it."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from inflight.messages import Manifest
from inflight.weights.pack import checksums
from inflight.weights.publish.finite import NotFinite, require_finite
from inflight.weights.publish.progress import PackingProgress
from inflight.weights.publish.read_fence import ReadFence
from inflight.weights.transport.sums import BufferSums


class Offer:
    """The version in the send buffer: its bytes, where each parameter lies in them, and whether it may go live.

    Several threads use it at once; the first call of `sums` computes them and that of `check` checks, others wait for
    it. The two do not wait for each other (docs/decisions/020-check-while-sending.md).
    """

    def __init__(
        self,
        version: int,
        manifest: Manifest,
        buffer: torch.Tensor,
        views: Mapping[str, torch.Tensor],
        fence: ReadFence,
        packed: PackingProgress,
        buffer_sums: BufferSums,
        *,
        finite_check: bool,
    ) -> None:
        """`buffer` is uint8 `[manifest.total_bytes]`, `views` its parameters by name; packing into it may still be
        queued on the device: `packed` tells how far that is, and `fence` when it is done. `buffer_sums`: the buffer's
        checksums that the transports have computed."""
        self.version = version
        self.manifest = manifest
        self.buffer = buffer
        self.packed = packed
        self._views = views
        self._fence = fence
        self._buffer_sums = buffer_sums
        self._lock = threading.Lock()
        self._sums: list[int] | None = None
        self._check = threading.Lock()
        self.checked = not finite_check
        """Whether it is known that it may go live."""
        self.unsound: NotFinite | None = None
        """Why it must not go live; None while no reason is known."""

    def sums(self, *, follow: bool = False) -> list[int]:
        """The buckets' checksums, one CRC-32 each, or none if the transport verifies. Waits until all is packed; with
        `follow`, if nothing will be summed, only until the first part is."""
        if follow and self.manifest.checksum == "none":
            next(iter(self.packed))
            return []
        with self._lock:
            if self._sums is None:
                self._fence.wait_read()  # before this the buffer may hold other bytes
                self._buffer_sums.forget()
                self._sums = checksums(self.manifest, self.buffer)
            return self._sums

    def check(self) -> None:
        """Returns when it is known that the version may go live; waits until all is packed.

        Raises NotFinite, at each call, for a version that holds NaN or Inf.
        """
        with self._check:
            if self.unsound is None and not self.checked:
                self._fence.wait_read()
                try:
                    require_finite(self.version, self._views)
                except NotFinite as error:
                    self.unsound = error
                else:
                    self.checked = True
            if self.unsound is not None:
                raise self.unsound
