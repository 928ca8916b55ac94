"""Which rows are trained on, in which order in which epoch, and which are held out.

All of it is computed from numbers of rows, the seed and the epoch, with numpy's RandomState, whose streams are the same
in every version of numpy: a run that resumes needs no stored order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from inflight.config import ConfigError

_SPLIT = 1
_EPOCH = 2
"""What random numbers are for: each purpose has its own."""


class RowOrder:
    """The order of a data set of `rows` rows, of which a share is held out."""

    def __init__(self, rows: int, seed: int, *, held_out: float, shuffle: bool) -> None:
        """`held_out` is the share, 0 to below 1. Raises ConfigError when it leaves one side without a row."""
        self._seed = seed
        self._shuffle = shuffle
        kept_back = round(rows * held_out)
        if held_out and not 0 < kept_back < rows:
            raise ConfigError(
                f"task.options.held_out={held_out:g} is not allowed: of {rows} rows it holds {kept_back} out, and both"
                " training and evaluation need one"
            )
        mixed = _random(seed, _SPLIT).permutation(rows) if kept_back else np.arange(rows)
        self._held_out = np.sort(mixed[:kept_back])
        self._trained = np.sort(mixed[kept_back:])
        self._of_epoch = lru_cache(maxsize=2)(self._make)  # around an epoch's end, questions of both are asked

    def __len__(self) -> int:
        """Rows that an epoch has."""
        return len(self._trained)

    @property
    def held_out_size(self) -> int:
        """Rows that are held out."""
        return len(self._held_out)

    def row(self, epoch: int, index: int) -> int:
        """The row that is the index-th of an epoch. Raises IndexError."""
        return int(self._of_epoch(epoch)[_from_start(index)])

    def held_out_row(self, index: int) -> int:
        """The index-th row that is held out, by row. Raises IndexError."""
        return int(self._held_out[_from_start(index)])

    def _make(self, epoch: int) -> Any:
        """[n] rows of an epoch."""
        if not self._shuffle:
            return self._trained
        return self._trained[_random(self._seed, _EPOCH, epoch).permutation(len(self._trained))]


def _random(*key: int) -> np.random.RandomState:
    return np.random.RandomState(list(key))


def _from_start(index: int) -> int:
    if index < 0:
        raise IndexError(index)
    return index
