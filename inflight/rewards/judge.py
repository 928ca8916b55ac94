"""A language model as a judge, behind an OpenAI-compatible chat endpoint."""

from __future__ import annotations

import asyncio
import math
import os
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from inflight.config import ConfigError, require
from inflight.http_body import bounded_body
from inflight.rewards.base import text_of
from inflight.rewards.match import compiled, last_match

MAX_ANSWER_BYTES = 4 << 20
AT_ONCE = 32
"""Most requests of one call that are under way at once, as many as a child has calls (rollout.reward_concurrency): with
`per: group` a call has all completions of a question, and each request is a connection of its own."""
PROMPT = (
    "Rate the answer to the question from 0 (useless) to 10 (perfect). Reason briefly, then end with a line"
    " `Score: N`.\n\nQuestion:\n{prompt}\n\nAnswer:\n{completion}"
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class JudgeError(RuntimeError):
    """The judge gave no usable answer."""


class _ChatText(msgspec.Struct):
    content: str | None = None


class _ChatChoice(msgspec.Struct):
    message: _ChatText


class _ChatBody(msgspec.Struct):
    choices: list[_ChatChoice]


@dataclass(frozen=True)
class Judge:
    """What the judge's answer says, divided by `out_of`.

    Example: `{name: judge, options: {url: "https://api.example.com/v1", model: judge-1, api_key_env: JUDGE_KEY}}`.
    """

    url: str
    """Base address of the endpoint, which `/chat/completions` is appended to."""
    model: str
    prompt: str = PROMPT
    """With `{completion}`, and `{prompt}` or the name of a column in braces."""
    system: str = ""
    """A system message; empty: none."""
    pattern: str = r"(?i)score:\s*(-?\d+(?:\.\d+)?)"
    """Finds the score, its first group, in the judge's answer; the last match counts."""
    out_of: float = 10.0
    api_key_env: str = ""
    """Name of the environment variable that holds the API key; the key itself stays out of the configuration."""
    timeout_s: float = 20.0
    """For one request, from when it is sent."""
    max_tokens: int = 512
    temperature: float = 0.0
    _fields: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require(self.url.startswith(("http://", "https://")), "options.url", self.url, "http://… or https://…")
        require("@" not in self.url, "options.url", "…@…", "no password in it: name a variable in options.api_key_env")
        require(bool(self.model), "options.model", self.model, "the endpoint's name of the judge")
        require(0 < self.timeout_s < math.inf, "options.timeout_s", self.timeout_s, "above 0 s")
        require(self.max_tokens >= 1, "options.max_tokens", self.max_tokens, "1 or more")
        require(0 <= self.temperature <= 2, "options.temperature", self.temperature, "0 to 2")
        require(0 < abs(self.out_of) < math.inf, "options.out_of", self.out_of, "a number other than 0")
        groups = compiled(self.pattern, "", "options.pattern").groups
        require(groups >= 1, "options.pattern", self.pattern, "a regular expression whose first group is the score")
        object.__setattr__(self, "_fields", _fields(self.prompt))
        if self.api_key_env:
            named = _VARIABLE.fullmatch(self.api_key_env) is not None
            require(named, "options.api_key_env", "…", "the name of an environment variable, not the key itself")
            is_set = bool(os.environ.get(self.api_key_env))
            require(is_set, "options.api_key_env", self.api_key_env, "a variable that is set")

    @property
    def needs(self) -> frozenset[str]:
        """Columns that the prompt names."""
        return frozenset(self._fields) - {"completion", "prompt"}

    async def __call__(
        self, /, completions: Sequence[str], prompts: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float | None]:
        if "prompt" in self._fields and any(type(each) is int for prompt in prompts for each in prompt):
            raise JudgeError("options.prompt names {prompt}, and the question's prompt is token ids: name a column")
        room = asyncio.Semaphore(AT_ONCE)
        rows = [
            {name: column[index] for name, column in columns.items()} | texts
            for index, texts in enumerate(_texts(completions, prompts))
        ]
        try:
            async with asyncio.TaskGroup() as asked:
                scores = [asked.create_task(self._score(row, room)) for row in rows]
        except ExceptionGroup as failed:  # the first to fail; the others were cancelled
            raise failed.exceptions[0] from None
        return [score.result() for score in scores]

    async def _score(self, row: Mapping[str, Any], room: asyncio.Semaphore) -> float:
        async with room:
            text = await self._ask(self.prompt.format_map({name: row[name] for name in self._fields}))
        found = last_match(self.pattern, text)
        try:
            return float(found or "") / self.out_of
        except ValueError:
            raise JudgeError(f"no score in the judge's answer: {text[-200:]!r}") from None

    async def _ask(self, content: str) -> str:
        """The judge's answer. Raises JudgeError."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": [*system, {"role": "user", "content": content}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        key = os.environ.get(self.api_key_env, "") if self.api_key_env else ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        too_large = JudgeError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                session.post(f"{self.url.rstrip('/')}/chat/completions", json=body, allow_redirects=False) as answer,
            ):
                said = await bounded_body(answer, MAX_ANSWER_BYTES, too_large)
                if answer.status != 200:
                    raise JudgeError(_without(key, f"http {answer.status}: {said[:200].decode('utf-8', 'replace')}"))
        except TimeoutError:
            raise JudgeError(f"no answer within {self.timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a key that is no header's value
            raise JudgeError(_without(key, f"{type(error).__name__}: {error}")) from None
        try:
            return msgspec.json.decode(said, type=_ChatBody).choices[0].message.content or ""
        except (msgspec.DecodeError, UnicodeDecodeError, IndexError, RecursionError) as error:
            raise JudgeError(f"not an answer of a chat endpoint: {type(error).__name__}") from None


def _texts(completions: Sequence[str], prompts: Sequence[Any]) -> list[dict[str, str]]:
    return [
        {"completion": completion, "prompt": text_of(prompt)}
        for completion, prompt in zip(completions, prompts, strict=True)
    ]


def _fields(template: str) -> list[str]:
    """Names in braces. Raises ConfigError for a template that is malformed, or that leaves the completion out."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(f"options.prompt is malformed: {error}; a brace is written twice") from None
    plain = all(_VARIABLE.fullmatch(name) for name in names)
    require(plain, "options.prompt", template[:100], "plain names in braces; a brace of the text is written twice")
    require("completion" in names, "options.prompt", template[:100], "a text with {completion}")
    return sorted(set(names))


def _without(key: str, text: str) -> str:
    """A text that goes into logs, with the key blanked: servers repeat what they refuse."""
    return text.replace(key, "…") if key else text
