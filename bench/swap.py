"""What a swap costs the step loop on CPU: rebinding against vLLM's blocking reload. `python -m bench.swap`.

One engine, a batch that decodes, both ways in turn with the same weights, which lie in memory: no transfer is measured.
Blocking is vLLM's `reload_weights` and, for a tied model, the packing of `lm_head` again that it leaves out. A round is
some steps, the swap, two steps; `extra` is what the swap and the two steps after it took beyond two ordinary steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.cpu_engine import Decoder, heading, spread
from bench.publish import machine
from inflight.generator.settings import Settings
from inflight.models import prepare

BATCH = 8
BASE_STEPS = 6
AFTER_STEPS = 2
WARM_UP = 3


@dataclass
class Rounds:
    """Seconds, one of each a round."""

    base: list[float] = field(default_factory=list)
    """Median of the steps before the swap."""
    gap: list[float] = field(default_factory=list)
    """The step loop stalled."""
    extra: list[float] = field(default_factory=list)
    build: list[float] = field(default_factory=list)
    """Loading and packing beside the step loop; none when that is part of the gap."""


class Swaps:
    """Both ways of bringing the same weights into a decoding engine."""

    def __init__(self, name: str) -> None:
        from safetensors.torch import load_file

        model = prepare(name)
        self._file = model / "model.safetensors"
        self._tensors = load_file(self._file)
        self.nbytes = sum(tensor.nbytes for tensor in self._tensors.values())
        self._decoder = Decoder(model, name, BATCH, context=128, settings=Settings())
        self._version = 0

    def rebind(self, rounds: Rounds) -> None:
        """Builds beside, then measures the commit."""
        self._version += 1
        started = time.perf_counter()
        self._decoder.rpc("stage_weights", str(self._file), self._version)
        rounds.build.append(time.perf_counter() - started)
        self._round(rounds, self._commit)

    def blocking(self, rounds: Rounds) -> None:
        """Measures vLLM's reload with the repair of a tied lm_head."""
        self._round(rounds, self._reload)

    def _commit(self) -> None:
        self._decoder.engine.commit_weights(self._version)

    def _reload(self) -> None:
        runner = self._decoder.worker.model_runner
        runner.reload_weights(weights_iterator=iter(self._tensors.items()))
        head = runner.get_model().lm_head
        if "lm_head.weight" not in self._tensors:
            head.quant_method.process_weights_after_loading(head)

    def _round(self, rounds: Rounds, swap: Callable[[], None]) -> None:
        self._decoder.start()
        base = statistics.median(self._decoder.steps(BASE_STEPS))
        started = time.perf_counter()
        swap()
        gap = time.perf_counter() - started
        after = sum(self._decoder.steps(AFTER_STEPS))
        rounds.base.append(base)
        rounds.gap.append(gap)
        rounds.extra.append(gap + after - AFTER_STEPS * base)


def measure(name: str, count: int) -> list[str]:
    """The table's lines for one model."""
    swaps = Swaps(name)
    ways = {"rebind": (swaps.rebind, Rounds()), "vLLM's reload": (swaps.blocking, Rounds())}
    for index in range(WARM_UP + count):
        for way, rounds in ways.values():
            way(rounds if index >= WARM_UP else Rounds())
    lines = []
    for label, (_, rounds) in ways.items():
        cells = [spread(rounds.base), spread(rounds.gap), spread(rounds.extra)]
        cells.append(spread(rounds.build) if rounds.build else "in the gap")
        lines.append(f"| {name}, {swaps.nbytes / 1e6:.1f} MB | {label} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="one engine per process: run it once for each")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    where = machine()
    lines = measure(options.model, options.rounds)
    print(f"""
{heading(f"Swap on CPU, {options.model}", "bench.swap", where)}
{BATCH} sequences decoding on one thread; medians (maxima) of {options.rounds} rounds, milliseconds.

| weights | swap | step before | gap | extra | built beside, not in the gap |
|---|---|---|---|---|---|
{chr(10).join(lines)}
""")


if __name__ == "__main__":
    main()
