"""Replays sequences through the engine's own kernels, pass by pass, so that the replay rounds as the recording did.

An engine that computes in bfloat16 rounds by more than a small optimizer step changes. With the same kernels the
rounding is the same on both sides, and what remains is the question of the audit: which weights ran, on which KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from inflight.audit.alone import Trial, explain
from inflight.audit.replay import AuditError, Job, KeptVersions, Replayer, Sequenced
from inflight.config import RunConfig, Sampling
from inflight.generator.pass_engine import MAX_BATCH, EngineMissing, Pass, PassEngine
from inflight.sampling import processed_logprobs

TRIAL_TOKENS = 1 << 14
"""Tokens of KV cache for trials, in addition to the sequences themselves."""


class EngineReplayer(Replayer):
    """Replays through the kernels of a CPU vLLM in this process."""

    rounds_alike = True
    token_by_token = True

    def __init__(
        self, model_dir: Path, kept: KeptVersions, sampling: Sampling, config: RunConfig, *, lengths: list[int]
    ) -> None:
        """Starts the engine. `lengths` are those of all sequences to come: the KV of all is held at once.

        Raises AuditError when there is no vLLM for CPU.
        """
        super().__init__(model_dir, kept, sampling)
        most = max(lengths, default=1)
        try:
            self._engine = PassEngine(model_dir, config, lengths=[*lengths, *[most] * max(TRIAL_TOKENS // most, 1)])
        except EngineMissing as error:
            raise AuditError(f"no replay through the engine: {error}") from None
        self._blocks: dict[int, list[int]] = {}
        """KV blocks by job (its identity), as long as the job has passes left."""

    def retrace(self, sequences: Sequence[Sequenced], recorded: Sequence[Sequence[float]]) -> list[list[float] | None]:
        """Tries passes of which some had no other sequence beside them."""
        return explain(sequences, recorded, self._try, self._trial)

    def _trial(self, sequence: Sequenced, recorded: Sequence[float], turns: list[int]) -> Trial:
        tokens, segments, kept = sequence
        return Trial(list(tokens), self._passes(segments)[::-1], kept, turns=turns, recorded=recorded)

    def _try(self, trials: list[Trial]) -> None:
        """Runs as many at once as fit into the KV cache."""
        while trials:
            room = self._engine.room
            now = 0
            while now < len(trials) and (room := room - self._engine.blocks(len(trials[now].tokens))) >= 0:
                now += 1
            self._run_all(trials[: max(now, 1)])
            trials = trials[max(now, 1) :]

    def _use(self, state: dict[str, torch.Tensor]) -> None:
        try:
            self._engine.load(state)
        except EngineMissing as error:
            raise AuditError(f"no replay through the engine: {error}") from None

    def _advance(self, jobs: list[Job], version: int) -> None:
        for start in range(0, len(jobs), MAX_BATCH):
            group = jobs[start : start + MAX_BATCH]
            while going := [job for job in group if job.next_of(version)]:
                self._step(going)

    def _step(self, jobs: list[Job]) -> None:
        """Runs the next pass of each job: in one forward pass, except those that are alone."""
        together = []
        for job in jobs:
            if isinstance(job, Trial) and job.alone:
                self._forward([job], alone=True)
            else:
                together.append(job)
        if together:
            self._forward(together, alone=False)

    def _forward(self, jobs: list[Job], *, alone: bool) -> None:
        segments = [job.todo.pop() for job in jobs]
        passes = [
            Pass(job.tokens[: segment.end], segment.start, self._blocks_of(job))
            for job, segment in zip(jobs, segments, strict=True)
        ]
        for job, segment, logits in zip(jobs, segments, self._engine.run(passes, alone=alone), strict=True):
            if segment.scored != segment.end:
                known = self._recorded(job, segment, logits[None])
                logprobs = processed_logprobs(logits[None], self.sampling, known)
                job.logprobs.append(float(logprobs[0, job.tokens[segment.end]]))
            if isinstance(job, Trial):
                job.judge()
            if not job.todo:
                self._engine.give_back(self._blocks.pop(id(job)))

    def _blocks_of(self, job: Job) -> list[int]:
        if id(job) not in self._blocks:
            self._blocks[id(job)] = self._engine.take(len(job.tokens))
        return self._blocks[id(job)]
