"""What a check found, and what a person should do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How serious a finding is."""

    OK = "ok"
    WARN = "warn"
    """A run can start, but may be slower or fail later."""
    FAIL = "fail"
    """A run can't start, or will fail."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line."""

    state: Severity
    name: str
    text: str
    todo: str = ""
    """What to do; empty where all is well."""


def ok(name: str, text: str) -> Finding:
    """All is well."""
    return Finding(Severity.OK, name, text)


def warn(name: str, text: str, todo: str) -> Finding:
    """A run may be slower or fail later."""
    return Finding(Severity.WARN, name, text, todo)


def fail(name: str, text: str, todo: str) -> Finding:
    """A run will fail."""
    return Finding(Severity.FAIL, name, text, todo)
