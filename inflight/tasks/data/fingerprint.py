"""What files hold, as a short text: equal for equal files, whatever their names, at a cost that has a bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

READ = 64 << 20
"""Bytes that are read at most, shared equally by the files. A file of no more than its part is read whole; of a larger
one its size and PIECES pieces, evenly spaced from its first byte to its last. A change between them that keeps the size
is not seen."""
LEAST = 64 << 10
"""Bytes that are read of each file in any case."""
PIECES = 32
CHAT_TEMPLATE = "task.options.chat_template"
"""The option by which a run's configuration keeps the fingerprint of the template that the user has given."""


def of_files(files: Sequence[Path], *, among: int = 0) -> str:
    """Number of files, if several, bytes and a hash. Raises OSError. `among`: how many files share what may be read,
    where these are some of them."""
    total = 0
    hashed = blake2b(digest_size=12)
    part = max(LEAST, READ // (among or len(files)))
    for file in files:
        size = file.stat().st_size
        total += size
        hashed.update(f"{size}:".encode())
        with file.open("rb") as content:
            for start, length in _pieces(size, part):
                content.seek(start)
                hashed.update(content.read(length))
    count = "" if len(files) == 1 else f"{len(files)} files, "
    return f"{count}{total} bytes, {hashed.hexdigest()}"


def of_text(text: str) -> str:
    """Of a text."""
    return f"{len(text)} characters, {blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=12).hexdigest()}"


def _pieces(size: int, part: int) -> Iterator[tuple[int, int]]:
    """Start and length of what is read of a file of which `part` bytes may be."""
    if size <= part:
        yield 0, size
        return
    length = part // PIECES
    for number in range(PIECES):
        yield (size - length) * number // (PIECES - 1), length
