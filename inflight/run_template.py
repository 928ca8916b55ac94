"""How a run has rendered its chats, where that differs from its model's own template: for `inflight export`, so that a
served model is prompted as in training."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from inflight.config import CONFIG_FILE, run_of
from inflight.error_line import one_line
from inflight.tasks.data.chat_template import text_of
from inflight.tasks.data.fingerprint import CHAT_TEMPLATE, of_text

FILE = "chat_template.jinja"
"""Where transformers and vLLM look for it first."""
MORE = "additional_chat_templates"
"""Further templates of a model, such as one for tools: a run with a template of its own uses none of them."""


class TemplateError(ValueError):
    """A chat template that can't be exported; one line that says why."""


@dataclass(frozen=True)
class Rendering:
    """What replaces the model's own."""

    template: str = ""
    """In Jinja; empty: the model's own."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of the template (task.options.template), which no file of a model's directory can hold."""

    def write(self, directory: Path) -> None:
        """Makes the template the one of a model's or an adapter's directory. Raises OSError."""
        if self.template:
            shutil.rmtree(directory / MORE, ignore_errors=True)
            (directory / FILE).write_text(self.template, encoding="utf-8")


def rendering_of(source: Path, given: Path | None = None) -> Rendering:
    """That of the run that `source` is the folder or a checkpoint of; of a checkpoint elsewhere only what is given.

    `given` is a file with the template, in place of the run's. Raises TemplateError when the run's configuration or the
    template can't be read, and when the run's file no longer holds what the run has used.
    """
    task = _task_of(source)
    options = _mapping(task.get("options"))
    contents = _mapping(task.get("contents"))
    arguments = _mapping(options.get("template")) if task.get("name") == "dataset" else {}
    if given is not None:
        return Rendering(_text(given, f"--chat-template {given}"), arguments)
    if CHAT_TEMPLATE not in contents:
        return Rendering(arguments=arguments)
    path = Path(str(options.get("chat_template")))
    named = f"the run's {CHAT_TEMPLATE}={path}"
    instead = "put the file back, or name it: --chat-template FILE"
    text = _text(path, named, instead)
    if of_text(text) != contents[CHAT_TEMPLATE]:
        raise TemplateError(f"{named} holds another template than when the run used it; {instead}")
    return Rendering(text, arguments)


def _task_of(source: Path) -> dict[str, Any]:
    """`task` in the run's configuration; read without the schema, since the run may be of another release."""
    run = source if (source / CONFIG_FILE).is_file() else run_of(source)
    if run is None:
        return {}
    path = run / CONFIG_FILE
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise TemplateError(f"{path} can't be read: {one_line(error)}") from None
    return _mapping(_mapping(found).get("task"))


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(path: Path, named: str, instead: str = "") -> str:
    try:
        return text_of(path)
    except (OSError, ValueError) as error:
        raise TemplateError(f"{named} can't be read: {error}" + (f"; {instead}" if instead else "")) from None
