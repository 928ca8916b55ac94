"""How long a data set's questions are, and how many of them will be left out; counted before the run starts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import cast

from inflight.error_line import one_line
from inflight.prompts import Chat, ModelTokens
from inflight.tasks.base import Item, Task, columns_of
from inflight.tasks.column_values import to_wire
from inflight.tasks.row_limit import within

COUNT_S = 30.0
"""Seconds for counting; of larger data the beginning is counted."""
LONG = "too long"


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


def left_out(
    task: Task,
    lengths: PromptLengths,
    longest: int,
    *,
    within_s: float = COUNT_S,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """One line on the questions of the first epoch that have more than `longest` tokens, or that can't be asked; empty
    when there is none, or when the task does not say how many it has. Counting ends after `within_s`."""
    try:
        size = len(cast(Sized, task))
    except TypeError:
        return ""
    found: Counter[str] = Counter()
    looked_at = 0
    until = clock() + within_s
    while looked_at < size and clock() < until:
        try:
            found[LONG] += lengths.of(task.item, looked_at)[1] > longest
        except Exception as error:  # noqa: BLE001 - of the data, of a template
            found[one_line(type(error).__name__)] += 1
        looked_at += 1
    if not found.total():
        return ""
    long = found.pop(LONG, 0)
    why = [f"{long} longer than {longest} tokens"] if long else []
    why += [f"{found.total()} that can't be asked ({', '.join(sorted(found))})"] if found else []
    which = f"{size} questions" if looked_at == size else f"the first {looked_at} of {size} questions"
    return f"of {which}, {long + found.total()} will be left out: {', '.join(why)}"
