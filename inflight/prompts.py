"""What a model is asked, as token ids: text, a chat, or the ids themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from inflight.models import prepare
from inflight.vocabulary import decode_every_id


@dataclass(frozen=True)
class Chat:
    """A conversation; the model's chat template makes the prompt of it."""

    messages: list[dict[str, Any]]
    """As `apply_chat_template` of transformers takes them. Where the last one is the assistant's, the model continues
    it; otherwise the prompt ends with what begins an answer (the generation prompt)."""
    tools: list[dict[str, Any]] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    """For the template, such as `enable_thinking`; `chat_template` replaces the model's own one."""


Prompt = str | Sequence[int] | Chat
"""Text gets the special tokens that the tokenizer puts before a text, once. Token ids stay as they are."""


NO_TEMPLATE = (
    "the model's tokenizer has no chat template; name a file with one in task.options.chat_template, take an instruct "
    "model, or ask with plain text (task.options.prompt)"
)


_PROBE = "a part of a message"


class ModelTokens:
    """A model's own tokenizer."""

    def __init__(self, model: str, *, trust_remote_code: bool = False) -> None:
        """`model` is a name or a directory, for models.prepare. Raises ModelError, or what transformers does."""
        from transformers import AutoTokenizer

        self._model = prepare(model)
        self._trust_remote_code = trust_remote_code
        self._tokenizer: Any = AutoTokenizer.from_pretrained(self._model, trust_remote_code=trust_remote_code)
        decode_every_id(self._tokenizer)
        self._of_parts: dict[str, bool] = {}
        """Chat template → whether it renders a content that is a list of parts."""
        self.size = len(self._tokenizer)
        """Tokens in the vocabulary."""

    @cached_property
    def embedded(self) -> int:
        """Token ids that the model has: those of the vocabulary, and mostly some more that no text gives."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self._model, trust_remote_code=self._trust_remote_code)
        return int(getattr(config.get_text_config(), "vocab_size", self.size))

    @property
    def chat_template(self) -> str:
        """The model's own chat template; "None" where it has none."""
        return str(self._tokenizer.chat_template)

    def encode(self, prompt: str | Chat) -> Iterable[Any]:
        """Token ids of a prompt. Raises what the tokenizer or the template does."""
        return self._text(prompt) if isinstance(prompt, str) else self._chat(prompt)

    def decode(self, token_ids: list[int]) -> Any:
        """Text of a completion, without special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def _text(self, text: str) -> list[int]:
        """What the tokenizer puts before a text (BOS) stands there once, also where the text itself begins with it;
        what it puts after a text (EOS) is left out, since the model shall continue it."""
        plain = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = self._tokenizer(text)["input_ids"]
        added = len(whole) - len(plain)
        front = next((at for at in range(added + 1) if whole[at : at + len(plain)] == plain), None)
        if front is None:  # its pieces depend on what stands before them
            return list(whole)
        before = whole[:front]
        return list(plain if plain[:front] == before else before + plain)

    def _chat(self, chat: Chat) -> list[int]:
        """The template writes all special tokens itself: none is added to its text."""
        if not (self._tokenizer.chat_template or chat.arguments.get("chat_template")):
            raise ValueError(NO_TEMPLATE)
        messages = chat.messages if self._takes_parts(chat.arguments) else [_as_text(each) for each in chat.messages]
        continues = bool(messages) and messages[-1].get("role") == "assistant"
        ids = self._tokenizer.apply_chat_template(
            messages,
            tools=chat.tools,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            tokenize=True,
            return_dict=False,
            **chat.arguments,
        )
        return list(ids)

    def _takes_parts(self, arguments: dict[str, Any]) -> bool:
        """Whether the template renders a content that is a list of parts: most would write the list as Python does."""
        template = str(arguments.get("chat_template") or self._tokenizer.chat_template)
        if template not in self._of_parts:
            asked = [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
            try:
                text = self._tokenizer.apply_chat_template(asked, tokenize=False, **arguments)
            except Exception:  # noqa: BLE001 - foreign code: it fails again on the chat itself, or on no text of one
                text = ""
            self._of_parts[template] = _PROBE in text and repr(_PROBE) not in text
        return self._of_parts[template]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose parts of text are one text; any other one as it is."""
    content = message.get("content")
    if not (isinstance(content, list) and all(isinstance(each, dict) and "text" in each for each in content)):
        return message
    return message | {"content": joined(content)}


def joined(parts: Iterable[Any]) -> str:
    """The text of a message's parts: a line for each that is text, as vLLM's server joins them."""
    return "\n".join(str(each["text"]) for each in parts if isinstance(each, Mapping) and "text" in each)
