"""Bytes of a version: parameters into the send buffer, views out of a received one, and checksums over both."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Sequence

import torch

from inflight.messages import BucketMeta, Manifest
from inflight.weights.source import WIRE_DTYPES, WeightSource


class PackError(ValueError):
    """A source or a buffer that does not fit the manifest."""


class ChecksumError(ValueError):
    """Received bytes differ from those that were sent; the text names the buckets."""


def unpack(manifest: Manifest, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Name → view of `buffer` (uint8 `[total_bytes]`) in the parameter's shape and dtype. Nothing is copied.

    Tied names are not included; `manifest.tied` names the view that they share. Raises PackError for a buffer that does
    not fit. The manifest must have passed `plan.check`.
    """
    _require_buffer(manifest, buffer)
    views: dict[str, torch.Tensor] = {}
    for slot in manifest.slots:
        raw = buffer[slot.offset : slot.offset + slot.meta.nbytes]
        views[slot.meta.name] = raw.view(WIRE_DTYPES[slot.meta.dtype]).view(slot.meta.shape)
    return views


SMALL_BYTES = 4 << 20
"""On CUDA: smaller parameters are packed by one kernel per dtype, larger ones each by a copy at full memory rate."""
PART_BYTES = 1 << 30
"""The send buffer is packed in parts of at least so many bytes, one after the other."""

_Small = dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]]
"""Views and parameters that one kernel copies, by their dtypes."""


class Packer:
    """Packs a source into one send buffer, version after version; offsets in the buffer are computed once."""

    def __init__(self, manifest: Manifest, buffer: torch.Tensor) -> None:
        """Raises PackError for a buffer that does not fit."""
        self._slots = manifest.slots
        self._total = manifest.total_bytes
        self.views = unpack(manifest, buffer)
        """Name → its place in the buffer, in the parameter's shape and wire dtype."""
        self._grouped = buffer.is_cuda

    @torch.no_grad()
    def pack(self, source: WeightSource, mark: Callable[[int], None] = lambda _: None) -> None:
        """Casts and copies each parameter to its place, in place: no tensor is allocated for a plain module.

        Returns when the bytes are in the buffer (on a GPU: queued on the current stream); `mark(end)` is called when
        all bytes before `end` are, after each part of PART_BYTES and at the end. On CUDA a part's small parameters are
        packed last, together; those of a sharded module are held until then. Raises PackError when the source's
        parameters are not the manifest's, SourceError when the module has changed.
        """
        packed = begun = 0
        small: _Small = {}
        for (name, tensor), slot, view in zip(source, self._slots, self.views.values(), strict=False):
            if name != slot.meta.name or tensor.shape != slot.meta.shape:
                expected = f"{slot.meta.name} {slot.meta.shape}"
                raise PackError(f"the manifest expects {expected}, got {name} {tuple(tensor.shape)}")
            if self._grouped and slot.meta.nbytes < SMALL_BYTES:
                views, tensors = small.setdefault((view.dtype, tensor.dtype), ([], []))
                views.append(view)
                tensors.append(tensor)
            else:
                view.copy_(tensor)
            packed += 1
            end = slot.offset + slot.meta.nbytes
            if end - begun >= PART_BYTES:
                _copy(small)
                mark(end)
                begun = end
        _copy(small)
        if packed != len(self._slots) or packed != len(source.metas):
            raise PackError(f"the source has {len(source.metas)} parameters, the manifest {len(self._slots)}")
        mark(self._total)


def _copy(small: _Small) -> None:
    """Copies what was collected, and forgets it."""
    for views, tensors in small.values():
        torch._foreach_copy_(views, tensors)
    small.clear()


def checksums(manifest: Manifest, buffer: torch.Tensor) -> list[int]:
    """One CRC-32 per bucket of a buffer on the host, in order, computed without the GIL; empty unless the manifest says
    `crc32`: with `sum64` the transport verifies (transport/sums.py)."""
    _require_buffer(manifest, buffer)
    if manifest.checksum != "crc32":
        return []
    return [zlib.crc32(_bytes(buffer, bucket)) for bucket in manifest.buckets]


def content_digest(sums: Sequence[int]) -> str:
    """SHA-256 over the buckets' checksums in order: names the bytes of a version in one string."""
    return hashlib.sha256(b"".join(struct.pack("<I", value) for value in sums)).hexdigest()


def verify(manifest: Manifest, buffer: torch.Tensor, expected: Sequence[int]) -> str:
    """The digest of the received bytes. Raises ChecksumError that names the buckets that differ from the sent ones."""
    found = checksums(manifest, buffer)
    if len(found) != len(expected):
        raise ChecksumError(f"{len(expected)} checksums came for {len(found)} buckets")
    bad = [index for index, (got, sent) in enumerate(zip(found, expected, strict=True)) if got != sent]
    if bad:
        raise ChecksumError(f"bytes differ from those sent in buckets {bad[:8]} of {len(found)} ({len(bad)} in all)")
    return content_digest(found)


def _bytes(buffer: torch.Tensor, bucket: BucketMeta) -> memoryview:
    return buffer[bucket.offset : bucket.offset + bucket.nbytes].numpy().data


def _require_buffer(manifest: Manifest, buffer: torch.Tensor) -> None:
    if buffer.dtype != torch.uint8 or tuple(buffer.shape) != (manifest.total_bytes,) or not buffer.is_contiguous():
        raise PackError(
            f"need a contiguous uint8 buffer of {manifest.total_bytes} bytes, "
            f"got {buffer.dtype} of shape {tuple(buffer.shape)}"
        )
