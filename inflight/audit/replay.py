"""Replays sequences segment by segment, each under the version that it claims; this file has the transformers way."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from inflight.agreement import STEP
from inflight.audit.kept import plausible
from inflight.audit.segments import Segment
from inflight.config import Sampling
from inflight.error_line import first_line, one_line
from inflight.sampling import Recorded, processed_logprobs

EDGE_ALIKE = 1e-5
EDGE_STEPS = 300.0
"""By how much rounding may move a logit at the edge of a truncation: in nats in the kernels that recorded, which sum
probabilities in another order; elsewhere in rounding steps (agreement.py, which allows 50 where the median is 1)."""


class AuditError(ValueError):
    """Something that the audit needs is missing or damaged; the text names it."""


@dataclass(frozen=True, slots=True)
class Stale:
    """Part of the weights is taken from the version before: `previous[v]` is that version, `pattern` the parameters."""

    pattern: re.Pattern[str]
    previous: Mapping[int, int]


class KeptVersions:
    """The weights that a run kept, one file per version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, version: int) -> Path:
        """The file of a version, which need not exist."""
        return self.folder / f"{version:06d}.safetensors"

    def has(self, version: int) -> bool:
        """Whether its weights were kept."""
        return self.path(version).is_file()

    @property
    def newest(self) -> int | None:
        """The highest version whose weights were kept."""
        numbers = (int(path.stem) for path in self.folder.glob("*.safetensors") if path.stem.isdigit())
        return max(numbers, default=None)

    def load(self, version: int) -> dict[str, torch.Tensor]:
        """Checkpoint name → tensor in its wire dtype. Raises AuditError when the file can't be read."""
        path = self.path(version)
        try:
            with safe_open(path, "pt") as file:
                said = (file.metadata() or {}).get("version", str(version))
            if said != str(version):
                raise AuditError(f"{path} holds version {said}")
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise AuditError(f"{path} can't be read: {error}") from None


Sequenced = tuple[Sequence[int], Sequence[Segment], Sequence[Sequence[int]]]
"""Token ids of prompt and completion, the segments over them, and the kept sets of its tokens (see Job)."""


@dataclass(slots=True)
class Job:
    """The replay of a sequence in progress."""

    tokens: list[int]
    """Prompt and completion."""
    todo: list[Segment]
    """Segments left, the next one last."""
    kept: Sequence[Sequence[int]] = ()
    """The tokens that each token was sampled from; an empty set, or none, if that was not recorded."""
    logprobs: list[float] = field(default_factory=list)

    def next_of(self, version: int) -> bool:
        """Whether its next segment is under this version."""
        return bool(self.todo) and self.todo[-1].version == version

    def sampled(self, segment: Segment, device: torch.device) -> Recorded:
        """The recorded data of the tokens that a pass has sampled: the next ones without a log-probability."""
        chosen = self.tokens[segment.scored + 1 : segment.end + 1]
        sets = self.kept[len(self.logprobs) : len(self.logprobs) + len(chosen)]
        kept = [torch.tensor(each, dtype=torch.int64, device=device) for each in sets]
        return Recorded(
            torch.tensor(chosen, device=device),
            torch.nn.utils.rnn.pad_sequence(kept, batch_first=True, padding_value=-1) if any(sets) else None,
        )


