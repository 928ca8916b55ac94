"""One completion from one generator over HTTP: token ids in, a `Turn` with exact versions out.

A sample is a request of its own (n = 1), not one of G choices: a failed one is retried without losing its siblings, a
group is spread over generators, and each answer carries the spans of exactly one sequence.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import errno
import io
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, Any

import aiohttp
import msgspec
import numpy as np
from msgspec import Meta

from inflight.arrays import from_msgpack, to_msgpack
from inflight.config import RolloutConfig, Sampling
from inflight.error_line import one_line, with_kind
from inflight.http_body import bounded_body
from inflight.packed_logprobs import MAX_BYTES, Drawn, unpack
from inflight.types import PrefillSpan, RoutedExperts, Turn, VersionSpan, require_spans

MAX_ANSWER_BYTES = 64 << 20
REJECTING = (400, 413, 422)
"""HTTP statuses that blame the request. Others blame the server, for example an API key that it does not accept
(401)."""
TOO_LONG = "prompt too long"
"""Reason for a question whose prompt leaves no room for a token."""
NOT_FINITE = "log-probability not finite"
"""Reason for a sample with a log-probability that is NaN or infinite: the weights, or the engine's computation, are
wrong there."""
MALFORMED = "malformed answer"
"""Reason for an answer, or a part of one, that is not one whole sample."""
_NO_JSON = "Out of range float values"
"""From the error of Python's json, which refuses to write NaN: vLLM then answers with status 400."""


class Unpatched(RuntimeError):
    """The server does not tag tokens with versions: no rollout of it can ever be used."""


class RetryableFailure(Exception):
    """This attempt failed, another one may succeed; it is counted by `reason`."""

    def __init__(self, reason: str, *, down: bool = False, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason
        self.down = down
        """Whether the generator should get no requests until it answers /health again."""


class Rejected(Exception):
    """The server understood the request and refuses it: a retry would not help."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Choice(msgspec.Struct):
    """The state of one sample: from a whole answer, or from one chunk of a stream."""

    finish_reason: str | None = None
    packed_logprobs: Annotated[bytes, Meta(max_length=MAX_BYTES)] | None = None
    token_versions: list[VersionSpan] | None = None
    prefill_versions: list[PrefillSpan] | None = None
    routed_experts: str | None = None


class _CompletionBody(msgspec.Struct):
    choices: list[Choice]


_decoder = msgspec.json.Decoder(_CompletionBody)
_encoder = msgspec.msgpack.Encoder(enc_hook=to_msgpack)
_turns = msgspec.msgpack.Decoder(Turn, dec_hook=from_msgpack)


def session_of(api_key: str, *, connections: int = 0) -> aiohttp.ClientSession:
    """For requests to generators; they send `api_key` unless it is empty. `connections`: most at once; 0: any number.

    One connection per request: an idle one that the server closes at the wrong moment would look like a lost generator.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=connections, force_close=True), headers=headers)


def base_request(sampling: Sampling, max_tokens: int, *, logprobs: int = 0, model: str = "") -> dict[str, Any]:
    """What any request for a sample says; every option is set, so that no server default applies.

    `logprobs`: of how many of the most probable tokens, beside the sampled one. `model` names an adapter; empty: the
    generator's own model.
    """
    return {
        "n": 1,
        "stream": False,
        "max_tokens": max_tokens,
        **dataclasses.asdict(Sampling.of(sampling)),
        "logprobs": logprobs,
        "return_packed_logprobs": True,
        **({"model": model} if model else {}),
    }


def sampling(config: RolloutConfig, vocabulary: int, model: str = "") -> dict[str, Any]:
    """The part of an actor's request that is equal for all samples; `model`: see base_request.

    If sampling truncates, log-probabilities of the most probable tokens are requested as well, one more than a kept set
    may have: the possible ones among them are the set. At most `vocabulary` of them exist.
    """
    logprobs = min(config.kept_tokens + 1, vocabulary) if config.cuts and config.kept_tokens else 0
    return base_request(config, config.max_tokens, logprobs=logprobs, model=model) | endings(config)


