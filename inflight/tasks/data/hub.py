"""A data set of the Hugging Face hub, at one commit, memory-mapped from the cache of `datasets`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from inflight.config import ConfigError
from inflight.error_line import with_kind
from inflight.tasks.data.rows import own_fields, quiet, within


class HubRows:
    """Rows of one split."""

    def __init__(self, name: str, *, subset: str, split: str, revision: str) -> None:
        """Downloads what the cache does not have. Raises ConfigError when that can't be had."""
        datasets = quiet()
        try:
            builder = _at(datasets.load_dataset_builder(name, subset or None, revision=revision or None), revision)
            builder.download_and_prepare()
            table = builder.as_dataset(split=split)
        except Exception as error:  # noqa: BLE001 - of many libraries
            where = f"task.options.path={name!r}, split={split!r}" + (f", revision={revision!r}" if revision else "")
            offline = "; the hub is not asked, for HF_HUB_OFFLINE is set" if datasets.config.HF_HUB_OFFLINE else ""
            raise ConfigError(f"{where} can't be had: {with_kind(error)}{offline}") from None
        self._parts = _parts(split, {each: info.num_examples for each, info in builder.info.splits.items()})
        self._name = name
        self._split = split
        self._table = table
        self.commit = str(builder.hash)
        """The hub's commit that the rows are of."""
        if not len(table):
            raise ConfigError(f"task.options.path={name!r}, split={split!r} is empty: it has no row")

    def shared(self, other: HubRows) -> int:
        """How many rows of another split of the same data set are rows of this one, too."""
        return sum(
            max(0, min(one.to, another.to) - max(one.from_, another.from_))
            for one in self._parts
            for another in other._parts
            if one.splitname == another.splitname
        )

    def __len__(self) -> int:
        return len(self._table)

    def row(self, index: int) -> Mapping[str, Any]:
        """As Rows.row."""
        return own_fields(within(self._table, index))

    def place(self, index: int) -> str:
        """Data set, split and row."""
        return f"{self._name}, {self._split}, row {index + 1}"


def _parts(split: str, lengths: Mapping[str, int]) -> Sequence[Any]:
    """Which rows of which of the data set's own splits a name such as `train[:10%]+test` means."""
    named = "+".join(lengths) if split == "all" else split
    return quiet().ReadInstruction.from_spec(named).to_absolute(dict(lengths))  # type: ignore[no-any-return]


def _at(builder: Any, revision: str) -> Any:
    """The builder of a commit. Without a network the library takes the newest commit that its cache has; this one is
    then taken from the cache by its name, and is missed where its rows are read."""
    if builder.hash == revision or not re.fullmatch("[0-9a-f]{40}", revision) or builder.base_path:
        return builder
    return type(builder)(
        dataset_name=builder.dataset_name,
        repo_id=builder.repo_id,
        config_name=builder.config.name,
        version=str(builder.config.version),
        hash=revision,
    )
