"""The results of a run's evaluations in a line: the newest one, and the best checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class HeldOutReward(msgspec.Struct, frozen=True, kw_only=True):
    """Mean reward of the held-out questions, each with the version that answered them."""

    version: int
    reward: float
    stderr: float | None = None
    """Standard error of `reward`; None of one question."""
    questions: int | None = None
    best_version: int | None = None
    """None where no best checkpoint is kept (`eval.keep_best=false`)."""
    best_reward: float | None = None

    def __str__(self) -> str:
        error = "" if self.stderr is None else f" ± {self.stderr:.2g}"
        of = "" if self.questions is None else f", {'standard error of ' if error else ''}n={self.questions}"
        best = "" if self.best_reward is None else f", best {self.best_reward:.3g} (version {self.best_version})"
        return f"{self.reward:.3g}{error} (version {self.version}{of}){best}"


def held_out(lines: Sequence[Mapping[str, Any]]) -> HeldOutReward | None:
    """Of the lines of eval.jsonl, oldest first; None when no evaluation has a result."""
    done = [line for line in lines if line.get("eval/reward") is not None]
    if not done:
        return None
    best: Mapping[str, Any] = next((line for line in reversed(done) if line.get("eval/best")), {})
    return HeldOutReward(
        version=int(done[-1]["version"]),
        reward=float(done[-1]["eval/reward"]),
        stderr=done[-1].get("eval/reward_stderr"),
        questions=None if (asked := done[-1].get("eval/questions")) is None else int(asked),
        best_version=best.get("version"),
        best_reward=best.get("eval/reward"),
    )
