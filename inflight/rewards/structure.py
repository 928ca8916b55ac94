"""Rewards for the form of a completion: its structure and its length."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.config import require

_TAG = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True)
class Format:
    """1 where the completion has the form, 0 elsewhere. One of the two is chosen.

    With `tags: [think, answer]` the completion is `<think>…</think><answer>…</answer>`: each tag opened and closed
    once, in this order, with white space only around them. With `json: [name, …]` it is one JSON object that has these
    keys (`json: []` accepts any object).
    """

    tags: list[str] = field(default_factory=list)
    json: list[str] | None = None
    opened: bool = False
    """The prompt has opened the first tag already, as chat templates of reasoning models do."""
    _whole: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        chosen = bool(self.tags) != (self.json is not None)
        require(chosen, "options.tags", self.tags, "either tags, or json with the keys of an object")
        require(all(_TAG.fullmatch(str(each)) for each in self.tags), "options.tags", self.tags, "names of tags")
        require(bool(self.tags) or not self.opened, "options.opened", self.opened, "false without tags")
        inside = r"\s*".join(rf"<{tag}>((?:(?!</?{tag}>).)*)</{tag}>" for tag in self.tags)
        if self.opened:
            inside = inside.removeprefix(f"<{self.tags[0]}>")
        object.__setattr__(self, "_whole", re.compile(rf"\s*{inside}\s*", re.DOTALL))

    def __call__(self, completions: Sequence[str]) -> list[float | None]:
        return [float(self._fits(text)) for text in completions]

    def _fits(self, text: str) -> bool:
        if self.tags:
            return self._whole.fullmatch(text) is not None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return False
        return isinstance(value, dict) and all(key in value for key in self.json or ())


@dataclass(frozen=True)
class Length:
    """The share of `target` tokens that the completion has, at most 1; with `shorter` 1 minus that."""

    target: int
    shorter: bool = False

    def __post_init__(self) -> None:
        require(self.target >= 1, "options.target", self.target, "1 token or more")

    def __call__(self, completion_ids: Sequence[Sequence[int]]) -> list[float | None]:
        shares = [min(1.0, len(ids) / self.target) for ids in completion_ids]
        return [1.0 - share if self.shorter else share for share in shares]


@dataclass(frozen=True)
class Overlong:
    """The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13), in tokens.

    0 up to `longest - buffer`, from there on a line down to -1 at `longest`, and -1 beyond.
    """

    longest: int
    """The paper's L_max: what is expected of an answer and its buffer together, at most `rollout.max_tokens`."""
    buffer: int
    """The paper's L_cache."""

    def __post_init__(self) -> None:
        require(self.longest >= 1, "options.longest", self.longest, "1 token or more")
        require(1 <= self.buffer <= self.longest, "options.buffer", self.buffer, "1 token up to options.longest")

    def __call__(self, completion_ids: Sequence[Sequence[int]]) -> list[float | None]:
        return [max(-1.0, min(0.0, (self.longest - self.buffer - len(ids)) / self.buffer)) for ids in completion_ids]
