"""Things by name: built in, or `package.module:function` of one's own; with options that are checked before use."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from inflight.config import ConfigError


def find(name: str, built_in: Mapping[str, str], place: str) -> Callable[..., Any]:
    """The function that `name` stands for: a key of `built_in` or a path. Its module is imported only now.

    `place` is where the name was set, for the error. Raises ConfigError naming what is unknown and what there is.
    """
    path = name if ":" in name else built_in.get(name, "")
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise ConfigError(f"{place}={name!r} is not known: {', '.join(built_in)}, or package.module:function")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{place}={name!r} can't be imported: {error}") from None
    if not callable(found):
        raise ConfigError(f"{place}={name!r} is no function")
    return found  # type: ignore[no-any-return]


def with_options(function: Callable[..., Any], options: Mapping[str, Any], place: str) -> Callable[..., Any]:
    """`function` with `options` given to its keyword-only parameters, which are its options.

    Raises ConfigError for an option that it does not have, lacks, or that is of another type.
    """
    parameters = inspect.signature(function).parameters.values()
    known = {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(f"{place}.{name} is not an option: {', '.join(known) or 'it has none'}")
        _check_type(known[name], value, f"{place}.{name}")
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in options:
            raise ConfigError(f"{place}.{name} is missing: it has no default")
    return functools.partial(function, **options) if options else function


_PLAIN = {"int": int, "float": float, "bool": bool, "str": str}


def _check_type(parameter: inspect.Parameter, value: object, place: str) -> None:
    """By the type of the default; without one, or with None, by a plain annotation."""
    wanted: type | None = type(parameter.default)
    if parameter.default is None or parameter.default is parameter.empty:
        wanted = _PLAIN.get(getattr(parameter.annotation, "__name__", str(parameter.annotation)))
    if wanted is None or type(value) is wanted:
        return
    if wanted is float and type(value) is int:  # YAML writes 1.0 as 1
        return
    raise ConfigError(f"{place}={value!r} is not allowed: it takes {wanted.__name__}")
