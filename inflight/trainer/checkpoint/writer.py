"""Writes checkpoints beside the training: one at a time, in a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class CheckpointWriter:
    """At most one checkpoint is being written; what goes wrong with it is raised in the caller's thread."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s` bounds each wait for a checkpoint (`trainer.checkpoint_timeout_s`)."""
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self._name = ""
        self._error: Exception | None = None

    def start(self, name: str, write: Callable[[], None]) -> None:
        """Calls `write` in a thread, once the checkpoint before it is written. Raises as `wait` does."""
        self.wait()
        self._name = name
        # A daemon: a write that a disk holds for good does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, args=(write,), name=f"checkpoint {name}", daemon=True)
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # noqa: BLE001 - raised by `require`
            self._error = error

    def require(self) -> None:
        """Raises the error of a checkpoint that could not be written, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Returns when no checkpoint is being written.

        Raises TimeoutError when that takes longer than the timeout, and the error of one that could not be written.
        """
        if self._thread is not None:
            self._thread.join(self._timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(
                    f"the checkpoint {self._name} is not written after {self._timeout_s:g} s"
                    " (trainer.checkpoint_timeout_s)"
                )
            self._thread = None
        self.require()

    def close(self) -> None:
        """Waits as `wait` does. What goes wrong is logged: the trainer is ending, perhaps by an error of its own."""
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001
            log.error("%s", error)
