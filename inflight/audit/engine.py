"""Replays sequences through the engine's own kernels, pass by pass, so that the replay rounds as the recording did.

An engine that computes in bfloat16 rounds by more than a small optimizer step changes. With the same kernels the
rounding is the same on both sides, and what is left is the question that is asked: which weights ran, on which KV.
"""

from __future__ import annotations

from pathlib import Path

import torch

from inflight.audit.replay import AuditError, Job, KeptVersions, Replayer
from inflight.config import RunConfig
from inflight.generator.passes import MAX_BATCH, EngineMissing, Pass, PassEngine
from inflight.sampling import Sampling, processed_logprobs


class EngineReplayer(Replayer):
    """Through the kernels of a vLLM on CPU that lives in this process."""

    rounds_alike = True
    token_by_token = True

    def __init__(
        self, model_dir: Path, kept: KeptVersions, sampling: Sampling, config: RunConfig, *, lengths: list[int]
    ) -> None:
        """Starts the engine. `lengths` are those of all sequences to come: the KV of all is held at once.

        Raises AuditError where there is no vLLM for CPUs.
        """
        super().__init__(model_dir, kept)
        self._sampling = sampling
        try:
            self._engine = PassEngine(model_dir, config, lengths=lengths)
        except EngineMissing as error:
            raise AuditError(f"no replay through the engine: {error}") from None
        self._blocks: dict[int, list[int]] = {}
        """KV blocks by job (its identity), for as long as the job has passes left."""

    def _use(self, state: dict[str, torch.Tensor]) -> None:
        self._engine.load(state)

    def _advance(self, jobs: list[Job], version: int) -> None:
        for start in range(0, len(jobs), MAX_BATCH):
            group = jobs[start : start + MAX_BATCH]
            while going := [job for job in group if job.next_of(version)]:
                self._step(going)

    def _step(self, jobs: list[Job]) -> None:
        """The next pass of each job, in one forward pass."""
        segments = [job.todo.pop() for job in jobs]
        passes = [
            Pass(job.tokens[: segment.end], segment.start, self._blocks_of(job))
            for job, segment in zip(jobs, segments, strict=True)
        ]
        for job, segment, logits in zip(jobs, segments, self._engine.run(passes), strict=True):
            if segment.scored != segment.end:
                logprobs = processed_logprobs(logits[None], self._sampling, job.sampled(segment, logits.device))
                job.logprobs.append(float(logprobs[0, job.tokens[segment.end]]))
            if not job.todo:
                self._engine.give_back(self._blocks.pop(id(job)))

    def _blocks_of(self, job: Job) -> list[int]:
        if id(job) not in self._blocks:
            self._blocks[id(job)] = self._engine.take(len(job.tokens))
        return self._blocks[id(job)]
