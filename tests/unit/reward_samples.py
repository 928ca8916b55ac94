"""Reward functions of a user's own, for tests in this process and in real child processes (not a test file)."""

import asyncio
import functools
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np


def columns_seen(completions, prompts, completion_ids, **columns):
    """1 when it was given what is documented."""
    count = len(completions)
    assert count == len(prompts) == len(completion_ids)
    assert columns["completion_messages"] == [[{"role": "assistant", "content": text}] for text in completions]
    assert all(len(column) == count for column in columns.values())
    return [1.0] * count


def company(completions):
    """How many completions a call has."""
    return [float(len(completions))] * len(completions)


def rank(completions, completion_ids, answer, finish_reasons):
    """Relative: the share of the others that are longer. None for a completion without a text."""
    assert len(set(answer)) == 1
    assert len(completions) == len(completion_ids) == len(finish_reasons)
    others = len(completions) - 1
    return [
        sum(len(each) > len(text) for each in completions) / others if text.strip() else None for text in completions
    ]


async def rare(completions):
    """Relative, and waits for something else: the share of the others that say something different."""
    await asyncio.sleep(0.01)
    return [sum(each != text for each in completions) / (len(completions) - 1) for text in completions]


def share(completions, answer, letter="a"):
    """By a column without a default, and an option with one."""
    return [text.count(letter) / len(wanted) for text, wanted in zip(completions, answer, strict=True)]


async def soon(completions):
    """Waits for something else."""
    await asyncio.sleep(0.01)
    return [None if text == "none" else float(len(text)) for text in completions]


def odd(completions):
    """What foreign code may do, by the completion's text."""
    match "".join(completions):
        case "raise":
            raise KeyError("gone")
        case "library":
            json.loads("{")
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
        case "numpy texts":
            return np.array(["1"])
        case "lines":
            raise type("Torn\n\x1b[2J", (Exception,), {})("a\nb\x1b[2J\ud800c")
        case "two":
            return [1.0, 2.0]
        case "nan":
            return [float("nan")]
        case "none":
            return [None]
    return [0.5]


def _traced(function):
    return functools.wraps(function)(lambda completions: function(completions))


odd_elsewhere = _traced(odd)
"""Wrapped, and still counted by the line in `odd`."""


@dataclass(frozen=True)
class Own:
    """A class of one's own, whose fields are its options."""

    factor: float
    column: str = "answer"

    def __call__(self, completions, **columns):
        return [self.factor * float(wanted) for wanted in columns[self.column]]


@dataclass(frozen=True)
class Unnamed:
    """Takes a column of any name."""

    def __call__(self, /, completions, **columns):
        return [float(text != own) for text, own in zip(completions, columns["self"], strict=True)]


@dataclass(frozen=True)
class Failing:
    def __post_init__(self):
        raise OSError("no disk")

    def __call__(self, completions):
        return [0.0]


failures = 0
"""How many calls of `moody` still fail."""


def moody(completions):
    """A service that is down for a while."""
    global failures
    if failures:
        failures -= 1
        raise ConnectionError("down")
    return [1.0] * len(completions)


def place_of(code):
    """How a reported error names the line of this file that has `code`."""
    lines = Path(__file__).read_text().splitlines()
    return f"reward_samples.py:{next(number for number, line in enumerate(lines, 1) if code in line)}"


NO_FUNCTION = 7


KEPT = []


def keep(completions, **columns):
    """Keeps what it was given, for a test in the same process."""
    KEPT.append(columns)
    return [0.0] * len(completions)
