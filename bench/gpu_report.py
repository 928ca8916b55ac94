"""The interruption bench's files: JSON, a Markdown table, and plots where matplotlib is installed."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from bench.gpu_gaps import Timeline, Update
from inflight.weights.publish.events import PHASES

_COLUMNS = (
    ("strategy", lambda c: c["strategy"]),
    ("batch", lambda c: c["batch"]),
    ("updates", lambda c: c["updates"]),
    ("every s", lambda c: c["interval_s"]),
    ("extra gap ms p50 / p99 / max", lambda c: _spread(c["extra_gap_ms"])),
    ("control p50 / p99 / max", lambda c: _spread(c["control_gap_ms"])),
    ("in the engine core p50 / p99 / max", lambda c: _spread(c["core_extra_gap_ms"])),
    ("base gap ms", lambda c: c["base_gap_ms"]),
    ("decode time lost ms p50", lambda c: c["decode_time_lost_ms"]["p50"]),
    ("update ms p50", lambda c: c["update_ms"]["p50"]),
    ("remap ms p50 / p99 / max", lambda c: _spread(c["remap_ms"])),
    ("trainer blocked ms p50 / p99 / max", lambda c: _spread(c["trainer_blocked_ms"])),
    ("throughput kept", lambda c: f"{100 * c['throughput_kept']:.1f} %"),
    ("aborted", lambda c: c["aborted"]),
    ("recomputed", lambda c: c["recomputed"]),
)


def phases(packed: list[float], swaps: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of a version's phases in milliseconds: publish/events.py says what they are. `packed`: seconds for which
    the publisher packed, `swaps` its records."""
    named = {name: [swap[name] for swap in swaps] for name in PHASES}
    return {name: round(1e3 * statistics.median(values), 3) for name, values in {"pack_s": packed, **named}.items()}


def _spread(values: dict[str, float]) -> str:
    return f"{values['p50']:.2f} / {values['p99']:.2f} / {values['max']:.2f}"


def write_report(report: dict[str, Any], timelines: dict[str, tuple[Timeline, list[Update]]], out: Path) -> None:
    """Writes interruption.json, interruption.md and the plots, over what an earlier cell wrote."""
    (out / "interruption.json").write_text(json.dumps(report, indent=1))
    (out / "interruption.md").write_text(markdown(report))
    try:
        import matplotlib
    except ImportError:
        return
    if not timelines:
        return
    matplotlib.use("Agg")
    _plot_gaps(timelines, out / "gaps.png")
    _plot_rate(timelines, out / "rate.png")


def markdown(report: dict[str, Any]) -> str:
    """The cells as one table, with machine and command."""
    lines = [
        "| " + " | ".join(name for name, _ in _COLUMNS) + " |",
        "|" + "---|" * len(_COLUMNS),
    ]
    for cell in report["cells"]:
        if "error" in cell:
            lines.append(f"| {cell['strategy']} | {cell['batch']} | failed: {cell['error']} |")
        else:
            lines.append("| " + " | ".join(str(value(cell)) for _, value in _COLUMNS) + " |")
    about = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    config = report["config"]
    return "\n".join(
        [
            f"{config['shape']} shape, random weights, TP {config['tensor_parallel_size']}, "
            f"transport {config['transport']}; {about}",
            "",
            *lines,
            "",
        ]
    )


def _plot_gaps(timelines: dict[str, tuple[Timeline, list[Update]]], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name, (timeline, _) in timelines.items():
        gaps = [1e3 * gap for gap in timeline.gap if gap > 0]
        bins = [10 ** (0.3 + 0.02 * i) for i in range(180)]
        axes.hist(gaps, bins=bins, histtype="step", label=name)
    axes.set(xscale="log", yscale="log", xlabel="time between tokens at the client, ms", ylabel="steps")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _plot_rate(timelines: dict[str, tuple[Timeline, list[Update]]], path: Path) -> None:
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(len(timelines), 1, figsize=(9, 1.9 * len(timelines)), squeeze=False)
    for (axes,), (name, (timeline, updates)) in zip(rows, timelines.items(), strict=True):
        shown = [update for update in updates if update.began < updates[0].began + 10]
        start = updates[0].began - 0.5
        stop = updates[0].began + 10
        width = 0.05
        moments = [start + i * width for i in range(int((stop - start) / width))]
        axes.plot([m - start for m in moments], [timeline.rate(m, m + width) for m in moments], linewidth=0.7)
        for update in shown:
            axes.axvline(update.swap_began - start, color="tab:red", linewidth=0.5)
        axes.set(ylabel="tokens/s", title=name)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
