"""How far a run is: complete, running, or ended early."""

from __future__ import annotations

import os
from pathlib import Path

from inflight.config.folder import LOCK_FILE


def is_running(run_dir: Path) -> bool:
    """Whether a process holds the run folder's lock, by the kernel's list (proc(5), /proc/locks): taking the lock to
    find out could stop a run from starting."""
    try:
        sought = (run_dir / LOCK_FILE).stat()
        listed = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    device = f"{os.major(sought.st_dev):02x}:{os.minor(sought.st_dev):02x}:{sought.st_ino}"
    return any("FLOCK" in line and device in line.split() for line in listed)


def state(run_dir: Path, steps: int, of_steps: int | None, ended: str = "") -> str:
    """In words; `ended` is what the launcher knows about an end."""
    progress = f"{steps} of {of_steps} steps" if of_steps is not None else f"{steps} steps"
    if ended:
        return f"{ended}, {progress}"
    if of_steps is not None and steps >= of_steps:
        return f"complete, {progress}"
    if is_running(run_dir):
        return f"running, {progress} so far"
    return f"ended early, {progress}"
