"""How many of a data set's questions will be left out, counted before the run starts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sized
from typing import cast

from inflight.prompts import Chat, ModelTokens
from inflight.tasks.base import Item, Task

COUNT_S = 30.0
"""Seconds for counting; of larger data the beginning is counted."""
LONG = "too long"


def length_of(item: Item, tokens: ModelTokens) -> int:
    """Number of tokens of a question's prompt. Raises what the tokenizer or the chat template does."""
    prompt = item.prompt
    return len(prompt) if not isinstance(prompt, str | Chat) else len(list(tokens.encode(prompt)))


def left_out(
    task: Task,
    tokens: ModelTokens,
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
            found[LONG] += length_of(task.item(looked_at), tokens) > longest
        except Exception as error:  # noqa: BLE001 - of the data, of a template
            found[type(error).__name__] += 1
        looked_at += 1
    if not found.total():
        return ""
    long = found.pop(LONG, 0)
    why = [f"{long} longer than {longest} tokens"] if long else []
    why += [f"{found.total()} that can't be asked ({', '.join(sorted(found))})"] if found else []
    which = f"{size} questions" if looked_at == size else f"the first {looked_at} of {size} questions"
    return f"of {which}, {long + found.total()} will be left out: {', '.join(why)}"
