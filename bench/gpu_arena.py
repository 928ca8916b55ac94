"""How long a remap takes outside of vLLM, that what is read moves with it, and that a captured graph follows.

    python -m bench.gpu_arena [GIGABYTES [MANY]]

MANY more remaps, 3 ms apart, tell what the rare slow ones spend their time on: computing, or asleep in the driver.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time

import torch

from inflight.generator.shadow.arena import Arena

SLOWEST = 5
PAUSE_S = 0.003


def slowest(arena: Arena, many: int) -> list[dict[str, float]]:
    """Of `many` remaps the slowest: when it began (s), how long it took, the thread's processor time in it (ms), and
    how often the thread gave its processor up, and had to."""
    found = []
    began = time.perf_counter()
    for _ in range(many):
        at = time.perf_counter()
        before = resource.getrusage(resource.RUSAGE_THREAD)
        computed = time.thread_time()
        moved = arena.remap().move
        computed = time.thread_time() - computed
        after = resource.getrusage(resource.RUSAGE_THREAD)
        found.append(
            {
                "at_s": round(at - began, 3),
                "move_ms": round(1e3 * moved, 3),
                "processor_ms": round(1e3 * computed, 3),
                "slept": after.ru_nvcsw - before.ru_nvcsw,
                "preempted": after.ru_nivcsw - before.ru_nivcsw,
            }
        )
        time.sleep(PAUSE_S)
    return sorted(found, key=lambda one: -one["move_ms"])[:SLOWEST]


def main() -> None:
    """Prints one JSON line, and one for each of the slowest of MANY."""
    nbytes = int(float(sys.argv[1]) * 1e9) if len(sys.argv) > 1 else 15_200_000_000
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    arena = Arena(nbytes, device)
    arena.add_shadow()
    arena.live.fill_(1)
    arena.shadow.fill_(2)
    weights = arena.live[: 64 << 20].view(torch.bfloat16)
    total = torch.zeros((), dtype=torch.int64, device=device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        total.copy_(arena.live[: 1 << 20].sum(dtype=torch.int64))
    result: dict[str, float] = {"gb": nbytes / 1e9}
    for way, in_one in (("calls", False), ("one_call", True)):
        seconds = []
        seen = []
        for _ in range(20):
            graph.replay()
            torch.cuda.synchronize()
            seen.append(int(total) >> 20)
            seconds.append(arena.remap(in_one=in_one).move)
        assert seen == [1, 2] * 10, seen
        result |= {f"{way}_median_ms": 1e3 * statistics.median(seconds), f"{way}_max_ms": 1e3 * max(seconds)}
    arena.shadow.fill_(7)  # set 1: the live one is set 0 again
    assert int(arena.live[0]) == 1
    assert weights.data_ptr() == arena.live.data_ptr()
    print(json.dumps(result), flush=True)
    for one in slowest(arena, int(sys.argv[2]) if len(sys.argv) > 2 else 0):
        print(json.dumps(one), flush=True)


if __name__ == "__main__":
    main()
