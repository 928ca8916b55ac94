"""The CUDA worker whose pull over CUDA IPC can be stopped between two pieces; the engine decodes on meanwhile.

`INFLIGHT_RUN_FILE` names a file less its suffix: `.halt` holds the number of pieces that are let through; when they are
there it becomes `.halted`, and the rest waits for `.go`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from inflight.generator.worker.cuda import InflightCUDAWorker
from inflight.weights.transport import cuda
from inflight.weights.transport.scatter import CopyRegion

HALT_S = 60.0
copy = cuda.copy
done = 0


def halting(strips: Iterable[CopyRegion], source: int, target: int, stream: int) -> None:
    """In the place of `cuda.copy_in_one_call`, piece by piece."""
    global done
    file = Path(os.environ["INFLIGHT_RUN_FILE"] + ".halt")
    for strip in strips:
        copy([strip], source, target, stream)
        done += 1
        if file.exists() and done >= int(file.read_text()):
            torch.cuda.ExternalStream(stream).synchronize()
            file.rename(file.with_suffix(".halted"))
            deadline = time.monotonic() + HALT_S
            while not file.with_suffix(".go").exists() and time.monotonic() < deadline:
                time.sleep(0.005)
        if not file.exists():
            done = 0


class HaltingWorker(InflightCUDAWorker):
    """See the module's text."""


if "INFLIGHT_RUN_FILE" in os.environ:
    cuda.copy_in_one_call = halting
