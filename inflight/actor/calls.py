"""Messages between the actor and the child processes that run foreign code: msgpack, typed, of bounded size.

A frame is four bytes of length, little endian, and a message. Text that can't be encoded (a lone surrogate) and values
that msgpack can't represent are refused by the encoding side, where they come from.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from inflight.arrays import from_msgpack, to_msgpack
from inflight.config import RewardConfig
from inflight.prompts import Chat
from inflight.types import Turn

MAX_FRAME_BYTES = 64 << 20
_LENGTH_BYTES = 4
MAX_NAMED = 3
"""Most rewards that are named before what their process prints."""

Call = Annotated[int, Meta(ge=0)]
"""Number of a call of one child process; repeated in each message about it."""


class CallError(ValueError):
    """Bytes that are not a message, or a message that is too large."""


class _CallMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages; the tag is the class name."""


class Question(_CallMessage):
    """An item of the task: `answer` and `columns` are any values of msgpack, for the task and its rewards, as
    `to_wire` of `inflight/tasks/column_values.py` makes them."""

    key: str
    prompt: str | list[int] | Chat
    answer: Any = None
    columns: dict[str, Any] = {}


# --- to the child --------------------------------------------------------------------------------------------------


class MakeTask(_CallMessage, tag=True, kw_only=True):
    """The first message: which task to construct."""

    name: str
    options: dict[str, Any]
    seed: int
    epochs: int = 1
    contents: dict[str, str] = {}
    """What its files must hold (TaskConfig.contents)."""
    scores_only: bool = False
    """Questions come from another child: this one need not read the data."""
    limit_s: float
    """Seconds after which the child itself cancels an asynchronous call."""


class MakeRewards(_CallMessage, tag=True, kw_only=True):
    """The first message: which rewards to make."""

    rewards: list[RewardConfig]
    limit_s: float
    """As that of MakeTask."""


class MakeTokenizer(_CallMessage, tag=True, kw_only=True):
    """The first message: which model's tokenizer to load."""

    model: str
    """Its directory."""
    trust_remote_code: bool = False


class AskItem(_CallMessage, tag=True):
    """`task.item(index)`, or `task.held_out_item(index)`."""

    call: Call
    index: int
    held_out: bool = False


class AskScore(_CallMessage, tag=True):
    """`task.score`, or `task.score_turn` if the task has one; `turn` is set then."""

    call: Call
    question: Question
    completion: str
    prompt_ids: list[int] = []
    turn: Turn | None = None


class AskReward(_CallMessage, tag=True):
    """One reward of N completions of a question: which of those that the child has made."""

    call: Call
    which: Annotated[int, Meta(ge=0)]
    question: Question
    completions: list[str]
    completion_ids: list[list[int]]
    finish_reasons: list[str]


class AskEncode(_CallMessage, tag=True):
    """Requests the token ids of a prompt."""

    call: Call
    prompt: str | list[int] | Chat


class AskDecode(_CallMessage, tag=True):
    """Requests the text of a completion."""

    call: Call
    token_ids: list[int]


# --- from the child ------------------------------------------------------------------------------------------------


class Constructed(_CallMessage, tag=True, kw_only=True):
    """The task or tokenizer is constructed."""

    concurrent: bool = False
    """Whether its calls are asynchronous, so that many may run at once."""
    turns: bool = False
    """Whether scoring needs the turn."""
    size: int = 0
    """Vocabulary size of the tokenizer."""
    questions: int | None = None
    """Number of questions of all the task's epochs, where that is known before they are asked."""
    held_out: int = 0
    """Number of questions that the task holds out."""
    asynchronous: list[bool] = []
    """Of each reward, whether it is an asynchronous function."""


class Unusable(_CallMessage, tag=True):
    """The task or tokenizer can't be constructed; no further message follows."""

    reason: str
    bad_input: bool
    """The input is at fault: another child would fail as well."""


class Begun(_CallMessage, tag=True):
    """Work on the call has begun; calls that wait for a free child have not."""

    call: Call


class ItemIs(_CallMessage, tag=True):
    call: Call
    question: Question


class NoItem(_CallMessage, tag=True):
    """There is no question of that index: the task has `questions`, over all its epochs or held out."""

    call: Call
    questions: Annotated[int, Meta(ge=0)]


class ScoreIs(_CallMessage, tag=True):
    """The fields of tasks.base.Score."""

    call: Call
    reward: float
    step_rewards: list[tuple[int, float]]
    teacher_logprobs: list[float] | None


class RewardsAre(_CallMessage, tag=True):
    """[N] None: the reward does not apply to the completion."""

    call: Call
    values: list[float | None]


class TokensAre(_CallMessage, tag=True):
    call: Call
    token_ids: list[int]


class TextIs(_CallMessage, tag=True):
    call: Call
    text: str


class Raised(_CallMessage, tag=True, kw_only=True):
    """The call failed: `kind` names the exception's class, with the line in a reward of the user's own, or what is
    wrong with the result."""

    call: Call
    kind: str
    text: str
    trace: str = ""
    """Of a reward or a score that raised: the traceback, several lines."""
    late: bool = False
    """It exceeded its time limit; its threads and processes may still be running."""
    spent: bool = False
    """The child should be replaced: it is out of memory, or still runs a call that was given up."""


Make = MakeTask | MakeRewards | MakeTokenizer
Ask = AskItem | AskScore | AskReward | AskEncode | AskDecode
Answer = ItemIs | NoItem | ScoreIs | RewardsAre | TokensAre | TextIs
FromChild = Constructed | Unusable | Begun | Raised | Answer
ToChild = Make | Ask


def what_for(make: Make) -> str:
    """What a child is for, in a few words: of rewards, the names of the user's own ones, if there are any."""
    if isinstance(make, MakeTokenizer):
        return "tokenizer"
    if isinstance(make, MakeTask):
        return "score of the task" if make.scores_only else "task"
    names = [each.known_as for each in make.rewards if ":" in each.name] or [each.known_as for each in make.rewards]
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"reward{'s' * (len(names) > 1)} {', '.join(names[:MAX_NAMED])}{more}"


_encoder = msgspec.msgpack.Encoder(enc_hook=to_msgpack)
_to_child = msgspec.msgpack.Decoder(ToChild, dec_hook=from_msgpack)
_from_child = msgspec.msgpack.Decoder(FromChild)


def encode(message: ToChild | FromChild) -> bytes:
    """Encodes one frame. Raises CallError, or msgspec's errors for values that msgpack can't represent
    (UnicodeEncodeError, TypeError, OverflowError, RecursionError)."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise CallError(f"{type(message).__name__} of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
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
            raise CallError(f"a message of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _decode(decoder: Any, body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CallError(f"not a message: {error}") from None
