"""The common part of all messages."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from inflight.error_line import with_kind

Text = Annotated[str, Meta(max_length=4096)]
MAX_REASON = 1000
"""Most characters of an error's reason."""
Seconds = Annotated[float, Meta(ge=0)]
Checksum = Annotated[int, Meta(ge=0, lt=1 << 32)]
MAX_BUCKETS = 1 << 18
"""Most buckets of one version."""


def reason_of(error: BaseException) -> str:
    """The reason in a message about a failure: the error's type and text, cut to MAX_REASON."""
    return with_kind(error, MAX_REASON)


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages; the tag on the wire is the class name."""
