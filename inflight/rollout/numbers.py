"""Numbers for an actor's groups, so that no question and no group id comes twice in a run."""

from __future__ import annotations

import os
from pathlib import Path


class Numbers:
    """Consecutive numbers of this actor's groups, never given twice, not even by a restarted process.

    The file holds the next number; it is replaced whole before a number is used.
    """

    def __init__(self, path: Path) -> None:
        """Raises ValueError when the file holds no number."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.next = int(path.read_text())
        except FileNotFoundError:
            self.next = 0
        except ValueError:
            raise ValueError(f"{path} holds no number") from None

    def take(self) -> int:
        """The next number."""
        number, self.next = self.next, self.next + 1
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text(str(self.next))
        os.replace(partial, self._path)
        return number
