"""What the actor says to the child processes that run foreign code, and what they answer: msgpack, typed, bounded.

A frame is four bytes of length, little endian, and a message. Text that can't be encoded (a lone surrogate) and values
that msgpack does not hold are refused where they are encoded, which is where they come from.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from inflight.prompts import Chat
from inflight.types import Turn

MAX_FRAME_BYTES = 64 << 20
_LENGTH_BYTES = 4

Call = Annotated[int, Meta(ge=0)]
"""Number of a call of one child process; each message about it repeats it."""


class CallError(ValueError):
    """Bytes that are no message, or a message that is too large."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all; the tag is the class name."""


class Question(_Message):
    """An item as it travels: `answer` and `columns` are whatever msgpack holds, for the task and its rewards."""

    key: str
    prompt: str | list[int] | Chat
    answer: Any = None
    columns: dict[str, Any] = {}


# --- to the child --------------------------------------------------------------------------------------------------


class MakeTask(_Message, tag=True, kw_only=True):
    """The first message: which task to make."""

    name: str
    options: dict[str, Any]
    seed: int
    epochs: int = 1
    scores_only: bool = False
    """Another child is asked for the questions: this one need not read the data."""
    limit_s: float
    """What an asynchronous call may take before the child itself gives it up."""


class MakeTokenizer(_Message, tag=True, kw_only=True):
    """The first message: which model's tokenizer to load."""

    model: str
    """Its directory."""
    trust_remote_code: bool = False


class AskItem(_Message, tag=True):
    """`task.item(index)`, or `task.held_out_item(index)`."""

    call: Call
    index: int
    held_out: bool = False


class AskScore(_Message, tag=True):
    """`task.score`, or `task.score_turn` where the task has one: then `turn` is given."""

    call: Call
    question: Question
    completion: str
    prompt_ids: list[int] = []
    turn: Turn | None = None


class AskEncode(_Message, tag=True):
    """Token ids of a prompt."""

    call: Call
    prompt: str | list[int] | Chat


class AskDecode(_Message, tag=True):
    """Text of a completion."""

    call: Call
    token_ids: list[int]


# --- from the child ------------------------------------------------------------------------------------------------


class Ready(_Message, tag=True, kw_only=True):
    """What was asked for is made."""

    concurrent: bool = False
    """Whether its calls wait for something else most of the time, so that many may be under way at once."""
    turns: bool = False
    """Whether a score wants the turn."""
    size: int = 0
    """Tokens in the vocabulary."""
    held_out: int = 0
    """Questions that the task keeps back."""


class Unusable(_Message, tag=True):
    """It can't be made; nothing more comes."""

    reason: str
    bad_input: bool
    """What was asked for is at fault: another child would not make it either."""


class Begun(_Message, tag=True):
    """The call is being worked on; those that wait behind a busy one are not."""

    call: Call


class ItemIs(_Message, tag=True):
    call: Call
    question: Question


class NoItem(_Message, tag=True):
    """The task has `questions` questions, over all its epochs, or held out, and the one that was asked for is none of
    them."""

    call: Call
    questions: Annotated[int, Meta(ge=0)]


class ScoreIs(_Message, tag=True):
    """As tasks.base.Score."""

    call: Call
    reward: float
    step_rewards: list[tuple[int, float]]
    teacher_logprobs: list[float] | None


class TokensAre(_Message, tag=True):
    call: Call
    token_ids: list[int]


class TextIs(_Message, tag=True):
    call: Call
    text: str


class Raised(_Message, tag=True, kw_only=True):
    """The call failed: `kind` names the exception's class, or what was wrong with its result."""

    call: Call
    kind: str
    text: str
    late: bool = False
    """It took longer than it may; what it has started may still be running."""
    spent: bool = False
    """The child should be replaced: it is out of memory, or runs what nobody waits for any more."""


Make = MakeTask | MakeTokenizer
Ask = AskItem | AskScore | AskEncode | AskDecode
Answer = ItemIs | NoItem | ScoreIs | TokensAre | TextIs
FromChild = Ready | Unusable | Begun | Raised | Answer
ToChild = Make | Ask

_encoder = msgspec.msgpack.Encoder()
_to_child = msgspec.msgpack.Decoder(ToChild)
_from_child = msgspec.msgpack.Decoder(FromChild)


def encode(message: ToChild | FromChild) -> bytes:
    """One frame. Raises CallError, or what msgspec does for values that msgpack can't hold (UnicodeEncodeError,
    TypeError, OverflowError, RecursionError)."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise CallError(f"{type(message).__name__} of {len(body)} bytes, at most {MAX_FRAME_BYTES} may travel")
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


async def read_from_child(reader: asyncio.StreamReader) -> FromChild | None:
    """The next message; None at the end. Raises CallError for anything else."""
    body = await _read(reader)
    return None if body is None else _decode(_from_child, body)


async def read_to_child(reader: asyncio.StreamReader) -> ToChild | None:
    """The next message; None at the end. Raises CallError for anything else."""
    body = await _read(reader)
    return None if body is None else _decode(_to_child, body)


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
        if length > MAX_FRAME_BYTES:
            raise CallError(f"a message of {length} bytes, at most {MAX_FRAME_BYTES} may travel")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _decode(decoder: Any, body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CallError(f"not a message: {error}") from None
