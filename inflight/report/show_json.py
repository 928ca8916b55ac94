"""A group as one line of JSON: ASCII only, so that a terminal can print it whatever a model has written."""

from __future__ import annotations

import json
import math
from typing import Any

from inflight.report.answers import ShownGroup, ShownRollout


def line(asked: ShownGroup) -> str:
    """One object; numbers that JSON does not have (NaN, infinities) are null."""
    group = asked.group
    record = {
        "group_id": group.group_id,
        "prompt_key": group.prompt_key,
        "prompt": asked.prompt,
        "prompt_ids": group.rollouts[0].prompt_ids.tolist(),
        "trained_at": asked.trained_at,
        "fate": asked.fate,
        "rollouts": [_rollout(answer) for answer in asked.answers],
    }
    return json.dumps(record).replace("\x7f", "\\u007f")


def _rollout(answer: ShownRollout) -> dict[str, Any]:
    rollout = answer.rollout
    turn = answer.rollout.turn
    return {
        "rollout_id": rollout.rollout_id,
        "reward": _finite(rollout.reward),
        "unscored": rollout.unscored,
        "left_out": answer.left_out,
        "generator": rollout.generator,
        "actor": rollout.actor,
        "finish_reason": turn.finish_reason,
        "text": None if answer.texts is None else "".join(answer.texts),
        "tokens": {
            "id": turn.token_ids.tolist(),
            "text": answer.texts,
            "version": answer.versions,
            "lag": answer.lags,
            "logprob": [_finite(each) for each in turn.logprobs],
        },
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
