"""A group for a terminal: each answer's tokens in the colour of the version that sampled them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from inflight.report.answers import ShownGroup, ShownRollout
from inflight.report.visible import CLOSE, OPEN, visible

COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#d55e00", "#0072b2")
"""The colours of Okabe and Ito, which colour-blind people can tell apart (jfly.uni-koeln.de/color); neighbouring
versions never share one. Each run of tokens is also marked with its version, since a pipe has no colours."""


def show(console: Console, asked: ShownGroup) -> None:
    """Prints the group."""
    console.print(Text.assemble((visible(asked.group.group_id), "bold"), f"  {visible(asked.fate)}"), soft_wrap=True)
    shown = _ids(asked.group.rollouts[0].prompt_ids) if asked.prompt is None else _lines(asked.prompt)
    console.print(Text.assemble(("  prompt  ", "dim"), shown), soft_wrap=True)
    for answer in asked.answers:
        console.print(_head(answer), soft_wrap=True)
        console.print(Text("    ") + _tokens(answer), soft_wrap=True)
    console.print()


def _head(answer: ShownRollout) -> Text:
    rollout = answer.rollout
    facts = [
        f"reward {rollout.reward:.4g}" + (f" (not scored: {rollout.unscored})" if rollout.unscored else ""),
        f"{len(rollout.turn.token_ids)} tokens",
        _span("version", answer.versions),
        _span("lag", answer.lags),
        rollout.generator,
        rollout.turn.finish_reason,
        "left out by the gate" if answer.left_out else "",
    ]
    return Text.assemble(f"  {visible(rollout.rollout_id)}  ", (visible(" · ".join(filter(None, facts))), "dim"))


def _span(name: str, numbers: Sequence[int] | None) -> str:
    if not numbers:
        return ""
    low = min(numbers)
    high = max(numbers)
    return f"{name} {low}" if low == high else f"{name}s {low} to {high}"


def _tokens(answer: ShownRollout) -> Text:
    """The answer, with `⟦v3⟧` before the first token of each run of tokens that one version sampled."""
    ids = answer.rollout.turn.token_ids
    versions: Sequence[int | None] = answer.versions or [None] * len(ids)
    line = Text()
    for version, run in itertools.groupby(range(len(ids)), lambda at: versions[at]):
        tokens = list(run)
        style = "" if version is None else COLOURS[version % len(COLOURS)]
        mark = f"{OPEN}{'version unknown' if version is None else f'v{version}'}{CLOSE}"
        line.append(mark, f"bold {style}")
        if answer.texts is None:
            line.append(_ids([ids[at] for at in tokens]), style)
        else:
            line.append(_lines("".join(answer.texts[at] for at in tokens)), style)
    return line


def _lines(text: str) -> str:
    """Line breaks are shown and made; what follows one stays indented, so that it can't pass for a line of ours."""
    return "␊\n    ".join(map(visible, text.split("\n")))


def _ids(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids)) + " "
