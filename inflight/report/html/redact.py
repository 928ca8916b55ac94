"""Secrets in a configuration or environment, by their names and by how they look."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "(redacted)"
_SECRET_NAME = re.compile(
    r"^key$|(api|access|private|secret|signing|auth)[_-]?key|(^|[_.-])(token|auth|authorization|cookie|credentials?)$"
    r"|passw|passphrase|secret|bearer",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[A-Z0-9]{16}"
    r"|xox[baprs]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
)
_URL_SECRET = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HEADER_SECRET = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}")


def redacted(value: Any, name: str = "") -> Any:
    """A copy in which each text that is a secret, or contains one, has REDACTED instead."""
    if isinstance(value, Mapping):
        return {str(key): redacted(each, str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(each, name) for each in value]
    if isinstance(value, str) and value:
        if _SECRET_NAME.search(name):
            return REDACTED
        return text(value)
    return value


def text(value: str) -> str:
    """The text without what looks like a secret: known kinds of tokens, and user and password in an address."""
    for pattern in (_SECRET_VALUE, _HEADER_SECRET):
        value = pattern.sub(REDACTED, value)
    return _URL_SECRET.sub(REDACTED, value)


def flat(value: Any, name: str = "") -> dict[str, str]:
    """Dotted name → value as text, of nested mappings."""
    if isinstance(value, Mapping) and value:
        found: dict[str, str] = {}
        for key, each in value.items():
            found |= flat(each, f"{name}.{key}" if name else str(key))
        return found
    return {name: "" if value is None else str(value)}
