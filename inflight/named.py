"""Functions selected by name: built in, or the user's own as `package.module:function`; options are checked first."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from inflight.config import ConfigError
from inflight.error_line import one_line
from inflight.nearest_name import meant


def find(name: str, built_in: Mapping[str, str], place: str) -> Callable[..., Any]:
    """The function that `name` stands for: a key of `built_in` or a path. Its module is imported only by this call.

    `place` is the option that holds the name. Raises ConfigError that names what is unknown and what exists.
    """
    path = name if ":" in name else built_in.get(name, "")
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        known = meant(name, built_in) or f"{', '.join(built_in)}, or package.module:function"
        raise ConfigError(f"{place}={name!r} is not known: {known}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{place}={name!r} can't be imported: {one_line(error)}") from None
    if not callable(found):
        raise ConfigError(f"{place}={name!r} is not a function")
    return found  # type: ignore[no-any-return]


def with_options(function: Callable[..., Any], options: Mapping[str, Any], place: str) -> Callable[..., Any]:
    """`function` with `options` bound to its keyword-only parameters.

    Raises ConfigError for an unknown option, a missing one, and a value of the wrong type.
    """
    parameters = inspect.signature(function).parameters.values()
    known = {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY}
    for name, value in options.items():
        if name not in known:
            names = meant(name, known) or ", ".join(known) or "it has none"
            raise ConfigError(f"{place}.{name} is not an option: {names}")
        _check_type(known[name], value, f"{place}.{name}")
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in options:
            raise ConfigError(f"{place}.{name} is missing: it has no default")
    return functools.partial(function, **options) if options else function


def of_entry(entry: Mapping[str, Any], built_in: Mapping[str, str], place: str) -> Callable[..., Any]:
    """The function that an entry of a list stands for: its `name`, and its options as further keys. Raises ConfigError
    as `find` and `with_options` do."""
    options = {key: value for key, value in entry.items() if key != "name"}
    return with_options(find(entry["name"], built_in, f"{place}.name"), options, place)


_PLAIN = {"int": int, "float": float, "bool": bool, "str": str}


def _check_type(parameter: inspect.Parameter, value: object, place: str) -> None:
    """Checks against the type of the default, or against a plain annotation if there is no default or it is None."""
    wanted: type | None = type(parameter.default)
    if parameter.default is None or parameter.default is parameter.empty:
        wanted = _PLAIN.get(getattr(parameter.annotation, "__name__", str(parameter.annotation)))
    if wanted is None or type(value) is wanted:
        return
    if wanted is float and type(value) is int:  # YAML writes 1.0 as 1
        return
    raise ConfigError(f"{place}={value!r} is not allowed: it takes {wanted.__name__}")
