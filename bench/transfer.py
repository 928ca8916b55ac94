"""GB/s from the trainer's send buffer into a shadow on another GPU, by transport and bucket size.

    python -m bench.transfer
    python -m bench.transfer trainer_devices=0 engine_devices=0 'cases=[{transport: ipc, bucket_mb: 256}]'   one GPU

The trainer is a process of its own, as in a run. Both sides are timed; the figure is the receiver's, from the moment
that both are ready. `plain` is one NCCL broadcast of the whole buffer in the same run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf

from inflight.messages import BucketMeta
from inflight.weights.transport.ipc import IpcReceiver, IpcSender
from inflight.weights.transport.nccl import NcclReceiver, NcclSender
from inflight.weights.transport.scatter import CopyRegion, ScatterTarget

SENDERS: dict[str, Any] = {"ipc": IpcSender, "nccl": NcclSender, "plain": NcclSender}
RECEIVERS: dict[str, Any] = {"ipc": IpcReceiver, "nccl": NcclReceiver, "plain": NcclReceiver}


def buckets_of(nbytes: int, bucket_mb: int) -> list[BucketMeta]:
    """Buckets that tile `[0, nbytes)`; 0 MB: one for all."""
    size = bucket_mb << 20 or nbytes
    return [BucketMeta(offset=at, nbytes=min(size, nbytes - at)) for at in range(0, nbytes, size)]


def send(options: dict[str, Any]) -> None:
    """The trainer's process: for each case, opens a sender, says where, and sends."""
    torch.cuda.set_device(0)
    nbytes = options["nbytes"]
    buffer = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    for case in options["cases"]:
        sender = SENDERS[case["transport"]](2, options["timeout_s"])
        print(json.dumps({"rendezvous": sender.rendezvous, "first": buffer[:8].tolist()}), flush=True)
        seconds = []
        for _ in range(options["repeats"]):
            sys.stdin.readline()  # the receiver is ready
            started = time.perf_counter()
            sender.send(buffer, buckets_of(nbytes, case["bucket_mb"]))
            seconds.append(time.perf_counter() - started)
        print(json.dumps({"seconds": seconds, "sum": int(buffer.sum(dtype=torch.int64))}), flush=True)
        sender.close()


def measure(case: dict[str, Any], peer: subprocess.Popen[str], target: torch.Tensor, repeats: int) -> dict[str, Any]:
    """The receiver's side of one case. Raises RuntimeError when the bytes are not those sent."""
    assert peer.stdin is not None
    assert peer.stdout is not None
    where = json.loads(peer.stdout.readline())["rendezvous"]
    receiver = RECEIVERS[case["transport"]](where, 1, 2, 60.0)
    buckets = buckets_of(target.numel(), case["bucket_mb"])
    strips = tuple(CopyRegion(bucket.offset, bucket.offset, bucket.nbytes) for bucket in buckets)
    seconds = []
    target.zero_()
    torch.cuda.synchronize()
    for _ in range(repeats):
        peer.stdin.write("go\n")
        peer.stdin.flush()
        started = time.perf_counter()
        if case["transport"] == "plain":
            receiver.receive(target, buckets)
        else:
            receiver.receive_into(ScatterTarget(target, target.device, strips), buckets)
        seconds.append(time.perf_counter() - started)
    told = json.loads(peer.stdout.readline())
    receiver.close()
    if int(target.sum(dtype=torch.int64)) != told["sum"]:
        raise RuntimeError(f"{case}: other bytes arrived than were sent")
    ordered = sorted(seconds[1:] or seconds)  # the first one connects
    return {
        **case,
        "nbytes": target.numel(),
        "seconds": [round(value, 5) for value in seconds],
        "gb_per_s": round(target.numel() / ordered[len(ordered) // 2] / 1e9, 1),
    }


@hydra.main(version_base=None, config_path="configs", config_name="transfer")
def main(config: DictConfig) -> None:
    """Runs the cases; writes transfer.json and a Markdown table."""
    cases = OmegaConf.to_container(config.cases, resolve=True)
    nbytes = int(config.gigabytes * 1e9) // 4096 * 4096
    options = {"nbytes": nbytes, "cases": cases, "repeats": config.repeats, "timeout_s": config.timeout_s}
    peer = subprocess.Popen(
        [sys.executable, "-m", "bench.transfer", "--send", json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": str(config.trainer_devices)},
    )
    os.environ["CUDA_VISIBLE_DEVICES"] = str(config.engine_devices)
    torch.cuda.set_device(0)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")
    results = []
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    try:
        for case in cases:
            results.append(measure(case, peer, target, config.repeats))
            print(json.dumps(results[-1]), flush=True)
            (out / "transfer.json").write_text(json.dumps(results, indent=1))
    finally:
        peer.kill()
    rows = [f"| {r['transport']} | {r['bucket_mb'] or 'all'} | {r['gb_per_s']} |" for r in results]
    (out / "transfer.md").write_text("\n".join(["| transport | bucket MB | GB/s |", "|---|---|---|", *rows, ""]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--send"]:
        send(json.loads(sys.argv[2]))
    else:
        main()
