"""What a long run must not do: grow in memory, or put a tag on a token that it can't have.

`Tags` looks at each step's outputs as they arrive. `memory` is a reading of all GPUs and of this process with all that
it started; the cell option `watch` takes one every so many updates.
"""

from __future__ import annotations

import subprocess
from typing import Any

import psutil

PIPELINE_STEPS = 3
"""Steps that may have been dispatched before a commit was answered and arrive after that."""
MAX_FAULTS = 20


class Tags:
    """Checks the version tags of steps. `told` and `answered` come from the thread that commits, the rest from the one
    that reads tokens.

    All tokens of one step have one version; versions of steps never fall; no step has a version that the engine was not
    ordered to commit yet, nor an older one than was answered some steps ago. Only an audit can say which weights that
    version was.
    """

    def __init__(self, version: int) -> None:
        """`version` is live."""
        self.faults: list[str] = []
        self.steps = 0
        self.tokens = 0
        self.changes = 0
        """Swaps seen in the middle of a sequence."""
        self.preemptions = 0
        """Prefills of sequences that had tokens already."""
        self._told = self._answered = self._last = version
        self._floor: list[int] = []

    def told(self, version: int) -> None:
        """The engine is about to get the order to swap."""
        self._told = version

    def answered(self, version: int) -> None:
        """It has answered that it did."""
        self._answered = version

    def step(self, outputs: list[Any]) -> None:
        """One step's outputs at the client, in DELTA mode."""
        spans = [(output, span) for output in outputs for span in output.outputs[0].token_versions]
        for output in outputs:
            self._finished(output)
        if not spans:
            return
        self.steps += 1
        self.tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        versions = {span[1] for _, span in spans}
        if len(versions) > 1:
            self._fault(f"one step has tokens of versions {sorted(versions)}")
        version = max(versions)
        floor = self._floor[0] if len(self._floor) == PIPELINE_STEPS else 0
        if version > self._told:
            self._fault(f"version {version} before the engine had the order, its newest was {self._told}")
        if version < max(self._last, floor):
            self._fault(f"version {version} after {self._last} was seen and {floor} was answered")
        if version > self._last:
            self.changes += sum(span[0] > 0 for _, span in spans)
        self._last = version
        self._floor = [*self._floor, self._answered][-PIPELINE_STEPS:]

    def summary(self) -> dict[str, Any]:
        """The figures of a cell."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "changes_in_sequences": self.changes,
            "preemptions": self.preemptions,
            "faults": self.faults,
        }

    def _finished(self, output: Any) -> None:
        """Prefills as they are reported at the end of a sequence: in order, under versions that were there."""
        prefills = output.outputs[0].prefill_versions
        starts = [index for index, _, _ in prefills]
        versions = [version for _, _, version in prefills]
        if starts != sorted(starts) or versions != sorted(versions) or max(versions, default=0) > self._told:
            self._fault(f"{output.request_id}: prefills {prefills}")
        self.preemptions += len({index for index in starts if index > 0})

    def _fault(self, text: str) -> None:
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(f"step {self.steps}: {text}")


def memory(update: int) -> dict[str, Any]:
    """MiB in use on each GPU, and resident MiB of each process of this bench, largest first."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        told = ""
    this = psutil.Process()
    resident = [process.memory_info().rss >> 20 for process in (this, *this.children(recursive=True))]
    return {"update": update, "gpu_mib": [int(line) for line in told.split()], "rss_mib": sorted(resident)[::-1]}
