"""Sends a micro-batch to another rank in pieces: messages have a size limit that long sequences may exceed.

rank 0 --Piece--> other rank     in order, WINDOW of them at a time
rank 0 <--Took--- other rank     number of bytes received
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from inflight.messages.ranks import MAX_PARCEL_BYTES, PIECE_BYTES, Parcel, Piece
from inflight.trainer.batch import Batch
from inflight.trainer.wire import from_wire, to_wire

WINDOW = 4
"""Pieces that may be sent without acknowledgement: bounds the data queued in the sockets."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Parcel)


class PieceError(ValueError):
    """A piece that is not the next one, or a parcel that is too large, incomplete or not a micro-batch."""


def pieces(number: int, batch: Batch) -> Iterator[Piece]:
    """A micro-batch split into at least one piece. Raises PieceError when it is larger than the limit."""
    parcel = _encoder.encode(to_wire(batch))
    if len(parcel) > MAX_PARCEL_BYTES:
        raise PieceError(
            f"a micro-batch of {len(batch.input_ids)} sequences and {len(parcel)} bytes exceeds the limit of "
            f"{MAX_PARCEL_BYTES}: lower trainer.micro_batch or trainer.micro_batch_tokens"
        )
    for offset in range(0, len(parcel), PIECE_BYTES):
        yield Piece(number=number, offset=offset, total=len(parcel), data=parcel[offset : offset + PIECE_BYTES])


class Assembly:
    """Collects the received pieces of one micro-batch at a time."""

    def __init__(self) -> None:
        self._number = self._total = 0
        self._parts = bytearray()

    def add(self, piece: Piece) -> int:
        """Adds the next piece; returns the number of bytes received of its micro-batch.

        Raises PieceError that names the expected piece for any but the next one. Memory is allocated for received
        bytes, never for announced ones.
        """
        if piece.offset == 0 and len(self._parts) == self._total:
            self._number = piece.number
            self._total = piece.total
            self._parts = bytearray()
        where = (piece.number, piece.total, piece.offset)
        expected = (self._number, self._total, len(self._parts))
        if where != expected:
            raise PieceError(f"piece (order, bytes in all, offset) {where} came in place of {expected}")
        if not piece.data or piece.offset + len(piece.data) > piece.total:
            raise PieceError(f"piece of {len(piece.data)} bytes at {piece.offset} of {piece.total} does not fit")
        self._parts += piece.data
        return len(self._parts)

    def take(self, number: int) -> Batch:
        """Removes and returns the micro-batch of an order. Raises PieceError or RankDataError when it is none."""
        if self._number != number or len(self._parts) != self._total or not self._total:
            have = f"{len(self._parts)} of {self._total} bytes of order {self._number}"
            raise PieceError(f"order {number}: {have} were received")
        parcel, self._parts, self._total = self._parts, bytearray(), 0
        try:
            return from_wire(Batch, _decoder.decode(parcel))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PieceError(f"order {number} brings no micro-batch: {error}") from None
