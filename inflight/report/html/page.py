"""Puts data, style and scripts together into one HTML file that loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from inflight import __version__
from inflight.report.html.data import of_run

REPORT_FILE = "report.html"
SCRIPTS = (
    "format.js",
    "colours.js",
    "chart.js",
    "tables.js",
    "timeline.js",
    "bands.js",
    "inspector.js",
    "view.js",
    "sections.js",
    "main.js",
)
"""In the order in which they run; each adds to one object, `inflight`."""
MOST_RUNS = 2
_MARKS = ("%%POLICY%%", "%%STYLE%%", "%%DATA%%", "%%SCRIPT%%")
"""What page.html has in place of its parts, in this order."""
_ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
"""U+2028 and U+2029, which end a line in a script, are escaped already: the JSON is ASCII."""


def write(run_dirs: Sequence[Path], target: Path, ended: str = "") -> None:
    """Writes the report of one run, or of two side by side: whole, or OSError and nothing.

    Raises ValueError for a folder that is no run's.
    """
    if not 1 <= len(run_dirs) <= MOST_RUNS:
        raise ValueError(f"{len(run_dirs)} runs: a report shows one, or two side by side")
    page = rendered([of_run(run_dir, ended) for run_dir in run_dirs]).encode()
    descriptor, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(page)
        os.chmod(partial, 0o644)
        os.replace(partial, target)
    except BaseException:
        os.unlink(partial)
        raise


def rendered(runs: Sequence[dict[str, Any]]) -> str:
    """The page. Its policy lets the browser run and apply the parts below alone, and load nothing."""
    style = _part("style.css")
    script = "\n".join(map(_part, SCRIPTS))
    policy = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'"
    page = ""
    rest = _part("page.html")
    data = {"inflight": __version__, "runs": list(runs)}
    for mark, part in zip(_MARKS, (policy, style, as_json(data), script), strict=True):
        before, _, rest = rest.partition(mark)  # not replaced: what was filled in may hold the next mark
        page += before + part
    return page + rest


def as_json(data: Any) -> str:
    """JSON in ASCII that can stand in a script element: nothing in it ends the element or begins a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character, escaped in _ESCAPED.items():
        text = text.replace(character, escaped)
    return text


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(part: str) -> str:
    """As Content-Security-Policy names an inline part that is allowed."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'"
