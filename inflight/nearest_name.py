"""The known name that is most like an unknown one, for errors about names: of options, rewards, commands."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """Empty where none is much like it."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), "")


def meant(name: str, known: Iterable[str], before: str = "") -> str:
    """For the end of an error: `did you mean NAME?`, with `before` put before the name; empty where none is like it."""
    found = nearest(name, known)
    return f"did you mean {before}{found}?" if found else ""
