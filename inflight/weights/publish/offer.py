"""A version in the send buffer, checked once before any of it is sent."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from inflight.messages import Manifest
from inflight.weights.pack import checksums
from inflight.weights.publish.finite import NotFinite, require_finite
from inflight.weights.publish.read_fence import ReadFence
from inflight.weights.transport.sums import BufferSums


class Offer:
    """The version in the send buffer: its bytes, where each parameter lies in them, and whether it may be sent.

    Several sending threads use it at once; the first call of `sums` computes them, the others wait for it.
    """

    def __init__(
        self,
        version: int,
        manifest: Manifest,
        buffer: torch.Tensor,
        views: Mapping[str, torch.Tensor],
        fence: ReadFence,
        buffer_sums: BufferSums,
        *,
        finite_check: bool,
    ) -> None:
        """`buffer` is uint8 `[manifest.total_bytes]`, `views` its parameters by name; packing into it may still be
        queued on the device, and `fence` tells when that is done. `buffer_sums`: the buffer's checksums that the
        transports have computed."""
        self.version = version
        self.manifest = manifest
        self.buffer = buffer
        self._views = views
        self._fence = fence
        self._buffer_sums = buffer_sums
        self._finite_check = finite_check
        self._lock = threading.Lock()
        self._sums: list[int] | None = None
        self.unsound: NotFinite | None = None
        """Why it must not be sent; None while no reason is known."""

    def sums(self) -> list[int]:
        """The buckets' checksums, one CRC-32 each, or none if the transport verifies; waits until all is packed.

        Raises NotFinite, at each call, for a version that must not be sent.
        """
        with self._lock:
            if self.unsound is not None:
                raise self.unsound
            if self._sums is None:
                self._fence.wait_read()  # before this the buffer may hold other bytes
                self._buffer_sums.forget()
                self._require_finite()
                self._sums = checksums(self.manifest, self.buffer)
            return self._sums

    def _require_finite(self) -> None:
        if self._finite_check:
            try:
                require_finite(self.version, self._views)
            except NotFinite as error:
                self.unsound = error
                raise
