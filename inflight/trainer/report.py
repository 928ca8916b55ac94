"""The trainer's reports: one line per step, one line per swap, and a status each second.

metrics.jsonl, for figures whose name does not explain them: `log_ratio_*`, `tail_share`, `ess`, `kl` and `by_lag` are
described in stats.py; `reward` is that of the groups that were trained on, `reward_all` that of all groups that the
gate has judged since the step before; if the run has its own rewards, `rewards` has the mean of each, before its
weight, over the rollouts that it applies to, and `rewards_applied` their share; `updates` is the number of optimizer
steps of the batch, `loss` and `grad_norm` are means over them, and `by_update` has a row for each if there are several,
including skipped ones; `updates_skipped` is the number of those whose gradient was not finite, in batches since the
last line; all other figures of tokens are of the first epoch, which has each token once; `tokens_trained` counts tokens
in the loss, `tokens_masked` the others of the batch, and `lag_*` those that the gate's rules accept, without rules on
log-ratios; `groups_*` and `rollouts_dropped` count since the run began; `wait_s` is the wait for a batch, `train_s` the
time from the loss to the end of the optimizer step, `publish_wait_s` the wait for the previous version; `guard_s`, a
part of `train_s`, is the time for which the optimizer step waited for the packing of the previous version;
`tokens_per_s` is sampled tokens of the batch divided by the time since the last step ended; `length_asked`,
`length_finished` and `length_trained` are mean completion tokens: of all samples requested since the process began, as
far as they were received; of those whose group was delivered; and of those in this step. A last one well below the
first shows that long answers are lost. `first_tokens_masked` is the share of this step's sequences whose first token
was too stale to be trained on; `questions` are the indices of those that were trained on, `left_out` names their
rollouts that the gate has dropped; `dropped` names the groups that were dropped since the line before, with the reason;
`compared` and `lag_0` are described in docs/operations.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from inflight.bus import BusError, Link
from inflight.config import RunConfig
from inflight.groups import index_of
from inflight.messages import Status
from inflight.metrics import EVAL_FILE, METRICS_FILE, SWAPS_FILE, JsonLines
from inflight.rollout.books import Counts
from inflight.rollout.buffer import Buffer
from inflight.rollout.gate import GatedGroup
from inflight.trainer.batch import Batch
from inflight.trainer.exported import TrainerMetrics
from inflight.trainer.now import now
from inflight.trainer.stats import combine
from inflight.trainer.trackers import Trackers
from inflight.trainer.updates import Update
from inflight.types import Rollout
from inflight.weights.publish.events import Event, Failure, Left, Superseded, Swap
from inflight.weights.publish.publisher import Publisher, PublishReport

_TICK_S = 0.2
_STATUS_S = 1.0
WARNINGS_KEPT = 16
"""Number of warnings in the status: several, so that none is missed when two occur in a second."""
log = logging.getLogger(__name__)
Value = float | int | str


class Clock:
    """Seconds of a step by phase."""

    def __init__(self, elapsed_s: float = 0.0) -> None:
        """`elapsed_s`: seconds of earlier starts of the run."""
        self._last = time.monotonic()
        self.began = self._last - elapsed_s
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the duration of the block."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = time.monotonic() - started

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning of the run."""
        return time.monotonic() - self.began

    def lap(self) -> float:
        """Seconds since the last call, or since the beginning."""
        now = time.monotonic()
        elapsed = now - self._last
        self._last = now
        return elapsed


