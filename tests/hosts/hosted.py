"""The other host's side of a starter, with the stand-in as its generator (not a test file)."""

from __future__ import annotations

import sys

from inflight.hosted import running
from inflight.hosted.__main__ import main

running.MODULES["generator"] = "tests.hosts.generator"

if __name__ == "__main__":
    sys.exit(main())
