"""The live view as a whole: which parts stand where in a window of a given size."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from inflight.view import panels
from inflight.view.advice import advice
from inflight.view.progress import Progress

WIDE = 140
"""Columns from which on two parts stand side by side."""
FIXED = 17
"""Lines of a narrow view beside the generators' own."""
SWAPS = 3
WARNINGS = 4
"""Most swaps and warnings that are shown."""


class Screen:
    """A renderable of rich's: the run as it is when it is drawn."""

    def __init__(self, progress: Progress, warned: Sequence[str] = ()) -> None:
        """`warned`: lines of processes, oldest first; those that fit are shown after the view's own advice."""
        self._progress = progress
        self._warned = warned

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        most = max(1, (options.height or console.height) - FIXED)
        progress = self._progress
        yield panels.head(progress, width)
        if width < WIDE:
            yield panels.learning(progress, width)
            if not progress.over:
                yield panels.generators(progress, most)
            yield panels.flow(progress)
            yield panels.swaps(progress, SWAPS)
        else:
            left = Table.grid()
            right = Table.grid()
            left.add_row(panels.learning(progress, width // 2))
            left.add_row(panels.flow(progress))
            if not progress.over:
                right.add_row(panels.generators(progress, most))
            right.add_row(panels.swaps(progress, SWAPS))
            both = Table.grid(expand=True, padding=(0, 2))
            both.add_column(ratio=1)
            both.add_column(ratio=1)
            both.add_row(left, right)
            yield both
        lines = [*advice(progress), *reversed(self._warned)]
        if lines:
            yield panels.warnings(lines[:WARNINGS])
