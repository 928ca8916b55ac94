"""One sampled sequence while it grows: tokens of one generator, or of several of which each continued the one before.

Tags stay as exact as those of an uninterrupted answer. A generator that continues a sequence computes the KV of all
tokens before from its own weights and reports that: as after a preemption, a prefill event from position 0 on. The
prefill events of a lost generator are lost, because vLLM sends them with the last chunk only; its tokens keep their
versions, and their KV is marked as unknown.
"""

from __future__ import annotations

import numpy as np

from inflight.arrays import Tokens
from inflight.completions import (
    Choice,
    Rejected,
    RetryableFailure,
    checked,
    drawn_of,
    malformed,
    require_tags,
)
from inflight.packed_logprobs import Drawn, tokens_in
from inflight.types import GeneratorSpan, PrefillSpan, Turn, VersionSpan, require_spans, versions_of_tokens

UNKNOWN = -1
"""Version in a prefill event if it is unknown."""
READ_AT_ONCE = 1024
"""Tokens whose packed fields are read together: numpy takes as long for a chunk of 32 tokens as for all of these. A
damaged field is found at most that many tokens late, and always before its piece ends."""


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
        self._fields: list[bytes] = []
        """Packed fields of the newest piece that come after `_drawn`."""
        self._unread = 0
        """Tokens in them."""
        self._spans: list[VersionSpan] = []
        self._prefills: list[PrefillSpan] = []
        self.finish_reason: str | None = None

    @property
    def token_ids(self) -> Tokens:
        """The tokens so far. Raises as `add`."""
        self.read()
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
        self.read()
        self.pieces.append(GeneratorSpan(self.length, generator))

    def add(self, choice: Choice) -> None:
        """Appends one chunk of a stream, whose spans count from the first token of the newest piece.

        Raises Unpatched for a chunk without tags, and RetryableFailure(MALFORMED) for one that contradicts
        itself or earlier ones; nothing of it is kept. What its log-probabilities say is read later, with those of
        up to READ_AT_ONCE tokens: this, `read`, `token_ids` and `turn` raise Rejected for one that is no number, and
        RetryableFailure for a damaged field; nothing of what was read with it is kept.
        """
        generator = self.pieces[-1].generator
        seam = self.pieces[-1].start
        require_tags(choice, generator)
        field = choice.packed_logprobs or b""
        spans = choice.token_versions or ()
        try:
            length = tokens_in(field)
            require_spans(spans, length, self.length - seam)
        except ValueError as error:
            raise malformed(generator, error) from None
        if self.length + length > self._most:
            raise malformed(generator, f"more than the requested {self._most} tokens")
        self.finish_reason = choice.finish_reason
        for each in choice.prefill_versions or ():
            self._prefills.append(PrefillSpan(each.output_index + seam, each.position, each.version))
        if not length:
            return
        for span in spans:
            if not self._spans or self._spans[-1].version != span.version:
                self._spans.append(VersionSpan(span.start + seam, span.version))
        self._fields.append(field)
        self.length += length
        self._unread += length
        if self._unread >= READ_AT_ONCE:
            self.read()

    def read(self) -> None:
        """Makes arrays of the fields that came since it was last called, or removes them and their tags and raises as
        `add`."""
        fields = self._fields
        if not fields:
            return
        try:
            drawn = drawn_of(fields, self._asked, self.pieces[-1].generator)
        except (RetryableFailure, Rejected):
            self.cut(self.length - self._unread)
            raise
        self._fields = []
        self._unread = 0
        self._drawn.append(drawn)

    def lose(self) -> None:
        """Ends the newest piece, whose generator sends no more. A piece without tokens, or with damaged ones, is
        removed.

        A generator that aborted the request itself has sent its prefill events. Raises Rejected.
        """
        try:
            self.read()
        except RetryableFailure:
            self.cut(self.seam)
        self.finish_reason = None
        self._prefills = [each for each in self._prefills if each.output_index < self.length]
        if self.seam == self.length:
            self.pieces.pop()
        elif not any(each.output_index >= self.seam for each in self._prefills):
            self._prefills += self._unknown_prefills()

    def cut(self, length: int) -> None:
        """Removes all tokens of the newest piece from index `length` on."""
        if length > self.length - self._unread:
            self.read()
        self._fields = []
        self._unread = 0
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
        """The complete sequence, once it is finished. Raises RetryableFailure(MALFORMED) when a part is out of
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
        self.read()
        if len(self._drawn) != 1:
            self._drawn = [Drawn.joined(self._drawn) if self._drawn else drawn_of([], self._asked, "")]
        return self._drawn[0]

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
