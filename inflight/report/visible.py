"""Text that a model, a task or a file has made, for a terminal: what could control the terminal is made visible."""

from __future__ import annotations

import unicodedata

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that are not printed: control and format characters (among them ESC, which starts a terminal's
control sequences, and the overrides of text direction), surrogates, private and unassigned ones, line separators."""
_PICTURES = 0x2400
"""The Unicode block "Control Pictures": the picture of control character c is at 0x2400 + c."""
OPEN = "⟦"
CLOSE = "⟧"
"""The brackets around a mark of ours: text never holds them, so that no text can imitate a mark."""


def visible(text: str) -> str:
    """`text` with each character that is not printed replaced by its picture (`␛`) or by its number (`\\u202e`)."""
    return text if text.isascii() and text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(_PICTURES + code)
    if code == 0x7F:
        return "␡"
    if character in (OPEN, CLOSE) or unicodedata.category(character) in _HIDDEN:
        return f"\\u{code:04x}"
    return character
