"""The text of an exception, or of another program, as one line that can be logged, sent, counted and shown."""

from __future__ import annotations

from collections.abc import Callable

LONGEST = 500
"""Most characters of a line, unless another bound is given."""


def one_line(said: object, longest: int = LONGEST) -> str:
    """The text of an exception, or a text itself, in one line of printable characters: nothing in it controls a
    terminal, and lone surrogates, which no file and no message can hold, are left out. An exception without a text is
    written as `KeyError()`."""
    if isinstance(said, BaseException):
        return _printable(_text(said), longest) or _printable(_text(said, repr), longest)
    return _printable(str(said), longest)


def with_kind(error: BaseException, longest: int = LONGEST) -> str:
    """An exception's class and text: `KeyError: 'answer'`, or `TimeoutError` for one without a text."""
    kind = _printable(type(error).__name__, longest)
    text = _printable(_text(error), longest)
    return f"{kind}: {text}"[:longest] if text else kind


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, without what libraries print below it: stack traces, advice. Its class
    for one without a text."""
    lines = _text(error).strip().splitlines()
    return _printable(lines[0], LONGEST) if lines else _printable(type(error).__name__, LONGEST)


def _text(error: BaseException, written: Callable[[object], str] = str) -> str:
    try:
        return written(error)
    except BaseException:  # noqa: BLE001 - its __str__ and __repr__ are foreign code, too
        return f"{type(error).__name__}, whose text can't be read"


def _printable(text: str, longest: int) -> str:
    # Cut first, since a text may have hundreds of megabytes; what is left out of it makes a line shorter.
    shown = "".join(each if each.isprintable() else " " for each in text[: 4 * longest])
    return " ".join(shown.split())[:longest]