def rewards_and_lags(groups: Sequence[GatedGroup], judged: Sequence[float], batch: Batch) -> dict[str, object]:
    """The part of a step's line about its batch; `judged` are the rewards of all groups that it was selected from."""
    rewards = [reward for group in groups for reward in group.rewards]
    lags = batch.lag_counts()
    members = [member for group in groups for member in group.rollouts]
    return {
        "questions": [index_of(group.group.group_id) for group in groups],
        "left_out": [rollout.rollout_id for group in groups for rollout in group.left_out],
        "reward": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "reward_all": statistics.fmean(judged),
        **_by_name([rollout for group in groups for rollout in group.group.rollouts]),
        "length_trained": statistics.fmean(len(member.mask) for member in members),
        "first_tokens_masked": statistics.fmean(not member.mask[0] for member in members),
        "lag_mean": sum(lag * count for lag, count in lags.items()) / max(sum(lags.values()), 1),
        "lag_max": max(lags, default=0),
        "lag_counts": lags,
        "tokens_masked_by_rule": dict(sum((Counter(group.masked) for group in groups), Counter())),
    }


def _by_name(rollouts: Sequence[Rollout]) -> dict[str, object]:
    """Of the run's rewards, by name: the mean where they apply, and the share of rollouts that they apply to."""
    names = sorted({name for rollout in rollouts for name in rollout.rewards})
    given = {name: [each.rewards[name] for each in rollouts if name in each.rewards] for name in names}
    if not given:
        return {}
    return {
        "rewards": {name: statistics.fmean(values) for name, values in given.items()},
        "rewards_applied": {name: len(values) / len(rollouts) for name, values in given.items()},
    }


