"""The checkpoint of the best evaluation so far, as `best/step-000040`.

A checkpoint is nominated before it is evaluated, because the trainer has moved on when the result is there. It appears
in its place whole, by being renamed, with the figures by which it got there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from inflight.trainer.checkpoint import index

log = logging.getLogger(__name__)

BEST_FOLDER = "best"
NOMINEES = "nominee"
FIGURES_FILE = "trainer/evaluation.json"


def best_of(run_dir: Path) -> Path | None:
    """The best checkpoint that a run keeps; None where it keeps none."""
    return next(reversed(index.all_of(run_dir / BEST_FOLDER)), None)


class Best:
    """`best/` of a run. A figure that is higher is better."""

    def __init__(self, run_dir: Path, by: str) -> None:
        """`by` names the figure that decides. What a start before has nominated and not decided is removed."""
        self._folder = run_dir / BEST_FOLDER
        self._by = by
        self.nominees = self._folder / NOMINEES
        """Where checkpoints are written that are to be evaluated."""
        self._rejected: set[Path] = set()
        shutil.rmtree(self.nominees, ignore_errors=True)

    @property
    def path(self) -> Path | None:
        """The best checkpoint; None while there is none."""
        return max(index.all_of(self._folder), key=self._worth, default=None)

    def consider(self, nominee: Path, figures: Mapping[str, float]) -> bool:
        """Whether a nominee is better than the best so far, and has taken its place; else it is removed.

        Raises OSError when the disk is full; the best so far is still in its place then.
        """
        best = self.path
        if best is not None and figures[self._by] <= self._worth(best):
            shutil.rmtree(nominee)
            with contextlib.suppress(OSError):  # not empty: it holds one that was rejected
                self.nominees.rmdir()
            return False
        _write(nominee / FIGURES_FILE, msgspec.json.encode(dict(figures)))
        target = self._folder / nominee.name
        if target.exists():  # of the same step, before the run was resumed from an earlier one
            os.replace(target, self.nominees / f"replaced-{target.name}")
        os.replace(nominee, target)
        for other in index.all_of(self._folder):
            if other != target:
                shutil.rmtree(other, ignore_errors=True)
        shutil.rmtree(self.nominees, ignore_errors=True)
        return True

    def reject(self, nominee: Path) -> None:
        """Removes a nominee whose evaluation does not count, now or when it has been written."""
        self._rejected.add(nominee)
        self.sweep()

    def sweep(self) -> None:
        """Removes rejected nominees that have been written since."""
        for nominee in [each for each in self._rejected if each.exists()]:
            shutil.rmtree(nominee, ignore_errors=True)
            self._rejected.discard(nominee)

    def _worth(self, checkpoint: Path) -> float:
        """Less than any other where it is unknown: its figures are damaged, or are not those that decide now."""
        try:
            return msgspec.json.decode((checkpoint / FIGURES_FILE).read_bytes(), type=dict[str, float])[self._by]
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, KeyError) as error:
            log.warning("%s: its %s is not known: %s", checkpoint, self._by, error)
            return float("-inf")


def _write(path: Path, body: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
