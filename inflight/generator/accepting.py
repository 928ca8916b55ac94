"""Rate-limited logging of connections that the server could not accept.

When a process is out of file descriptors, asyncio reports every connection in the backlog, about two thousand per
second, each with a stack trace. The connections themselves stay in the backlog; accepting them is retried one second
later.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from typing import Any

logger = logging.getLogger(__name__)

OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SAY_EVERY_S = 30.0


class AcceptErrors:
    """An exception handler for an event loop: counts connections that could not be accepted, and passes everything else
    on to the loop's own handler."""

    def __init__(self) -> None:
        self._count = 0
        self._said = -SAY_EVERY_S

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The signature that `loop.set_exception_handler` expects."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in OUT_OF_FILES and "socket" in context):
            loop.default_exception_handler(context)
            return
        self._count += 1
        if time.monotonic() - self._said > SAY_EVERY_S:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            text = (
                "connections wait, %d so far could not be accepted: %s (this process may have %d files open: ulimit -n)"
            )
            logger.warning(text, self._count, error.strerror, limit)
            self._said = time.monotonic()
