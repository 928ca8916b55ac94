"""One sampled sequence while it grows: tokens of one generator, or of several of which each continued the one before.

Tags stay as exact as those of an uninterrupted answer. A generator that continues a sequence computes the KV of all
tokens before from its own weights and reports that: as after a preemption, a prefill event from position 0 on. The
prefill events of a lost generator are lost, because vLLM sends them with the last chunk only; its tokens keep their
versions, and their KV is marked as unknown.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from inflight.arrays import Tokens
from inflight.completions import Choice, RetryableFailure, checked, drawn_of
from inflight.packed_logprobs import Drawn, unpack
from inflight.types import GeneratorSpan, PrefillSpan, Turn, VersionSpan, require_spans, versions_of_tokens

UNKNOWN = -1
"""Version in a prefill event if it is unknown."""


class Sequence:
    """The tokens so far, with their tags."""

    def __init__(self, prompt_tokens: int, most: int, asked: int = 0) -> None:
        """`most`: most tokens; `asked`: number of log-probabilities requested in addition to the sampled token's."""
        self._prompt = prompt_tokens
        self._most = most
        self._asked = asked
        self.pieces: list[GeneratorSpan] = []
        """Which generator made which tokens; the last piece may still grow."""
        self.length = 0
        """Number of tokens."""
        self._drawn: list[Drawn] = []
        self._spans: list[VersionSpan] = []
        self._prefills: list[PrefillSpan] = []
        self.finish_reason: str | None = None

    @property
    def token_ids(self) -> Tokens:
        """The tokens so far."""
        return Tokens(np.concatenate([each.token_ids for each in self._drawn]) if self._drawn else ())

    @property
    def newest_version(self) -> int:
        """Version of the last token; there must be one."""
        return self._spans[-1].version

    @property
    def seam(self) -> int:
        """Index of the first token of the newest piece; 0 if there is only one piece."""
        return self.pieces[-1].start if self.pieces else 0

    def begin(self, generator: str) -> None:
        """Starts a piece: the following tokens come from `generator`."""
        self.pieces.append(GeneratorSpan(self.length, generator))

    def add(self, choice: Choice) -> None:
        """Appends one chunk of a stream, whose spans count from the first token of the newest piece.

        Raises Unpatched for a chunk without tags, Rejected for a log-probability that is no number, and
        RetryableFailure("malformed answer") for a chunk that contradicts itself or earlier ones; nothing of it is kept.
        """
        generator = self.pieces[-1].generator
        seam = self.seam
        drawn = drawn_of(choice, self._asked, generator)
        have = self.length - seam
        if self.length + len(drawn) > self._most:
            detail = f"{generator}: more than the requested {self._most} tokens"
            raise RetryableFailure("malformed answer", detail=detail)
        try:
            own = [VersionSpan(_not_below(span.start - have), span.version) for span in choice.token_versions or ()]
            require_spans(own, len(drawn))
            prefills = [
                PrefillSpan(_not_below(each.output_index) + seam, each.position, each.version)
                for each in choice.prefill_versions or ()
            ]
        except ValueError as error:
            raise RetryableFailure("malformed answer", detail=f"{generator}: {error}") from None
        if len(drawn):
            self._extend(VersionSpan(span.start + self.length, span.version) for span in own)
            self._drawn.append(drawn)
            self.length += len(drawn)
        self._prefills += prefills
        self.finish_reason = choice.finish_reason

    def lose(self) -> None:
        """Ends the newest piece, whose generator sends no more. A piece without tokens is removed.

        A generator that aborted the request itself has sent its prefill events.
        """
        self.finish_reason = None
        self._prefills = [each for each in self._prefills if each.output_index < self.length]
        if self.seam == self.length:
            self.pieces.pop()
        elif not any(each.output_index >= self.seam for each in self._prefills):
            self._prefills += self._unknown_prefills()

    def cut(self, length: int) -> None:
        """Removes all tokens of the newest piece from index `length` on."""
        self._drawn = [self._whole().first(length)] if length and self._drawn else []
        self.length = min(self.length, length)
        self._spans = [span for span in self._spans if span.start < length]
        self._prefills = [each for each in self._prefills if each.output_index < length]

    def drop_piece(self) -> None:
        """Removes the newest piece: its generator sent malformed data."""
        self.cut(self.seam)
        self.lose()

    def restart(self) -> None:
        """Removes all tokens: this sequence can't be continued exactly."""
        self.pieces.clear()
        self.cut(0)

    def turn(self) -> Turn:
        """The complete sequence, once it is finished. Raises RetryableFailure("malformed answer") when a part is out of
        bounds."""
        whole = self._whole()
        return checked(
            self.pieces[-1].generator,
            token_ids=whole.token_ids,
            logprobs=whole.logprobs,
            token_versions=self._spans,
            prefill_versions=self._prefills,
            finish_reason=self.finish_reason or "",
            kept=whole.kept,
        )

    def _whole(self) -> Drawn:
        """All that was drawn."""
        if len(self._drawn) != 1:
            self._drawn = [Drawn.joined([unpack(b"", self._asked), *self._drawn])]
        return self._drawn[0]

    def _extend(self, spans: Iterable[VersionSpan]) -> None:
        for span in spans:
            if not self._spans or self._spans[-1].version != span.version:
                self._spans.append(span)

    def _unknown_prefills(self) -> list[PrefillSpan]:
        """Prefill events that hold without the generator's report: the step that samples a token computes the position
        before it.

        Everything earlier may have been computed under any version: by chunks of the prefill before a swap at the
        start, and anew, after a preemption, wherever a later version begins.
        """
        starts = sorted({self.seam, *(span.start for span in self._spans if span.start > self.seam)})
        versions = versions_of_tokens(self._spans, self.length)
        events = []
        for start in starts:
            last = self._prompt + start - 1
            events += [PrefillSpan(start, 0, UNKNOWN)] if last else []
            events.append(PrefillSpan(start, last, versions[start]))
        return events


def _not_below(index: int) -> int:
    if index < 0:
        raise ValueError(f"a span begins {-index} tokens before the chunk that it is in")
    return index
