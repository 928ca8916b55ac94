"""The training loop: take a batch, train on it, publish.

One version per step: step s trains at version s - 1 and publishes s. The trainer waits for a batch and, when publishing
is slower than a step, for the previous version; generation and transfer overlap with training.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from inflight.config import RunConfig
from inflight.rollout.books import NO_BOOKS
from inflight.rollout.buffer import Buffer, BufferClosed, DataEnded
from inflight.rollout.gate import GatedGroup
from inflight.rollout.gate_result import GroupDrop
from inflight.trainer.batch_watch import deserted
from inflight.trainer.checkpoint.index import FOLDER, SCHEMA, Saved, name_of
from inflight.trainer.checkpoint.io import drop_checkpoints, keep_version, replace_books, save_checkpoint
from inflight.trainer.checkpoint.snapshot import Snapshot, take
from inflight.trainer.checkpoint.writer import CheckpointWriter
from inflight.trainer.clock import Clock
from inflight.trainer.coordinator import CoordinatorError
from inflight.trainer.evaluations import Evaluations
from inflight.trainer.learner import Learner, Stopped
from inflight.trainer.lines import delivery, learning, rewards_and_lags
from inflight.trainer.logprob_mismatch import LogprobMismatch
from inflight.trainer.report import Reporter
from inflight.trainer.skips import LearnError, Skips
from inflight.trainer.start_comparison import StartComparison
from inflight.trainer.stop import StopFlag
from inflight.trainer.updates import train
from inflight.weights.publish.comparison import NumbersDiffer
from inflight.weights.publish.publisher import Publisher, PublishReport
from inflight.weights.source import WeightSource

FINISH_S = 10.0
"""Seconds that actors get to finish their groups in flight."""


class TrainError(RuntimeError):
    """The run can't continue; the text says which process or data is missing."""


