"""Where a resume of a run would begin, and the command for it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from inflight.config import RunConfig
from inflight.trainer.checkpoint import index

_OF_A_START = re.compile(r"\+{0,2}(run_dir|resume)=")
_PLAIN = re.compile(r"[\w./@+-]+")
"""A value that the grammar of overrides takes as it is."""


def command_to_resume(given: Sequence[str], run_dir: str) -> str:
    """The arguments with which a run was launched as the command that resumes it, quoted for a shell."""
    kept = [each for each in given if not _OF_A_START.match(each)]
    quoted = run_dir.replace("\\", "\\\\").replace("'", "\\'")
    value = run_dir if _PLAIN.fullmatch(run_dir) else f"'{quoted}'"
    return shlex.join(["inflight", "launch", *kept, f"run_dir={value}", "resume=true"])


def resumption(config: RunConfig, done: int, command: str = "", *, data_ended: bool = False) -> str:
    """Where a resume would begin, after `done` steps, and what is lost when there is no checkpoint. `command` is the
    one that resumes the run, where that is known.

    A run whose data have ended has nothing left to resume, since neither its data nor its epochs can be changed; its
    weights can begin another run.
    """
    resume = command or f"the command of its start with resume=true run_dir={config.run_dir}"
    if (checkpoint := index.newest(config.path)) is not None:
        if data_ended and not config.trainer.lora.rank:
            return f"{checkpoint.name} is kept; model.name={checkpoint} begins another run with its weights"
        return f"{checkpoint.name} is kept; to resume from it: {resume}"
    lost = f", and {done} step{'s are' if done > 1 else ' is'} lost" if done else ""
    return f"no checkpoint was written{lost}; to begin again at step 0: {resume}"
