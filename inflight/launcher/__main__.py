"""`python -m inflight.launcher --config-name demo`: the same as `inflight launch`."""

from __future__ import annotations

import sys

from inflight.launcher.launch import main

if __name__ == "__main__":
    sys.exit(main())
