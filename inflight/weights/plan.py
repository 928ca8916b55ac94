"""The layout of a version: where each parameter lies in the send buffer and how the buffer is cut. Pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from inflight.messages import BucketMeta, Manifest, Slot
from inflight.messages.base import MAX_BUCKETS
from inflight.types import ParamMeta

ALIGNMENT = 256
"""Bytes. As guaranteed by cudaMalloc, so that a slice of an arena is as well aligned as a separate tensor and kernels
choose no slower path for it; also whole cache lines on a CPU. Costs 128 bytes per parameter on average."""

_canonical = msgspec.msgpack.Encoder(order="deterministic")


class ManifestError(ValueError):
    """A layout that can't be made, or a received one that must not be trusted; says what is wrong with it."""


def plan(
    metas: Sequence[ParamMeta],
    tied: Mapping[str, str],
    bucket_bytes: int,
    checksum: str,
    *,
    alignment: int = ALIGNMENT,
    base: str | None = None,
) -> Manifest:
    """Slots in the order of `metas`, each at the next aligned offset; buckets of `bucket_bytes` tile the buffer.

    A parameter may cross buckets and a bucket may hold many. `base` is Manifest.base. Raises ManifestError for metas
    that make no valid layout.
    """
    slots: list[Slot] = []
    end = 0
    for meta in metas:
        slots.append(Slot(meta=meta, offset=end))
        end = _round_up(end + meta.nbytes, alignment)
    if bucket_bytes < 1:
        raise ManifestError(f"buckets of {bucket_bytes} bytes can't be cut")
    if end > MAX_BUCKETS * bucket_bytes:
        raise ManifestError(
            f"publish.bucket_bytes={bucket_bytes} makes more than {MAX_BUCKETS} buckets of {end} bytes of weights: "
            f"{-(-end // MAX_BUCKETS)} or more"
        )
    buckets = [
        BucketMeta(offset=offset, nbytes=min(bucket_bytes, end - offset)) for offset in range(0, end, bucket_bytes)
    ]
    manifest = Manifest(
        slots=slots,
        tied=dict(tied),
        buckets=buckets,
        total_bytes=end,
        alignment=alignment,
        checksum=checksum,
        base=base,
    )
    check(manifest)
    return manifest


def digest(manifest: Manifest) -> str:
    """SHA-256 over the manifest's canonical encoding: equal exactly when the layouts are."""
    return hashlib.sha256(_canonical.encode(manifest)).hexdigest()


def check(manifest: Manifest) -> None:
    """Raises ManifestError unless a received manifest is consistent, so that no later read or write based on it can
    leave the buffer or overlap."""
    _check_slots(manifest)
    _check_buckets(manifest)
    names = {slot.meta.name for slot in manifest.slots}
    for alias, travelling in manifest.tied.items():
        if travelling not in names:
            raise ManifestError(f"{alias} is tied to {travelling}, which is not sent")
        if alias in names:
            raise ManifestError(f"{alias} is sent and is tied to {travelling} as well")


def _check_slots(manifest: Manifest) -> None:
    if not manifest.slots:
        raise ManifestError("the manifest has no parameters")
    if manifest.alignment % 4:
        raise ManifestError(f"alignment of {manifest.alignment} bytes splits elements: a multiple of 4 is needed")
    seen: set[str] = set()
    end = 0
    for slot in manifest.slots:
        name = slot.meta.name
        if name in seen:
            raise ManifestError(f"{name} is sent twice")
        seen.add(name)
        if slot.offset % manifest.alignment:
            raise ManifestError(f"{name} at byte {slot.offset} is not aligned to {manifest.alignment}")
        if slot.offset < end:
            raise ManifestError(f"{name} at byte {slot.offset} overlaps the parameter that ends at {end}")
        end = slot.offset + slot.meta.nbytes
        if end > manifest.total_bytes:
            raise ManifestError(f"{name} ends at byte {end} of a buffer of {manifest.total_bytes}")
    if manifest.total_bytes != _round_up(end, manifest.alignment):
        raise ManifestError(f"buffer of {manifest.total_bytes} bytes for parameters that end at {end}")


def _check_buckets(manifest: Manifest) -> None:
    end = 0
    for index, bucket in enumerate(manifest.buckets):
        if bucket.offset != end:
            raise ManifestError(f"bucket {index} starts at byte {bucket.offset}, the one before ends at {end}")
        end += bucket.nbytes
    if end != manifest.total_bytes:
        raise ManifestError(f"buckets cover {end} bytes of {manifest.total_bytes}")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
