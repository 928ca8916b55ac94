"""Validation of options: a bad value is refused in one line with the value, its place and what is allowed."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Collection
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from inflight.error_line import with_kind

LARGEST = 1_000_000_000
"""Upper limit of numbers without a limit of their own: it fits into the 32 bits in which torch and vLLM store some."""
LARGEST_REAL = 1e38
"""Upper limit of real numbers that multiply weights: float32 can hold it."""
LONGEST_S = 1e8
"""Longest duration, three years; threads and sockets can't wait for more than about a hundred times that."""

MAX_PROCESSES = 1024
"""Most processes of one kind."""


PLAIN = (int, float, str, bool)


class ConfigError(ValueError):
    """A configuration value that can't be used; the text names it, its place and what is allowed."""


def raised(error: BaseException) -> str:
    """An exception of foreign code in one line, with the file and line that raised it, for a ConfigError."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{with_kind(error)}{where}"


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raises ConfigError that names the value, its place and what is allowed."""
    if not ok:
        raise ConfigError(f"{name}={value!r} is not allowed: {allowed}")


def require_one_of(config: object, section: str, name: str, allowed: Collection[str]) -> None:
    """Requires a field to be one of these words."""
    value = getattr(config, name)
    require(value in allowed, f"{section}.{name}", value, ", ".join(allowed))


def require_takes(field: dataclasses.Field[Any], kind: type[Any], value: object, place: str) -> None:
    """Requires an option to be of the type of a dataclass's field: that of its default, or the annotated one where the
    default is no plain value. An annotation with other than plain types, lists and dicts is not looked at."""
    wanted = type(field.default)
    if wanted in PLAIN:
        fits = type(value) is wanted or (wanted is float and type(value) is int)  # YAML writes 1.0 as 1
        require(fits, place, value, f"it takes {wanted.__name__}")
        return
    try:
        annotated = get_type_hints(kind)[field.name]
    except (NameError, TypeError, KeyError):
        return
    if _is_plain(annotated):
        try:
            msgspec.convert(value, annotated)
        except msgspec.ValidationError:
            require(False, place, value, f"it takes {getattr(field.type, '__name__', field.type)}")


def _is_plain(annotated: Any) -> bool:
    origin = get_origin(annotated)
    if origin is None:
        return annotated in (*PLAIN, list, dict, Any, type(None))
    return origin in (list, dict, Union, UnionType) and all(map(_is_plain, get_args(annotated)))


def require_fields(
    config: object, section: str, names: str, *, least: float | None = None, most: float = LARGEST
) -> None:
    """Requires each field to be at least `least`, or above 0 without it, and at most `most`; for seconds LONGEST_S."""
    for name in names.split():
        value = getattr(config, name)
        limit = LONGEST_S if name.endswith("_s") else most
        require(not value > limit, f"{section}.{name}", value, f"at most {limit:.15g}")
        fits = value > 0 if least is None else value >= least
        require(fits, f"{section}.{name}", value, "above 0" if least is None else f"{least:.15g} or more")
