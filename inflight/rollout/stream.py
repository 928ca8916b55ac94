"""A file of rollout groups that grows frame by frame and survives being cut off anywhere.

Layout: the 8 bytes `MAGIC`, then frames of `length u32 | crc32 u32 | body`, little endian; the body is the msgpack of
one RolloutGroup. A frame goes out in one write, so a killed writer leaves whole frames and at most one torn tail,
which a reader reports instead of raising. Whole frames after a bad one are no torn tail: something else did harm to
the file, and neither reader nor writer goes on, lest groups be lost without a word.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from inflight.types import RolloutGroup

SCHEMA = 2
MAGIC = b"inflrol" + bytes([SCHEMA])
MAX_BODY_BYTES = 64 << 20
_HEAD = struct.Struct("<II")

_SEARCHED_BYTES = 1 << 20
"""Read at a time when a damaged file is searched for the next whole frame."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RolloutGroup)
_BODY_START = b"".join(
    _encoder.encode(RolloutGroup(group_id="", prompt_key="", rollouts=[])).partition(b"group_id")[:2]
)
"""What each body starts with: the name of its first field."""


class StreamError(ValueError):
    """The file is no rollout stream of this schema or is damaged before its end, or a group is too large for one."""


def encode_frame(group: RolloutGroup) -> bytes:
    """One frame. Raises StreamError when the group exceeds MAX_BODY_BYTES."""
    body = _encoder.encode(group)
    if len(body) > MAX_BODY_BYTES:
        raise StreamError(f"group {group.group_id} of {len(body)} bytes exceeds the limit of {MAX_BODY_BYTES}")
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def decode_frame(frame: bytes) -> RolloutGroup:
    """The group of a frame that `encode_frame` has made."""
    return _decoder.decode(memoryview(frame)[_HEAD.size :])


class Reader:
    """Yields the whole groups of a stream; afterwards `torn` says what the file ends with, if not with a whole frame.

    Holds one group in memory at a time and reads no frame above MAX_BODY_BYTES. Each iteration starts anew.
    Raises StreamError when the file does not start as a stream of this schema, and when whole frames follow a bad one.

    Example: `reader = Reader(path); groups = list(reader); assert reader.torn is None`
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.torn: str | None = None
        """What is wrong with the tail and where; None when the file ends with a whole frame (or was not read yet)."""
        self.good_bytes = 0
        """Where the last whole frame ends."""

    def __iter__(self) -> Iterator[RolloutGroup]:
        self.torn, self.good_bytes = None, len(MAGIC)
        with self.path.open("rb") as file:
            start = file.read(len(MAGIC))
            if start != MAGIC:
                raise StreamError(f"{self.path} is no rollout stream of schema {SCHEMA}: it starts with {start!r}")
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
        """Where a whole frame begins behind the bad one. None too when that has become whole: a writer is at work."""
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
    """Appends groups. An existing stream is continued; a torn tail is cut off first and told in `cut`.

    Raises StreamError, and leaves the file alone, when it is no stream or is damaged before its end.
    Not thread-safe: one writer, one thread.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.cut: str | None = None
        """What was cut off an existing file; None in the ordinary case."""
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
        """Adds one group with one write. Raises StreamError when it is too large, OSError when the disk is full."""
        self.append_frame(encode_frame(group))

    def append_frame(self, frame: bytes) -> None:
        """Adds a group that is encoded already."""
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