def seed_of(text: str) -> int:
    """A sampling seed of 63 bits that depends on the text alone."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1


def endings(config: RolloutConfig) -> dict[str, Any]:
    """The part of a request that says how a completion ends, beside its number of tokens."""
    given = {"stop": config.stop, "stop_token_ids": config.stop_token_ids, "ignore_eos": config.ignore_eos}
    return {name: value for name, value in given.items() if value}


def parse_turn(body: bytes, generator: str, asked: int = 0) -> Turn:
    """The turn of a completions answer; `asked` is the number of log-probabilities requested beside the sampled one.

    Raises Unpatched when it has no version tags, RetryableFailure("aborted") when the engine aborted the request and
    RetryableFailure(MALFORMED) for anything else that is not one whole sample.
    """
    try:
        answer = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(generator, error) from None
    if len(answer.choices) != 1:
        raise malformed(generator, f"{len(answer.choices)} choices instead of one")
    choice = answer.choices[0]
    if choice.finish_reason in (None, "abort", "error"):
        raise RetryableFailure("aborted", detail=f"{generator}: finish_reason {choice.finish_reason}")
    require_tags(choice, generator)
    drawn = drawn_of([choice.packed_logprobs or b""], asked, generator)
    try:
        require_spans(choice.token_versions or [], len(drawn))
    except ValueError as error:
        raise malformed(generator, error) from None
    return checked(
        generator,
        token_ids=drawn.token_ids,
        logprobs=drawn.logprobs,
        token_versions=choice.token_versions or [],
        prefill_versions=choice.prefill_versions or [],
        finish_reason=choice.finish_reason,
        kept=drawn.kept,
        routed_experts=_experts(choice, generator),
    )


def require_tags(choice: Choice, generator: str) -> None:
    """Raises Unpatched for a choice without version tags or packed log-probabilities."""
    if choice.token_versions is None or (choice.finish_reason is not None and choice.prefill_versions is None):
        raise Unpatched(f"{generator} answers without token_versions: its vLLM is not patched (inflight patch apply)")
    if choice.packed_logprobs is None:
        raise Unpatched(f"{generator} answers without packed_logprobs: its vLLM has an older patch of inflight")


def drawn_of(fields: Sequence[bytes], asked: int, generator: str) -> Drawn:
    """The tokens of packed fields; `asked` is the number of log-probabilities requested beside the sampled one.

    Raises Rejected for a log-probability that is no number (under these weights a retry would give the same, and the
    sample can't be trained on), and RetryableFailure(MALFORMED) for a damaged field.
    """
    try:
        drawn = unpack(fields, asked)
    except ValueError as error:
        raise malformed(generator, error) from None
    finite = np.isfinite(drawn.logprobs)
    if not np.logical_and.reduce(finite):
        wrong = np.count_nonzero(~finite)
        detail = f"{generator}: {wrong} of {len(drawn)} log-probabilities are no numbers"
        raise Rejected(NOT_FINITE, detail)
    return drawn


def checked(generator: str, **fields: Any) -> Turn:
    """A turn of these fields, validated against the limits of the wire: the buffer cannot decode one that exceeds them,
    and the actor would resend it forever. Raises RetryableFailure(MALFORMED)."""
    try:
        return _turns.decode(_encoder.encode(Turn(**fields)))
    except (msgspec.ValidationError, ValueError) as error:
        raise malformed(generator, error) from None


def _experts(choice: Choice, generator: str) -> RoutedExperts | None:
    """From base64 of a .npy array [tokens, layers, experts per token] of integers, as vLLM sends it if requested."""
    if choice.routed_experts is None:
        return None
    try:
        file = io.BytesIO(base64.b64decode(choice.routed_experts, validate=True))
        array = np.load(file, allow_pickle=False)
        tokens, layers, each = map(int, array.shape)
        if array.dtype.kind not in "iu" or not _fits(array):
            raise ValueError(f"{array.dtype} of shape {array.shape} is no routing")
        size = 1 if array.max(initial=0) < 256 else 2
        data = array.astype(f"<u{size}").tobytes()
        return RoutedExperts(shape=(tokens, layers, each), bytes_each=size, data=data)
    except (ValueError, EOFError, OSError, binascii.Error) as error:
        raise malformed(generator, f"routed_experts: {error}") from None


def _fits(array: np.ndarray) -> bool:
    return bool(array.min(initial=0) >= 0 and array.max(initial=0) < 1 << 16)


async def complete(
    session: aiohttp.ClientSession, generator: str, url: str, request: dict[str, Any], timeout_s: float
) -> Turn:
    """Sends one request and waits for its turn, at most `timeout_s`.

    Raises RetryableFailure, Rejected or Unpatched.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.post(f"{url}/v1/completions", json=request, timeout=timeout) as response:
            status = response.status
            body = await bounded_body(response, MAX_ANSWER_BYTES, too_large(generator))
    except TimeoutError:
        raise RetryableFailure("request timeout", detail=f"{generator}: no answer within {timeout_s:.0f} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise lost(error, generator) from None
    if status == 200:
        return parse_turn(body, generator, request["logprobs"])
    raise refused(status, body, generator)


def malformed(generator: str, why: object) -> RetryableFailure:
    """What a damaged answer means: another one may be whole."""
    return RetryableFailure(MALFORMED, detail=f"{generator}: {why}")


def too_large(generator: str) -> RetryableFailure:
    """What an answer of more than MAX_ANSWER_BYTES means."""
    return malformed(generator, f"more than {MAX_ANSWER_BYTES} bytes")


def lost(error: aiohttp.ClientError | OSError, generator: str) -> RetryableFailure:
    """What a failed connection means: a generator that is down, unless this process has reached its file limit."""
    detail = f"{generator}: {with_kind(error)}"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return RetryableFailure("too many open files", detail=f"{detail} (raise the limit: ulimit -n)")
    return RetryableFailure("connection lost", down=True, detail=detail)


def refused(status: int, body: bytes, generator: str) -> RetryableFailure | Rejected:
    """What an HTTP status other than 200 means, or an error of that code within a stream."""
    text = body[:300].decode("utf-8", "replace")
    detail = f"{generator}: http {status}: {one_line(text)}"
    if status not in REJECTING:
        return RetryableFailure(f"http {status}", down=status == 503, detail=detail)
    known = {"context length": TOO_LONG, _NO_JSON: NOT_FINITE}
    return Rejected(next((reason for says, reason in known.items() if says in text), f"http {status}"), detail)


async def healthy(session: aiohttp.ClientSession, url: str, timeout_s: float) -> bool:
    """Whether the server answers /health with 200 within `timeout_s`."""
    try:
        async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False
