"""The ways to give a running engine new weights, each as one function of (bench, version) that returns an Update."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.gpu_engine import Agent, Client
from bench.gpu_gaps import Update
from bench.native_sender import update_info

WAIT_S = 120.0
KILL_AFTER_S = 0.04
"""From the order to publish: packing is over by then, the transfer of a 7B shape is not."""
KILL_WATCH_S = 8.0


class TrainerProcess:
    """The other side: orders in, answers out, one at a time or several under way."""

    def __init__(self, options: dict[str, Any], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu_trainer", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, name="trainer answers", daemon=True).start()

    def order(self, op: str, **arguments: Any) -> None:
        """Sends an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = WAIT_S) -> dict[str, Any]:
        """The next answer. Raises RuntimeError when it is an error, or the trainer is gone or silent."""
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise RuntimeError(f"the trainer did not answer within {timeout_s:g} s") from None
        if "error" in answer:
            raise RuntimeError(f"trainer, {answer['op']}: {answer['error']}")
        return answer

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """An order and its answer."""
        self.order(op, **arguments)
        return self.answer()

    def kill(self) -> None:
        """Ends the process at once, whatever it does."""
        self._process.kill()
        self._process.wait(20)

    def close(self) -> None:
        """Ends the process."""
        try:
            self.order("quit")
            self._process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put({"op": "end", "error": "the trainer process ended"})


@dataclass
class Bench:
    """What a strategy works with."""

    client: Client
    trainer: TrainerProcess
    agent: Agent | None
    native: dict[str, Any]
    """names, dtype_names and shapes of what is sent, as vLLM's update wants them."""


Strategy = Callable[[Bench, int], Update]


def inflight(bench: Bench, version: int) -> Update:
    """Publish; nothing else. The engine is never stopped."""
    assert bench.agent is not None
    began = time.perf_counter()
    report = bench.trainer.ask("publish", version=version)
    told, done, _ = bench.agent.wait(version, WAIT_S)
    blocked = report["wait_s"] + report["pack_s"]
    return Update(
        began=began,
        ended=done,
        swap_began=told,
        trainer_blocked_s=blocked,
        packed_s=report["pack_s"],
        transfer_s=told - began,
    )


def blocking(bench: Bench, version: int) -> Update:
    """Our transfer with the engine paused meanwhile: what the shadow alone saves."""
    began = time.perf_counter()
    bench.client.call("pause_scheduler", "keep", False)
    update = inflight(bench, version)
    bench.client.call("resume_scheduler")
    update.began = update.swap_began = began
    update.ended = time.perf_counter()
    return update


def _native(bench: Bench, packed: bool) -> float:
    """vLLM's own NCCL update; the engine has to be paused. Returns the trainer's seconds."""
    bench.client.rpc("start_weight_update")
    bench.trainer.order("native", packed=packed)
    bench.client.rpc("update_weights", update_info(bench.native, packed=packed))
    bench.client.rpc("finish_weight_update")
    return float(bench.trainer.answer()["send_s"])


def _paused(bench: Bench, mode: str, packed: bool) -> Update:
    aborted = bench.client.aborted
    recomputed = bench.client.recomputed
    began = time.perf_counter()
    bench.client.call("pause_scheduler", mode, False)
    stopped = time.perf_counter()
    send_s = _native(bench, packed)
    moved = time.perf_counter()
    bench.client.call("resume_scheduler")
    ended = time.perf_counter()
    if mode != "keep":
        ended = bench.client.wait_all_after(ended, WAIT_S)
    return Update(
        began=began,
        ended=ended,
        swap_began=began,
        trainer_blocked_s=send_s,
        transfer_s=moved - stopped,
        aborted=bench.client.aborted - aborted,
        recomputed=bench.client.recomputed - recomputed,
    )


def packed(bench: Bench, version: int) -> Update:
    """vLLM's packed NCCL update behind pause(keep), KV kept."""
    return _paused(bench, "keep", packed=True)


def per_tensor(bench: Bench, version: int) -> Update:
    """The same, a broadcast for each tensor."""
    return _paused(bench, "keep", packed=False)


def drain(bench: Bench, version: int) -> Update:
    """Let every running sequence end, then update."""
    return _paused(bench, "wait", packed=True)


def abort(bench: Bench, version: int) -> Update:
    """Abort everything, update, submit it again with what it had so far."""
    return _paused(bench, "abort", packed=True)


def killed(bench: Bench, version: int) -> Update:
    """The trainer dies in the middle of a transfer: what the engine's clients see of it. The last thing that a bench
    can do; `extra` is the longest gap of the seconds after it."""
    began = time.perf_counter()
    bench.trainer.order("publish", version=version)
    time.sleep(KILL_AFTER_S)
    bench.trainer.kill()
    time.sleep(KILL_WATCH_S)
    return Update(began=began, ended=time.perf_counter(), swap_began=began)


STRATEGIES: dict[str, Strategy] = {
    "inflight": inflight,
    "inflight-copy": inflight,  # the worker copies the shadow over the live weights instead
    "inflight-calls": inflight,  # the worker remaps by several calls from Python, not in one
    "inflight-idle": inflight,  # the worker waits until the device is idle, not only behind the last use of weights
    "blocking": blocking,
    "vllm-packed": packed,
    "vllm-per-tensor": per_tensor,
    "killed": killed,
    "drain": drain,
    "abort": abort,
}
