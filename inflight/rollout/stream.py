"""Rollout groups, appended frame by frame to files of a bounded size, which survive being cut off anywhere.

A frame is written in one call, so a killed writer leaves whole frames and at most one torn tail, which a reader
reports instead of raising. Whole frames after a bad one are no torn tail: the file is corrupted, and both reader and
writer refuse it, so that no groups are lost silently. The same holds for a file that is missing or of another stream.

A file that has reached its size ends with a note that another one continues it (frames.py). The next file is there
before the note is: without it no group can have been written to the next file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from inflight.rollout.frames import CONTINUED, HEAD, BadFrame, StreamError, encode_frame, read_frame
from inflight.rollout.part import START_BYTES, Part, new_stream, part_path, start_of
from inflight.types import RolloutGroup


class FramePlace(NamedTuple):
    """Where a group's frame begins: in which file of the stream, and at which byte of it."""

    part: int
    byte: int


def recorded(path: Path) -> bool:
    """Whether there is a stream of that name. Raises StreamError when later files of it are there, and the first is
    not."""
    if not path.is_file() and (later := sorted(path.parent.glob(f"{path.name}.[0-9]*"))):
        raise StreamError(f"{path} is missing, and {later[0].name} is there")
    return path.is_file()


def parts(path: Path) -> Iterator[Part]:
    """The files of a stream, in order; each has to be read to its end before the next one is asked for.

    Raises StreamError for a file that is missing or of another stream, and for one that ends too early.
    """
    part: Part | None = Part(path, 0)
    while part is not None:
        yield part
        if not part.continued and not part.has_grown():
            _require_last(path, part)
        part = _following(path, part) if part.continued else None


def _following(path: Path, part: Part) -> Part:
    following = part_path(path, part.number + 1)
    if not following.is_file():
        raise StreamError(f"{following} is missing: {part.path.name} ends with a note that it follows")
    return Part(path, part.number + 1, part.stream)


def _require_last(path: Path, part: Part) -> None:
    """Raises StreamError when groups follow a file that does not say so: its end is lost."""
    following = part_path(path, part.number + 1)
    if following.is_file() and following.stat().st_size > START_BYTES:
        how = part.torn or f"it ends at byte {part.good_bytes}"
        raise StreamError(f"{part.path} is damaged: {how}; groups follow it in {following.name}")


def read_group(path: str | Path, at: FramePlace) -> RolloutGroup:
    """The group at a place that a `Reader` has returned. Raises StreamError for anything else."""
    file_path = part_path(Path(path), at.part)
    with file_path.open("rb") as file:
        file.seek(at.byte)
        try:
            return read_frame(file, file.read(HEAD.size))[0]
        except BadFrame as bad:
            raise StreamError(f"{file_path} has no frame at byte {at.byte}: {bad}") from None


class Reader:
    """Yields the whole groups of a stream; afterwards `torn` describes an incomplete frame at the end.

    Holds one group in memory at a time. Each iteration starts from the beginning. Raises StreamError when a file does
    not start as a part of this stream of this schema, is missing, or has whole frames after a bad one.

    Example: `reader = Reader(path); groups = list(reader); assert reader.torn is None`
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._part: Part | None = None

    def __iter__(self) -> Iterator[RolloutGroup]:
        for part in parts(self.path):
            self._part = part
            yield from part

    @property
    def torn(self) -> str | None:
        """What is wrong at the end and where; None when the stream ends with a whole frame (or was not read yet)."""
        return None if self._part is None else self._part.torn

    @property
    def place(self) -> FramePlace:
        """Where the last group that was yielded begins; there must be one."""
        assert self._part is not None
        return FramePlace(self._part.number, self._part.begin)


class Writer:
    """Appends groups. An existing stream is continued; a torn tail is cut off first and described in `cut`.

    Raises StreamError, and leaves the files unchanged, when they are no stream or are damaged before its end.
    Not thread-safe: to be used by one thread only.
    """

    def __init__(self, path: str | Path, most_bytes: int | None = None) -> None:
        """`most_bytes`: the largest size of a file, unless its first group is larger; None: any."""
        self._of = Path(path)
        self._most = most_bytes
        self._of.parent.mkdir(parents=True, exist_ok=True)
        self.cut: str | None = None
        """What was cut off an existing file; None if it ended with a whole frame."""
        part = _last(self._of) if recorded(self._of) and self._of.stat().st_size else None
        if part is None:
            self._stream = new_stream()
            self._number = 0
            self._size = 0
            self._file = self._of.open("wb", buffering=0)
            self._write(start_of(self._stream, 0))
            return
        self.cut = part.torn
        self._stream = part.stream
        self._number = part.number
        self._size = part.good_bytes
        self._file = part.path.open("r+b", buffering=0)
        self._file.truncate(self._size)
        self._file.seek(self._size)

    def append(self, group: RolloutGroup) -> None:
        """Appends one group in one write. Raises StreamError when it is too large, OSError when the disk is full."""
        self.append_frame(encode_frame(group))

    def append_frame(self, frame: bytes) -> None:
        """Appends a group that is already encoded."""
        full = self._most is not None and self._size + len(frame) + len(CONTINUED) > self._most
        if full and self._size > START_BYTES:
            self._roll_over()
        self._write(frame)

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        self._file.close()

    def _roll_over(self) -> None:
        """The next file is whole under its name before this one says that it follows."""
        following = part_path(self._of, self._number + 1)
        partial = following.with_name(following.name + ".partial")
        with partial.open("wb", buffering=0) as file:
            written(file, start_of(self._stream, self._number + 1))
        os.replace(partial, following)
        self._write(CONTINUED)
        self._file.close()
        self._file = following.open("r+b", buffering=0)
        self._file.seek(START_BYTES)
        self._number = self._number + 1
        self._size = START_BYTES

    def _write(self, data: bytes) -> None:
        written(self._file, data)
        self._size += len(data)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def written(file: FileIO, data: bytes) -> None:
    """Writes all of it, or raises OSError."""
    count = file.write(data)
    if count != len(data):
        raise OSError(f"{file.name}: only {count} of {len(data)} bytes could be written")


def _last(path: Path) -> Part:
    """The file of a stream that has no successor, read to its end."""
    part = Part(path, 0)
    while part.ends_with_note():
        part = _following(path, part)
    for _ in part:
        pass
    _require_last(path, part)
    return part
