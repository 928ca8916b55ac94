"""How long a data set's questions are, and how many of them will be left out; counted before the run starts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import cast

from inflight.error_line import one_line
from inflight.prompts import Chat, ModelTokens
from inflight.tasks.base import Item, KnowsPlaces, Task, columns_of
from inflight.tasks.column_values import to_wire
from inflight.tasks.row_limit import within

COUNT_S = 30.0
"""Seconds for counting; of larger data the beginning is counted."""
MAX_PLACE = 200
"""Most characters of a question's place."""


class NotATokenId(ValueError):
    """A prompt of token ids has one that the model does not have."""


@dataclass(frozen=True)
class PromptLengths:
    """Numbers of tokens of questions' prompts."""

    tokens: ModelTokens
    limit_s: float
    """Seconds that a question may take, as in the run: foreign code may hang on one row."""
    asked: Callable[[str], object] = lambda which: None
    """Is called with the question that is next."""

    def of(self, item: Callable[[int], Item], index: int, kind: str = "") -> tuple[Item, int]:
        """A question and the number of its prompt's tokens. Raises what `item` and `length_of` do, or TimeoutError."""

        def looked_at() -> tuple[Item, int]:
            self.asked(which)
            found = item(index)
            self.asked(f"{which} ({found.key})")
            return found, length_of(found, self.tokens)

        which = f"{kind}question {index + 1}"
        return within(self.limit_s, looked_at)


def length_of(item: Item, tokens: ModelTokens) -> int:
    """Number of tokens of a question's prompt, at least one.

    Raises what keeps the question from being asked: what the tokenizer or the chat template does, NotATokenId, or
    NotCarried.
    """
    prompt = item.prompt
    ids = prompt if not isinstance(prompt, str | Chat) else list(tokens.encode(prompt))
    if not ids:
        raise ValueError("the prompt has no tokens")
    if wrong := [each for each in (min(ids), max(ids)) if not 0 <= each < tokens.embedded]:
        raise NotATokenId(f"token id {wrong[0]} is not one of the model's: 0 to {tokens.embedded - 1}")
    to_wire(columns_of(item))
    return len(ids)


@dataclass
class _Alike:
    """Questions with one reason for which they are no use."""

    first: str
    """Where the first of them stands; empty where the task does not say."""
    count: int = 0

    def __str__(self) -> str:
        return self.first + (f", and {self.count - 1} more" if self.count > 1 else "")


def left_out(
    task: Task,
    lengths: PromptLengths,
    longest: int,
    *,
    unscorable: Callable[[Item], str] = lambda item: "",
    within_s: float = COUNT_S,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """One line on the questions of the first epoch that have more than `longest` tokens, that can't be asked, or that
    a reward can't score: for them, `unscorable` says why. Of each kind, the first one's place is named.

    Empty when there is none, or when the task does not say how many it has. Counting ends after `within_s`.
    """
    try:
        size = len(cast(Sized, task))
    except TypeError:
        return ""
    unasked: dict[str, _Alike] = {}
    unscored: dict[str, _Alike] = {}
    long = looked_at = 0
    until = clock() + within_s
    while looked_at < size and clock() < until:
        try:
            item, length = lengths.of(task.item, looked_at)
        except Exception as error:  # noqa: BLE001 - of the data, of a template
            _add(unasked, one_line(type(error).__name__), task, looked_at)
        else:
            long += length > longest
            if length <= longest and (why := unscorable(item)):
                _add(unscored, why, task, looked_at)
        looked_at += 1
    which = f"{size} questions" if looked_at == size else f"the first {looked_at} of {size} questions"
    says = [*_unasked(unasked, long, longest), *_unscored(unscored)]
    return f"of {which}, {'; '.join(says)}" if says else ""


def _add(found: dict[str, _Alike], why: str, task: Task, index: int) -> None:
    if why not in found:
        found[why] = _Alike(_place(task, index))
    found[why].count += 1


def _place(task: Task, index: int) -> str:
    """Of the index-th question, without the folder of its file."""
    try:
        place = task.place_of(index) if isinstance(task, KnowsPlaces) else ""
    except Exception:  # noqa: BLE001 - the data can't be read at all
        return ""
    return one_line(os.path.basename(place) if os.path.isabs(place) else place, MAX_PLACE)


def _unasked(found: Mapping[str, _Alike], long: int, longest: int) -> list[str]:
    count = sum(each.count for each in found.values())
    kinds = [f"{kind}: {alike}" if alike.first else kind for kind, alike in sorted(found.items())]
    why = [f"{long} longer than {longest} tokens"] if long else []
    why += [f"{count} that can't be asked ({'; '.join(kinds)})"] if found else []
    return [f"{long + count} will be left out: {', '.join(why)}"] if why else []


def _unscored(found: Mapping[str, _Alike]) -> list[str]:
    kinds = [f"{why} ({alike})" if alike.first else why for why, alike in sorted(found.items())]
    return [f"{sum(each.count for each in found.values())} can't be scored: {', '.join(kinds)}"] if found else []
