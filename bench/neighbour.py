"""What a process on a GPU feels when another one on the same GPU is killed, without vLLM.

    python -m bench.neighbour [REPEATS]

Each step replays a CUDA graph of matrix products, with a copy to the device and one back, and waits for an event:
awake, or asleep by an event that is made anew in each step, as vLLM 0.26 does. The neighbour holds memory, and sleeps,
replays many graphs, or copies what it has mapped from a third process over CUDA IPC.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

GIB = 1 << 30
MAPPED = 3 * GIB
QUIET_S = 1.0
WATCH_S = 1.5
START_S = 120.0
NEIGHBOURS = ("asleep", "graphs", "mapped", "mapped, graphs")


def products(size: int = 2048, many: int = 60) -> torch.cuda.CUDAGraph:
    """A captured graph of so many products of square bfloat16 matrices: 1.4 ms on an H200."""
    factor = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        factor @ factor
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product = factor
        for _ in range(many):
            product = product @ factor
    return graph


def share() -> None:
    """The third process: prints the handle of its memory, and ends with its standard input."""
    from cuda.bindings import driver

    from inflight.weights.transport.cuda import check

    torch.zeros(1, device="cuda")
    address = check("cuMemAlloc", driver.cuMemAlloc(MAPPED))
    print(bytes(check("cuIpcGetMemHandle", driver.cuIpcGetMemHandle(address)).reserved).hex(), flush=True)
    sys.stdin.read()


def live(kind: str, handle: str) -> None:
    """The neighbour: runs until it is killed."""
    work: list[Callable[[], object]] = []
    held = [torch.empty(GIB, dtype=torch.uint8, device="cuda").fill_(1) for _ in range(6)]
    if "graphs" in kind:
        work += [products().replay for _ in range(600)]
    if "mapped" in kind:
        from cuda.bindings import driver

        from inflight.weights.transport.cuda import check

        opened = driver.CUipcMemHandle()
        target = torch.empty(MAPPED, dtype=torch.uint8, device="cuda")
        opened.reserved = bytes.fromhex(handle)
        source = int(check("cuIpcOpenMemHandle", driver.cuIpcOpenMemHandle(opened, 1)))
        stream = torch.cuda.current_stream().cuda_stream
        work.append(lambda: driver.cuMemcpyAsync(target.data_ptr(), source, MAPPED, stream))
    torch.cuda.synchronize()
    print(f"holds {len(held)} GiB", flush=True)
    while True:
        for task in work:
            task()
            torch.cuda.synchronize()
        time.sleep(0.001)


def process(task: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """One of the two above, started, and the line that it printed."""
    code = f"from bench.neighbour import {task}; import sys; {task}(*sys.argv[1:])"
    made = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert made.stdout is not None
    line = made.stdout.readline().strip()
    if not line:
        raise SystemExit(f"bench.neighbour: {task} ended with code {made.wait(START_S)}")
    return made, line


def stepping(*, asleep: bool) -> Callable[[float], list[tuple[float, float]]]:
    """Makes steps for so many seconds; when each began, and its milliseconds."""
    graph = products()
    there = torch.zeros(64, device="cuda")
    host = torch.zeros(64, pin_memory=True)
    back = torch.zeros(64, pin_memory=True)

    def steps(seconds: float) -> list[tuple[float, float]]:
        found = []
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            there.copy_(host, non_blocking=True)
            graph.replay()
            back.copy_(there, non_blocking=True)
            done = torch.cuda.Event(blocking=asleep)
            done.record()
            done.synchronize()
            found.append((began, 1e3 * (time.perf_counter() - began)))
        return found

    return steps


def killed(steps: Callable[[float], list[tuple[float, float]]], kind: str, handle: str) -> dict[str, object]:
    """Milliseconds of steps before the neighbour is killed and after it."""
    neighbour, _ = process("live", kind, handle)
    steps(QUIET_S / 4)
    quiet = [length for _, length in steps(QUIET_S)]
    neighbour.kill()
    at = time.perf_counter()
    began, longest = max(steps(WATCH_S), key=lambda step: step[1])
    neighbour.wait(START_S)
    return {
        "neighbour": kind,
        "p50_ms": round(statistics.median(quiet), 2),
        "longest_before_ms": round(max(quiet), 2),
        "longest_after_ms": round(longest, 2),
        "began_after_kill_ms": round(1e3 * (began - at), 1),
    }


def main() -> None:
    """One JSON line for each neighbour killed."""
    if not torch.cuda.is_available():
        raise SystemExit("bench.neighbour: needs a GPU")
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    third, handle = process("share")
    try:
        for asleep in (True, False):
            steps = stepping(asleep=asleep)
            for kind in NEIGHBOURS * repeats:
                waits = "asleep" if asleep else "awake"
                print(json.dumps({"waits": waits, **killed(steps, kind, handle)}), flush=True)
    finally:
        third.kill()
        third.wait(START_S)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
