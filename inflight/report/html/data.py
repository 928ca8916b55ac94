"""Everything that the page shows of one run, read from its folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import OmegaConf

from inflight.config.folder import AUDIT_FILE, CONFIG_FILE, ENVIRONMENT_FILE
from inflight.error_line import one_line
from inflight.metrics import EVAL_FILE, METRICS_FILE, SWAPS_FILE, read_lines
from inflight.report import staleness, summary, summary_text
from inflight.report.answers import Texts, Training
from inflight.report.html import bands, series
from inflight.report.html.redact import flat, redacted, text
from inflight.report.html.state import state
from inflight.report.token_text import TokenTexts
from inflight.rollout.buffer import ROLLOUTS_FILE

MOST_NAMED = 200
"""Lines of an audit, of faults and of what is open."""


@dataclass
class _Problems:
    """What could not be read, a line each: a report of a crashed run shows the rest."""

    lines: list[str]

    def tried(self, what: str, read: Callable[[], Any], otherwise: Any) -> Any:
        """What `read` returns or, when a file is damaged, `otherwise` and a note."""
        try:
            return read()
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, OSError) as error:
            self.lines.append(f"{what}: {one_line(error)}")
            return otherwise


def of_run(run_dir: Path, ended: str = "") -> dict[str, Any]:
    """The run as JSON has it; `ended` is what the launcher knows about its end.

    Raises ValueError when the folder is no run folder. What is damaged in one is left out, and `notes` says so.
    """
    if not run_dir.is_dir() or not any((run_dir / name).is_file() for name in (CONFIG_FILE, METRICS_FILE)):
        raise ValueError(f"{run_dir} is no run folder: it has neither {CONFIG_FILE} nor {METRICS_FILE}")
    notes = _Problems([])
    steps = notes.tried(METRICS_FILE, lambda: read_lines(run_dir / METRICS_FILE), [])
    swaps = notes.tried(SWAPS_FILE, lambda: read_lines(run_dir / SWAPS_FILE), [])
    config = notes.tried(CONFIG_FILE, lambda: _config(run_dir), {})
    counted = bands.census(run_dir / ROLLOUTS_FILE)
    if counted.torn:
        notes.lines.append(f"{ROLLOUTS_FILE}: {counted.torn}")
    texts = notes.tried("token ids instead of text", lambda: _texts(config), None)
    training = notes.tried(METRICS_FILE, lambda: Training(steps), Training([]))
    path = run_dir / ROLLOUTS_FILE
    return {
        "name": run_dir.resolve().name,
        "state": state(run_dir, len(steps), _steps_of(config), ended),
        "summary": notes.tried("summary", lambda: _summary(run_dir), []),
        "steps": notes.tried(METRICS_FILE, lambda: series.of_steps(steps), {}),
        "swaps": notes.tried(SWAPS_FILE, lambda: series.of_swaps(swaps), series.of_swaps([])),
        "lags": notes.tried(METRICS_FILE, lambda: series.lags(steps), []),
        "by_lag": notes.tried(METRICS_FILE, lambda: _rows(staleness.by_lag(steps)), []),
        "by_version": notes.tried(METRICS_FILE, lambda: _rows(staleness.by_version(steps)), []),
        "gate": notes.tried(METRICS_FILE, lambda: series.gate(steps), {}),
        "waits": notes.tried(METRICS_FILE, lambda: series.waits(steps), {}),
        "busy": bands.busy(counted),
        "scores": series.durations(counted.scores),
        "evaluations": notes.tried(EVAL_FILE, lambda: series.of_evaluations(read_lines(run_dir / EVAL_FILE)), {}),
        "bands": notes.tried(ROLLOUTS_FILE, lambda: bands.bands(path, counted, training, texts), None),
        "audit": notes.tried(AUDIT_FILE, lambda: _audit(run_dir), None),
        "config": flat(redacted(config)),
        "environment": notes.tried(ENVIRONMENT_FILE, lambda: _environment(run_dir), {}),
        "notes": [text(line) for line in notes.lines],
    }


def _config(run_dir: Path) -> dict[str, Any]:
    found = OmegaConf.to_container(OmegaConf.load(run_dir / CONFIG_FILE))
    if not isinstance(found, dict):
        raise ValueError("it holds no options")
    return {str(key): value for key, value in found.items()}


def _steps_of(config: dict[str, Any]) -> int | None:
    trainer = config.get("trainer")
    steps = trainer.get("steps") if isinstance(trainer, dict) else None
    return steps if isinstance(steps, int) else None


def _texts(config: dict[str, Any]) -> Texts | None:
    model = config.get("model")
    return TokenTexts(Path(str(model["name"]))).of if isinstance(model, dict) and model.get("name") else None


def _summary(run_dir: Path) -> list[list[str]]:
    """Label and text, as in the table at the end of a run."""
    return [list(row) for row in summary_text.labelled(summary.summarize(run_dir))]


def _rows(rows: list[staleness.Row]) -> list[dict[str, Any]]:
    return [{name: series.number(value) for name, value in msgspec.structs.asdict(row).items()} for row in rows[-64:]]


def _audit(run_dir: Path) -> dict[str, Any] | None:
    path = run_dir / AUDIT_FILE
    if not path.is_file():
        return None
    from inflight.audit.report import read  # late: it takes some seconds to import, and most runs have no audit

    found = read(path.read_bytes())
    return {
        "outcome": found.outcome.value,
        "faults": found.faults[:MOST_NAMED],
        "open": found.open[:MOST_NAMED],
        "rows": [
            ["rollouts replayed", str(found.rollouts)],
            ["times that a swap fell into a sequence", str(found.swaps)],
            ["tokens of sequences with two or more versions", str(found.straddling_tokens)],
            ["tokens compared", str(found.agreement.tokens)],
            ["difference of log-probabilities, median", f"{found.agreement.median:.3g} nats"],
            ["difference of log-probabilities, largest", f"{found.agreement.largest:.3g} nats"],
            ["recorded in, replayed in", f"{found.recorded_in}, {found.dtype}"],
        ],
    }


def _environment(run_dir: Path) -> dict[str, str]:
    path = run_dir / ENVIRONMENT_FILE
    return flat(redacted(json.loads(path.read_text()))) if path.is_file() else {}
