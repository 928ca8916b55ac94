"""`python -m inflight.generator` with the worker of halting_worker.py, noting its steps."""

from __future__ import annotations

import os
import sys

from inflight.generator import engine_args
from tests.faults.timed_generator import run

WORKER = "tests.gpu.halting_worker.HaltingWorker"

if __name__ == "__main__":
    engine_args.CUDA_WORKER = WORKER
    code = run(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
