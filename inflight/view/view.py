"""Shows a run while it is active: live in a terminal, else a line from time to time."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from inflight.report.visible import visible
from inflight.types import Value
from inflight.view import snapshot
from inflight.view.advice import advice
from inflight.view.progress import Progress
from inflight.view.screen import Screen

DRAW_EVERY_S = 0.5
KEEP_EVERY_S = 1.0
SAME_LINE_S = 7.0
"""A line that says nothing new is repeated after this time: with the default of `launch.line_every_s`, 5 s, the output
is never silent for more than 10 s."""
WARNINGS_KEPT = 4


class View:
    """Shows a Progress until it is closed."""

    def __init__(
        self,
        progress: Progress,
        *,
        line_every_s: float,
        console: Console | None = None,
        kept: Path | None = None,
        command: str = "launch",
    ) -> None:
        """With `kept`, the latest values are also written there each second, for `inflight watch`. `command`: the one
        of inflight that shows it, which is named before each warning."""
        self.progress = progress
        self._command = command
        self._console = console or Console()
        self._line_every_s = line_every_s
        self._next_line = time.monotonic() + line_every_s
        self._next_draw = 0.0
        self._last_line = ""
        self._same_since = time.monotonic()
        self._warned: set[tuple[str, str]] = set()
        self._shown: deque[str] = deque(maxlen=WARNINGS_KEPT)
        self._advised: set[str] = set()
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._closed = False
        self._kept = kept
        self._next_kept = 0.0

    def heard(self, source: str, values: Mapping[str, Value]) -> None:
        """Merges one status message; a new warning in it is shown at once."""
        self.progress.update(source, values)
        for warning in str(values.get("warnings", "")).splitlines():
            if (source, warning) not in self._warned:
                self._warned.add((source, warning))
                self._shown.append(visible(f"{source}: {warning}"))
                self.tell(f"inflight {self._command}: {source}: {warning}")

    def refresh(self) -> None:
        """Redraws the view, or prints a line, when that is due; cheap to call often."""
        now = time.monotonic()
        if self._kept is not None and now >= self._next_kept:
            self._next_kept = now + KEEP_EVERY_S
            snapshot.write(self._kept, self.progress.elapsed_s, self.progress.latest)
        if self._live is not None and now >= self._next_draw:
            self._next_draw = now + DRAW_EVERY_S
            self._draw(self._live)
        elif self._live is None and now >= self._next_line:
            self._next_line = now + self._line_every_s
            self.progress.record.refresh()
            self._print_news()

    def tell(self, text: str) -> None:
        """Prints an event that must be seen, above the live view or among the lines."""
        text = visible(text)
        if self._live is not None:
            self._live.console.print(Text(text))
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Shows the last state; the terminal is then as it was."""
        if self._closed:
            return
        self._closed = True
        if self._live is not None:
            self._draw(self._live)
            self._live.stop()
        else:
            self.progress.record.refresh()
            print(self.progress.line(), flush=True)

    def _draw(self, live: Live) -> None:
        self.progress.record.refresh()
        live.update(Screen(self.progress, self._shown), refresh=True)

    def _print_news(self) -> None:
        """Skips a line that equals the last one, but not for long: no output would look like a hang."""
        news = self.progress.news()
        now = time.monotonic()
        if news != self._last_line or now - self._same_since > SAME_LINE_S:
            self._last_line = news
            self._same_since = now
            print(self.progress.line(), flush=True)
        for line in advice(self.progress):
            kind = "".join(letter for letter in line if not letter.isdigit())
            if kind not in self._advised:
                self._advised.add(kind)
                self.tell(f"inflight {self._command}: {line}")

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
