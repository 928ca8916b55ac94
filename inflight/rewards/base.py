"""What a reward function is given, and what it gives back.

A reward function is `f(completions, prompts, completion_ids, **columns) -> list[float | None]`, plain or asynchronous.
It is called with all completions of a question, or with one at a time (RewardConfig.per): each list has an entry for
each completion, and so has the result. None says that the reward does not apply to the completion.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from inflight.prompts import joined

RewardFunction = Callable[..., Any]


class RewardError(ValueError):
    """What a reward function gave, or was to be given, can't be used; `kind` is what it is counted by."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Samples:
    """N completions of one question that are scored in one call."""

    completions: list[str]
    """[N] texts without special tokens."""
    completion_ids: list[list[int]]
    """[N]"""
    prompt: str | list[Any]
    """Text, token ids, or the messages of a chat."""
    finish_reasons: list[str]
    """[N] `stop`, or `length` where the sequence was cut off."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Of the question: `answer`, `key`, and the columns of a data set."""

    def arguments(self) -> dict[str, list[Any]]:
        """All that a reward function may ask for, as lists of N entries."""
        count = len(self.completions)
        return {name: [value] * count for name, value in self.columns.items()} | {
            "completions": self.completions,
            "prompts": [self.prompt] * count,
            "completion_ids": self.completion_ids,
            "completion_messages": [[{"role": "assistant", "content": text}] for text in self.completions],
            "finish_reasons": self.finish_reasons,
        }


def text_of(prompt: str | list[Any]) -> str:
    """A prompt as text: of a chat with one message its content, of a longer one a paragraph for each message."""
    if isinstance(prompt, str):
        return prompt
    messages = [each for each in prompt if isinstance(each, Mapping)]
    if len(messages) == 1:
        return _content(messages[0])
    return "\n\n".join(f"{each.get('role', '')}: {_content(each)}" for each in messages)


def _content(message: Mapping[str, Any]) -> str:
    """The text of a message."""
    content = message.get("content") or ""
    return joined(content) if isinstance(content, list) else str(content)


RESERVED = tuple(Samples([], [], "", []).arguments())
"""Names of arguments that every question has, which no column may have."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function with its options, ready to be called."""

    function: RewardFunction
    takes: frozenset[str] | None
    """Names of the arguments that it takes; None: whatever there is."""
    needs: frozenset[str]
    """Names of columns without which it can't be called."""
    refuses: frozenset[str]
    """Names of columns with which it can't be called."""
    asynchronous: bool
    files: frozenset[str] = frozenset()
    """Of the user's own code, with the function."""

    async def values(self, samples: Samples) -> list[float | None]:
        """[N] Raises RewardError for a missing column or a result of another kind, or what the function does."""
        arguments = samples.arguments()
        if missing := sorted(self.needs - arguments.keys()):
            there = ", ".join(sorted(samples.columns)) or "none"
            raise RewardError("column", f"the question has no column {missing[0]}, it has: {there}")
        if self.takes is not None:
            arguments = {name: value for name, value in arguments.items() if name in self.takes}
        given = self.function(**arguments)
        return _numbers(await given if inspect.isawaitable(given) else given, len(samples.completions))


def _numbers(given: Any, count: int) -> list[float | None]:
    """A result as plain numbers. Raises RewardError for one of another shape or type."""
    if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__len__") or not hasattr(given, "__getitem__"):
        raise RewardError("no list", f"a reward function gives a list, not {type(given).__name__}")
    if len(given) != count:
        raise RewardError("length", f"a reward function gives one value for each completion: {len(given)} for {count}")
    return [_number(given[index]) for index in range(count)]


def is_number(value: Any) -> bool:
    """Whether it is a number of any kind, numpy's and torch's included; numpy gives its texts a `__float__`, too."""
    return hasattr(type(value), "__float__") and not isinstance(value, str | bytes)


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if not is_number(value):
        raise RewardError("no number", f"a reward is a number or None, not {type(value).__name__}")
    return float(value)
