"""What a task of files is, before a run starts: whether its questions can be asked, and what its files hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from inflight.config import ConfigError, RunConfig
from inflight.error_line import with_kind
from inflight.models import ModelError, prepare
from inflight.prompts import Chat, ModelTokens
from inflight.tasks.base import HeldOut, Item, OfFiles, Task
from inflight.tasks.check import require_columns, require_held_out, unscorable
from inflight.tasks.count import PromptLengths, left_out
from inflight.tasks.course import Course
from inflight.tasks.data.fingerprint import of_text

TRIED = 8
"""First questions of which one must be fine: that shows a wrong column, and a template that always fails."""
EXAMINED_FILE = "examined.json"
"""In the run folder that the examination is given."""
MAX_EXAMINED_BYTES = 16 << 20
ASKED_FILE = "asked.txt"
"""Beside it: the question that the examination is at, so that one on which it hangs can be named."""
MAX_ASKED = 200
"""Bytes of it."""
TEMPLATE = "model.chat_template"


class Examined(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the run's configuration keeps of it."""

    options: dict[str, Any]
    """Those of the task, with absolute paths and commits."""
    contents: dict[str, str]
    """What files hold, by the option that names them (OfFiles.contents), and the model's chat template."""
    left_out: str = ""
    """One line on the questions that will be left out or can't be scored; empty where there is none."""
    questions: int | None = None
    """How many there are to train on, over all epochs; None where the task does not say."""
    held_out: int = 0


def examine(config: RunConfig, task: Task, asked: Callable[[str], object] = lambda which: None) -> Examined | None:
    """None for a task that is not of files; `asked` is called with each question before it is looked at. Raises
    ConfigError when the files can't be read, or when none of the first questions can be asked."""
    if not isinstance(task, OfFiles):
        return None
    contents = dict(task.contents())
    model = config.model
    try:
        directory = prepare(model.name, revision=model.revision)
        tokens = ModelTokens(str(directory), trust_remote_code=model.trust_remote_code)
    except (ModelError, OSError, ValueError) as error:
        raise ConfigError(f"model.name={model.name!r}: its tokenizer can't be loaded: {with_kind(error)}") from None
    longest = config.longest_prompt
    lengths = PromptLengths(tokens, config.rollout.reward_timeout_s, asked)
    first = [_askable("", task.item, lengths, longest)]
    if config.eval.every:
        require_held_out(task, config)
    held_out = task.held_out_size() if isinstance(task, HeldOut) else 0
    if isinstance(task, HeldOut) and held_out:
        first.append(_askable("held-out ", task.held_out_item, lengths, longest))
    for item in first if config.rewards else ():
        require_columns(config, item)
    if any(isinstance(item.prompt, Chat) for item in first):
        contents[TEMPLATE] = of_text(tokens.chat_template)
    missing = left_out(task, lengths, longest, unscorable=unscorable(config))
    questions = Course(task, config.task.epochs).questions
    return Examined({**config.task.options, **task.settled()}, contents, missing, questions, held_out)


def require_same(task: Task, expected: Mapping[str, str]) -> None:
    """Raises ConfigError when the files of a task do not hold what they held when the run was examined."""
    if not isinstance(task, OfFiles) or not expected:
        return
    for name, found in task.contents().items():
        if found != expected.get(name):
            raise ConfigError(f"{name} holds other data ({found}) than when the run started ({expected.get(name)})")


def write(examined: Examined, folder: Path) -> None:
    """For `read`. Raises OSError, or what msgspec does for options that JSON does not hold."""
    (folder / EXAMINED_FILE).write_bytes(msgspec.json.encode(examined))


def read(folder: Path) -> Examined | None:
    """What `write` wrote; None where nothing was written. Raises ConfigError."""
    try:
        with (folder / EXAMINED_FILE).open("rb") as file:
            return msgspec.json.decode(file.read(MAX_EXAMINED_BYTES), type=Examined)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, OSError) as error:
        raise ConfigError(f"what the task's files hold can't be read: {with_kind(error)}") from None


@contextmanager
def asked_in(folder: Path) -> Iterator[Callable[[str], object]]:
    """For `examine`: keeps the question that it is at in a file, for `last_asked`. Raises OSError."""
    with (folder / ASKED_FILE).open("wb", buffering=0) as file:
        yield lambda which: os.pwrite(file.fileno(), which.encode(errors="replace")[:MAX_ASKED].ljust(MAX_ASKED), 0)


def last_asked(folder: Path) -> str:
    """The question that an examination was at when it ended; empty where it was at none."""
    try:
        with (folder / ASKED_FILE).open("rb") as file:
            return file.read(MAX_ASKED).decode(errors="replace").rstrip()
    except FileNotFoundError:
        return ""


def _askable(what: str, item: Callable[[int], Item], lengths: PromptLengths, longest: int) -> Item:
    """The first question that is fine. Raises ConfigError when none of the first TRIED is."""
    why: list[str] = []
    for index in range(TRIED):
        try:
            found, length = lengths.of(item, index, what)
        except IndexError:
            break
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - of the data, of a template
            why.append(with_kind(error))
            continue
        if length <= longest:
            return found
        why.append(f"{length} tokens, and generator.max_model_len and rollout.max_prompt_tokens allow 1 to {longest}")
    first = f"the first {len(why)} {what}questions" if len(why) > 1 else f"the only {what}question"
    raise ConfigError(f"task.name=dataset: {first} can't be asked; the first: {why[0] if why else 'there is none'}")