class Replayer(ABC):
    """Replays sequences version by version.

    Versions are visited in ascending order, each with all segments that claim it, so that each is loaded once. In
    addition to the model, memory holds the KV of the sequences that straddle the current version.
    """

    rounds_alike = False
    """Whether the kernels are those that recorded, so that sound tokens come out bit for bit alike."""
    token_by_token = False
    """Whether each sampled token has a pass of its own, as in an engine."""
    rounding = "float32"
    """The coarser dtype of record and replay, which decides what kept sets are plausible."""
    progress: Callable[[str], object] = staticmethod(lambda line: None)
    """Is called before each version is replayed, with what is done."""

    def __init__(self, model_dir: Path, kept: KeptVersions, sampling: Sampling) -> None:
        """The run's model, the weights that it kept, and its sampling options."""
        self._kept = kept
        self.sampling = sampling
        self.config = AutoConfig.from_pretrained(model_dir)
        self._tied = bool(self.config.get_text_config().tie_word_embeddings)
        # Never tied here: a stale output layer over new embeddings is one of the faults to detect.
        self.config.tie_word_embeddings = False
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config)
        self._output_name = _name_of(model, model.get_output_embeddings().weight)
        self._input_name = _name_of(model, model.get_input_embeddings().weight)
        self.vocabulary = len(model.get_input_embeddings().weight)
        self._last: tuple[int, dict[str, torch.Tensor]] | None = None
        self.same: set[tuple[int, int]] = set()
        """Pairs of versions, loaded one after the other, whose weights are bit-identical."""

    def replay(self, sequences: Sequence[Sequenced], stale: Stale | None = None) -> list[list[float]]:
        """For each sequence the log-probabilities of its sampled tokens. All versions must have been kept.

        Raises AuditError when a version's weights are not those of the model.
        """
        jobs = [Job(list(tokens), list(reversed(self._passes(segments))), kept) for tokens, segments, kept in sequences]
        self._run_all(jobs, stale)
        return [job.logprobs for job in jobs]

    def retrace(self, sequences: Sequence[Sequenced], recorded: Sequence[Sequence[float]]) -> list[list[float] | None]:
        """For sequences that did not come out as recorded: the log-probabilities of other passes under the same tags,
        which the engine may have run as well and which match the record; None if there are none."""
        return [None for _ in sequences]

    def _recorded(self, job: Job, segment: Segment, logits: torch.Tensor) -> Recorded:
        """The recorded data of the tokens that a pass has sampled from these logits [N, V], as far as it is
        plausible."""
        slack = EDGE_ALIKE if self.rounds_alike else EDGE_STEPS * STEP[self.rounding]
        return plausible(logits, self.sampling, job.sampled(segment, logits.device), slack / self.sampling.temperature)

    @torch.inference_mode()
    def _run_all(self, jobs: Sequence[Job], stale: Stale | None = None) -> None:
        """Runs all passes of these jobs, version by version."""
        versions = sorted({segment.version for job in jobs for segment in job.todo})
        while waiting := [job for job in jobs if job.todo]:
            version = min(job.todo[-1].version for job in waiting)
            self.progress(f"replaying version {version}, {versions.index(version) + 1} of {len(versions)}")
            self._load(version, stale)
            self._advance([job for job in waiting if job.next_of(version)], version)

    @abstractmethod
    def _use(self, state: dict[str, torch.Tensor]) -> None:
        """Loads these weights, all of the model, including the output layer's. Raises any error of the loaders."""

    @abstractmethod
    def _advance(self, jobs: list[Job], version: int) -> None:
        """Runs all next passes that are of this version, and stores the log-probabilities of the sampled tokens."""

    def _passes(self, segments: Sequence[Segment]) -> list[Segment]:
        """The passes to run for these segments."""
        if not self.token_by_token:
            return list(segments)
        return [single for each in segments for single in each.one_by_one()]

    def _load(self, version: int, stale: Stale | None) -> None:
        state = self._state(version)
        self._compare(version, state)
        if stale is not None and version in stale.previous:
            older = self._state(stale.previous[version])
            state = state | {name: tensor for name, tensor in older.items() if stale.pattern.search(name)}
        try:
            self._use(state)
        except AuditError:
            raise
        except (KeyError, ValueError, AssertionError, RuntimeError) as error:
            reason = one_line(error)
            raise AuditError(f"{self._kept.path(version)} does not fit the run's model: {reason}") from None

    def _compare(self, version: int, state: dict[str, torch.Tensor]) -> None:
        """Records when this version is identical to the one that was loaded before it."""
        last, self._last = self._last, (version, state)
        if last is None or last[0] >= version or last[1].keys() != state.keys():
            return
        if all(torch.equal(last[1][name], tensor) for name, tensor in state.items()):
            self.same.add((last[0], version))

    def _state(self, version: int) -> dict[str, torch.Tensor]:
        state = self._kept.load(version)
        if self._tied and self._output_name not in state and self._input_name in state:
            state[self._output_name] = state[self._input_name]
        return state


class TransformersReplayer(Replayer):
    """Replays through plain transformers, which shares no code with the engine: a second implementation."""

    def __init__(
        self,
        model_dir: Path,
        kept: KeptVersions,
        sampling: Sampling,
        *,
        dtype: torch.dtype = torch.float32,
        token_by_token: bool = False,
        device: str = "cpu",
    ) -> None:
        """`dtype` is that of the computation; weights are cast to it from their wire dtype. Raises AuditError for a
        device that does not exist."""
        super().__init__(model_dir, kept, sampling)
        self._device = _usable(device)
        self.token_by_token = token_by_token
        self._model = self._make_model(model_dir, dtype).eval().to(self._device)
        self._caches: dict[int, DynamicCache] = {}
        """KV by job (its identity), as long as the job has segments left."""

    def _make_model(self, model_dir: Path, dtype: torch.dtype) -> PreTrainedModel:
        """On the CPU; its weights come with each version."""
        model: PreTrainedModel = AutoModelForCausalLM.from_config(self.config, dtype=dtype, attn_implementation="eager")
        return model

    def _use(self, state: dict[str, torch.Tensor]) -> None:
        self._model.load_state_dict(state, strict=True)

    def _advance(self, jobs: list[Job], version: int) -> None:
        for job in jobs:
            cache = self._caches.pop(id(job), None)
            while job.next_of(version):
                cache = self._run(job, job.todo.pop(), cache)
            if job.todo and cache is not None:
                self._caches[id(job)] = cache

    def _run(self, job: Job, segment: Segment, cache: DynamicCache | None) -> DynamicCache:
        if segment.start == 0 or cache is None:
            cache = DynamicCache(config=self._model.config)
        if beyond := cache.get_seq_length() - segment.start:
            cache.crop(-beyond)
        scored = segment.end - segment.scored
        ids = torch.tensor([job.tokens[segment.start : segment.end]], device=self._device)
        output = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=max(scored, 1))
        if scored:
            known = self._recorded(job, segment, output.logits[0])
            logprobs = processed_logprobs(output.logits[0], self.sampling, known)
            job.logprobs.extend(logprobs.gather(1, known.chosen[:, None])[:, 0].tolist())
        return cache


def _usable(device: str) -> torch.device:
    """The device by its name, as torch writes it."""
    try:
        found = torch.device(device)
        torch.zeros(1, device=found).item()
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises the latter
        raise AuditError(f"device {device!r} can't be used: {first_line(error)}") from None
    return found


def _name_of(model: PreTrainedModel, parameter: torch.Tensor) -> str:
    return next(name for name, each in _named(model) if each is parameter)


def _named(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    return model.named_parameters(remove_duplicate=False)
