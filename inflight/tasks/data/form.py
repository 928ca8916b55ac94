"""From a row to a question: which columns are the prompt, and what a chat template is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from inflight.config import ConfigError
from inflight.error_line import with_kind
from inflight.tasks.base import Chat, Item, Prompt
from inflight.tasks.data.rows import BadRow


class NoColumn(BadRow):
    """A row does not have a column that is named in the configuration."""


class BadPrompt(BadRow):
    """What is in the column of the prompt, the messages or the tools is none."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """Names of columns, and what is the same for all rows. Exactly one of `prompt` and `messages` is named."""

    prompt: str
    messages: str
    tools: str
    chat: bool
    """A text prompt is what the user says in a chat."""
    system: str
    """A message that is put before each chat; empty: none."""
    columns: Sequence[str] | None
    """What goes to rewards; None: all columns that are not part of the prompt."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """For the chat template."""

    def __post_init__(self) -> None:
        if bool(self.prompt) == bool(self.messages):
            raise ConfigError(
                "task.options.prompt or task.options.messages is needed, and only one: the name of the column that"
                " holds the prompt (text or token ids), or the messages of a chat"
            )
        if self.messages and self.chat:
            raise ConfigError("task.options.chat is set and has no effect: task.options.messages are a chat already")
        if not (self.messages or self.chat):
            for name in ("tools", "system"):
                if getattr(self, name):
                    raise ConfigError(f"task.options.{name} is set and has no effect: the prompts are no chat")
            if self.arguments:
                name = next(iter(self.arguments))
                option = name if name == "chat_template" else f"template.{name}"
                raise ConfigError(f"task.options.{option} is set and has no effect: the prompts are no chat")

    def item(self, key: str, row: Mapping[str, Any], place: str) -> Item:
        """The question of a row. Raises NoColumn or BadPrompt naming `place`."""
        if self.messages:
            prompt: Prompt = self._chat(_messages(_column(row, self.messages, place), self.messages, place), row, place)
        else:
            prompt = _prompt(_column(row, self.prompt, place), self.prompt, place)
            if self.chat and not isinstance(prompt, str):
                raise BadPrompt(f"{place}: column {self.prompt!r} holds token ids, and what a user says is text")
            if isinstance(prompt, str) and self.chat:
                prompt = self._chat([{"role": "user", "content": prompt}], row, place)
        asked = (self.prompt, self.messages, self.tools)
        names = [name for name in row if name not in asked] if self.columns is None else self.columns
        return Item(key, prompt, row.get("answer"), {name: _column(row, name, place) for name in names})

    def _chat(self, messages: list[dict[str, Any]], row: Mapping[str, Any], place: str) -> Chat:
        before = [{"role": "system", "content": self.system}] if self.system else []
        tools = _tools(_column(row, self.tools, place), self.tools, place) if self.tools else None
        return Chat([*before, *messages], tools, dict(self.arguments))


def _column(row: Mapping[str, Any], name: str, place: str) -> Any:
    if name not in row:
        raise NoColumn(f"{place}: there is no column {name!r}; there are: {', '.join(map(str, row)) or 'none'}")
    return row[name]


def _prompt(value: Any, name: str, place: str) -> str | list[int]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        return value
    hint = "; messages are named as task.options.messages" if isinstance(value, list) and value else ""
    raise BadPrompt(f"{place}: column {name!r} holds {_kind(value)}, and a prompt is text or token ids{hint}")


def _messages(value: Any, name: str, place: str) -> list[dict[str, Any]]:
    if isinstance(value, list) and value and all(isinstance(each, dict) and "role" in each for each in value):
        if why := next(filter(None, map(_unusable, value)), ""):
            raise BadPrompt(f"{place}: column {name!r}: {why}")
        return value
    hint = "; texts are named as task.options.prompt" if isinstance(value, str) else ""
    raise BadPrompt(f"{place}: column {name!r} holds {_kind(value)}, and messages are a list with roles{hint}")


def _unusable(message: Mapping[str, Any]) -> str:
    """Why a message can't be asked as it is: a template would write `None`, or a list as Python does, without an error.
    Empty for a sound one."""
    role = message["role"]
    content = message.get("content")
    if not isinstance(role, str) or not role:
        return f"a message has the role {role!r}, and a role is text"
    if content is None:
        # Of a call of tools, or what a template of the user's own takes in its place.
        return "" if message.keys() - {"role", "content"} else f"a message of the role {role!r} has no content"
    if isinstance(content, str):
        return ""
    parts = content if isinstance(content, list) else []
    wrong = [each for each in parts if not (isinstance(each, dict) and isinstance(each.get("text"), str))]
    if parts and not wrong:
        return ""
    named = wrong and isinstance(wrong[0], dict) and "type" in wrong[0]
    what = repr(wrong[0]["type"]) if named else _kind(wrong[0] if wrong else content)
    return f"the content of a message holds {what}, and a model is asked with text: content is text, or parts of text"


def _tools(value: Any, name: str, place: str) -> list[dict[str, Any]] | None:
    """A list, or JSON text of one, as tables have it whose rows differ in their tools; None or empty: no tools."""
    if isinstance(value, str) and value:
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise BadPrompt(f"{place}: column {name!r} is no JSON: {with_kind(error)}") from None
    if not value:
        return None
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return value
    raise BadPrompt(f"{place}: column {name!r} holds {_kind(value)}, and tools are a list of objects")


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {', '.join(sorted({type(each).__name__ for each in value}))}" if value else "an empty list"
    return "nothing" if value is None else type(value).__name__
