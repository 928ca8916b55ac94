"""Python code that a model's directory brings for its configuration, its layers or its tokenizer (`auto_map`), which
transformers and vLLM run where `trust_remote_code` is set."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inflight.error_line import one_line

CONFIG = "config.json"
TOKENIZER = "tokenizer_config.json"


class RemoteCodeError(ValueError):
    """A model whose code is not trusted or can't be had; one line."""


def require_code(model: str, directory: Path, *, trusted: bool) -> None:
    """Raises RemoteCodeError for a model that can't be loaded without code of its own where that is not `trusted`, for
    code in another repository, whose commit is not fixed, and for trust in a model that has no code.

    Code that transformers has a class of its own for is not needed.
    """
    found = {file: _named(directory / file) for file in (CONFIG, TOKENIZER)}
    names = sorted(name for each in found.values() for name in each)
    if not names:
        if trusted:
            raise RemoteCodeError(f"model.trust_remote_code is set and has no effect: model {model!r} has no code")
        return
    if trusted:
        if elsewhere := [name for name in names if "--" in name]:
            raise RemoteCodeError(
                f"model {model!r} takes {elsewhere[0]} from another repository, of no fixed commit; give a directory"
                " that holds that code as model.name"
            )
        return
    needed = next((file for file, named in found.items() if named and not _known(directory / file)), None)
    if needed is not None:
        raise RemoteCodeError(
            f"model {model!r} needs code of its own, {found[needed][0]} ({needed}), which is not run by default: read"
            " it and, if you trust it, set model.trust_remote_code=true"
        )


def _named(path: Path) -> list[str]:
    """The classes of `auto_map`: `module.Class`, or `repository--module.Class`."""
    return list(_texts(_read(path).get("auto_map")))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _known(path: Path) -> bool:
    """Whether transformers has a class for it. Takes some seconds: transformers imports torch."""
    values = _read(path)
    if path.name == CONFIG:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        return values.get("model_type") in CONFIG_MAPPING_NAMES
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    return tokenizer_class_from_name(str(values.get("tokenizer_class"))) is not None


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise RemoteCodeError(f"{path} can't be read: {one_line(error)}") from None
    return values if isinstance(values, dict) else {}