class Trainer:
    """Takes steps until the configured number is reached, `stop` is set or something is permanently lost."""

    def __init__(
        self,
        config: RunConfig,
        model_dir: Path,
        learner: Learner,
        source: WeightSource,
        buffer: Buffer,
        publisher: Publisher,
        reporter: Reporter,
        stop: StopFlag,
        begun: Saved,
        evaluations: Evaluations | None = None,
    ) -> None:
        """`begun`: the state to start from: step 0, or that of a checkpoint."""
        self._evaluations = evaluations
        self._config = config
        self._model_dir = model_dir
        self._learner = learner
        self._source = source
        self._buffer = buffer
        self._publisher = publisher
        self._reporter = reporter
        self._stop = stop
        self._patience = config.publish.transfer_timeout_s + config.publish.commit_timeout_s
        """Seconds that a published version may take until it is live or has failed."""
        self._start_comparison = StartComparison(config, publisher, learner, stop.is_set, source.device)
        self._mismatch = LogprobMismatch(config, source.device)
        learner.mismatch = self._mismatch
        self.writer = CheckpointWriter(config.trainer.checkpoint_timeout_s)
        self._skips = Skips(config.trainer.max_skipped_updates)
        self._clock = Clock(begun.elapsed_s)
        self.steps_done = begun.step
        self.data_ended = ""
        """Why the task has no more questions; empty while it may have some."""
        self._books = begun.books
        """The buffer's state at the last optimizer step, done or skipped. A checkpoint thus counts a group as trained
        on only if its optimizer has seen it; groups dropped before are not repeated."""

    def run(self) -> None:
        """Runs all steps, then shuts the run down.

        Raises TrainError, TimeoutError, LearnError or NumbersDiffer; raises NotFinite instead if the newest weights
        cannot be resumed from.
        """
        self._reporter.phase("comparing with generators")
        self._start_comparison.begin(self.steps_done)
        self._reporter.phase("training")
        self._evaluate_when_due()  # of the version that a run begins or resumes with
        while self.steps_done < self._config.trainer.steps and not self._stop.is_set():
            try:
                learned = self.train_step(self.steps_done + 1)
                self.steps_done += learned
                self._skips.require()
            except DataEnded as end:
                self.data_ended = str(end)
                break
            except (Stopped, BufferClosed) as end:
                if not self._stop.is_set():
                    error = TrainError(deserted(self._publisher) or str(end))
                    self._save_before(error)
                    raise error from end
                break
            # no batch was ready, no gradient is finite, or the generators' numbers differ from the trainer's
            except (TimeoutError, LearnError, NumbersDiffer) as end:
                self._save_before(end)
                raise
            if learned:
                self._checkpoint_when_due()
                self._evaluate_when_due()
        self._finish()

    def train_step(self, step: int) -> bool:
        """One version: a batch judged at the previous version, the optimizer steps on it, the publication.

        Returns False when no gradient of the batch was finite: then there is no version, and its questions are settled.
        """
        self._mismatch.require()
        self.writer.require()
        with self._clock.phase("wait_s"):
            settings = self._config.trainer
            if settings.synchronous:
                self._publisher.flush(self._patience)
            self._reporter.phase("waiting for a batch")
            groups = self._buffer.take(settings.groups_per_step, step - 1, settings.batch_timeout_s)
            self._reporter.phase("training")
            self._start_comparison.before_step(step - 1)
        with self._clock.phase("train_s"):
            batch = self._learner.collate(groups)
            rate = self._learner.learning_rate
            updates = train(self._learner, batch, self._stop.is_set)
        skipped = self._skips.note(updates)
        moved = any(each.taken for each in updates)
        if skipped:
            self._tell_skipped(f"step {step}: {skipped}", [] if moved else groups)
        self._books = self._buffer.books()
        if not moved:
            return False
        report = self.publish(step)
        learned = rewards_and_lags(groups, self._buffer.rewards, batch)
        learned |= learning(updates, settings.epochs_per_batch, batch) | {"learning_rate": rate}
        self._write_line(step, learned, report, batch.completion_tokens)
        return True

    def _tell_skipped(self, text: str, lost_groups: Sequence[GatedGroup]) -> None:
        """Reports updates that were skipped; `lost_groups` are those that were not trained on.

        Raises NotFinite if the weights, which are published already, are the cause.
        """
        if lost_groups:
            self._require_sound()
            self._buffer.reject(lost_groups, GroupDrop.NOT_FINITE)
            text += f"; not trained on: {', '.join(group.group.group_id for group in lost_groups)}"
        self._reporter.warn(text)

    def publish(self, version: int) -> PublishReport:
        """Writes the version's file first, so that no token can be sampled by weights that an audit does not have."""
        self.keep(version)
        return self._publisher.publish(version)

    def keep(self, version: int) -> None:
        """Writes the version's file when the run is to be audited."""
        if self._config.audit.keep_versions:
            keep_version(self._source, version, self._config.version_file(version))

    def _write_line(self, step: int, learned: dict[str, object], report: PublishReport, tokens: int) -> None:
        now = {"step": step, "version": step, "time_s": round(self._clock.elapsed, 3), "time": round(time.time(), 6)}
        rates = self._clock.seconds | {"tokens_per_s": tokens / self._clock.lap()}
        refused = {"refused": dict(self._publisher.refused + self._buffer.refused)}
        learned |= self._start_comparison.told() | self._mismatch.judge() | self._skips.told()
        delivered = delivery(self._publisher, report, self._buffer.counts()) | self._buffer.lengths()
        delivered["dropped"] = self._buffer.dropped()
        self._reporter.line(now | learned | rates | delivered | refused)

    def _checkpoint_when_due(self) -> None:
        every = self._config.trainer.checkpoint_every
        if every and self.steps_done % every == 0 and self.steps_done < self._config.trainer.steps:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Copies the state after the last whole step, and writes the checkpoint in the background. When this returns,
        the previous checkpoint is complete.

        Raises NotFinite, and writes none, when its weights can't be sent: a resumed run would serve them. Raises
        OSError when the previous checkpoint can't be written, or not in time.
        """
        self._save(self._config.path / FOLDER)

    def _save(self, folder: Path) -> Path:
        """The checkpoint's own folder in `folder`, which appears when it is complete."""
        self._reporter.phase(f"checkpoint at step {self.steps_done}")
        learner = self._learner
        self._require_sound()
        self.writer.wait()
        saved = Saved(schema=SCHEMA, step=self.steps_done, elapsed_s=self._clock.elapsed, books=self._books)
        target = folder / name_of(saved.step)
        if target.exists():
            replace_books(target, saved)
        else:
            snapshot = take(learner.policy.master, learner.optimizer, learner.coordinator.together("checkpoint"))
            self.writer.start(target.name, lambda: self._write(folder, saved, snapshot))
        self._reporter.phase("training")
        return target

    def _evaluate_when_due(self) -> None:
        """Begins the evaluation of the newest version, once the previous one is over; it is over before the run is."""
        evaluations = self._evaluations
        if evaluations is None or not evaluations.due(self.steps_done):
            return
        if evaluations.busy:
            self._reporter.phase("waiting for the previous evaluation")
        if evaluations.wait_idle(self.steps_done, lambda: not self._stop.is_set()):
            best = evaluations.best
            evaluations.begin(self.steps_done, self._save(best.nominees) if best is not None else None)
        self._reporter.phase("training")

    def _write(self, folder: Path, saved: Saved, snapshot: Snapshot) -> None:
        """In the writer's thread. Raises OSError."""
        settings = self._config.trainer
        master = self._learner.policy.master
        save_checkpoint(folder, saved, snapshot, master, self._model_dir, settings.checkpoint_dtype)
        if folder.name == FOLDER:
            drop_checkpoints(folder, settings.checkpoints_kept, self._config.checkpoint)

    def _require_sound(self) -> None:
        """Raises NotFinite when the newest version can't be sent."""
        with self._learner.coordinator.within_bound("check the weights"):
            self._publisher.require_sound()

    @property
    def _has_begun(self) -> bool:
        """Whether there is a state to resume from other than the beginning."""
        return self.steps_done > 0 or self._books != NO_BOOKS

    def _save_before(self, end: Exception) -> None:
        """Writes a checkpoint although the run ends with an error: as long as the optimizer is not in a step, all steps
        are whole. The original error is reported first."""
        if self._has_begun:
            try:
                self.checkpoint()
                self.writer.wait()
            except (OSError, CoordinatorError) as error:
                end.add_note(f"and no checkpoint could be written: {error}")

    def _finish(self) -> None:
        """Writes the result, waits for the last version, ends the actors and the generators."""
        stopped = self._stop.is_set()
        ended = "all {} steps are done" if not self.data_ended else "the data ended after {} steps"
        reason = "the trainer was stopped" if stopped else ended.format(self.steps_done)
        if self._has_begun:
            self.checkpoint()
            self.writer.wait()  # before Finish is sent: once others have ended, the launcher does not wait for long
        self._reporter.phase("finishing")
        if self._evaluations is not None:
            self._evaluations.settle(wait=lambda: not self._stop.is_set())
        if not stopped:
            self._publisher.flush(self._patience)
        self._buffer.finish(reason, 0.0 if stopped else FINISH_S)
        self._publisher.finish(reason)
        if self._evaluations is not None:
            self._evaluations.finish(reason)
        self._reporter.phase("done")
