"""How a run ended: what the launcher prints and writes at its end, and its exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from inflight.config import RunConfig
from inflight.error_line import one_line
from inflight.exits import BAD_INPUT, DATA_ENDED, DONE, GIVEN_UP, STOPPED
from inflight.launcher.last_words import last_words, why_it_ended
from inflight.metrics import METRICS_FILE
from inflight.processes import Ended
from inflight.view.figures import whole
from inflight.view.progress import Progress
from inflight.view.resumption import resumption
from inflight.view.stage import stage

LOG_LINES = 20
"""Lines of a failed process's log that are printed."""


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run ended: by the trainer, by a process that failed, or by a signal."""

    trainer: Ended | None = None
    """The trainer, if it ended the run by itself: all steps are done, the data has ended, or it was asked to stop."""
    failed: Ended | None = None
    note: str = ""
    """A remark about the process that failed."""
    interrupted: signal.Signals | None = None

    @property
    def text(self) -> str:
        """How it ended, in words."""
        if self.interrupted is not None:
            return f"stopped by {self.interrupted.name}"
        if self.failed is not None:
            return f"failed: {self.failed}{self.note}"
        ends = {DONE: "complete", DATA_ENDED: "out of data", STOPPED: "stopped"}
        return ends[DONE if self.trainer is None else self.trainer.code]

    @property
    def code(self) -> int:
        """Exit code of the launcher."""
        if self.interrupted is not None:
            return 128 + self.interrupted
        if self.failed is not None:
            return BAD_INPUT if self.failed.code == BAD_INPUT else GIVEN_UP
        return DONE if self.trainer is None else self.trainer.code


def report(progress: Progress, outcome: RunOutcome, late: Sequence[str], resume: str = "") -> None:
    """Prints how the run ended, with the last lines of a failed process's log, and writes summary and report. `late`:
    processes that had to be killed; `resume`: the command that resumes the run, where that is known."""
    config = progress.config
    grace = config.launch.stop_grace_s
    for name in late:
        text = f"{name} did not stop within {grace} s, killed"
        if outcome.interrupted is not None:  # no failure: a trainer's step can take longer than the grace period
            lost = "; its work since the last checkpoint is lost and will be repeated" if name == "trainer" else ""
            text = f"{name} was busy when it was asked to stop and was killed after {grace} s{lost}"
        print(f"inflight launch: {text}", file=sys.stderr)
    if (config.path / METRICS_FILE).exists():
        with stage("writing summary and report"):
            _summarize(progress)
            _write_page(config, outcome)
    if outcome.failed is not None:
        command = outcome.failed.command
        for line in why_it_ended(command.log, LOG_LINES):
            print(f"  {command.name} | {line}", file=sys.stderr)
        print(f"inflight launch: {outcome.failed}{outcome.note}; its log: {command.log}", file=sys.stderr)
    if outcome.trainer is not None and outcome.trainer.code != DONE:
        for line in last_words(outcome.trainer.command.log, 1):
            print(f"inflight launch: {line.removeprefix('inflight ')}", file=sys.stderr)
    if outcome.code:
        done = whole(progress.step) or 0
        print(f"inflight launch: {resumption(config, done, resume, data_ended=outcome.code == DATA_ENDED)}")
    if outcome.interrupted is not None:
        print(f"inflight launch: stopped by {outcome.interrupted.name}", file=sys.stderr)


def _summarize(progress: Progress) -> None:
    """Reports a failure in one line: a failed run may have damaged files, and its own error must still be shown."""
    from inflight.report import summary, summary_text

    path = progress.config.path
    counted = {figure: progress.counted(prefix, figure) for figure, prefix in summary.COUNTED.items()}
    try:
        result = summary.summarize(path, counted)
        summary.write(path, result)
        if table := summary_text.table(result):
            print(table, flush=True)
    except (ValueError, OSError) as error:
        print(f"inflight launch: no summary: {one_line(error)}", file=sys.stderr)


def _write_page(config: RunConfig, outcome: RunOutcome) -> None:
    """As above: what keeps the page from being written is one line, and the run's exit code stays what it is."""
    from inflight.report.html import page

    target = config.path / page.REPORT_FILE
    try:
        page.write([config.path], target, outcome.text)
        print(f"report      {target}", flush=True)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, OSError) as error:
        print(f"inflight launch: no report: {one_line(error)}", file=sys.stderr)
