"""Frames of a rollout file: `length u32 | crc32 u32 | body`, little endian; a body is the msgpack of a RolloutGroup."""

from __future__ import annotations

import struct
import zlib
from typing import BinaryIO

import msgspec

from inflight.arrays import from_msgpack, to_msgpack
from inflight.types import RolloutGroup

MAX_BODY_BYTES = 64 << 20
HEAD = struct.Struct("<II")
CONTINUED = HEAD.pack(0, int.from_bytes(b"next", "little"))
"""The end of a file that another one continues: no frame, since an empty body has the checksum 0."""

_SEARCHED_BYTES = 1 << 20
"""Bytes read at a time when a damaged file is searched for the next whole frame."""

_encoder = msgspec.msgpack.Encoder(enc_hook=to_msgpack)
_decoder = msgspec.msgpack.Decoder(RolloutGroup, dec_hook=from_msgpack)
_BODY_START = b"".join(
    _encoder.encode(RolloutGroup(group_id="", prompt_key="", rollouts=[])).partition(b"group_id")[:2]
)
"""Start of each body: the name of its first field."""


class StreamError(ValueError):
    """A file is not a rollout stream of this schema, is damaged before its end, is missing or is of another stream; or
    a group is too large."""


class BadFrame(ValueError):
    """An incomplete or damaged frame; the text says what is wrong with it."""


def encode_frame(group: RolloutGroup) -> bytes:
    """Encodes one frame. Raises StreamError when the group exceeds MAX_BODY_BYTES."""
    body = _encoder.encode(group)
    if len(body) > MAX_BODY_BYTES:
        raise StreamError(f"group {group.group_id} of {len(body)} bytes exceeds the limit of {MAX_BODY_BYTES}")
    return HEAD.pack(len(body), zlib.crc32(body)) + body


def decode_frame(frame: bytes) -> RolloutGroup:
    """The group of a frame from `encode_frame`."""
    return _decoder.decode(memoryview(frame)[HEAD.size :])


def read_frame(file: BinaryIO, head: bytes) -> tuple[RolloutGroup, int]:
    """The group of a frame whose head was read, and the frame's size in bytes. Raises BadFrame; reads no more than
    MAX_BODY_BYTES."""
    if len(head) < HEAD.size:
        raise BadFrame(f"{len(head)} bytes of a frame's {HEAD.size}-byte head")
    length, checksum = HEAD.unpack(head)
    if length > MAX_BODY_BYTES:
        raise BadFrame(f"frame claims {length} bytes, allowed are {MAX_BODY_BYTES}")
    body = file.read(length)
    if len(body) < length:
        raise BadFrame(f"{len(body)} of a frame's {length} bytes")
    if zlib.crc32(body) != checksum:
        raise BadFrame(f"frame of {length} bytes does not match its checksum")
    try:
        return _decoder.decode(body), HEAD.size + length
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"frame is no group: {error}") from None


def is_frame(file: BinaryIO, at: int) -> bool:
    """Whether a whole frame begins at that byte."""
    file.seek(at)
    head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        return False
    length, checksum = HEAD.unpack(head)
    body = file.read(length) if length <= MAX_BODY_BYTES else b""
    whole: bool = len(body) == length and zlib.crc32(body) == checksum
    return whole


def frame_after(file: BinaryIO, bad: int) -> int | None:
    """Offset of a whole frame after the bad one that begins at byte `bad`. None if there is none, or if the bad one has
    become whole because a writer is active."""
    if is_frame(file, bad):
        return None
    start = bad + 1
    kept = b""
    file.seek(start)
    while chunk := file.read(_SEARCHED_BYTES):
        searched = kept + chunk
        found = -1
        while (found := searched.find(_BODY_START, found + 1)) >= 0:
            at = start - len(kept) + found - HEAD.size
            if at > bad and is_frame(file, at):
                return at
        start += len(chunk)
        kept = searched[-len(_BODY_START) + 1 :]
        file.seek(start)
    return None
