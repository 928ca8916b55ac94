"""Fuzzes every decoder in turn for a given time: `make fuzz SECONDS=600`, or `python tests/fuzz/rounds.py 600`.

Hypothesis makes the inputs: whole ones that were cut, bent, mixed and repeated, and bytes of any kind. Ends with a line
for each decoder; an input that breaks one is shown, smallest first, and the exit code is 1.
"""

from __future__ import annotations

import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

from decoders import TARGETS, Target
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

EXAMPLES = 500
GROWTH_LIMIT_MIB = 64
"""Memory that a decoder may have added after its first round, however many rounds follow."""


@st.composite
def damaged(draw, samples: list[bytes]) -> bytes:
    """A whole input after a few changes."""
    data = bytearray(draw(st.sampled_from(samples)))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["flip", "cut", "insert", "delete", "repeat", "splice"])):
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at:]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=9))
            case "delete":
                del data[at : at + draw(st.integers(1, 16))]
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 64))] * draw(st.integers(1, 50))
            case "splice":
                other = draw(st.sampled_from(samples))
                data[at:] = other[draw(st.integers(0, len(other))) :]
    return bytes(data)


def round_of(target: Target, number: int, outcomes: Counter[str]) -> None:
    """EXAMPLES inputs; raises what is no declared error."""

    @seed(number)
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.one_of(
            damaged(target.samples), st.binary(max_size=300), st.binary(max_size=60).map(target.samples[0][:8].__add__)
        )
    )
    def one(data: bytes) -> None:
        try:
            target.read(data)
        except target.errors:
            outcomes["refused"] += 1
        else:
            outcomes["accepted"] += 1

    one()


def memory_mib() -> float:
    """Resident now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def main(seconds: float) -> int:
    """Exit code: 1 when a decoder broke or kept memory."""
    deadline, number, code = time.monotonic() + seconds, random.SystemRandom().randrange(1 << 30), 0
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in TARGETS}
    base: dict[str, float] = {}
    growth: Counter[str] = Counter()
    print(f"seed {number}", flush=True)
    while time.monotonic() < deadline:
        for name, target in TARGETS.items():
            before = memory_mib()
            number += 1
            try:
                round_of(target, number, outcomes[name])
            except Exception as error:  # noqa: BLE001 - whatever it is, it was not declared
                print(f"{name}, seed {number}: {type(error).__name__}: {error}\n{getattr(error, '__notes__', '')}")
                return 1
            if name in base:
                growth[name] += memory_mib() - before
            base.setdefault(name, before)
    for name, count in outcomes.items():
        kept = growth[name] > GROWTH_LIMIT_MIB
        code |= kept
        print(
            f"{name:<12} {count['refused']:>8} refused {count['accepted']:>8} accepted, {growth[name]:+.1f} MiB"
            + " TOO MUCH" * kept
        )
    return code


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0))
