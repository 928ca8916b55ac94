"""What all messages have in common."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Text = Annotated[str, Meta(max_length=4096)]
Seconds = Annotated[float, Meta(ge=0)]
Checksum = Annotated[int, Meta(ge=0, lt=1 << 32)]
MAX_BUCKETS = 1 << 18
"""Of a version."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages; the tag on the wire is the class name."""
