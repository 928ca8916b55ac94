"""A file of rollout groups that grows frame by frame and survives being cut off anywhere.

Layout: the 8 bytes `MAGIC`, then frames of `length u32 | crc32 u32 | body`, little endian; the body is the msgpack of
one RolloutGroup. A frame is written in one call, so a killed writer leaves whole frames and at most one torn tail,
which a reader reports instead of raising. Whole frames after a bad one are no torn tail: the file is corrupted, and
both reader and writer refuse it, so that no groups are lost silently.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from inflight.arrays import from_msgpack, to_msgpack
from inflight.types import RolloutGroup

SCHEMA = 3
MAGIC = b"inflrol" + bytes([SCHEMA])
MAX_BODY_BYTES = 64 << 20
_HEAD = struct.Struct("<II")

_SEARCHED_BYTES = 1 << 20
"""Bytes read at a time when a damaged file is searched for the next whole frame."""

_encoder = msgspec.msgpack.Encoder(enc_hook=to_msgpack)
_decoder = msgspec.msgpack.Decoder(RolloutGroup, dec_hook=from_msgpack)
_BODY_START = b"".join(
    _encoder.encode(RolloutGroup(group_id="", prompt_key="", rollouts=[])).partition(b"group_id")[:2]
)
"""Start of each body: the name of its first field."""


class StreamError(ValueError):
    """The file is not a rollout stream of this schema or is damaged before its end, or a group is too large."""


def encode_frame(group: RolloutGroup) -> bytes:
    """Encodes one frame. Raises StreamError when the group exceeds MAX_BODY_BYTES."""
    body = _encoder.encode(group)
    if len(body) > MAX_BODY_BYTES:
        raise StreamError(f"group {group.group_id} of {len(body)} bytes exceeds the limit of {MAX_BODY_BYTES}")
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def decode_frame(frame: bytes) -> RolloutGroup:
    """The group of a frame from `encode_frame`."""
    return _decoder.decode(memoryview(frame)[_HEAD.size :])


def read_group(path: str | Path, at: int) -> RolloutGroup:
    """The group whose frame begins at byte `at`, as `Reader.good_bytes` tells. Raises StreamError for anything else."""
    with Path(path).open("rb") as file:
        if not _is_frame(file, at):
            raise StreamError(f"{path} has no frame at byte {at}")
        file.seek(at)
        length, _ = _HEAD.unpack(file.read(_HEAD.size))
        return _decoder.decode(file.read(length))


class Reader:
    """Yields the whole groups of a stream; afterwards `torn` describes an incomplete frame at the end.

    Holds one group in memory at a time and reads no frame above MAX_BODY_BYTES. Each iteration starts from the
    beginning. Raises StreamError when the file does not start as a stream of this schema, and when whole frames follow
    a bad one.

    Example: `reader = Reader(path); groups = list(reader); assert reader.torn is None`
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.torn: str | None = None
        """What is wrong at the end and where; None when the file ends with a whole frame (or was not read yet)."""
        self.good_bytes = 0
        """Offset at which the last whole frame ends."""

    def __iter__(self) -> Iterator[RolloutGroup]:
        self.torn, self.good_bytes = None, len(MAGIC)
        with self.path.open("rb") as file:
            start = file.read(len(MAGIC))
            if start != MAGIC:
                raise StreamError(f"{self.path} is {_what(start)}; this release reads streams of schema {SCHEMA}")
            while (group := self._group(file)) is not None:
                yield group
            if self.torn is not None and (next_at := self._next_frame(file)) is not None:
                raise StreamError(f"{self.path} is damaged: {self.torn}; groups follow it from byte {next_at} on")

    def _group(self, file: BinaryIO) -> RolloutGroup | None:
        """The next group; None at the end or, with `torn` set, at the first bad frame."""
        body = self._body(file)
        if body is None:
            return None
        try:
            group = _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.torn = self._at(f"frame is no group: {error}")
            return None
        self.good_bytes += _HEAD.size + len(body)
        return group

    def _next_frame(self, file: BinaryIO) -> int | None:
        """Offset of a whole frame after the bad one. None if there is none, or if the bad one has become whole because
        a writer is active."""
        if _is_frame(file, self.good_bytes):
            return None
        start, kept = self.good_bytes + 1, b""
        file.seek(start)
        while chunk := file.read(_SEARCHED_BYTES):
            searched, found = kept + chunk, -1
            while (found := searched.find(_BODY_START, found + 1)) >= 0:
                at = start - len(kept) + found - _HEAD.size
                if at > self.good_bytes and _is_frame(file, at):
                    return at
            start += len(chunk)
            kept = searched[-len(_BODY_START) + 1 :]
            file.seek(start)
        return None

    def _body(self, file: BinaryIO) -> bytes | None:
        """The next frame's verified body; None at the end or, with `torn` set, at the first bad frame."""
        head = file.read(_HEAD.size)
        if not head:
            return None
        if len(head) < _HEAD.size:
            self.torn = self._at(f"{len(head)} bytes of a frame's {_HEAD.size}-byte head")
            return None
        length, checksum = _HEAD.unpack(head)
        if length > MAX_BODY_BYTES:
            self.torn = self._at(f"frame claims {length} bytes, allowed are {MAX_BODY_BYTES}")
            return None
        body = file.read(length)
        if len(body) < length:
            self.torn = self._at(f"{len(body)} of a frame's {length} bytes")
            return None
        if zlib.crc32(body) != checksum:
            self.torn = self._at(f"frame of {length} bytes does not match its checksum")
            return None
        return body

    def _at(self, what: str) -> str:
        return f"{what}, at byte {self.good_bytes} of {self.path.name}"


def _what(start: bytes) -> str:
    if len(start) == len(MAGIC) and start.startswith(MAGIC[:-1]):
        return f"of schema {start[-1]}"
    return f"not a rollout stream, it starts with {start!r}"


def _is_frame(file: BinaryIO, at: int) -> bool:
    file.seek(at)
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return False
    length, checksum = _HEAD.unpack(head)
    body = file.read(length) if length <= MAX_BODY_BYTES else b""
    whole: bool = len(body) == length and zlib.crc32(body) == checksum
    return whole


class Writer:
    """Appends groups. An existing stream is continued; a torn tail is cut off first and described in `cut`.

    Raises StreamError, and leaves the file unchanged, when it is not a stream or is damaged before its end.
    Not thread-safe: to be used by one thread only.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.cut: str | None = None
        """What was cut off an existing file; None if it ended with a whole frame."""
        end = 0
        if path.exists() and path.stat().st_size:
            reader = Reader(path)
            for _ in reader:
                pass
            self.cut, end = reader.torn, reader.good_bytes
        self._file = path.open("r+b" if end else "wb", buffering=0)
        self._file.truncate(end)
        self._file.seek(end)
        if not end:
            self._write(MAGIC)

    def append(self, group: RolloutGroup) -> None:
        """Appends one group in one write. Raises StreamError when it is too large, OSError when the disk is full."""
        self.append_frame(encode_frame(group))

    def append_frame(self, frame: bytes) -> None:
        """Appends a group that is already encoded."""
        self._write(frame)

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        self._file.close()

    def _write(self, data: bytes) -> None:
        written = self._file.write(data)
        if written != len(data):
            raise OSError(f"{self._file.name}: only {written} of {len(data)} bytes could be written")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
