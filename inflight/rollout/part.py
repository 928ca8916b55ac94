"""One file of a rollout stream: its name, its start, which says where it belongs, and its groups.

Layout: `MAGIC` (8 bytes), 16 random bytes that all files of a stream share, the file's number u32, then frames
(frames.py). File 0 has the stream's name, the next ones that name with their number.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from inflight.rollout.frames import CONTINUED, HEAD, BadFrame, StreamError, frame_after, is_frame, read_frame
from inflight.types import RolloutGroup

SCHEMA = 4
MAGIC = b"inflrol" + bytes([SCHEMA])
_ID_BYTES = 16
START_BYTES = len(MAGIC) + _ID_BYTES + 4


def part_path(path: Path, number: int) -> Path:
    """`rollouts.msgpack`, `rollouts.msgpack.00001`, …"""
    return path.with_name(f"{path.name}.{number:05d}") if number else path


def new_stream() -> bytes:
    """What tells a stream from any other one."""
    return secrets.token_bytes(_ID_BYTES)


def start_of(stream: bytes, number: int) -> bytes:
    """The first START_BYTES of a file."""
    return MAGIC + stream + number.to_bytes(4, "little")


class Part:
    """Yields the whole groups of one file; afterwards `torn` describes an incomplete frame at the end.

    Holds one group in memory at a time. Each iteration starts from the beginning. Raises StreamError when the file does
    not start as this part of the stream, and when whole frames follow a bad one.
    """

    def __init__(self, of: Path, number: int, stream: bytes | None = None) -> None:
        """File `number` of the stream at `of`; without `stream` that may be any one."""
        self.path = part_path(of, number)
        self.number = number
        self.stream = self._start(stream)
        self.torn: str | None = None
        """What is wrong at the end and where; None when the file ends with a whole frame (or was not read yet)."""
        self.continued = False
        """Whether the note was read that another file continues this one."""
        self.good_bytes = START_BYTES
        """Offset at which the last whole frame ends."""
        self.begin = START_BYTES
        """Offset at which the last group that was yielded begins."""

    def __iter__(self) -> Iterator[RolloutGroup]:
        self.torn = None
        self.continued = False
        self.good_bytes = START_BYTES
        with self.path.open("rb") as file:
            file.seek(START_BYTES)
            try:
                while (head := file.read(HEAD.size)) not in (b"", CONTINUED):
                    group, size = read_frame(file, head)
                    self.begin = self.good_bytes
                    self.good_bytes += size
                    yield group
                self.continued = head == CONTINUED
                if self.continued and file.read(1):
                    raise BadFrame("something follows the note that another file continues this one")
            except BadFrame as bad:
                self.torn = f"{bad}, at byte {self.good_bytes} of {self.path.name}"
                if (next_at := frame_after(file, self.good_bytes)) is not None:
                    what = f"is damaged: {self.torn}; groups follow it from byte {next_at} on"
                    raise StreamError(f"{self.path} {what}") from None

    def has_grown(self) -> bool:
        """Whether something whole is there now where reading has ended: a writer is active."""
        with self.path.open("rb") as file:
            file.seek(self.good_bytes)
            return file.read(HEAD.size) == CONTINUED or is_frame(file, self.good_bytes)

    def ends_with_note(self) -> bool:
        """Whether its last bytes say that another file continues it; without reading the rest."""
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(START_BYTES, size - len(CONTINUED)))
            return file.read() == CONTINUED

    def _start(self, stream: bytes | None) -> bytes:
        with self.path.open("rb") as file:
            start = file.read(START_BYTES)
        if start[: len(MAGIC)] != MAGIC:
            raise StreamError(f"{self.path} is {_what(start)}; this release reads streams of schema {SCHEMA}")
        if len(start) < START_BYTES:
            raise StreamError(f"{self.path} is damaged: {len(start)} of its first {START_BYTES} bytes")
        found = bytes(start[len(MAGIC) : -4])
        number = int.from_bytes(start[-4:], "little")
        if stream is not None and found != stream:
            raise StreamError(f"{self.path} is of another stream ({found.hex()}) than the files before it")
        if number != self.number:
            raise StreamError(f"{self.path} is file {number} of its stream: it has the name of file {self.number}")
        return found


def _what(start: bytes) -> str:
    if len(start) >= len(MAGIC) and start.startswith(MAGIC[:-1]):
        return f"of schema {start[len(MAGIC) - 1]}"
    return f"not a rollout stream, it starts with {start[: len(MAGIC)]!r}"
