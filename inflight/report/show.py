"""`inflight show RUN [GROUP]`: prompts, answers and rewards of a run, with the version of each token."""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

from inflight.config import ConfigError, load
from inflight.error_line import one_line
from inflight.exits import BAD_INPUT, say_why
from inflight.file_path import file_path
from inflight.metrics import METRICS_FILE, counts_of, read_lines
from inflight.report import show_json, show_text
from inflight.report.answers import ShownGroup, Texts, Training, asked
from inflight.report.selection import Range, Selection, range_of
from inflight.report.summary import counted_before, damage_named
from inflight.report.token_text import TokenTexts
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Reader, recorded
from inflight.types import RolloutGroup

SHOWN = 5
"""Groups that are shown unless more are asked for."""
EXAMPLES = """examples:
  inflight show runs/mine                          the first groups
  inflight show runs/mine --last --limit 3         the newest three
  inflight show runs/mine q5                       all attempts at question 5
  inflight show runs/mine q5/0                     one rollout
  inflight show runs/mine --version 3 --reward :0  rollouts with tokens of version 3 and no reward
  inflight show runs/mine --lag 4: --limit 0       all that were trained on with tokens 4 versions old or older
  inflight show runs/mine --dropped                what was not trained on; the first line of a group says why
  inflight show runs/mine --json | jq .            one JSON object per group

Ranges include both ends: 3, 2:5, 2: or :5; one that begins with a minus is written --reward=-1:0.
⟦v3⟧ stands before tokens that version 3 sampled."""


def main(argv: Sequence[str]) -> int:
    """Exit code: 0, 1 when nothing was found, 2 for bad input or a damaged file, in one line."""
    parser = argparse.ArgumentParser(
        prog="inflight show",
        description="Show a run's rollouts, and which version sampled which token.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=file_path, metavar="RUN")
    parser.add_argument("name", nargs="?", metavar="GROUP", help="such as q5, its second attempt q5.1, or rollout q5/0")
    parser.add_argument("--reward", type=_range, metavar="RANGE", help="rollouts with such a reward")
    parser.add_argument("--version", type=_range, metavar="RANGE", help="rollouts with a token of such a version")
    parser.add_argument("--lag", type=_range, metavar="RANGE", help="rollouts trained on with a token of such a lag")
    parser.add_argument("--dropped", action="store_true", help="only rollouts that were not trained on")
    parser.add_argument("--limit", type=_count, default=SHOWN, metavar="N", help="groups at most (default 5; 0: all)")
    parser.add_argument("--last", action="store_true", help="the newest groups instead of the first ones")
    parser.add_argument("--json", action="store_true", help="one JSON object per group")
    given = parser.parse_args(argv)
    selection = Selection(
        name=given.name, reward=given.reward, lag=given.lag, version=given.version, dropped=given.dropped
    )
    try:
        return _show(given.run_dir, selection, limit=given.limit or None, last=given.last, as_json=given.json)
    except BrokenPipeError:
        raise  # the reader of the output has enough: cli.py
    except (ValueError, OSError) as error:
        return say_why("show", error, BAD_INPUT)


def _show(run_dir: Path, selection: Selection, *, limit: int | None, last: bool, as_json: bool) -> int:
    reader = Reader(_file(run_dir))
    steps = read_lines(run_dir / METRICS_FILE)
    with damage_named(run_dir):
        training = Training(steps)
    texts = _texts(run_dir)
    found = matching(reader, selection, training)
    # Text is made of those alone that are shown: decoding takes longer than reading.
    chosen: Iterable[ShownGroup] = deque(found, maxlen=limit) if last else islice(found, limit)
    console = Console(highlight=False, markup=False, emoji=False)
    shown = 0
    for each in chosen:
        whole = _with_texts(each, training, texts)
        if as_json:
            print(show_json.line(whole))
        else:
            show_text.show(console, whole)
        shown += 1
    if not last and next(found, None) is not None:
        print(f"inflight show: there are more groups; --limit 0 shows all, --last the newest {limit}", file=sys.stderr)
    if reader.torn is not None:
        print(f"inflight show: the file is still written, or its writer was killed: {reader.torn}", file=sys.stderr)
    if not shown:
        with damage_named(run_dir):
            print(f"inflight show: {run_dir} has {_none(run_dir, selection)}{_failed(run_dir, steps)}", file=sys.stderr)
    return 0 if shown else 1


def _none(run_dir: Path, selection: Selection) -> str:
    """What was not found: a run may have no rollout at all."""
    if next(iter(Reader(_file(run_dir))), None) is None:
        return "no rollout: no group has arrived"
    named = "" if selection.name is None else f" by the name {selection.name} (such as q5, q5.1 or q5/0)"
    return f"no such rollout{named}; --last shows the newest"


def _failed(run_dir: Path, steps: Sequence[Mapping[str, Any]]) -> str:
    """That groups have failed, which are never complete and so are in no file."""
    counts = counts_of(steps[-1] if steps else counted_before(run_dir), "groups_failed")
    if not counts:
        return ""
    reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(counts.items()))
    return f"; groups that failed are not recorded ({reasons}): the actors' logs name the first of each reason"


def matching(groups: Iterable[RolloutGroup], selection: Selection, training: Training) -> Iterator[ShownGroup]:
    """The groups with the rollouts that were asked for, those without any left out; still without texts."""
    for group in groups:
        if not selection.names(group):
            continue
        whole = asked(group, training, None)
        answers = [answer for answer in whole.answers if selection.takes(answer)]
        if answers:
            yield replace(whole, answers=answers)


def _with_texts(found: ShownGroup, training: Training, texts: Texts | None) -> ShownGroup:
    rollouts = [answer.rollout for answer in found.answers]
    group = RolloutGroup(group_id=found.group.group_id, prompt_key=found.group.prompt_key, rollouts=rollouts)
    return asked(group, training, texts)


def _file(run_dir: Path) -> Path:
    if not run_dir.is_dir():
        raise ValueError(f"there is no folder {run_dir}")
    path = run_dir / ROLLOUTS_FILE
    if not recorded(path):
        raise ValueError(f"{run_dir} has no {ROLLOUTS_FILE}: no group arrived yet, or the run has rollout.keep=false")
    return path


def _texts(run_dir: Path) -> Texts | None:
    """None, and a line on stderr, where the run's tokenizer is not available: token ids are shown then."""
    try:
        return TokenTexts(Path(load(run_dir).model.name)).of
    except (ConfigError, ValueError, OSError) as error:
        print(f"inflight show: token ids instead of text: {one_line(error)}", file=sys.stderr)
        return None


def _range(text: str) -> Range:
    try:
        return range_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return number


_count.__name__ = "int"  # argparse names it for what is no number
