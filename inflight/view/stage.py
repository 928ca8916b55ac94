"""Says what is being done when it takes long: a spinner in a terminal, else a line from time to time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.text import Text

QUIET_S = 2.0
"""What takes less is not mentioned where there is no terminal."""
EVERY_S = 8.0
"""A stage is never silent for longer."""


class _Changing:
    """For rich: a text that is composed anew each time that it is drawn."""

    def __init__(self, what: Callable[[], str]) -> None:
        self._what = what

    def __rich__(self) -> Text:
        return Text(f"{self._what()} …")


@contextlib.contextmanager
def stage(what: str | Callable[[], str], console: Console | None = None) -> Iterator[None]:
    """Around work without output of its own; `what` is a phrase such as "preparing the model", or gives the present
    one. It is shown on `console`, which is that of stdout if there is none."""
    console = console or Console()
    text = what if callable(what) else lambda: what
    if console.is_terminal:
        with console.status(_Changing(text)):
            yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_tell, args=(text, console, over), name="stage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=1)


def _tell(text: Callable[[], str], console: Console, over: threading.Event) -> None:
    began = time.monotonic()
    pause = QUIET_S
    while not over.wait(pause):
        print(f"{text()} … {time.monotonic() - began:.0f} s", file=console.file, flush=True)
        pause = EVERY_S
