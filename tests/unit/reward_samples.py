"""Reward functions of a user's own, for tests in this process and in real child processes (not a test file)."""

import asyncio
import os
import time
from dataclasses import dataclass


def columns_seen(completions, prompts, completion_ids, **columns):
    """1 when it was given what is documented."""
    assert len(completions) == len(prompts) == len(completion_ids) == 1
    assert columns["completion_messages"] == [[{"role": "assistant", "content": completions[0]}]]
    assert all(len(column) == 1 for column in columns.values())
    return [1.0]


def share(completions, answer, letter="a"):
    """By a column without a default, and an option with one."""
    return [text.count(letter) / len(wanted) for text, wanted in zip(completions, answer, strict=True)]


async def soon(completions):
    """Waits for something else."""
    await asyncio.sleep(0.01)
    return [None if text == "none" else float(len(text)) for text in completions]


def odd(completions):
    """What foreign code may do, by the completion's text."""
    match completions[0]:
        case "raise":
            raise KeyError("gone")
        case "sleep":
            time.sleep(3600)
        case "die":
            os._exit(139)
        case "float":
            return 1.0
        case "text":
            return "1"
        case "texts":
            return ["1"]
        case "two":
            return [1.0, 2.0]
        case "nan":
            return [float("nan")]
        case "none":
            return [None]
    return [0.5]


@dataclass(frozen=True)
class Own:
    """A class of one's own, whose fields are its options."""

    factor: float
    column: str = "answer"

    def __call__(self, completions, **columns):
        return [self.factor * float(wanted) for wanted in columns[self.column]]


@dataclass(frozen=True)
class Failing:
    def __post_init__(self):
        raise OSError("no disk")

    def __call__(self, completions):
        return [0.0]


NO_FUNCTION = 7
