"""The outcome of one held-out question and sample."""

from __future__ import annotations

from dataclasses import dataclass

MIXED = "mixed versions"
"""Reason of an answer of which a part was computed under another version than the pinned one."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer that counts, or why there is none."""

    question: int
    """Its index among the held-out ones."""
    sample: int
    reward: float = 0.0
    tokens: int = 0
    truncated: bool = False
    """It was cut off by max_tokens."""
    failed: str = ""
    """The reason by which it is counted where it does not count; empty where it does."""
