"""What files hold, as a short text: equal for equal files, whatever their names, at a cost that has a bound."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

BLOCK = 1 << 20
BLOCKS = 64
"""A file of up to so many blocks is read whole; of a larger one its size and so many blocks, evenly spaced from its
first byte to its last. A change between them that keeps the size is not seen."""


def of_files(files: Sequence[Path]) -> str:
    """Number of files, if several, bytes and a hash. Raises OSError."""
    total, hashed = 0, blake2b(digest_size=12)
    for file in files:
        size = file.stat().st_size
        total += size
        hashed.update(f"{size}:".encode())
        with file.open("rb") as content:
            for start in _starts(size):
                content.seek(start)
                hashed.update(content.read(BLOCK))
    count = "" if len(files) == 1 else f"{len(files)} files, "
    return f"{count}{total} bytes, {hashed.hexdigest()}"


def of_text(text: str) -> str:
    """Of a text."""
    return f"{len(text)} characters, {blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=12).hexdigest()}"


def _starts(size: int) -> Sequence[int]:
    if size <= BLOCK * BLOCKS:
        return range(0, size, BLOCK)
    last = size - BLOCK
    return [last * number // (BLOCKS - 1) for number in range(BLOCKS)]
