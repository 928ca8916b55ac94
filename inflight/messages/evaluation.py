"""Messages about evaluations: trainer (ROUTER) with the evaluator (DEALER); see trainer/evaluations.py."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from inflight.messages.base import Message, Seconds, Text
from inflight.types import Count, Name, Url, Version

Figures = Annotated[dict[Name, float], Meta(max_length=1024)]


class EvaluatorHello(Message, tag=True):
    """The evaluator is there, and says so again every few seconds.

    `incarnation` differs from process to process: a new one knows of no order.
    """

    incarnation: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    answers: Count
    """To the held-out questions, that one evaluation has."""


class Evaluate(Message, tag=True):
    """Ask the generator at `url` all held-out questions within `timeout_s`. It stamps `version` until that is done.

    Repeated until it is answered; a repeat begins nothing anew.
    """

    number: Count
    """Of the order, upwards; what is said about it repeats it. A newer order ends one that is under way."""
    version: Version
    url: Url
    timeout_s: Seconds


class StopEvaluating(Message, tag=True):
    """The order is given up: its answers are not wanted any more."""

    number: Count


class Evaluated(Message, tag=True):
    """All questions are answered, or `problem` says why not. Repeated when the order is."""

    number: Count
    figures: Figures
    """As evaluation/figures.py has them."""
    failed: Annotated[dict[Name, Count], Meta(max_length=1024)] = msgspec.field(default_factory=dict)
    """Answers that do not count, by reason."""
    problem: Text = ""
