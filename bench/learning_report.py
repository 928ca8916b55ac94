"""From the folders of finished runs to figures, a table and plots."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from inflight.metrics import METRICS_FILE, read_lines
from inflight.report import summary
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Reader

AXES = {"seconds": "wall time, s", "tokens": "sampled tokens that reached the trainer", "steps": "optimizer steps"}
DONE_FILE = "done"
"""In the folder of a run that is complete: the other load of the machine meanwhile, as JSON."""
LAST = 0.2
"""Share of the steps whose mean is a run's final reward."""


@dataclass(frozen=True)
class Curve:
    """A run's reward over three axes; one value per step."""

    seed: int
    steps: list[float]
    seconds: list[float]
    tokens: list[float]
    reward: list[float]
    """Smoothed: the mean of the last few steps."""
    final: float
    lag: float
    """Mean lag of the trained tokens, in versions."""
    masked: float
    """Share of the tokens that the gate masked."""
    dropped: int
    """Groups that the gate dropped."""
    ess: float
    """Effective sample size as a share of the tokens, mean over steps."""
    sampled: int
    versions: float
    """Versions that a token's sequence was sampled under, mean over sampled tokens."""
    others_cpu: float
    """Share of the machine's processors that other processes took during the run."""

    def figures(self) -> dict[str, float]:
        """For a line of progress."""
        return {"seconds": round(self.seconds[-1], 1), "final": round(self.final, 4), "lag": round(self.lag, 2)}

    def reaches(self, reward: float) -> float | None:
        """Seconds until the smoothed reward is at least `reward`; None when it never is."""
        return next((at for at, got in zip(self.seconds, self.reward, strict=True) if got >= reward), None)


def read_curve(folder: Path, smooth: int, seed: int) -> Curve:
    """Raises FileNotFoundError or ValueError when the run is not complete."""
    lines = read_lines(folder / METRICS_FILE)
    figures = summary.read(folder)
    reward = [float(line["reward"]) for line in lines]
    began = lines[-1]["time_s"] - (figures.seconds or 0.0)
    trained, masked = (sum(line[key] for line in lines) for key in ("tokens_trained", "tokens_masked"))
    return Curve(
        seed=seed,
        steps=[float(line["step"]) for line in lines],
        seconds=[line["time_s"] - began for line in lines],
        tokens=list(accumulate(float(line["tokens_trained"] + line["tokens_masked"]) for line in lines)),
        reward=[statistics.fmean(reward[max(0, end - smooth) : end]) for end in range(1, len(reward) + 1)],
        final=statistics.fmean(reward[-max(1, int(LAST * len(reward))) :]),
        lag=sum(line["lag_mean"] * line["tokens_trained"] for line in lines) / max(trained, 1),
        masked=masked / max(trained + masked, 1),
        dropped=sum(figures.groups_dropped.values()),
        ess=statistics.fmean(line["ess"] for line in lines),
        sampled=figures.tokens or 0,
        versions=_versions(folder / ROLLOUTS_FILE),
        others_cpu=json.loads((folder / DONE_FILE).read_text())["others_cpu"],
    )


def _versions(path: Path) -> float:
    turns = [rollout.turn for group in Reader(path) for rollout in group.rollouts]
    spans = sum(len(turn.token_ids) * len({span.version for span in turn.token_versions}) for turn in turns)
    return spans / max(sum(len(turn.token_ids) for turn in turns), 1)


def write_report(report: Mapping[str, Any], curves: Mapping[str, Sequence[Curve]], out: Path, baseline: str) -> None:
    """results.json, table.md and, where matplotlib is installed, a plot for each axis."""
    cells = {name: [vars(each) for each in runs] for name, runs in curves.items()}
    (out / "results.json").write_text(json.dumps({**report, "cells": cells}, indent=1) + "\n")
    (out / "table.md").write_text(table(curves, baseline) + "\n")
    for axis in AXES:
        _plot(curves, axis, out / f"reward-{axis}.png")


def table(curves: Mapping[str, Sequence[Curve]], baseline: str) -> str:
    """Means over seeds with the range in brackets; time to the baseline's final reward seed by seed."""
    head = (
        "| policy | seeds | final reward | run, s | to the baseline's final reward, of its wall time | mean lag |"
        " versions in a sequence | masked | groups dropped | ESS | tokens sampled | other processes' CPU |"
    )
    rows = [head, "|---" * head.count(" |") + "|"]
    for name, runs in curves.items():
        pairs = [(run, base) for run in runs for base in curves.get(baseline, []) if run.seed == base.seed]
        shares = [share for run, base in pairs if (share := _share(run, base)) is not None]
        missed = "never" if pairs else "–"
        reached = f"{_band(shares, 0, 100)} % ({len(shares)} of {len(pairs)})" if shares else missed
        figures = [
            name,
            str(len(runs)),
            _band([run.final for run in runs], 3),
            _band([run.seconds[-1] for run in runs], 0),
            reached,
            _band([run.lag for run in runs], 2),
            _band([run.versions for run in runs], 1),
            _band([run.masked for run in runs], 1, 100) + " %",
            _band([run.dropped for run in runs], 0),
            _band([run.ess for run in runs], 3),
            _band([run.sampled for run in runs], 0),
            _band([run.others_cpu for run in runs], 0, 100) + " %",
        ]
        rows.append("| " + " | ".join(figures) + " |")
    return "\n".join(rows)


def _share(run: Curve, baseline: Curve) -> float | None:
    """Time to the baseline's final reward as a share of the baseline's whole wall time."""
    reached = run.reaches(baseline.final)
    return None if reached is None else reached / baseline.seconds[-1]


def _band(values: Sequence[float], digits: int, times: float = 1.0) -> str:
    shown = [times * value for value in values]
    spread = f" ({min(shown):.{digits}f} to {max(shown):.{digits}f})" if len(shown) > 1 else ""
    return f"{statistics.fmean(shown):.{digits}f}{spread}"


def _plot(curves: Mapping[str, Sequence[Curve]], axis: str, path: Path) -> None:
    """Mean over seeds as a line, smallest to largest as a band; over the part that all seeds have."""
    try:
        import matplotlib
    except ImportError:
        print(f"matplotlib is not installed: {path.name} is not drawn", flush=True)
        return
    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot

    figure, plot = pyplot.subplots(figsize=(7, 4.2))
    for name, runs in curves.items():
        upto = min(getattr(run, axis)[-1] for run in runs)
        at = np.linspace(max(getattr(run, axis)[0] for run in runs), upto, 200)
        lines = np.stack([np.interp(at, getattr(run, axis), run.reward) for run in runs])
        (line,) = plot.plot(at, lines.mean(axis=0), label=name, linewidth=1.6)
        plot.fill_between(at, lines.min(axis=0), lines.max(axis=0), color=line.get_color(), alpha=0.15, linewidth=0)
    plot.set_xlabel(AXES[axis])
    plot.set_ylabel("reward")
    plot.grid(alpha=0.3)
    plot.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
