"""Runs what may hang or crash (an import of vLLM, a CUDA driver) in a process of its own, within a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inflight.error_line import one_line
from inflight.exits import in_words

KILL_WAIT_S = 3.0
"""How long a killed process may take to end: one that hangs in a driver does not end at all."""
MAX_ANSWER_BYTES = 1 << 20


class ProbeError(RuntimeError):
    """The process did not answer: it crashed, raised or took too long. One line."""


def ask(
    name: str,
    arguments: Sequence[str] = (),
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    module: str = "inflight.doctor.probes",
) -> dict[str, Any]:
    """What function `name` of `module` returns, called in a process of its own. Of that process and what it started
    nothing is left, unless the kernel can't end it.

    Raises ProbeError.
    """
    with tempfile.TemporaryDirectory(prefix="inflight-") as folder:
        answer = Path(folder) / "answer.json"
        log = Path(folder) / "log"
        with log.open("wb") as output:  # a file: a grandchild could keep a pipe open
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(answer), name, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=dict(os.environ if environment is None else environment),
            )
        code = _end_of(process, timeout_s)
        if code is None:
            raise ProbeError(f"no answer within {timeout_s:g} s{_last_line(log)}")
        if code:
            raise ProbeError(f"ended {'by' if code < 0 else 'with'} {in_words(code)}{_last_line(log)}")
        try:
            with answer.open("rb") as file:
                found = json.loads(file.read(MAX_ANSWER_BYTES))
        except (OSError, ValueError) as error:
            raise ProbeError(f"no answer: {one_line(error)}") from None
    if not isinstance(found, dict):
        raise ProbeError(f"answered {type(found).__name__}, not an object")
    return found


def _end_of(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """The exit code; None for one that had to be killed."""
    code = None
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_WAIT_S)
    return code


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - 4096, 0))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return f": {one_line(lines[-1], 300)}" if lines else ""
