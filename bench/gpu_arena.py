"""How long a remap takes outside of vLLM, that what is read moves with it, and that a captured graph follows.

python -m bench.gpu_arena [GIGABYTES]
"""

from __future__ import annotations

import json
import statistics
import sys

import torch

from inflight.generator.arena import Arena


def main() -> None:
    """Prints one JSON line."""
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
        seconds, seen = [], []
        for _ in range(20):
            graph.replay()
            torch.cuda.synchronize()
            seen.append(int(total) >> 20)
            seconds.append(arena.remap(in_one=in_one).move)
        assert seen == [1, 2] * 10, seen
        result |= {f"{way}_median_ms": 1e3 * statistics.median(seconds), f"{way}_max_ms": 1e3 * max(seconds)}
    arena.shadow.fill_(7)  # set 1: the live one is set 0 again
    assert int(arena.live[0]) == 1
    assert weights.data_ptr() == arena.live_address
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
