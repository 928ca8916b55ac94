"""Which release of inflight wrote a run folder: the first line of its config.yaml names it."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from inflight import __version__
from inflight.config.folder import CONFIG_FILE

HEADER = f"# written by inflight {__version__}\n"
"""First line of config.yaml; a comment, so that every release can read the file."""
_HEADER = re.compile(rb"# written by inflight (\S{1,64})\r?\n")
_HEADER_BYTES = 128


def written_by(run_dir: Path) -> str:
    """The release that wrote the configuration in a run folder; "" if the folder does not say."""
    with contextlib.suppress(OSError), (run_dir / CONFIG_FILE).open("rb") as file:
        if (found := _HEADER.match(file.read(_HEADER_BYTES))) is not None:
            return found[1].decode("ascii", "replace")
    return ""


def remark(run_dir: Path) -> str:
    """The end of an error about a file in a run folder: which other release wrote the folder. "" if this one did."""
    release = written_by(run_dir)
    if release == __version__:
        return ""
    return f" (the folder was written by {release or 'a release that did not record itself'}, this is {__version__})"
