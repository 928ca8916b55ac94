"""The parts of the live view, each a table of text for a given width."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from inflight.report.html import series
from inflight.report.visible import visible
from inflight.types import Value
from inflight.view.figures import duration, finite, milliseconds, number, sparkline, whole
from inflight.view.progress import Progress

LABEL = 9
"""Columns of the labels at the left."""
LEAST_CURVE = 8
MOST_CURVE = 60
BAR = 20
"""Columns of the buffer's bar."""
NEXT = {
    "IDLE": "next",
    "SENDING": "arriving",
    "READY": "ready, kept back for an evaluation",
    "COMMITTING": "swapping",
    "ABORTING": "given up",
    "UNSURE": "not confirmed",
}
"""What happens to a generator's next version, by its state at the publisher."""
ACTORS = 3
"""Most actors with a row each."""
DONE_BY_ACTORS = {"in_flight": "groups under way", "done": "done", "failed": "failed"}
OUT = {"ABSENT": "not there", "STALLED": "does not answer", "POISONED": "poisoned", "INCOMPATIBLE": "refused"}


def labelled(rows: Iterable[tuple[str, Text]]) -> Table:
    """Rows with a label each."""
    table = Table.grid(padding=(0, 1))
    table.add_column(width=LABEL, no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(Text(label), text)
    return table


def head(progress: Progress, width: int) -> Group:
    """The name of the run, time spent and left, and the progress bar."""
    last = progress.last_step
    done = whole(progress.step)
    left = "" if progress.left_s is None else f", {duration(progress.left_s)} left"
    title = Text.assemble(("inflight ", "bold"), visible(progress.config.path.name))
    times = Text("" if progress.over else f"{duration(progress.elapsed_s)}{left}")
    first = Table.grid(expand=True)
    first.add_column(overflow="ellipsis", no_wrap=True)
    first.add_column(justify="right", no_wrap=True)
    first.add_row(title, times)
    said = progress.step_of
    room = max(width - LABEL - len(said) - 3, LEAST_CURVE)
    filled = round(room * min(done or 0, last) / max(last, 1))
    bar = Text.assemble((("━" * filled), "green"), ("─" * (room - filled), "dim"), f" {said}")
    return Group(first, labelled([("step", bar)]))


def learning(progress: Progress, width: int) -> Table:
    """Reward, held-out reward and loss as curves; lag and speed."""
    rows = progress.record.steps
    last = progress.record.last
    room = min(max(width - LABEL - 32, LEAST_CURVE), MOST_CURVE)
    found = []
    of_all = "" if last.get("reward_all") in (None, last.get("reward")) else f"  all {number(last['reward_all'])}"
    for label, name, style, more in (("reward", "reward", "green", of_all), ("loss", "loss", "cyan", "")):
        if curve := _curve(rows, name, room, style):
            found.append((label, curve.append(more)))
    if held_out := _curve(progress.record.evaluations, "eval/reward", room, "magenta"):
        found.insert(1, ("held-out", held_out.append(f"  version {_held_out(progress)}")))
    if last:
        speed = f"   {number(finite(last.get('tokens_per_s')))} tokens/s" if "tokens_per_s" in last else ""
        lag = f"{number(finite(last.get('lag_mean')))} mean, {last.get('lag_max', '?')} max"
        found.append(("lag", Text(f"{lag} at training{speed}")))
    elif not progress.over:
        found.append(("trainer", Text(str(progress.of("trainer").get("phase", "starting")))))
    return labelled(found)


def _curve(rows: Iterable[Mapping[str, Any]], name: str, width: int, style: str) -> Text | None:
    values = [value for row in rows if (value := finite(row.get(name))) is not None]
    if not values:
        return None
    return Text.assemble((sparkline(values, width), style), f" {number(values[-1])}")


def _held_out(progress: Progress) -> object:
    done = [row for row in progress.record.evaluations if "eval/reward" in row and "version" in row]
    if not done:
        return "?"
    error = finite(done[-1].get("eval/reward_stderr"))
    questions = finite(done[-1].get("eval/questions"))
    size = ("" if error is None else f", ± {error:.2g}") + ("" if questions is None else f", n={questions:.0f}")
    return f"{done[-1]['version']}{size}"


def generators(progress: Progress, most: int) -> Table:
    """A row each, `most` of them: version, what happens to the next one, speed, requests."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("generator", width=LABEL, no_wrap=True)
    table.add_column("version", justify="right")
    table.add_column("next version", min_width=16)
    for name in ("tokens/s", "running", "waiting"):
        table.add_column(name, justify="right")
    names = progress.generators()
    for name in names[:most]:
        values = progress.of(name)
        figures = [_figure(values, key) for key in ("tokens_per_s", "running", "waiting")]
        version = str(values["version"]) if "version" in values else "–"
        table.add_row(Text(name), version, _next(progress, name), *figures)
    if len(names) > most:
        table.add_row(Text(f"+{len(names) - most}"), "", Text("more: the window is too low", style="dim"))
    return table


def _next(progress: Progress, name: str) -> Text:
    trainer = progress.of("trainer")
    values = progress.of(name)
    state = str(trainer.get(f"state_{name}", ""))
    if state in OUT:
        here = state == "ABSENT" and "version" not in values
        return Text(str(values.get("phase", "starting")) if here else OUT[state], style="yellow")
    behind = whole(trainer.get(f"behind_{name}"))
    committed = whole(trainer.get(f"committed_{name}"))
    if behind is None or committed is None:
        return Text(str(values.get("phase", "–" if "version" in values else "starting")))
    if not behind or (whole(values.get("version")) or 0) >= committed + behind:  # the trainer's status may be older
        return Text("– (up to date)", style="dim")
    return Text(f"{committed + behind} {NEXT.get(state, '')}".strip())


def _figure(values: Mapping[str, Value], name: str) -> str:
    return number(values[name]) if name in values else "–"


def flow(progress: Progress) -> Table:
    """The buffer with the ages of its groups, the actors, and what the gate has left out, by reason."""
    trainer = progress.of("trainer")
    rows = []
    if (buffered := whole(trainer.get("buffer"))) is not None:
        in_flight = whole(trainer.get("in_flight")) or 0
        capacity = max(progress.config.capacity, 1)
        full = min(round(BAR * buffered / capacity), BAR)
        under_way = min(round(BAR * in_flight / capacity), BAR - full)
        bar = ("█" * full, "green"), ("▒" * under_way, "green"), ("░" * (BAR - full - under_way), "dim")
        ages = str(trainer.get("buffer_ages", ""))
        said = f" {buffered} of {progress.config.capacity} groups wait{f' ({ages})' if ages else ''}"
        rows.append(("buffer", Text.assemble(*bar, f"{said}, {in_flight} under way")))
    rows += [(name, Text(text)) for name, text in _actors(progress)]
    left_out = _left_out(progress)
    rows.append(("gate", Text(left_out or "nothing left out", style="" if left_out else "dim")))
    return labelled(rows)


def _actors(progress: Progress) -> list[tuple[str, str]]:
    """A row each; the sums of all when there are more than ACTORS."""
    names = [name for name in progress.sources() if name[0] == "a"]
    if len(names) <= ACTORS:
        return [(name, text) for name in names if (text := _actor(progress.of(name)))]
    sums = {key: sum(whole(progress.of(name).get(key)) or 0 for name in names) for key in DONE_BY_ACTORS}
    return [("actors", f"{len(names)}: {_actor(sums)}")]


def _actor(values: Mapping[str, Value]) -> str:
    return ", ".join(f"{values[key]} {word}" for key, word in DONE_BY_ACTORS.items() if key in values)


def _left_out(progress: Progress) -> str:
    parts = [
        _by_reason("groups", progress.counted("dropped/", "groups_dropped")),
        _by_reason("rollouts", progress.counted("rollouts/", "rollouts_dropped")),
        _by_reason("failed groups", progress.counted("failed/", "groups_failed")),
        _by_reason("tokens", series.masked(progress.record.steps)),
    ]
    return " · ".join(part for part in parts if part)


def _by_reason(word: str, counts: Mapping[str, int]) -> str:
    """For example `groups 3 too old, 2 all rewards equal`; the three most frequent reasons."""
    ordered = sorted(((count, visible(reason)) for reason, count in counts.items() if count), reverse=True)
    more = sum(count for count, _ in ordered[3:])
    said = [f"{count:,} {reason}" for count, reason in ordered[:3]] + ([f"{more:,} other"] if more else [])
    return f"{word}: {', '.join(said)}" if said else ""


def swaps(progress: Progress, most: int) -> Table:
    """The last swaps, newest first."""
    rows = []
    for at, row in enumerate(list(progress.record.swaps)[: -most - 1 : -1]):
        transfer = finite(row.get("transfer_s"))
        took = "?" if transfer is None else f"{number(transfer)} s"
        text = f"{row.get('generator')} → {row.get('version')}   gap {milliseconds(row.get('gap_s'))}"
        running = finite(row.get("running"))
        text += f"   transfer {took}   through {'?' if running is None else f'{running:g}'} sequences"
        rows.append(("swaps" if at == 0 else "", Text(visible(text))))
    return labelled(rows)


def warnings(lines: Sequence[str]) -> Table:
    """One after another, wrapped."""
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1, style="yellow")
    table.add_column(overflow="fold", style="yellow")
    for line in lines:
        table.add_row("!", Text(line))
    return table
