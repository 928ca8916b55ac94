"""Your own data: JSON lines, parquet, or a data set of the hub (docs/data.md)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from inflight.config import ConfigError, require
from inflight.tasks.base import Item
from inflight.tasks.data import fingerprint
from inflight.tasks.data.chat_template import require_arguments, text_of
from inflight.tasks.data.form import Form
from inflight.tasks.data.hub import HubRows
from inflight.tasks.data.order import RowOrder
from inflight.tasks.data.rows import BadRow, Rows, is_of_files, matching, open_files
from inflight.tasks.data.stream import StreamRows

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dataset:
    """A question for each row. It has no score of its own: rewards are configured, or `score` is that of a subclass.

    Data are opened when the first question is asked, not where only scores are wanted.

    Example: `task: {name: dataset, options: {path: problems.jsonl, messages: messages, held_out: 0.05}}`.
    """

    seed: int
    path: str
    """A file (.jsonl, .ndjson, .json with one object per line, .parquet), a pattern such as `data/*.parquet`, or
    `owner/name` of a data set of the hub."""
    prompt: str = ""
    """The column that holds the prompt: text, or token ids, which are sent as they are."""
    messages: str = ""
    """The column that holds the messages of a chat; the model's chat template makes the prompt of them."""
    chat: bool = False
    """What the column `prompt` holds is what the user says in a chat."""
    system: str = ""
    """A system message that is put before each chat."""
    tools: str = ""
    """The column that holds the tools of a chat: a list of JSON schemas, or JSON text of one."""
    template: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as `{enable_thinking: false}`."""
    chat_template: str = ""
    """A file with a chat template (Jinja) to take in place of the model's own one."""
    columns: list[str] | None = None
    """Columns that go to rewards; all that are not part of the prompt, where this is not set."""
    shuffle: bool = True
    """Each epoch in a random order of its own, by the run's seed; else in the order of the rows."""
    streaming: bool = False
    """Read the files one row after the other, in place of a memory-mapped copy: without shuffle only."""
    held_out: float = 0.0
    """Share of the rows, drawn by the run's seed, that is kept for evaluation."""
    held_out_path: str = ""
    """Files with questions for evaluation, as `path`."""
    held_out_split: str = ""
    """Split of the same data set of the hub with questions for evaluation."""
    split: str = "train"
    """Of a data set of the hub: what is trained on."""
    subset: str = ""
    """Of a data set of the hub: the name of its configuration, where it has several."""
    revision: str = ""
    """Of a data set of the hub: a commit, branch or tag. A run keeps the commit that it began with."""
    _form: Form = field(init=False, repr=False, compare=False)
    _told: set[str] = field(init=False, repr=False, compare=False, default_factory=set)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_form", self._make_form())
        if self.streaming and self.shuffle:
            raise ConfigError(
                "task.options.streaming=True is not allowed with task.options.shuffle=True: a stream that is shuffled"
                " can't be resumed exactly; set shuffle=false, or leave streaming out"
            )
        require(0 <= self.held_out < 1, "task.options.held_out", self.held_out, "0 to below 1, a share of the rows")
        self._require_split()

    def _make_form(self) -> Form:
        if not isinstance(self.template, dict):
            raise ConfigError(f"task.options.template={self.template!r} is not allowed: it takes names with values")
        require_arguments(self.template)
        own = {"chat_template": self._template} if self.chat_template else {}
        return Form(
            prompt=self.prompt,
            messages=self.messages,
            tools=self.tools,
            chat=self.chat,
            system=self.system,
            columns=self.columns,
            arguments={**self.template, **own},
        )

    def _require_split(self) -> None:
        of_files = is_of_files(self.path)
        given = [name for name in ("held_out", "held_out_path", "held_out_split") if getattr(self, name)]
        if len(given) > 1:
            raise ConfigError(
                f"task.options.{given[0]} and {given[1]} are set: questions are held out one way; leave one of them out"
            )
        if self.streaming and self.held_out:
            raise ConfigError("task.options.held_out is not allowed with streaming: name a file by held_out_path")
        wrong = ("held_out_split", "subset", "revision") if of_files else ("streaming",)
        for name in wrong:
            if getattr(self, name):
                what = "files" if of_files else "a data set of the hub, or no file of that name"
                raise ConfigError(f"task.options.{name} can't be used: task.options.path={self.path!r} is {what}")

    # --- questions ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Questions of an epoch. Raises TypeError for a stream whose end was not read yet, ConfigError for data that
        can't be read."""
        return len(self._rows) if self._order is None else len(self._order)

    def item(self, index: int) -> Item:
        """The index-th question of the first epoch. Raises IndexError, or BadRow."""
        return self.item_of_epoch(0, index)

    def item_of_epoch(self, epoch: int, index: int) -> Item:
        """The index-th question of an epoch. Raises IndexError, or BadRow for a row that is none."""
        return self._item("dataset", self._rows, self._row(epoch, index))

    def place_of(self, index: int) -> str:
        """File and row of the index-th question of the first epoch. Raises IndexError."""
        return self._rows.place(self._row(0, index))

    def _row(self, epoch: int, index: int) -> int:
        return index if self._order is None else self._order.row(epoch, index)

    def held_out_size(self) -> int:
        """Questions for evaluation."""
        if self._other is not None:
            return len(self._other)
        return 0 if self._order is None else self._order.held_out_size

    def held_out_item(self, index: int) -> Item:
        """The index-th question for evaluation, in the order of the rows. Raises IndexError, or BadRow."""
        if self._other is not None:
            return self._item("held_out", self._other, index)
        if self._order is None:
            raise IndexError(index)
        return self._item("held_out", self._rows, self._order.held_out_row(index))

    def _item(self, kind: str, rows: Rows, row: int) -> Item:
        key = f"{kind}:{row + 1}"
        try:
            return self._form.item(key, rows.row(row), rows.place(row))
        except BadRow as error:
            if key not in self._told:
                self._told.add(key)
                log.warning("no question: %s", error)
            raise

    # --- the data -------------------------------------------------------------------------------------------------

    def contents(self) -> Mapping[str, str]:
        """What the files hold that options name, by option; equal for equal data. Raises ConfigError."""
        found = {"task.options.path": self._content(self.path, self._rows, "task.options.path")}
        if self.held_out_path:
            name = "task.options.held_out_path"
            found[name] = self._content(self.held_out_path, self._other, name)
        if self.chat_template:
            found[fingerprint.CHAT_TEMPLATE] = fingerprint.of_text(self._template)
        return found

    def settled(self) -> Mapping[str, Any]:
        """Options with places that stay: absolute paths, and the hub's commit."""
        found: dict[str, Any] = {}
        if isinstance(self._rows, HubRows):
            found["revision"] = self._rows.commit
        else:
            found["path"] = str(Path(self.path).expanduser().absolute())
        for name in ("held_out_path", "chat_template"):
            if value := getattr(self, name):
                found[name] = str(Path(value).expanduser().absolute())
        return found

    def _content(self, path: str, rows: Rows | None, option: str) -> str:
        if isinstance(rows, HubRows):
            return f"{path} at {rows.commit}"
        try:
            return fingerprint.of_files(matching(path, option))
        except OSError as error:
            raise ConfigError(f"{option}={path!r} can't be read: {error}") from None

    @cached_property
    def _rows(self) -> Rows:
        if not is_of_files(self.path):
            return self._of_hub(self.split)
        files = matching(self.path, "task.options.path")
        return StreamRows(files, "task.options.path") if self.streaming else open_files(files, "task.options.path")

    @cached_property
    def _other(self) -> Rows | None:
        """What is held out, where that is not a part of the rows. Raises ConfigError where it is trained on as well."""
        if self.held_out_split:
            other = self._of_hub(self.held_out_split)
            if isinstance(self._rows, HubRows) and (shared := self._rows.shared(other)):
                held = f"task.options.held_out_split={self.held_out_split!r}"
                raise ConfigError(f"{held} is not allowed: {shared} of its rows are in split={self.split!r}, too")
            return other
        if not self.held_out_path:
            return None
        name = "task.options.held_out_path"
        files = matching(self.held_out_path, name)
        if is_of_files(self.path):
            self._require_apart(files, matching(self.path, "task.options.path"))
        return open_files(files, name)

    def _require_apart(self, held_out: Sequence[Path], trained: Sequence[Path]) -> None:
        """Raises ConfigError for a file with questions for evaluation that is trained on, under this name or another.
        (Single questions are not compared.)"""
        sizes = {file: file.stat().st_size for file in trained}
        for one in held_out:
            alike = [file for file, size in sizes.items() if size == one.stat().st_size]
            content = fingerprint.of_files([one]) if alike else ""
            if same := next((file for file in alike if fingerprint.of_files([file]) == content), None):
                held = f"task.options.held_out_path={self.held_out_path!r} is not allowed"
                raise ConfigError(f"{held}: {one} would be trained on, too, as {same} of task.options.path")

    def _of_hub(self, split: str) -> HubRows:
        if "/" not in self.path:
            allowed = "neither a file nor a data set of the hub: owner/name"
            raise ConfigError(f"task.options.path={self.path!r} is {allowed}")
        return HubRows(self.path, subset=self.subset, split=split, revision=self.revision)

    @cached_property
    def _order(self) -> RowOrder | None:
        """None for a stream: the rows as they are."""
        if self.streaming:
            return None
        return RowOrder(len(self._rows), self.seed, held_out=float(self.held_out), shuffle=self.shuffle)

    @cached_property
    def _template(self) -> str:
        try:
            return text_of(self.chat_template)
        except (OSError, ValueError) as error:
            raise ConfigError(f"task.options.chat_template={self.chat_template!r} can't be read: {error}") from None
