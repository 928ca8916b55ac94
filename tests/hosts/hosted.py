"""The other host's side of a starter, with the stand-in as its generator; `join ADDRESS` as `inflight join` (not a test
file)."""

from __future__ import annotations

import sys

from inflight.hosted import join, running
from inflight.hosted.__main__ import main

running.MODULES["generator"] = "tests.hosts.generator"

if __name__ == "__main__":
    sys.exit(join.main(sys.argv[2:]) if sys.argv[1:2] == ["join"] else main())