def learning(updates: Sequence[Update], epochs: int, batch: Batch) -> dict[str, object]:
    """The part of a step's line about its updates, those of all `epochs`; at least one was taken."""
    taken = [each for each in updates if each.taken]
    first = [each for each in updates[: len(updates) // epochs] if each.taken] or taken[:1]
    stats = combine([each.stats for each in first])
    return {
        "updates": len(taken),
        "loss": statistics.fmean(each.loss for each in taken),
        "grad_norm": statistics.fmean(each.grad_norm for each in taken),
        "tokens_trained": stats.tokens,
        "tokens_masked": batch.completion_tokens - stats.tokens,
        **stats.values(),
        **({"by_update": [_row(each) for each in updates]} if len(updates) > 1 else {}),
    }


def _row(update: Update) -> dict[str, float]:
    figures = {name: update.stats.whole()[name] for name in ("clip_share", "drift", "tokens")}
    return {"loss": update.loss, "grad_norm": update.grad_norm, **figures}


def delivery(publisher: Publisher, report: PublishReport, counts: Counts) -> dict[str, object]:
    """The part of a step's line about publishing and the buffer, at this moment."""
    return {
        "publish_wait_s": report.wait_s,
        "pack_s": report.pack_s,
        "guard_s": report.guard_s,
        "committed": publisher.committed,
        "behind": publisher.behind,
        "swaps": publisher.stats()["swaps"],
        "buffer": counts.buffered,
        "groups_granted": counts.granted,
        "groups_in_flight": counts.in_flight,
        "groups_dropped": counts.dropped,
        "rollouts_dropped": counts.rollouts_dropped,
        "groups_failed": counts.failed,
    }


class Reporter:
    """Owns the files and a thread that sends the status and records swaps; it also calls `watch`.

    Leaving it writes the remaining swaps.
    """

    def __init__(self, config: RunConfig, link: Link, watch: Callable[[], None]) -> None:
        """`watch` runs about five times per second in the thread; an error that it raises ends the reporting."""
        run_dir = Path(config.run_dir)
        self._metrics = JsonLines(run_dir / METRICS_FILE)
        self._swaps = JsonLines(run_dir / SWAPS_FILE)
        self._evaluations = JsonLines(run_dir / EVAL_FILE) if config.eval.every else None
        self._link = link
        self._watch = watch
        self._lock = threading.Lock()
        self._values: dict[str, Value] = {"steps": config.trainer.steps}
        self._warnings: deque[str] = deque(maxlen=WARNINGS_KEPT)
        self._publisher: Publisher | None = None
        self._now: Callable[[], dict[str, Value]] = dict
        self._trackers: Trackers | None = None
        self.exported = TrainerMetrics(config)
        """The same figures for Prometheus."""
        self._noted = 0
        self._error: OSError | None = None
        """Why swaps can't be written."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainer report", daemon=True)
        self._thread.start()

    def follow(self, publisher: Publisher, buffer: Buffer) -> None:
        """Records the swaps of this publisher from now on; how it and the buffer stand goes into each status."""
        self._publisher = publisher
        self._now = lambda: now(publisher, buffer)
        self.exported.follow(publisher, buffer)

    def track(self, trackers: Trackers) -> None:
        """Shows all further lines there, too."""
        self._trackers = trackers

    def phase(self, text: str) -> None:
        """Sets the trainer's phase, for the status."""
        with self._lock:
            self._values["phase"] = text

    def warn(self, text: str) -> None:
        """Shows a line to the user at once: in the log, and on the launcher's screen."""
        log.warning("%s", text)
        with self._lock:
            self._warnings.append(" ".join(text.split()))
            self._values["warnings"] = "\n".join(self._warnings)

    def line(self, values: dict[str, object]) -> None:
        """Writes a step's line and puts its numbers into the status. Raises OSError when the disk is full."""
        if self._error is not None:
            raise self._error
        self._metrics.write(values)
        self.exported.step(values)
        self._show(values)
        with self._lock:
            self._values.update({k: v for k, v in values.items() if isinstance(v, int | float | str)})
            self._values["groups_dropped"] = sum(_counts(values.get("groups_dropped")))

    def evaluation(self, values: dict[str, object]) -> None:
        """Writes an evaluation's line; its reward goes into the status. Raises OSError when the disk is full."""
        if self._evaluations is None:
            return
        self._evaluations.write(values | {"time": round(time.time(), 6)})
        self.exported.evaluation(values)
        self._show(values)
        with self._lock:
            self._values["evaluations"] = int(self._values.get("evaluations", 0)) + 1
            if isinstance(reward := values.get("eval/reward"), float):
                self._values |= {"eval_reward": reward, "eval_step": int(str(values["step"]))}

    def _show(self, values: dict[str, object]) -> None:
        if self._trackers is not None:
            self._trackers.log(int(str(values["step"])), values)

    def _run(self) -> None:
        due = 0.0
        while not self._closing.wait(_TICK_S):
            self._watch()
            try:
                self._note_swaps()
            except OSError as error:  # a full disk: logged once; the next `line` raises in the trainer and ends the run
                if self._error is None:
                    log.error("%s can't be written: %s", SWAPS_FILE, error)
                self._error = error
            if time.monotonic() >= due:
                due = time.monotonic() + _STATUS_S
                self._send()

    def _note_swaps(self) -> None:
        events = self._publisher.events_since(self._noted) if self._publisher is not None else []
        for event in events:
            self._swaps.write(swap_line(event))
            self.exported.event(event)
            self._noted += 1
            if isinstance(event, Swap):
                with self._lock:
                    self._values |= {"gap_ms": event.gap_s * 1e3, "running_at_swap": event.running}

    def _send(self) -> None:
        with self._lock:
            values = dict(self._values)
        values |= self._now()
        with contextlib.suppress(BusError):  # no launcher listens: one that died has ended this process or will
            self._link.send(Status(source="trainer", values=values))

    def close(self) -> None:
        """Stops the thread, sends a last status, closes the files."""
        self._closing.set()
        self._thread.join(timeout=5)
        self._send()
        files = [self._metrics, self._swaps, *([self._evaluations] if self._evaluations is not None else [])]
        for last in (self._note_swaps, *(file.close for file in files)):
            try:
                last()
            except OSError as error:  # logged only: the error that ends the run must not be hidden by it
                log.error("the reports are not complete: %s", error)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def swap_line(event: Event) -> dict[str, object]:
    """An event of the publisher as a line of swaps.jsonl."""
    kinds = {Swap: "committed", Failure: "failed", Superseded: "superseded", Left: "left"}
    return {"event": kinds[type(event)], "time": time.time(), **dataclasses.asdict(event)}


def _counts(value: object) -> list[int]:
    return list(value.values()) if isinstance(value, dict) else []
