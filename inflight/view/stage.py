"""Says what is being done when it takes long: a spinner in a terminal, else a line from time to time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from inflight.view.figures import duration

QUIET_S = 2.0
"""What takes less is not mentioned where there is no terminal."""
EVERY_S = 8.0
"""A stage is never silent for longer."""


@contextlib.contextmanager
def stage(what: str, console: Console | None = None) -> Iterator[None]:
    """Around work without output of its own; `what` is a phrase such as "preparing the model"."""
    console = console or Console()
    if console.is_terminal:
        with console.status(Text(f"{what} …")):
            yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_tell, args=(what, over), name="stage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=1)


def _tell(what: str, over: threading.Event) -> None:
    began = time.monotonic()
    pause = QUIET_S
    while not over.wait(pause):
        print(f"{duration(time.monotonic() - began)} · {what} …", flush=True)
        pause = EVERY_S
