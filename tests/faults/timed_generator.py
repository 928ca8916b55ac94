"""`python -m inflight.generator` that also writes when its engine had tokens: `python timed_generator.py ARGUMENTS`.

One line per step in the file NAME.steps of the run folder: when the engine core made it (time.monotonic) and how many
sequences got tokens (not a test file).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def note_steps(file: Path) -> None:
    """Notes every step of this process's engine from now on."""
    from vllm.v1.engine.output_processor import OutputProcessor

    process, out = OutputProcessor.process_outputs, file.open("a", buffering=1)

    def noted(self: Any, outputs: Any, timestamp: float | None = None, *rest: Any, **more: Any) -> Any:
        if outputs and timestamp is not None:
            out.write(f"{timestamp:.6f} {len(outputs)}\n")
        return process(self, outputs, timestamp, *rest, **more)

    OutputProcessor.process_outputs = noted


def run(arguments: list[str]) -> int:
    """Its exit code."""
    from inflight.generator import server
    from inflight.generator.__main__ import main

    entrypoints = server._entrypoints

    def noting() -> dict[str, Any]:
        found = entrypoints()  # the first import of vLLM: what must be set before is set
        note_steps(Path(os.environ["INFLIGHT_RUN_FILE"] + ".steps"))
        return found

    server._entrypoints = noting
    return main(arguments)


if __name__ == "__main__":
    code = run(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
