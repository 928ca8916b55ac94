"""What all messages have in common."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Text = Annotated[str, Meta(max_length=4096)]
MAX_REASON = 1000
"""Characters that are told of why something failed."""
Seconds = Annotated[float, Meta(ge=0)]
Checksum = Annotated[int, Meta(ge=0, lt=1 << 32)]
MAX_BUCKETS = 1 << 18
"""Of a version."""


def reason_of(error: BaseException) -> str:
    """Why something failed, as it is told to others."""
    return f"{type(error).__name__}: {error}"[:MAX_REASON]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages; the tag on the wire is the class name."""
