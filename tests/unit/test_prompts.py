"""Prompts as token ids, with real tokenizers: special tokens stand where they belong, once."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from inflight.actor import calls
from inflight.actor.calls import AskEncode, TokensAre
from inflight.actor.services import TextService
from inflight.actor.worker import answered
from inflight.models import TINY_CHARACTERS, prepare
from inflight.prompts import Chat, ModelTokens
from inflight.tasks.data.chat_template import NOT_OF_A_TEMPLATE

BOS, EOS = 2, 1
"""Ids of the tiny tokenizer's `<unk>`, which is taken for BOS here, and of its `<eos>`."""
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | length }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "{{ m.content }}{% if not loop.last or add_generation_prompt %}{{ ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '=' if enable_thinking else '==' }}{% endif %}"
)


def save(folder, *, before=(), after=(), template=None):
    """The tiny model's directory with a tokenizer that puts special tokens around a text."""
    tokenizer = AutoTokenizer.from_pretrained(prepare("tiny"))
    tokenizer.bos_token = "<unk>"
    names = [*before, "$A", *after]
    special = [(name, tokenizer.convert_tokens_to_ids(name)) for name in {*before, *after}]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(names), special_tokens=special
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_bytes((prepare("tiny") / "config.json").read_bytes())
    return ModelTokens(str(folder))


def ids(text):
    return [3 + TINY_CHARACTERS.index(each) for each in text]


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory):
    return save(tmp_path_factory.mktemp("bos"), before=["<unk>"], after=["<eos>"], template=TEMPLATE)


def test_what_a_tokenizer_puts_before_a_text_stands_there_once_and_nothing_after_it(with_bos):
    assert with_bos.encode("1+1=") == [BOS, *ids("1+1=")]
    assert with_bos.encode("<unk>1+1=") == [BOS, *ids("1+1=")], "the text begins with it already"
    assert with_bos.encode("<unk><unk>1") == [BOS, BOS, *ids("1")], "what the text has more of is its own"
    assert with_bos.encode("") == [], "no text, no prompt"


def test_a_tokenizer_that_adds_nothing_is_left_alone(tmp_path):
    plain = save(tmp_path)
    assert plain.encode("1+1=") == ids("1+1=")
    assert plain.encode("<unk>1+1=") == [BOS, *ids("1+1=")]
    assert plain.encode("") == []


PARTS = TEMPLATE.replace("{{ m.content }}", "{% for each in m.content %}{{ each.text }}{% endfor %}")


@pytest.mark.parametrize(("template", "between"), [(TEMPLATE, "\n"), (PARTS, "")], ids=["of text", "of parts"])
def test_parts_of_text_are_the_text_that_they_hold(tmp_path, template, between):
    """A template of texts would write the list as Python does, without an error."""
    tokens = save(tmp_path, template=template)
    one, two = ({"type": "text", "text": each} for each in ("1+1", "=2"))
    parts = Chat([{"role": "user", "content": [one, two]}, {"role": "assistant", "content": [dict(one)]}])
    joined = f"1+1{between}=2"
    seen = tokens._tokenizer(f"<unk>{joined} 1+1", add_special_tokens=False)["input_ids"]
    assert tokens.encode(parts) == seen
    if template == TEMPLATE:
        plain = [{"role": "user", "content": joined}, {"role": "assistant", "content": "1+1"}]
        assert tokens.encode(Chat(plain)) == seen
    with_another = Chat(parts.messages, arguments={"chat_template": TEMPLATE if template == PARTS else PARTS})
    assert tokens.encode(with_another) != seen


def test_a_chat_gets_its_special_tokens_from_the_template_alone(with_bos):
    asked = [{"role": "user", "content": "1+1="}]
    assert with_bos.encode(Chat(asked)) == [BOS, *ids("1+1= ==")]
    assert with_bos.encode(Chat(asked, arguments={"enable_thinking": True})) == [BOS, *ids("1+1= =")]
    assert with_bos.encode(Chat(asked, tools=[{"type": "function", "function": {"name": "f"}}])) == [
        BOS,
        *ids("11+1= =="),
    ]
    begun = [*asked, {"role": "assistant", "content": "0"}]
    assert with_bos.encode(Chat(begun)) == [BOS, *ids("1+1= 0")], "the last message is continued"
    own = {"chat_template": "{{ messages[0].content }}+"}
    assert with_bos.encode(Chat(asked, arguments=own)) == ids("1+1=+")


@pytest.mark.parametrize(
    ("prompt", "kind", "says"),
    [
        ([3, -1], "token ids", "0 or more"),
        (Chat([{"role": "system", "content": "1"}]), "TemplateError", "no system here"),
        (Chat([{"role": "user"}], arguments={"chat_template": "{{ nothing.at.all }}"}), "UndefinedError", "nothing"),
        (Chat([{"role": "user"}], arguments={"chat_template": "{% for %}"}), "TemplateSyntaxError", "Expected"),
    ],
)
def test_a_prompt_that_can_not_be_made_costs_itself(with_bos, prompt, kind, says):
    async def ask():
        reader = asyncio.StreamReader()
        for each in (prompt, [3, 4]):
            reader.feed_data(await answered(TextService(with_bos), AskEncode(0, each), 30.0))
        return [await calls.read_from_child(reader) for _ in range(2)]

    raised, next_one = asyncio.run(ask())
    assert (raised.kind, next_one) == (kind, TokensAre(0, [3, 4]))
    assert says in raised.text


def test_a_model_without_a_template_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"has no chat template; name a file with one in task\.options\.chat_template"):
        save(tmp_path).encode(Chat([{"role": "user", "content": "1"}]))


def test_what_transformers_takes_for_itself_is_no_argument_of_a_template():
    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()
    assert own - {"chat_template", "documents", "kwargs"} <= NOT_OF_A_TEMPLATE
