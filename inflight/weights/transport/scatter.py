"""Target addresses of received bytes, as byte runs, so that a transport can write them without a receive buffer.

A rank of a tensor-parallel generator keeps a part of each parameter, often next to parts of others (vLLM fuses q, k and
v). A `CopyRegion` describes one such part as a two-dimensional copy, which a copy engine does in one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from inflight.messages import BucketMeta

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class CopyRegion:
    """`rows` runs of `width` bytes, `source_pitch` bytes apart in the send buffer and `target_pitch` in the shadow."""

    source: int
    target: int
    width: int
    rows: int = 1
    source_pitch: int = 0
    target_pitch: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are copied."""
        return self.rows * self.width

    @property
    def source_end(self) -> int:
        """One past the last byte read."""
        return self.source + (self.rows - 1) * self.source_pitch + self.width

    def rows_of(self, first: int, count: int) -> CopyRegion:
        """The strip of rows `first` to `first + count`."""
        moved = replace(
            self,
            source=self.source + first * self.source_pitch,
            target=self.target + first * self.target_pitch,
            rows=count,
        )
        return moved if count > 1 else replace(moved, source_pitch=0, target_pitch=0)

    def part_of_row(self, row: int, left: int, width: int) -> CopyRegion:
        """`width` bytes of one row, from its byte `left` on."""
        one = self.rows_of(row, 1)
        return replace(one, source=one.source + left, target=one.target + left, width=width)


def clip(strip: CopyRegion, start: int, stop: int) -> list[CopyRegion]:
    """The parts of a strip whose source lies in `[start, stop)`: a piece of a row, whole rows, a piece of a row."""
    if strip.rows == 1:
        left = max(start, strip.source)
        right = min(stop, strip.source + strip.width)
        return [strip.part_of_row(0, left - strip.source, right - left)] if left < right else []
    pitch = strip.source_pitch
    width = strip.width
    first = max(0, (start - strip.source - width) // pitch + 1)
    last = min(strip.rows - 1, -((strip.source - stop) // pitch) - 1)
    if first > last:
        return []
    left = max(0, start - (strip.source + first * pitch))
    right = max(0, strip.source + last * pitch + width - stop)
    if first == last:
        return [strip.part_of_row(first, left, width - left - right)]
    parts: list[CopyRegion] = []
    tail: list[CopyRegion] = []
    if left:
        parts.append(strip.part_of_row(first, left, width - left))
        first += 1
    if right:
        tail.append(strip.part_of_row(last, 0, width - right))
        last -= 1
    if first <= last:
        parts.append(strip.rows_of(first, last - first + 1))
    return parts + tail


def split(strip: CopyRegion, piece_bytes: int) -> Iterator[CopyRegion]:
    """The strip in pieces of at most `piece_bytes`, so that no order occupies a copy engine for long."""
    if strip.nbytes <= piece_bytes:
        yield strip
    elif strip.width <= piece_bytes:
        rows = piece_bytes // strip.width
        for first in range(0, strip.rows, rows):
            yield strip.rows_of(first, min(rows, strip.rows - first))
    else:
        for row in range(strip.rows):
            for left in range(0, strip.width, piece_bytes):
                yield strip.part_of_row(row, left, min(piece_bytes, strip.width - left))


def by_bucket(strips: Iterable[CopyRegion], buckets: Iterable[BucketMeta]) -> list[list[CopyRegion]]:
    """For each bucket, the strips that read from it; source offsets count from the bucket's first byte."""
    ordered = sorted(strips, key=lambda strip: strip.source)
    per_bucket: list[list[CopyRegion]] = []
    for bucket in buckets:
        stop = bucket.offset + bucket.nbytes
        parts = [
            part
            for strip in ordered
            if strip.source < stop and strip.source_end > bucket.offset
            for part in clip(strip, bucket.offset, stop)
        ]
        per_bucket.append([replace(part, source=part.source - bucket.offset) for part in parts])
    return per_bucket


def from_buffer(strips: Iterable[CopyRegion], bucket: BucketMeta) -> list[CopyRegion]:
    """Strips that read from a bucket, with source offsets from the send buffer's first byte again."""
    return [replace(strip, source=strip.source + bucket.offset) for strip in strips]


@dataclass(frozen=True)
class ScatterTarget:
    """A shadow as a transport sees it: its memory, its device, and the strips to fill."""

    target: torch.Tensor
    """uint8, flat: on `device`, or pinned host memory."""
    device: torch.device
    """The generator's."""
    strips: tuple[CopyRegion, ...]

    @property
    def address(self) -> int:
        """Address of the target's first byte; host and devices share one address space."""
        address: int = self.target.data_ptr()
        return address


class DirectReceiver(Protocol):
    """A Receiver (see base.py) that can fill a scatter target without a buffer of `total_bytes`."""

    def receive_into(self, scatter: ScatterTarget, buckets: list[BucketMeta]) -> None:
        """Returns when every strip is filled and verified. Raises TransportError as `receive` does, and ChecksumError
        after a transfer that itself succeeded, so that the next one may follow."""

    def close(self) -> None:
        """Frees sockets and memory; never waits for a peer."""
