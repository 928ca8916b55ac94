"""Values of a question's columns on their way from the child process that reads the data to the one that scores.

msgpack has no dates, times and decimals: encoders write them as text, and a reward would get another value than the
data hold. Each is an extension of msgpack here, whose content is its own text; everything else is as msgpack has it. A
dict's key can't be an extension, and one that msgpack would write as something else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import msgspec
from msgspec.msgpack import Ext

_PLAIN = (str, int, float, bool, bytes, type(None))


class NotCarried(ValueError):
    """A column holds what no message between processes can hold; the text names the column."""


def to_wire(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Values by column as msgpack can hold them. Raises NotCarried: for an image, a whole number of more than 64 bits,
    nanoseconds, which Python's dates and durations do not have, a dict that has a date, time or decimal as a key, and a
    column whose name is no text."""
    found = {}
    for name, value in columns.items():
        if not isinstance(name, str):
            raise NotCarried(f"column {name!r} can't be given to rewards: a column's name is text")
        try:
            found[name] = _to_wire(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise NotCarried(f"column {name!r} can't be given to rewards: {error}") from None
    return found


def from_wire(columns: Mapping[str, Any]) -> dict[str, Any]:
    """What `to_wire` was given, lists in the place of tuples. Raises ValueError for an extension of another kind."""
    return {name: _from_wire(value) for name, value in columns.items()}


def _to_wire(value: Any) -> Any:
    if isinstance(value, dict):
        return {_key_to_wire(key): _to_wire(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_wire(each) for each in value]
    if isinstance(value, date | time | timedelta | Decimal):
        return _extension(value)
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise ValueError("it has a whole number of more than 64 bits; write it as text")
    if type(value) not in _PLAIN:  # numpy derives some of its numbers and texts from Python's
        msgspec.msgpack.encode(value)  # raises TypeError for what it has no form for
    return value


def _key_to_wire(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple(map(_key_to_wire, key))
    if not isinstance(key, _PLAIN):  # a date would become its text, a frozenset a tuple
        raise TypeError(f"it has a dict with a key of the type {type(key).__name__}; write it as text")
    return _to_wire(key)


def _extension(value: date | time | timedelta | Decimal) -> Ext:
    if getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0):  # classes of pandas, derived from Python's
        raise ValueError(f"{value} has nanoseconds; store it with microseconds")
    match value:
        case datetime():
            return Ext(1, value.isoformat().encode())
        case date():
            return Ext(2, value.isoformat().encode())
        case time():
            return Ext(3, value.isoformat().encode())
        case timedelta():
            return Ext(4, f"{value.days} {value.seconds} {value.microseconds}".encode())
        case Decimal():
            return Ext(5, str(value).encode())


def _duration(text: str) -> timedelta:
    days, seconds, microseconds = map(int, text.split())
    return timedelta(days, seconds, microseconds)


_FROM_TEXT: dict[int, Callable[[str], Any]] = {
    1: datetime.fromisoformat,
    2: date.fromisoformat,
    3: time.fromisoformat,
    4: _duration,
    5: Decimal,
}
"""By the code of the extension."""


def _from_wire(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _from_wire(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_from_wire(each) for each in value]
    if isinstance(value, Ext):
        if value.code not in _FROM_TEXT:
            raise ValueError(f"extension {value.code} of msgpack is no value of a column")
        return _FROM_TEXT[value.code](bytes(value.data).decode())
    return value
