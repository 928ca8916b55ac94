"""The outcome of one held-out question and sample."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.types import Turn, versions_of_tokens

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


def versions_of(turn: Turn) -> set[int]:
    """All versions that a turn was computed under: those of its tokens and of the prefills that it rests on."""
    tokens = versions_of_tokens(turn.token_versions, len(turn.token_ids))
    return {*tokens, *(span.version for span in turn.prefill_versions)}
