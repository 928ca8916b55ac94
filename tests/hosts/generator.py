"""The stand-in of a generator as a hosted process starts one: `--run-dir RUN --name g0` (not a test file)."""

from __future__ import annotations

import asyncio
import os
import sys

from tests.faults.stand_in import serve

if __name__ == "__main__":
    os._exit(asyncio.run(serve(sys.argv[2], sys.argv[4])))
